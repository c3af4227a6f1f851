//! The HTTP client for the clients of stores. It limits the length of answers. It follows no
//! redirect of a store, which would take credentials to another host.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dcp_rs_core::NOTICE_AGAIN;
use dcp_rs_core::lock;
use futures_util::StreamExt as _;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest,
    HttpResponse, HttpResponseBody, HttpService,
};
use object_store::{ClientOptions, Error};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{HeaderMap, LOCATION, RANGE, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::tls::Certificate;
use reqwest::{Method, NoProxy, Proxy, StatusCode, Url};

use crate::config::StoreKind;
use crate::{answers, credentials};

/// Limit on the bytes of an error that are read. Stores send a few hundred.
const MOST_ERROR: usize = 64 << 10;
/// Limit on an answer that is read whole, such as a page of a listing. Ranges of objects are
/// streamed.
const MOST_ANSWER: usize = 16 << 20;
/// Limit on redirects to a file of a web server.
const MOST_REDIRECTS: usize = 10;

/// An answer that was refused, with the reason.
#[derive(Debug)]
pub struct Refused(pub String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// A refused connection to a store that has not answered this process yet. Probably its URL or its
/// endpoint is wrong.
#[derive(Debug)]
pub struct NobodyListens(HttpError);

impl fmt::Display for NobodyListens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for NobodyListens {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// The stores that have answered a request of this process, by the fingerprint of the
/// configuration. A session lasts as long as a call, so it cannot remember that.
static ANSWERED: LazyLock<Mutex<HashSet<u64>>> = LazyLock::new(Mutex::default);

/// The time until which a store asked for no requests (`Retry-After`), and the notices about
/// requests without progress. All requests of a session share it.
#[derive(Debug, Default)]
pub struct Hold {
    until: Mutex<Option<Instant>>,
    notices: Mutex<Notices>,
}

#[derive(Debug, Default)]
struct Notices {
    texts: Vec<String>,
    last: Option<Instant>,
}

impl Hold {
    /// Leaves a notice for the caller, unless another one was left within a minute, since many
    /// requests fail together.
    pub fn tell(&self, text: impl FnOnce() -> String) {
        let mut notices = lock(&self.notices);
        if notices.last.is_none_or(|last| last.elapsed() >= NOTICE_AGAIN) {
            notices.last = Some(Instant::now());
            notices.texts.push(text());
        }
    }

    /// Returns the notices since the last call.
    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.notices).texts)
    }

    fn note(&self, headers: &HeaderMap) {
        let seconds = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let until =
            seconds.and_then(|seconds| Instant::now().checked_add(Duration::from_secs(seconds)));
        let mut hold = lock(&self.until);
        *hold = (*hold).max(until);
    }

    /// Returns the remaining time.
    pub fn left(&self) -> Duration {
        let until = *lock(&self.until);
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }
}

/// Makes the HTTP clients of a store.
#[derive(Clone, Debug)]
pub struct Transport {
    kind: StoreKind,
    /// Fingerprint of the configuration with the credentials.
    fingerprint: u64,
    authorities: Option<Arc<[Certificate]>>,
    hold: Arc<Hold>,
    /// The shared client, if sharing is allowed. All users then belong to one runtime.
    shared: Option<Arc<OnceLock<HttpClient>>>,
}

impl Transport {
    /// Makes a transport for the requests of a session, which share one pool of connections.
    pub fn of_session(
        kind: StoreKind,
        fingerprint: u64,
        authorities: Option<Arc<[Certificate]>>,
        hold: Arc<Hold>,
    ) -> Self {
        Self { kind, fingerprint, authorities, hold, shared: Some(Arc::default()) }
    }

    /// Makes a transport for providers of credentials. They outlive a session and its runtime, so
    /// they keep no connection open.
    pub fn of_credentials(&self) -> Self {
        Self { shared: None, ..self.clone() }
    }

    fn client(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = self
            .built(options)
            .map_err(|error| Error::Generic { store: "HTTP client", source: error })?;
        Ok(HttpClient::new(Bounded {
            client,
            fingerprint: self.fingerprint,
            hold: Arc::clone(&self.hold),
            is_of_store: self.shared.is_some(),
        }))
    }

