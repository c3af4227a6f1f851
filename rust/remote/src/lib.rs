//! Object stores for `dcp-rs-core`: S3 and compatible stores, Google Cloud Storage, Azure, and
//! plain web servers.
//!
//! [`Store`] implements the core's [`Remote`]. It only has the location and the versions of files
//! that were seen. A `Connection` has the runtime, its threads and the clients. It ends with the
//! call that it was made for, so that a fork finds nothing that it would break.

#![forbid(unsafe_code)]

mod answers;
mod config;
mod connection;
mod credentials;
mod fetch;
mod retry;
mod secrets;
mod session;
mod store;
#[cfg(test)]
mod testing;
mod transport;

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use dcp_rs_core::lock;
use dcp_rs_core::store::{Connection, Remote, StoringConnection};
use dcp_rs_core::{Error, Result};

use self::config::{Config, StoreKind};
use self::connection::Connected;

/// Version of a file when it was first seen. It must not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    size: u64,
    tag: Option<String>,
    /// A version that some stores have in addition to the tag, and compare in conditions.
    version: Option<String>,
    /// Modification time in seconds, which identifies objects without a tag.
    modified: i64,
}

impl Seen {
    pub(crate) fn of(meta: object_store::ObjectMeta) -> Self {
        Self {
            size: meta.size,
            tag: meta.e_tag,
            version: meta.version,
            modified: meta.last_modified.timestamp(),
        }
    }
}

/// A bucket, a container or a server, and how to reach it.
pub struct Store {
    config: Arc<Config>,
    seen: Arc<Mutex<HashMap<PathBuf, Seen>>>,
}

impl Store {
    /// Opens the store of `url`. Missing `options` are taken from the environment. It makes no
    /// request.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a URL of another kind, or for an unknown option. The error does
    /// not contain its value.
    pub fn new(url: &str, options: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        Ok(Self { config: Arc::new(Config::new(url, options)?), seen: Arc::default() })
    }

    /// Returns the start of all URLs on this store, such as `s3://bucket`.
    #[must_use]
    pub fn root(&self) -> &str {
        &self.config.root
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({:?})", self.root())
    }
}

impl Store {
    fn connected(&self, threads: usize) -> Result<Connected> {
        Connected::new(Arc::clone(&self.config), Arc::clone(&self.seen), threads)
    }
}

impl Remote for Store {
    fn connect(&self, threads: usize) -> Result<Arc<dyn Connection>> {
        Ok(Arc::new(self.connected(threads)?))
    }

    fn connect_to_store(&self, threads: usize) -> Result<Arc<dyn StoringConnection>> {
        if self.config.kind == StoreKind::Http {
            return Err(unsupported(format!(
                "{}: a web server is read only; checkpoints are saved to s3://, gs:// and az://",
                self.root()
            )));
        }
        Ok(Arc::new(self.connected(threads)?))
    }
}

/// Records the version of a file, and refuses a version that differs from an earlier one.
pub(crate) fn see(
    seen: &Mutex<HashMap<PathBuf, Seen>>,
    path: &Path,
    now: Seen,
) -> std::result::Result<(), String> {
    let mut seen = lock(seen);
    match seen.get(path) {
        Some(before) if before.tag != now.tag => Err(format!(
            "the object was replaced since it was opened: its tag is {}, and was {}",
            now.tag.as_deref().unwrap_or("none"),
            before.tag.as_deref().unwrap_or("none")
        )),
        Some(before) if before.size != now.size => Err(format!(
            "the object was replaced since it was opened: it is {} bytes long, and was {}",
            now.size, before.size
        )),
        Some(before) if now.tag.is_none() && before.modified != now.modified => Err(format!(
            "the object was replaced since it was opened: it was modified {} s later",
            now.modified.saturating_sub(before.modified)
        )),
        Some(_) => Ok(()),
        None => {
            seen.insert(path.to_owned(), now);
            Ok(())
        }
    }
}

fn unsupported(reason: impl Into<String>) -> Error {
    Error::Unsupported(reason.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_tag_is_known_by_its_date() {
        let seen = Mutex::default();
        let at = |path: &str, tag: Option<&str>, modified| {
            let now = Seen { size: 1, tag: tag.map(str::to_owned), version: None, modified };
            see(&seen, Path::new(path), now).is_ok()
        };
        assert!(at("plain", None, 5) && at("plain", None, 5) && !at("plain", None, 6));
        assert!(
            at("tagged", Some("a"), 5) && at("tagged", Some("a"), 6) && !at("tagged", Some("b"), 6)
        );
    }
}
