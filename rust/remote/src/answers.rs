//! Classification of a client's errors: whether to retry, and the message for the caller. A message
//! only has the server's error code, since the body of an error may repeat signed data.

use std::error::Error as StdError;
use std::path::Path;

use dcp_rs_core::{Error, StorageFault};
use object_store::client::{HttpError, HttpErrorKind};

use crate::secrets::Secrets;
use crate::transport::{NobodyListens, Refused, plain};

/// Codes of temporary errors, whatever the status. AWS's own clients retry them, and S3 sends some
/// with 400 or 409.
const PASSING: &[&str] = &[
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
];
/// Codes for bad credentials. S3 sends them with 400 or 403.
const CREDENTIALS: &[&str] = &[
    "AuthenticationFailed",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidAuthenticationInfo",
    "InvalidToken",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
];

/// Reason why one attempt failed.
#[derive(Debug)]
pub struct Failure {
    pub kind: StorageFault,
    pub is_worth_another_try: bool,
    pub reason: String,
    /// The server's status, if it answered.
    pub status: Option<u16>,
    /// True if the request was sent.
    pub was_sent: bool,
    /// True if the store refused the connection, and has never answered this process.
    pub nobody_listens: bool,
}

impl Failure {
    /// Returns a failure after which a retry may succeed.
    pub fn passing(reason: impl Into<String>) -> Self {
        Self { is_worth_another_try: true, ..Self::lasting(StorageFault::Failed, reason) }
    }

    /// Returns a permanent failure.
    pub fn lasting(kind: StorageFault, reason: impl Into<String>) -> Self {
        Self {
            kind,
            is_worth_another_try: false,
            reason: reason.into(),
            status: None,
            was_sent: true,
            nobody_listens: false,
        }
    }

    /// Classifies a client's error.
    pub fn of(error: &object_store::Error) -> Self {
        let text = chain(error);
        let status = status(&text);
        Self {
            status,
            was_sent: transport(error) != Some(HttpErrorKind::Connect)
                && !is_of_the_client(error, &text),
            nobody_listens: found::<NobodyListens>(error).is_some(),
            ..Self::judged(error, &text, status)
        }
    }

    /// Returns whether the store may have carried out the request although its answer was lost.
    pub fn may_be_done(&self) -> bool {
        let passes = |status| matches!(status, 408 | 500 | 502..=506 | 508..);
        self.was_sent && self.status.is_none_or(passes)
    }

    fn judged(error: &object_store::Error, text: &str, status: Option<u16>) -> Self {
        use object_store::Error as E;
        let told = told(error, text, status);
        if text.contains("URL scheme is not allowed") {
            let reason = "the endpoint is http://, which is not encrypted: set allow_http \
                          (AWS_ALLOW_HTTP=true) if that is meant";
            return Self::lasting(StorageFault::Failed, reason);
        }
        match (error, status) {
            (E::NotFound { .. }, _) => Self::lasting(StorageFault::NotFound, told),
            // S3 answers 404 if an object to replace does not exist.
            (E::Precondition { .. }, _) => Self::lasting(StorageFault::Precondition, told),
            // The answer to a listing.
            (_, Some(404)) if is_no_bucket(text) => Self::lasting(StorageFault::NotFound, told),
            // Not about an object: the service for credentials has none, for now.
            (_, Some(404)) => Self { kind: StorageFault::Denied, ..Self::passing(told) },
            (E::PermissionDenied { .. } | E::Unauthenticated { .. }, _) | (_, Some(401 | 403)) => {
                if code(text) == Some("RequestTimeTooSkewed") {
                    return Self::lasting(
                        StorageFault::Denied,
                        format!("{told}: the clock of this machine is wrong"),
                    );
                }
                Self::lasting(StorageFault::Denied, told)
            }
            (_, Some(status)) if blames_credentials(status, text) => {
                Self::lasting(StorageFault::Denied, told)
            }
            // 409: another write of the object is in progress, and this one was not carried out.
            (_, Some(400 | 409)) if code(text).is_some_and(|code| PASSING.contains(&code)) => {
                Self::passing(told)
            }
            // The client reports every 409 as an existing object, but a policy may protect the
            // object instead.
            (_, Some(409)) if code(text).is_some_and(|code| !code.ends_with("AlreadyExists")) => {
                Self::lasting(StorageFault::Failed, told)
            }
            (E::AlreadyExists { .. }, _) | (_, Some(412)) => {
                Self::lasting(StorageFault::Precondition, told)
            }
            // A missing feature, or a lack of space, is permanent.
            (_, Some(501 | 507)) => Self::lasting(StorageFault::Failed, told),
            (_, Some(408 | 409 | 429 | 500..=599)) => Self::passing(told),
            (_, Some(_)) => Self::lasting(StorageFault::Failed, told),
            (_, None) if found::<Refused>(error).is_some() => {
                Self::lasting(StorageFault::Failed, told)
            }
            (_, None) => match transport(error) {
                Some(_) if text.contains("certificate") => {
                    Self::lasting(StorageFault::Failed, told)
                }
                Some(_) => Self::passing(told),
                // S3 can report a failure in the body of a successful answer.
                None if text.contains("InternalError") || text.contains("SlowDown") => {
                    Self::passing(told)
                }
                None => Self::lasting(StorageFault::Failed, told),
            },
        }
    }

