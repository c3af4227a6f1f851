//! A runtime, its threads and a client: what ends together. It lives for a call.

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

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

/// Requests in flight at most, of one connection.
const IN_FLIGHT: usize = 96;
/// Interval at which a waiting call checks for cancellation.
const PERIOD: Duration = Duration::from_millis(50);
/// Longest wait for running tasks when a session ends: a DNS look-up can hang.
const LAST_WAIT: Duration = Duration::from_millis(200);

/// State that every request needs.
pub struct Shared {
    pub config: Arc<Config>,
    pub client: Client,
    hold: Arc<Hold>,
    pub permits: Semaphore,
    pub seen: Arc<Mutex<HashMap<PathBuf, Seen>>>,
}

/// [`Shared::as_seen`], of a connection.
pub fn as_seen(
    config: &Config,
    seen: &Mutex<HashMap<PathBuf, Seen>>,
    path: &Path,
) -> Option<UpdateVersion> {
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let seen = seen.get(path)?;
    // As in `Shared::tag`.
    let e_tag = seen.tag.clone().filter(|tag| !tag.starts_with("W/"));
    let version = seen.version.clone();
    // Google's clients name the version, all others the tag.
    let is_known = match config.kind {
        StoreKind::Google => version.is_some(),
        _ => e_tag.is_some(),
    };
    is_known.then_some(UpdateVersion { e_tag, version })
}

impl Shared {
    /// For one request.
    pub fn retry(&self) -> RetryState {
        RetryState::new(self.config.limits, Arc::clone(&self.hold))
    }

    /// The tag that a file has to have, if it was seen before.
    pub fn tag(&self, path: &Path) -> Option<String> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let tag = seen.get(path)?.tag.clone()?;
        // A weak tag matches nothing in a precondition (RFC 9110, 13.1.1); the answer's is
        // compared.
        (!tag.starts_with("W/")).then_some(tag)
    }

    /// The file as it was seen, where it was and can be told from others: what has to be there
    /// still.
    pub fn as_seen(&self, path: &Path) -> Option<UpdateVersion> {
        as_seen(&self.config, &self.seen, path)
    }

    /// The file as it was when it was seen.
    pub fn before(&self, path: &Path) -> Option<Seen> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get(path).cloned()
    }

    /// The file is this one from now on.
    pub fn note(&self, path: &Path, now: Seen) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.insert(path.to_owned(), now);
    }

    /// The file is another one from now on.
    pub fn forget(&self, path: &Path) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(path);
    }

    /// Does something, again and again until it is done or enough. `body`: how many bytes are sent
    /// each time.
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
                return Err(failure.into_error(
                    action,
                    path,
                    retry.attempts(),
                    &self.config.secrets,
                ));
            }
        }
    }
}

/// Dropped, it ends its threads.
pub struct Session {
    pub shared: Arc<Shared>,
    handle: Handle,
    /// Taken when it ends.
    runtime: Option<Runtime>,
    /// Process that made it: forks have none of its threads.
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
            // Tasks that the client starts later belong to this runtime.
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

    /// Waits for work on the runtime, and ends it where the call is to stop.
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
                        // Once it has ended, by its end or by this, the channel is closed, and
                        // nothing is written any more.
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
            // Requests in flight end with it.
            if let Some(runtime) = runtime {
                runtime.shutdown_timeout(LAST_WAIT);
            }
            return;
        }
        // Nothing of it works here: a lock in it may be held by a thread that is not there, and
        // what is idle in the client would wake tasks of that runtime.
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