    /// Builds a client with these options. `object_store` handles `default_headers`, because it
    /// signs them.
    fn built(
        &self,
        options: &ClientOptions,
    ) -> Result<reqwest::Client, Box<dyn std::error::Error + Send + Sync>> {
        use ClientConfigKey as Key;
        let text = |key: Key| options.get_config_value(&key);
        let is_on = |key: Key| match text(key).unwrap_or_default().to_ascii_lowercase().as_str() {
            "1" | "true" | "on" | "yes" | "y" => Ok(true),
            "" | "0" | "false" | "off" | "no" | "n" => Ok(false),
            _ => Err(format!("{} is neither true nor false", key.as_ref())),
        };
        let duration = |key: Key| {
            let parse = |value: String| match value.parse() {
                Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
                Err(_) => humantime::parse_duration(&value).ok(),
            };
            let fault = || format!("{} is not a number of seconds", key.as_ref());
            text(key).map(|value| parse(value).ok_or_else(fault)).transpose()
        };
        let mut builder =
            reqwest::Client::builder().referer(false).redirect(redirects(self.kind)).user_agent(
                text(Key::UserAgent)
                    .unwrap_or_else(|| concat!("dcp-rs/", env!("CARGO_PKG_VERSION")).into()),
            );
        if let Some(url) = text(Key::ProxyUrl) {
            let excluded = text(Key::ProxyExcludes).and_then(|hosts| NoProxy::from_string(&hosts));
            builder = builder.proxy(Proxy::all(url)?.no_proxy(excluded));
            if let Some(certificate) = text(Key::ProxyCaCertificate) {
                builder = builder.tls_certs_merge([Certificate::from_pem(certificate.as_bytes())?]);
            }
        }
        if let Some(authorities) = &self.authorities {
            builder = builder.tls_certs_only(authorities.iter().cloned());
        } else if is_on(Key::NoSystemCertificates)? {
            builder = builder.tls_certs_only([]);
        }
        if let Some(time) = duration(Key::Timeout)? {
            builder = builder.timeout(time);
        }
        if let Some(time) = duration(Key::ConnectTimeout)? {
            builder = builder.connect_timeout(time);
        }
        if let Some(time) = duration(Key::PoolIdleTimeout)? {
            builder = builder.pool_idle_timeout(time);
        }
        let idle = match (&self.shared, text(Key::PoolMaxIdlePerHost)) {
            (None, _) => Some(0),
            (Some(_), most) => most.map(|most| most.parse()).transpose()?,
        };
        if let Some(idle) = idle {
            builder = builder.pool_max_idle_per_host(idle);
        }
        if let Some(time) = duration(Key::Http2KeepAliveInterval)? {
            builder = builder.http2_keep_alive_interval(time);
        }
        if let Some(time) = duration(Key::Http2KeepAliveTimeout)? {
            builder = builder.http2_keep_alive_timeout(time);
        }
        if let Some(size) = text(Key::Http2MaxFrameSize) {
            builder = builder.http2_max_frame_size(Some(size.parse()?));
        }
        builder = builder.http2_keep_alive_while_idle(is_on(Key::Http2KeepAliveWhileIdle)?);
        if is_on(Key::Http1Only)? {
            builder = builder.http1_only();
        }
        if is_on(Key::Http2Only)? {
            builder = builder.http2_prior_knowledge();
        }
        if is_on(Key::RandomizeAddresses)? {
            builder = builder.dns_resolver(Arc::new(AnyAddress));
        }
        let client = builder
            .danger_accept_invalid_certs(is_on(Key::AllowInvalidCertificates)?)
            .https_only(!is_on(Key::AllowHttp)?)
            .build()?;
        Ok(client)
    }
}

impl HttpConnector for Transport {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let Some(shared) = &self.shared else {
            return self.client(options);
        };
        if let Some(client) = shared.get() {
            return Ok(client.clone());
        }
        let client = self.client(options)?;
        Ok(shared.get_or_init(|| client).clone())
    }
}

/// Stores redirect if a bucket is in another region, where the signature would be invalid. Web
/// servers redirect to the location of their files, and get no secrets. From the internet they may
/// not lead into a private network, where this machine may read what the server cannot.
fn redirects(kind: StoreKind) -> Policy {
    if kind != StoreKind::Http {
        return Policy::none();
    }
    Policy::custom(|attempt| {
        if attempt.previous().len() <= MOST_REDIRECTS && leads_on(attempt.previous(), attempt.url())
        {
            attempt.follow()
        } else {
            attempt.stop()
        }
    })
}

/// Returns whether a redirect is as safe as the URLs before it.
fn leads_on(previous: &[Url], to: &Url) -> bool {
    let was_safe = previous.iter().any(|url| url.scheme() == "https");
    let is_weaker = was_safe && to.scheme() != "https";
    !is_weaker && (!is_local(to) || previous.iter().all(is_local))
}

/// Returns whether the host of a URL has an address on this machine or in a private network.
fn is_local(url: &Url) -> bool {
    let addresses = url.socket_addrs(|| None).unwrap_or_default();
    addresses.iter().any(|address| match address.ip().to_canonical() {
        IpAddr::V4(ip) => {
            let is_shared = ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64;
            ip.is_loopback()
                || ip.is_private()
                || ip.is_link_local()
                || ip.is_unspecified()
                || is_shared
        }
        IpAddr::V6(ip) => {
            ip.is_loopback()
                || ip.is_unspecified()
                || ip.is_unique_local()
                || ip.is_unicast_link_local()
        }
    })
}

