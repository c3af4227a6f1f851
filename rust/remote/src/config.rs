//! Construction of clients from a URL and options.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::sync::{Arc, Once};
use std::time::Duration;

use dcp_rs_core::{NOTICE, Result};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, S3CopyIfNotExists};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::ClientConfigKey;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::list::PaginatedListStore;
use object_store::multipart::MultipartStore;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use reqwest::tls::Certificate;

use crate::credentials;
use crate::secrets::Secrets;
use crate::transport::{Hold, Transport};
use crate::unsupported;

/// Protocols of stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    S3,
    Google,
    Azure,
    Http,
}

/// Limits on the time and the attempts of a request.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time limit without progress.
    pub time: Duration,
    /// Retries after the first attempt. By default only the time is limited.
    pub retries: u32,
    /// Time limit of a store that refuses connections, and has never answered this process.
    pub refused: Duration,
    /// Time limit without a byte, after which a request counts as lost.
    pub silence: Duration,
    /// Time without progress until a notice.
    pub notice: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            time: Duration::from_secs(120),
            retries: u32::MAX,
            refused: Duration::from_secs(5),
            silence: Duration::from_secs(15),
            notice: NOTICE,
        }
    }
}

/// Location of a store, and its options. Options may be secret, so there is no `Debug`.
pub struct Config {
    pub root: String,
    pub kind: StoreKind,
    pub limits: Limits,
    pub secrets: Secrets,
    /// Bucket or container; for a server, its URL.
    place: String,
    options: Vec<(String, String)>,
    /// A file of certificates that replaces those of the system.
    authorities: Option<String>,
}

/// Clients of a store.
#[derive(Clone)]
pub struct Client {
    pub objects: Arc<dyn ObjectStore>,
    /// Client for objects in parts; `None` if the store is read-only.
    pub parts: Option<Arc<dyn MultipartStore>>,
    /// Client that lists objects page by page; `None` for a server of plain files.
    pub pages: Option<Arc<dyn PaginatedListStore>>,
    /// Client for conditional copies; `None` except for S3.
    pub copying: Option<Arc<Copying>>,
}

impl Client {
    fn storing<S: ObjectStore + MultipartStore + PaginatedListStore>(store: S) -> Self {
        let store = Arc::new(store);
        Self {
            objects: Arc::clone(&store) as _,
            parts: Some(Arc::clone(&store) as _),
            pages: Some(store),
            copying: None,
        }
    }

    fn on_s3(builder: AmazonS3Builder) -> object_store::Result<Self> {
        let store = builder.clone().build()?;
        Ok(Self { copying: Some(Arc::new(Copying(builder))), ..Self::storing(store) })
    }
}

/// Builder of S3 clients for copies. Each client demands the tag of one source. The client's own
/// condition, that the new name is free, is replaced by that one, because no other save uses the
/// name. All clients share one pool of connections.
pub struct Copying(AmazonS3Builder);

impl Copying {
    /// Builds a client that copies an object only if it has this tag
    /// ([`CopyMode::Create`](object_store::CopyMode::Create)).
    pub fn only(&self, tag: &str) -> object_store::Result<Arc<dyn ObjectStore>> {
        let asks = S3CopyIfNotExists::Header("x-amz-copy-source-if-match".into(), tag.into());
        let store = self.0.clone().with_copy_if_not_exists(asks).build()?;
        Ok(Arc::new(store))
    }

    /// Builds a client that sends this header with all requests.
    fn saying(&self, name: HeaderName, value: HeaderValue) -> object_store::Result<AmazonS3> {
        let options = client_options().with_default_headers(HeaderMap::from_iter([(name, value)]));
        self.0.clone().with_client_options(options).build()
    }
}

