//! What lives for a call: a runtime, its threads, a client, and what is in flight.
#![allow(unsafe_code)] // parts are fetched to memory by address

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use dcp_rs_core::store::{Condition, Connection, Listed, Part, StoringConnection, Upload, random_token};
use dcp_rs_core::{Control, Error, Result, StorageFault};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::{ObjectMeta, ObjectStoreExt as _, UpdateVersion};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::answers::Failure;
use crate::config::{Client, Config};
use crate::fetch::{self, File};
use crate::lend::lend;
use crate::patience::Patience;
use crate::store::{self, Removal};
use crate::{Seen, see};

/// Requests in flight at most, of one connection.
const IN_FLIGHT: usize = 96;
/// Threads that receive, at most: what a fast network card needs.
const MOST_THREADS: usize = 32;
/// How often a waiting call looks whether it is to stop.
const PERIOD: Duration = Duration::from_millis(50);
/// What is in the midst of something when a connection ends is waited for no longer than this: a look-up of a name can hang.
const LAST_WAIT: Duration = Duration::from_millis(200);

/// What every request needs.
pub struct Shared {
    pub config: Arc<Config>,
    pub client: Client,
    pub permits: Semaphore,
    pub seen: Arc<Mutex<HashMap<PathBuf, Seen>>>,
}

impl Shared {
    /// The tag that a file has to have, if it was seen before.
    pub fn tag(&self, path: &Path) -> Option<String> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let tag = seen.get(path)?.tag.clone()?;
        // A weak tag matches nothing in a precondition (RFC 9110, 13.1.1); the answer's is compared.
        (!tag.starts_with("W/")).then_some(tag)
    }

    /// The file as it was seen, where it was: what has to be there still.
    pub fn as_seen(&self, path: &Path) -> Option<UpdateVersion> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get(path).map(|seen| UpdateVersion {
            e_tag: seen.tag.clone(),
            version: seen.version.clone(),
        })
    }

    /// The file is another one from now on.
    pub fn forget(&self, path: &Path) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(path);
    }

    /// Does something, again and again until it is done or enough. `body`: how many bytes are sent each time.
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
        let mut patience = Patience::new(self.config.limits);
        loop {
            let failure = match timeout(patience.answer(body), attempt()).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(error)) => Failure::of(&error),
                Err(_) => Failure::passing("no answer in time"),
            };
            if !patience.endures(&failure).await {
                return Err(failure.into_error(action, path, patience.attempts(), &self.config.secrets));
            }
        }
    }
}

/// A connection. Dropped, it ends its threads.
pub struct Connected {
    handle: Handle,
    /// Taken when it ends.
    runtime: Mutex<Option<Runtime>>,
    /// That made it: forks of it have none of its threads.
    process: u32,
    shared: Arc<Shared>,
}

impl Connected {
    pub fn new(config: Arc<Config>, seen: Arc<Mutex<HashMap<PathBuf, Seen>>>, threads: usize) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads };
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads.clamp(1, MOST_THREADS))
            .thread_name("dcp-rs-store")
            .enable_all()
            .build()
            .map_err(|error| Error::io("start threads for", Path::new(&config.root), error))?;
        let client = {
            // What it sets up by and by belongs to this runtime.
            let _entered = runtime.enter();
            config.client()?
        };
        Ok(Self {
            handle: runtime.handle().clone(),
            runtime: Mutex::new(Some(runtime)),
            process: std::process::id(),
            shared: Arc::new(Shared {
                config,
                client,
                permits: Semaphore::new(IN_FLIGHT),
                seen,
            }),
        })
    }

    /// Ends it, and whatever is in flight.
    fn end(&self) {
        let Some(runtime) = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        if std::process::id() == self.process {
            runtime.shutdown_timeout(LAST_WAIT);
        } else {
            // A lock in it may be held by a thread that is not there.
            std::mem::forget(runtime);
        }
    }

    /// Waits for what sends these pieces. When this returns, nobody reads them any more.
    fn send<T: Send + 'static, F>(
        &self,
        pieces: &[&[u8]],
        control: &Control,
        work: impl FnOnce(Arc<Shared>, Vec<Bytes>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        // A server that answered may take what it was still to be sent. One that was given up gets no time for it.
        let given_up = AtomicBool::new(false);
        let patience = || {
            if given_up.load(Ordering::Relaxed) {
                LAST_WAIT
            } else {
                self.shared.config.limits.silence
            }
        };
        lend(pieces, &patience, &|| self.end(), |bytes| {
            let shared = Arc::clone(&self.shared);
            let work = work(Arc::clone(&self.shared), bytes);
            let sent = self.wait(control, async move {
                let _permit = shared.permits.acquire().await.map_err(|_| Error::Interrupted)?;
                work.await
            });
            given_up.store(sent.is_err(), Ordering::Relaxed);
            sent
        })
    }

    /// Waits for work on the runtime, and ends it where the call is to stop.
    fn wait<T: Send + 'static>(
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
            match is_done.recv_timeout(PERIOD) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(stopped) = control.check() {
                        task.abort();
                        // Once it has ended, by its end or by this, the channel is closed, and nothing is written any more.
                        while is_done.recv().is_ok() {}
                        return Err(stopped);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    control.check()?;
                    return Err(Error::Internal("a request to a store ended without an answer".into()));
                }
            }
        }
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.end();
    }
}