/// A client that limits the length of answers.
#[derive(Debug)]
struct Bounded {
    client: reqwest::Client,
    fingerprint: u64,
    hold: Arc<Hold>,
    /// False if it asks a provider of credentials.
    is_of_store: bool,
}

impl Bounded {
    /// Sends a request. Remembers that the store answered, or says that it never did.
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answer = HttpService::call(&self.client, request).await;
        if !self.is_of_store {
            return answer;
        }
        // Nobody waits for the lock: of several requests at once, one may remember it for all.
        let Ok(mut answered) = ANSWERED.try_lock() else { return answer };
        match answer {
            Ok(response) => {
                answered.insert(self.fingerprint);
                Ok(response)
            }
            Err(error) if is_refused(&error) && !answered.contains(&self.fingerprint) => {
                Err(HttpError::new(error.kind(), NobodyListens(error)))
            }
            failed => failed,
        }
    }
}

fn is_refused(error: &HttpError) -> bool {
    answers::found::<io::Error>(error)
        .is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

#[async_trait]
impl HttpService for Bounded {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_range = request.method() == Method::GET && request.headers().contains_key(RANGE);
        let asked = request.uri().host().unwrap_or_default().to_owned();
        let response = self.send(request).await?;
        let status = response.status();
        if status.is_redirection() && status != StatusCode::NOT_MODIFIED {
            return Err(refused(redirected(status, response.headers(), &asked)));
        }
        if status.is_success() && is_range {
            return Ok(response);
        }
        self.hold.note(response.headers());
        let (parts, body) = response.into_parts();
        let most = if status.is_success() { MOST_ANSWER } else { MOST_ERROR };
        let (mut bytes, is_whole) = beginning(body, most).await?;
        if !status.is_success() {
            // The limit may split a character, which must not be an error of its own.
            let mut text = String::from_utf8_lossy(&bytes).into_owned();
            // The answer to a HEAD request has no body that names the region.
            if status == StatusCode::BAD_REQUEST
                && let Some(region) = region(&parts.headers)
            {
                text.extend(["<Region>", &region, "</Region>"]);
            }
            if answers::blames_credentials(status.as_u16(), &text) {
                credentials::forget(self.fingerprint);
            }
            bytes = text.into();
        } else if !is_whole {
            return Err(refused(format!("the answer is longer than {most} bytes")));
        }
        Ok(HttpResponse::from_parts(parts, bytes.into()))
    }
}

/// Returns the start of a body, and whether that is all of it.
async fn beginning(body: HttpResponseBody, most: usize) -> Result<(Vec<u8>, bool), HttpError> {
    let mut bytes = Vec::new();
    let mut pieces = body.bytes_stream();
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        let room = most - bytes.len();
        bytes.extend_from_slice(&piece[..piece.len().min(room)]);
        if piece.len() > room {
            return Ok((bytes, false));
        }
    }
    Ok((bytes, true))
}

fn refused(reason: String) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, Refused(reason))
}

fn redirected(status: StatusCode, headers: &HeaderMap, asked: &str) -> String {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let host =
        text(LOCATION.as_str()).and_then(|to| Some(Url::parse(to).ok()?.host_str()?.to_owned()));
    let to = match host.as_deref() {
        Some(host) if host != asked => format!("to another host, {}", plain(host)),
        _ => "elsewhere".into(),
    };
    let region = region(headers).map_or_else(String::new, |region| {
        format!("; the bucket is in the region {region}: set aws_region")
    });
    format!("the store answered {} and points {to}, which is not followed{region}", status.as_u16())
}

/// Returns the region of the bucket, if S3 names it.
fn region(headers: &HeaderMap) -> Option<String> {
    headers.get("x-amz-bucket-region")?.to_str().ok().map(plain)
}

/// Returns a name from a server, without characters that no such name has.
pub fn plain(name: &str) -> String {
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    name.chars().filter(is_plain).take(128).collect()
}

/// Looks up a name and starts with a random one of its addresses, so that connections spread over
/// servers.
struct AnyAddress;

impl Resolve for AnyAddress {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let look_up = move || -> std::io::Result<Vec<SocketAddr>> {
                let mut found: Vec<_> = (name.as_str(), 0).to_socket_addrs()?.collect();
                let [random] = dcp_rs_core::store::random_bytes::<1>().unwrap_or_default();
                let first = usize::from(random).checked_rem(found.len()).unwrap_or_default();
                found.rotate_left(first);
                Ok(found)
            };
            let found = tokio::task::spawn_blocking(look_up).await??;
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
#[path = "transport_tests.rs"]
mod tests;