impl Config {
    pub fn new(url: &str, options: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| unsupported("not a URL"))?;
        let authority = rest.split('/').next().unwrap_or_default();
        let scheme = scheme.to_ascii_lowercase();
        let kind = match scheme.as_str() {
            "s3" => StoreKind::S3,
            "gs" => StoreKind::Google,
            "az" => StoreKind::Azure,
            "http" | "https" => StoreKind::Http,
            _ => {
                return Err(unsupported(format!(
                    "{scheme}:// is not one of s3://, gs://, az://, http://, https://, file://"
                )));
            }
        };
        if authority.contains('@') || rest.contains('?') || rest.contains('#') {
            return Err(unsupported(format!(
                "a {scheme}:// URL with a user, a query or a fragment: pass credentials in \
                storage_options or the environment"
            )));
        }
        if authority.is_empty() {
            return Err(unsupported(format!("a {scheme}:// URL without a bucket or a host")));
        }
        let mut config = Self {
            root: format!("{scheme}://{authority}"),
            kind,
            limits: Limits::default(),
            secrets: Secrets::default(),
            place: if kind == StoreKind::Http {
                format!("{scheme}://{authority}")
            } else {
                authority.to_owned()
            },
            options: Vec::new(),
            authorities: None,
        };
        for (key, value) in config.environment() {
            config.secrets.note(&key, &value);
        }
        for (key, value) in options {
            config.take(&key.to_ascii_lowercase(), value)?;
        }
        Ok(config)
    }

    fn take(&mut self, key: &str, value: String) -> Result<()> {
        match key {
            "retry_timeout" => {
                self.limits.time = seconds(key, &value)?;
                self.limits.refused = self.limits.time;
            }
            "aws_ca_bundle" if self.kind == StoreKind::S3 => self.authorities = Some(value),
            "read_timeout" => self.limits.silence = seconds(key, &value)?,
            "max_retries" => {
                self.limits.retries = value
                    .parse()
                    .map_err(|_| unsupported("storage_options: max_retries is not a number"))?;
            }
            _ => {
                let known = match self.kind {
                    StoreKind::S3 => key.parse::<AmazonS3ConfigKey>().is_ok(),
                    StoreKind::Google => key.parse::<GoogleConfigKey>().is_ok(),
                    StoreKind::Azure => key.parse::<AzureConfigKey>().is_ok(),
                    StoreKind::Http => key.parse::<ClientConfigKey>().is_ok(),
                };
                if !known {
                    return Err(unsupported(format!(
                        "storage_options: {key:?} is not known for {}",
                        self.root
                    )));
                }
                self.secrets.note(key, &value);
                self.options.push((key.to_owned(), value));
            }
        }
        Ok(())
    }

    /// Returns the environment variables for such a store.
    fn environment(&self) -> Vec<(String, String)> {
        let prefix = match self.kind {
            StoreKind::S3 => "AWS_",
            StoreKind::Google => "GOOGLE_",
            StoreKind::Azure => "AZURE_",
            StoreKind::Http => return Vec::new(),
        };
        std::env::vars_os()
            .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(key, _)| key.starts_with(prefix))
            .map(|(key, value)| (key.to_ascii_lowercase(), value))
            .collect()
    }

    /// Returns a hash that distinguishes this store and its options from others in this process.
    pub fn fingerprint(&self) -> u64 {
        let mut options = self.environment();
        options.extend_from_slice(&self.options);
        options.sort_unstable();
        let mut hasher = DefaultHasher::new();
        (&self.root, options, &self.authorities).hash(&mut hasher);
        hasher.finish()
    }

    /// Builds a client for one connection. `hold` records how long the store asks for no requests.
    pub fn client(&self, hold: Arc<Hold>) -> Result<Client> {
        static PROVIDER: Once = Once::new();
        PROVIDER.call_once(|| {
            // Ignored: another provider that was installed before works as well.
            let _ = rustls::crypto::ring::default_provider().install_default();
        });
        let fingerprint = self.fingerprint();
        let transport = Transport::of_session(self.kind, fingerprint, self.certificates()?, hold);
        let (client, once) = (client_options(), once());
        // The builders have no common trait.
        macro_rules! kept {
            ($kind:ident, $builder:expr) => {
                credentials::$kind.get(fingerprint, || {
                    let builder = $builder.clone().with_http_connector(transport.of_credentials());
                    Ok(Arc::clone(builder.build()?.credentials()))
                })
            };
        }
        let built: object_store::Result<Client> = match self.kind {
            StoreKind::S3 => {
                let builder = self.s3(client);
                let credentials = kept!(AWS, builder);
                credentials.and_then(|credentials| {
                    Client::on_s3(
                        builder.with_credentials(credentials).with_http_connector(transport),
                    )
                })
            }
            StoreKind::Google => {
                let builder = GoogleCloudStorageBuilder::from_env().with_client_options(client);
                let builder = self.apply(builder, GoogleCloudStorageBuilder::with_config);
                let builder = builder.with_bucket_name(&self.place).with_retry(once);
                let credentials = kept!(GOOGLE, builder);
                credentials.and_then(|credentials| {
                    let builder =
                        builder.with_credentials(credentials).with_http_connector(transport);
                    builder.build().map(Client::storing)
                })
            }
            StoreKind::Azure => {
                let builder = MicrosoftAzureBuilder::from_env().with_client_options(client);
                let builder = self.apply(builder, MicrosoftAzureBuilder::with_config);
                let builder = builder.with_container_name(&self.place).with_retry(once);
                let credentials = kept!(AZURE, builder);
                credentials.and_then(|credentials| {
                    let builder =
                        builder.with_credentials(credentials).with_http_connector(transport);
                    builder.build().map(Client::storing)
                })
            }
            StoreKind::Http => {
                let client = if self.place.starts_with("http://") {
                    client.with_allow_http(true)
                } else {
                    client
                };
                let builder = HttpBuilder::new().with_url(&self.place).with_client_options(client);
                let builder =
                    self.apply(builder, HttpBuilder::with_config).with_http_connector(transport);
                let store = builder.with_retry(once).build();
                store.map(|store| Client {
                    objects: Arc::new(store),
                    parts: None,
                    pages: None,
                    copying: None,
                })
            }
        };
        let told = |error: &object_store::Error| self.secrets.remove(&error.to_string());
        built.map_err(|error| unsupported(format!("{}: {}", self.root, told(&error))))
    }

    /// Returns the trusted certificates, unless they are those of the system.
    fn certificates(&self) -> Result<Option<Arc<[Certificate]>>> {
        let environment = || {
            let is_s3 = self.kind == StoreKind::S3;
            std::env::var("AWS_CA_BUNDLE").ok().filter(|file| is_s3 && !file.is_empty())
        };
        let Some(file) = self.authorities.clone().or_else(environment) else {
            return Ok(None);
        };
        let failed = |reason: String| unsupported(format!("aws_ca_bundle: {file}: {reason}"));
        let bytes = std::fs::read(&file).map_err(|error| failed(error.to_string()))?;
        match Certificate::from_pem_bundle(&bytes) {
            Ok(found) if !found.is_empty() => Ok(Some(found.into())),
            _ => Err(failed("it holds no certificate, or one that cannot be read (PEM)".into())),
        }
    }

    fn s3(&self, client: ClientOptions) -> AmazonS3Builder {
        // Some servers with the S3 protocol cannot remove many objects with one request. We remove
        // them one by one.
        let builder = AmazonS3Builder::from_env()
            .with_client_options(client)
            .with_config(AmazonS3ConfigKey::DisableBulkDelete, "true");
        let builder = self.apply(builder, AmazonS3Builder::with_config);
        builder.with_bucket_name(&self.place).with_retry(once())
    }

    /// Builds a client that removes an object only if it has this tag. The client has no condition
    /// for removals, so it sends the header with all requests. Returns `None` for stores whose
    /// clients cannot send one.
    pub fn removing(
        client: &Client,
        tag: &str,
    ) -> object_store::Result<Option<Arc<dyn ObjectStore>>> {
        let (Some(copying), Ok(tag)) = (&client.copying, HeaderValue::from_str(tag)) else {
            return Ok(None);
        };
        Ok(Some(Arc::new(copying.saying(IF_MATCH, tag)?)))
    }

    /// Builds a client that completes an upload only if no object has its name. Like
    /// [`removing`](Self::removing), it returns `None` for some stores.
    pub fn completing_new(
        client: &Client,
    ) -> object_store::Result<Option<Arc<dyn MultipartStore>>> {
        let Some(copying) = &client.copying else {
            return Ok(None);
        };
        let store = copying.saying(IF_NONE_MATCH, HeaderValue::from_static("*"))?;
        Ok(Some(Arc::new(store)))
    }

    /// Passes the options to a builder. Also passes the options of the client itself from the
    /// environment, which the builder lost when `with_client_options` replaced them.
    fn apply<B, K: std::str::FromStr>(&self, builder: B, with: impl Fn(B, K, String) -> B) -> B {
        let environment = self.environment();
        let client_only = environment.iter().filter(|(key, _)| {
            let name = key.split_once('_').map_or("", |(_, name)| name);
            name.parse::<ClientConfigKey>().is_ok()
        });
        let all = client_only.chain(&self.options);
        all.fold(builder, |builder, (key, value)| match key.parse() {
            Ok(known) => with(builder, known, value.clone()),
            Err(_) => builder,
        })
    }

    /// Returns the name of an object for its URL.
    pub fn name(&self, path: &Path) -> Result<object_store::path::Path> {
        let text =
            path.to_str().ok_or_else(|| unsupported(format!("{}: not UTF-8", path.display())))?;
        let rest = text
            .strip_prefix(&self.root)
            .ok_or_else(|| unsupported(format!("{text} is not on {}", self.root)))?;
        let name = if self.kind == StoreKind::Http {
            object_store::path::Path::from_url_path(rest)
        } else {
            object_store::path::Path::parse(rest)
        };
        name.map_err(|_| {
            unsupported(format!(
                "{text}: a path with an empty part, a dot alone, or a control character in it"
            ))
        })
    }
}

