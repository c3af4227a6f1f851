//! Secrets, kept out of messages.

/// Suffixes of options whose values are not secret. All other values are.
const PLAIN: &[&str] = &[
    "region",
    "bucket",
    "bucket_name",
    "endpoint",
    "endpoint_url",
    "endpoint_url_s3",
    "endpoint_url_sts",
    "allow_http",
    "allow_invalid_certificates",
    "virtual_hosted_style_request",
    "skip_signature",
    "unsigned_payload",
    "timeout",
    "retries",
    "ca_bundle",
    "account_name",
    "container_name",
    "use_emulator",
    "user_agent",
    "http1_only",
    "http2_only",
    "conditional_put",
    "disable_tagging",
];

/// The values that may appear in no message.
#[derive(Default)]
pub struct Secrets(Vec<String>);

impl Secrets {
    /// Records the value of an option, if it may be secret.
    pub fn note(&mut self, key: &str, value: &str) {
        // A shorter text would match by chance everywhere, and is no real secret.
        let mut note = |secret: &str| {
            if secret.len() >= 4 {
                self.0.push(secret.to_owned());
            }
        };
        if let Some((user, _)) = value.rsplit_once('@') {
            // An endpoint may contain credentials.
            note(value);
            let user = user.split_once("://").map_or(user, |(_, user)| user);
            note(user);
            if let Some((_, password)) = user.split_once(':') {
                note(password);
            }
        } else if !PLAIN.iter().any(|plain| key.ends_with(plain)) {
            note(value);
        }
    }

    /// Returns `text` without the secrets.
    pub fn remove(&self, text: &str) -> String {
        let removed = |text: String, secret: &String| text.replace(secret.as_str(), "***");
        self.0.iter().fold(text.to_owned(), removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_known_to_be_none_is_said() {
        let mut secrets = Secrets::default();
        secrets.note("aws_secret_access_key", "hunter22");
        secrets.note("aws_region", "eu-west-1");
        secrets.note("something_new", "token");
        secrets.note("aws_endpoint", "http://me:hunter33@host:9000");
        secrets.note("aws_endpoint_url", "http://host:9000");
        assert_eq!(
            secrets.remove("http://me:hunter33@host:9000, me:hunter33, hunter33, http://host:9000"),
            "***, ***, ***, http://host:9000"
        );
        assert_eq!(secrets.remove("hunter22 token eu-west-1"), "*** *** eu-west-1");
    }
}