/// The objects right in a folder. Each page is a request with time and retries of its own.
async fn list(
    shared: &Shared,
    pages: &dyn PaginatedListStore,
    path: &Path,
    folder: &object_store::path::Path,
) -> Result<Vec<ObjectMeta>> {
    let prefix = (!folder.as_ref().is_empty()).then(|| format!("{folder}/"));
    let mut found = Vec::new();
    let mut token = None;
    loop {
        let next = || {
            let options = PaginatedListOptions {
                delimiter: Some("/".into()),
                page_token: token.clone(),
                ..PaginatedListOptions::default()
            };
            pages.list_paginated(prefix.as_deref(), options)
        };
        let page = shared.persist("list", path, 0, next).await?;
        found.extend(page.result.objects);
        token = page.page_token;
        if token.is_none() {
            return Ok(found);
        }
    }
}

/// `None` for what is not there.
fn if_there<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(Error::Storage {
            kind: StorageFault::NotFound,
            ref reason,
            ..
        }) if !reason.contains("NoSuchBucket") && !reason.contains("ContainerNotFound") => Ok(None),
        Err(error) => Err(error),
    }
}

fn changed(path: &Path, reason: String) -> Error {
    Error::Storage {
        kind: StorageFault::Precondition,
        action: "read",
        path: path.to_owned(),
        attempts: 1,
        reason,
    }
}

impl Connection for Connected {
    fn look(&self, path: &Path, control: &Control) -> Result<Option<u64>> {
        {
            let seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(seen) = seen.get(path) {
                return Ok(Some(seen.size));
            }
        }
        let name = self.shared.config.name(path)?;
        let (shared, at) = (Arc::clone(&self.shared), path.to_owned());
        let meta = self.wait(control, async move {
            let _permit = shared.permits.acquire().await.map_err(|_| Error::Interrupted)?;
            shared
                .persist("look at", &at, 0, || shared.client.objects.head(&name))
                .await
        });
        let Some(meta) = if_there(meta)? else { return Ok(None) };
        let size = meta.size;
        see(&self.shared.seen, path, Seen::of(meta)).map_err(|reason| changed(path, reason))?;
        Ok(Some(size))
    }

    fn list(&self, folder: &Path, control: &Control) -> Result<Option<Vec<Listed>>> {
        let Some(pages) = self.shared.client.pages.clone() else {
            return Ok(None);
        };
        let prefix = self.shared.config.name(folder)?;
        let (shared, at) = (Arc::clone(&self.shared), folder.to_owned());
        let listed = self.wait(control, async move { list(&shared, &*pages, &at, &prefix).await })?;
        let now = SystemTime::now();
        let told = |object: ObjectMeta| {
            Some(Listed {
                name: object.location.filename()?.to_owned(),
                size: object.size,
                age: now.duration_since(object.last_modified.into()).unwrap_or_default(),
            })
        };
        Ok(Some(listed.into_iter().filter_map(told).collect()))
    }