    /// Converts the failure to the error of a call.
    pub fn into_error(
        self,
        action: &'static str,
        path: &Path,
        attempts: u32,
        secrets: &Secrets,
    ) -> Error {
        Error::Storage {
            kind: self.kind,
            action,
            path: path.to_owned(),
            attempts,
            reason: secrets.remove(&self.reason),
        }
    }
}

/// Returns the texts of an error and of all its causes.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}

/// Returns the status of a server's answer, which the client only gives in its text.
fn status(text: &str) -> Option<u16> {
    let (_, after) = text.split_once("status code: ")?;
    after.get(..3)?.parse().ok()
}

/// Returns the code in the body of an answer of S3 or Azure.
fn code(text: &str) -> Option<&str> {
    let (_, after) = text.split_once("<Code>")?;
    let (code, _) = after.split_once("</Code>")?;
    let is_code =
        (1..=64).contains(&code.len()) && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_code.then_some(code)
}

/// Names the region of the bucket, if the answer has it.
fn other_region(text: &str) -> String {
    let inner = |(_, after): (&str, &'_ str)| Some(plain(after.split_once("</Region>")?.0));
    match text.split_once("<Region>").and_then(inner) {
        Some(region) => format!(": the bucket is in the region {region}: set aws_region"),
        None => String::new(),
    }
}

/// Returns whether an answer says that the credentials are wrong or expired, so that new ones may
/// help.
pub fn blames_credentials(status: u16, text: &str) -> bool {
    match (status, code(text)) {
        (400 | 401 | 403, Some(code)) => CREDENTIALS.contains(&code),
        // The answer to a HEAD request has no code.
        (401 | 403, None) => true,
        _ => false,
    }
}

/// Returns whether the bucket, or the container, does not exist.
fn is_no_bucket(text: &str) -> bool {
    matches!(code(text), Some("NoSuchBucket" | "ContainerNotFound"))
}

/// Returns whether the client itself refused to send the request.
fn is_of_the_client(error: &object_store::Error, text: &str) -> bool {
    use object_store::Error as E;
    matches!(error, E::NotImplemented { .. } | E::InvalidPath { .. })
        || text.contains("ETag required")
        || text.contains("Version required")
}

/// Classifies a request without an answer.
fn transport(error: &(dyn StdError + 'static)) -> Option<HttpErrorKind> {
    found::<HttpError>(error).map(HttpError::kind)
}

/// Returns the error of this type among an error and its causes.
pub fn found<'a, E: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// Returns a message for people.
fn told(error: &object_store::Error, text: &str, status: Option<u16>) -> String {
    if let Some(status) = status {
        return match (code(text), status) {
            (_, 404)
                if !matches!(error, object_store::Error::NotFound { .. })
                    && !is_no_bucket(text) =>
            {
                "no credentials: the service that provides them answered 404".into()
            }
            (Some(code), _) if CREDENTIALS.contains(&code) => {
                format!(
                    "the store answered {status} {code}: the credentials are wrong, or have expired"
                )
            }
            (Some(code), _) => format!("the store answered {status} {code}{}", other_region(text)),
            (None, 401 | 403) => {
                format!(
                    "the store answered {status}: the credentials are missing, or do not allow this"
                )
            }
            (None, 404) => "there is no such object, or no such bucket".into(),
            (None, 412) => {
                "the store answered 412: the object is not the one that was asked for".into()
            }
            (None, _) => format!("the store answered {status}{}", other_region(text)),
        };
    }
    if let Some(Refused(reason)) = found(error) {
        return reason.clone();
    }
    if let Some(kind) = transport(error) {
        let what = match kind {
            HttpErrorKind::Connect => "no connection",
            HttpErrorKind::Timeout => "no answer in time",
            HttpErrorKind::Interrupted => "the connection was lost",
            HttpErrorKind::Decode => "the answer was cut short, or is not HTTP",
            _ => "the request failed",
        };
        return format!("{what} ({})", innermost(error));
    }
    match error {
        object_store::Error::NotFound { .. } => "there is no such object, or no such bucket".into(),
        object_store::Error::InvalidPath { source } => {
            let source = source.to_string().replace(char::is_control, "?");
            format!(
                "an object there has a name that cannot be read ({source}): rename or remove it"
            )
        }
        _ if text.contains("non-partial response") => {
            "the server sends whole files only, no ranges: they cannot be read in place".into()
        }
        _ => innermost(error),
    }
}

fn innermost(error: &dyn StdError) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    // Removes URLs, since those of requests may be signed.
    let text = error.to_string();
    text.split(' ').filter(|word| !word.contains("://")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> Failure {
        Failure::of(&object_store::Error::Generic { store: "S3", source: text.to_owned().into() })
    }

    #[test]
    fn answers_are_told_apart() {
        let answer = |status: &str, code: &str| {
            generic(&format!(
                "Server returned non-2xx status code: {status}: \
                <Error><Code>{code}</Code><X>hunter22</X></Error>"
            ))
        };
        let slow = answer("503 Service Unavailable", "SlowDown");
        assert!(slow.is_worth_another_try);
        assert_eq!(slow.reason, "the store answered 503 SlowDown");
        assert!(answer("500 Internal Server Error", "InternalError").is_worth_another_try);
        assert!(answer("409 Conflict", "ConditionalRequestConflict").is_worth_another_try);
        for (status, kind) in [
            ("403 Forbidden", StorageFault::Denied),
            ("412 Precondition Failed", StorageFault::Precondition),
            ("400 Bad Request", StorageFault::Failed),
        ] {
            let failure = answer(status, "Some<thing> hunter22");
            assert_eq!((failure.kind, failure.is_worth_another_try), (kind, false));
            assert!(!failure.reason.contains("hunter22"));
        }
    }

    #[test]
    fn not_every_conflict_says_that_the_object_exists() {
        for (code, kind, again) in [
            ("OperationAborted", StorageFault::Failed, true),
            ("BlobImmutableDueToPolicy", StorageFault::Failed, false),
            ("BlobAlreadyExists", StorageFault::Precondition, false),
        ] {
            let text = format!("status code: 409 Conflict: <Error><Code>{code}</Code></Error>");
            let conflict =
                object_store::Error::AlreadyExists { path: "x".into(), source: text.into() };
            let failure = Failure::of(&conflict);
            assert_eq!((failure.kind, failure.is_worth_another_try), (kind, again), "{code}");
        }
    }

    #[test]
    fn what_was_not_sent_is_not_done() {
        for text in ["ETag required for conditional put", "ETag required for conditional update"] {
            assert!(!generic(text).may_be_done());
        }
        let refused = object_store::Error::NotImplemented {
            operation: "put".into(),
            implementer: "S3".into(),
        };
        assert!(!Failure::of(&refused).may_be_done());
        // An answer that lacks what a client requires.
        assert!(generic("ETag Header missing from response").may_be_done());
    }

    #[test]
    fn only_of_an_object_404_says_that_it_is_not_there() {
        let text = "Server returned non-2xx status code: 404 Not Found: \
            <Error><Code>NoSuchKey</Code></Error>";
        let missing =
            Failure::of(&object_store::Error::NotFound { path: "x".into(), source: text.into() });
        assert_eq!(
            (missing.kind, missing.is_worth_another_try, missing.status),
            (StorageFault::NotFound, false, Some(404))
        );
        let credentials =
            generic("Server returned non-2xx status code: 404 Not Found: <html>hunter22</html>");
        assert_eq!(
            (credentials.kind, credentials.is_worth_another_try),
            (StorageFault::Denied, true)
        );
        assert!(credentials.reason.starts_with("no credentials"), "{}", credentials.reason);
        let bucket = generic(&text.replace("NoSuchKey", "NoSuchBucket"));
        assert_eq!((bucket.kind, bucket.is_worth_another_try), (StorageFault::NotFound, false));
    }
}