fn client_options() -> ClientOptions {
    // With HTTP/2, all requests would share one connection. Servers close idle connections, but
    // those of a call are new.
    let client = ClientOptions::new().with_http1_only().with_pool_max_idle_per_host(1024);
    // The time limit of a request depends on its size, so this crate sets it.
    client.with_timeout_disabled()
}

/// Disables retries by the client. This crate retries, so that a caller can stop it.
fn once() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// Longest time of an option in seconds: a year.
const LONGEST: f64 = 366.0 * 24.0 * 3600.0;

fn seconds(key: &str, value: &str) -> Result<Duration> {
    let number = value.strip_suffix('s').unwrap_or(value).trim().parse::<f64>();
    number
        .ok()
        .filter(|seconds| !seconds.is_nan())
        .map(|seconds| seconds.min(LONGEST))
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| unsupported(format!("storage_options: {key} is not a number of seconds")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> Result<Config> {
        Config::new(url, [])
    }

    #[test]
    fn urls_lead_to_places_and_names() {
        for (url, root, name) in [
            ("s3://b/a/index.dcprs", "s3://b", "a/index.dcprs"),
            ("gs://b/a%20b/x", "gs://b", "a%20b/x"),
            ("https://h:8/a%20b/x", "https://h:8", "a b/x"),
            ("S3://b/x", "s3://b", ""),
        ] {
            let config = config(url).unwrap();
            assert_eq!(config.root, root);
            if url.starts_with(root) {
                assert_eq!(
                    config.name(Path::new(url)).unwrap().to_string(),
                    object_store::path::Path::parse(name).unwrap().to_string()
                );
            }
        }
        let config = config("s3://b/x").unwrap();
        for other in ["s3://b/a/../x", "s3://b/a//x", "/etc/passwd", "s3://c/x"] {
            assert!(config.name(Path::new(other)).is_err(), "{other}");
        }
    }

    #[test]
    fn times_are_bounded() {
        for (given, seconds) in [("2.5", 2.5), ("30s", 30.0), ("1e19", LONGEST), ("inf", LONGEST)] {
            let config = Config::new("s3://b", [("read_timeout".into(), given.into())]).unwrap();
            assert_eq!(config.limits.silence, Duration::from_secs_f64(seconds));
        }
        for refused in ["-1", "NaN", "soon", "-inf"] {
            assert!(
                Config::new("s3://b", [("read_timeout".into(), refused.into())]).is_err(),
                "{refused}"
            );
        }
    }

    #[test]
    fn what_is_refused_names_no_secret() {
        for url in
            ["https://me:hunter22@h/x", "https://h/x?sig=hunter22", "ftp://hunter22/x", "s3:///x"]
        {
            let error = config(url).err().unwrap().to_string();
            assert!(
                !error.contains("hunter22/")
                    && !error.contains("=hunter22")
                    && !error.contains(":hunter22"),
                "{error}"
            );
        }
        let error = Config::new("s3://b", [("aws_secret_acess_key".into(), "hunter22".into())]);
        let error = error.err().unwrap().to_string();
        assert!(error.contains("aws_secret_acess_key") && !error.contains("hunter22"), "{error}");
    }
}