    fn start(&self, path: &Path, most: u64, anew: bool, control: &Control) -> Result<Option<(Vec<u8>, u64)>> {
        let name = self.shared.config.name(path)?;
        let (shared, at) = (Arc::clone(&self.shared), path.to_owned());
        let started = self.wait(control, async move {
            let _permit = shared.permits.acquire().await.map_err(|_| Error::Interrupted)?;
            fetch::start(&shared, &at, &name, most).await
        });
        let Some((now, bytes)) = if_there(started)? else {
            return Ok(None);
        };
        let size = now.size;
        if !anew {
            see(&self.shared.seen, path, now).map_err(|reason| changed(path, reason))?;
        }
        Ok(Some((bytes, size)))
    }

    unsafe fn fetch(&self, path: &Path, size: u64, parts: Vec<Part>, control: &Control) -> Result<()> {
        let name = self.shared.config.name(path)?;
        let shared = Arc::clone(&self.shared);
        let file = Arc::new(File {
            path: path.to_owned(),
            name,
            size,
        });
        self.wait(control, async move {
            // SAFETY: the caller's promise, for as long as this call lasts; `wait` returns once the task and with it every part has ended.
            let each = |part| unsafe { fetch::fetch(Arc::clone(&shared), Arc::clone(&file), part) };
            let mut fetches: FuturesUnordered<_> = parts.into_iter().map(each).collect();
            while let Some(fetched) = fetches.next().await {
                fetched?;
            }
            Ok(())
        })
    }
}

impl StoringConnection for Connected {
    fn put(&self, path: &Path, pieces: &[&[u8]], condition: Condition, control: &Control) -> Result<()> {
        let name = self.shared.config.name(path)?;
        let path = path.to_owned();
        self.send(pieces, control, |shared, bytes| async move {
            store::put(&shared, &path, &name, bytes, condition).await
        })
    }

    fn begin(&self, path: &Path, control: &Control) -> Result<Upload> {
        let name = self.shared.config.name(path)?;
        let path = path.to_owned();
        self.send(&[], control, |shared, _| async move {
            store::begin(&shared, &path, &name).await
        })
    }

    fn put_part(&self, upload: &Upload, number: usize, pieces: &[&[u8]], control: &Control) -> Result<String> {
        let name = self.shared.config.name(&upload.path)?;
        let upload = upload.clone();
        self.send(pieces, control, |shared, bytes| async move {
            store::put_part(&shared, &upload, &name, number, bytes).await
        })
    }

    fn complete(&self, upload: &Upload, parts: Vec<String>, size: u64, control: &Control) -> Result<()> {
        let name = self.shared.config.name(&upload.path)?;
        let upload = upload.clone();
        self.send(&[], control, |shared, _| async move {
            store::complete(&shared, &upload, &name, parts, size).await
        })
    }

    fn remove(&self, files: &[PathBuf], uploads: &[Upload], within: Duration, control: &Control) -> Vec<Error> {
        let config = &self.shared.config;
        let files = files
            .iter()
            .map(|path| Ok(Removal::File(path.clone(), config.name(path)?)));
        let uploads = uploads
            .iter()
            .map(|upload| Ok(Removal::Upload(upload.clone(), config.name(&upload.path)?)));
        let removals = match files.chain(uploads).collect::<Result<Vec<_>>>() {
            Ok(removals) => removals,
            Err(error) => return vec![error],
        };
        let removed = self.send(&[], control, |shared, _| async move {
            Ok(store::remove(&shared, &removals, within).await)
        });
        removed.unwrap_or_else(|error| vec![error])
    }

    fn keeps_conditions(&self, folder: &Path, control: &Control) -> Result<bool> {
        let path = folder.join(format!(".dcp-rs-asks-{:016x}", random_token()?));
        let name = self.shared.config.name(&path)?;
        self.send(&[], control, |shared, _| async move {
            store::keeps_conditions(&shared, &path, &name).await
        })
    }
}
