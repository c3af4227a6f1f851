//! A runtime, its threads and a client, which end together. A session lasts as long as a call.

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dcp_rs_core::lock;
use dcp_rs_core::{Control, Error, Result};
use object_store::UpdateVersion;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::Seen;
use crate::answers::Failure;
use crate::config::{Client, Config, StoreKind};
use crate::retry::RetryState;
use crate::transport::Hold;

/// Limit on the requests in flight of one connection.
const IN_FLIGHT: usize = 96;
/// Interval at which a waiting call checks for cancellation.
const PERIOD: Duration = Duration::from_millis(50);
/// Longest wait for running tasks when a session ends, because a DNS look-up can hang.
const LAST_WAIT: Duration = Duration::from_millis(200);

/// State that every request needs.
pub struct Shared {
    pub config: Arc<Config>,
    pub client: Client,
    hold: Arc<Hold>,
    pub permits: Semaphore,
    pub seen: Arc<Mutex<HashMap<PathBuf, Seen>>>,
}

impl Shared {
    /// Returns the retries of one request.
    pub fn retry(&self) -> RetryState {
        RetryState::new(self.config.limits, Arc::clone(&self.hold))
    }

    /// Returns the tag that a file must have, if it was seen before.
    pub fn tag(&self, path: &Path) -> Option<String> {
        // A weak tag never matches a precondition (RFC 9110, 13.1.1), so the tag of the answer is
        // compared instead.
        self.before(path)?.tag.filter(|tag| !tag.starts_with("W/"))
    }

    /// Returns the version of a file that was seen, as a condition; `None` if it was not seen or
    /// cannot be distinguished from others.
    pub fn as_seen(&self, path: &Path) -> Option<UpdateVersion> {
        let (e_tag, version) = (self.tag(path), self.before(path)?.version);
        // Google's clients send the version, all others the tag.
        let is_known = match self.config.kind {
            StoreKind::Google => version.is_some(),
            _ => e_tag.is_some(),
        };
        is_known.then_some(UpdateVersion { e_tag, version })
    }

    /// Returns the version of a file that was seen.
    pub fn before(&self, path: &Path) -> Option<Seen> {
        lock(&self.seen).get(path).cloned()
    }

    /// Records a new version of a file.
    pub fn note(&self, path: &Path, now: Seen) {
        lock(&self.seen).insert(path.to_owned(), now);
    }

    /// Removes the version of a file, which may change.
    pub fn forget(&self, path: &Path) {
        lock(&self.seen).remove(path);
    }

    /// Converts a failure to the error of a call.
    pub fn error(
        &self,
        failure: Failure,
        action: &'static str,
        path: &Path,
        attempts: u32,
    ) -> Error {
        failure.into_error(action, path, attempts, &self.config.secrets)
    }

    /// Makes attempts until one succeeds, or no retry is left. Each sends `body` bytes.
    pub async fn persist<T, F>(
        &self,
        action: &'static str,
        path: &Path,
        body: u64,
        attempt: impl Fn() -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let work = RetryState::sending(body);
        let mut retry = self.retry();
        loop {
            let failure = match timeout(retry.answer(work), attempt()).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(error)) => Failure::of(&error),
                Err(_) => retry.timed_out(work),
            };
            if !retry.wait_to_retry(&failure).await {
                return Err(self.error(failure, action, path, retry.attempts()));
            }
        }
    }
}

/// A runtime with the state of its requests. On drop it ends its threads.
pub struct Session {
    pub shared: Arc<Shared>,
    handle: Handle,
    /// Taken when the session ends.
    runtime: Option<Runtime>,
    /// Process that made it. Forks have none of its threads.
    process: u32,
}

impl Session {
    pub fn new(
        config: Arc<Config>,
        seen: Arc<Mutex<HashMap<PathBuf, Seen>>>,
        threads: usize,
    ) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("dcp-rs-store")
            .enable_all()
            .build()
            .map_err(|error| Error::io("start threads for", Path::new(&config.root), error))?;
        let hold = Arc::default();
        let client = {
            // Tasks that the client starts later run on this runtime.
            let _entered = runtime.enter();
            config.client(Arc::clone(&hold))?
        };
        Ok(Self {
            shared: Arc::new(Shared {
                config,
                client,
                hold,
                permits: Semaphore::new(IN_FLIGHT),
                seen,
            }),
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
            process: std::process::id(),
        })
    }

    /// Waits for work on the runtime, and aborts it if the call is cancelled.
    pub fn wait<T: Send + 'static>(
        &self,
        control: &Control,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (done, is_done) = channel();
        let task = self.handle.spawn(async move {
            // The receiver lives until the task has ended.
            let _ = done.send(work.await);
        });
        loop {
            let answer = is_done.recv_timeout(PERIOD);
            let Config { root, secrets, .. } = &*self.shared.config;
            for notice in self.shared.hold.take_notices() {
                control.tell(format!("{root}: {}", secrets.remove(&notice)));
            }
            match answer {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(stopped) = control.check() {
                        task.abort();
                        // When the task has ended, by itself or by the abort, the channel is
                        // closed. Then nothing is written any more.
                        while is_done.recv().is_ok() {}
                        return Err(stopped);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    control.check()?;
                    return Err(Error::Internal(
                        "a request to a store ended without an answer".into(),
                    ));
                }
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let runtime = self.runtime.take();
        if std::process::id() == self.process {
            // This ends the requests in flight.
            if let Some(runtime) = runtime {
                runtime.shutdown_timeout(LAST_WAIT);
            }
            return;
        }
        // In a fork none of it works. A missing thread may hold one of its locks, and idle
        // connections of the client would wake tasks of the runtime.
        std::mem::forget(runtime);
        std::mem::forget(self.handle.clone());
        std::mem::forget(Arc::clone(&self.shared));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_fork_has_of_it_is_left_alone() {
        let config = Arc::new(Config::new("s3://bucket", [("region".into(), "x".into())]).unwrap());
        let new = || Session::new(Arc::clone(&config), Arc::default(), 1).unwrap();
        let own = new();
        let shared = Arc::downgrade(&own.shared);
        drop(own);
        assert!(shared.upgrade().is_none());

        let mut of_a_parent = new();
        of_a_parent.process = 0;
        let shared = Arc::downgrade(&of_a_parent.shared);
        drop(of_a_parent);
        assert!(
            shared.upgrade().is_some(),
            "its client was dropped in a process that has none of its threads"
        );
    }
}
