//! What lives for a call: what a store is asked over a link, and over another one where that was cut.
#![allow(unsafe_code)] // parts are fetched to memory by address

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use dcp_rs_core::store::{Condition, Connection, Folder, Listed, Part, StoringConnection, Upload, random_token};
use dcp_rs_core::{Control, Error, Result, StorageFault};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::{ObjectMeta, ObjectStoreExt as _};

use crate::config::{Config, Kind};
use crate::fetch::{self, File};
use crate::lend::lend;
use crate::link::{LAST_WAIT, Link, Outcome, Shared, as_seen};
use crate::store::{self, Removal};
use crate::{Seen, see};

/// Threads that receive, at most: what a fast network card needs.
const MOST_THREADS: usize = 32;
/// Bytes of an object that S3 copies, at most.
const MOST_COPIED: u64 = 5 << 30;

/// A connection. Dropped, it ends its threads.
pub struct Connected {
    config: Arc<Config>,
    seen: Arc<Mutex<HashMap<PathBuf, Seen>>>,
    threads: usize,
    /// Another one, once it was cut.
    link: Mutex<Arc<Link>>,
}

impl Connected {
    pub fn new(config: Arc<Config>, seen: Arc<Mutex<HashMap<PathBuf, Seen>>>, threads: usize) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads }.clamp(1, MOST_THREADS);
        let link = Link::new(Arc::clone(&config), Arc::clone(&seen), threads)?;
        Ok(Self {
            config,
            seen,
            threads,
            link: Mutex::new(Arc::new(link)),
        })
    }

    fn link(&self) -> Result<Arc<Link>> {
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        if link.has_ended() {
            let next = Link::new(Arc::clone(&self.config), Arc::clone(&self.seen), self.threads)?;
            *link = Arc::new(next);
        }
        Ok(Arc::clone(&link))
    }

    /// Waits for a question about `path` and its answer.
    fn ask<T: Send + 'static, F>(
        &self,
        path: &Path,
        control: &Control,
        question: impl FnOnce(Arc<Shared>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let link = self.link()?;
        let answer = link.wait(control, question(Arc::clone(&link.shared)));
        answer.result(StorageFault::Failed, "read", path)
    }

    /// Waits for what sends these pieces, which may be done twice. When this returns, nobody reads them any more.
    fn send<T: Send + 'static, F>(
        &self,
        path: &Path,
        pieces: &[&[u8]],
        control: &Control,
        work: impl Fn(Arc<Shared>, Vec<Bytes>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.send_or(StorageFault::Failed, path, pieces, control, work)
    }

    /// The same; `lost` is what is said where no answer came.
    fn send_or<T: Send + 'static, F>(
        &self,
        lost: StorageFault,
        path: &Path,
        pieces: &[&[u8]],
        control: &Control,
        work: impl Fn(Arc<Shared>, Vec<Bytes>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let began = Instant::now();
        loop {
            let sent = self.send_once(pieces, control, &work)?;
            // Cut by another call that was given up: what has had as long as that one is not begun anew.
            if !matches!(sent, Outcome::Cut) || began.elapsed() >= self.config.limits.time {
                return sent.result(lost, "write", path);
            }
        }
    }

    fn send_once<T: Send + 'static, F>(
        &self,
        pieces: &[&[u8]],
        control: &Control,
        work: impl FnOnce(Arc<Shared>, Vec<Bytes>) -> F,
    ) -> Result<Outcome<T>>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let link = self.link()?;
        // A server that answered may take what it was still to be sent. One that was given up gets no time for it.
        let given_up = AtomicBool::new(false);
        let waits_on = |waited| {
            let is_hurried = given_up.load(Ordering::Relaxed) || control.check().is_err();
            waited
                < if is_hurried {
                    LAST_WAIT
                } else {
                    self.config.limits.silence
                }
        };
        // What still holds some is ended with the link, and with it what else is under way there: that goes on over another one.
        let sent = lend(pieces, &waits_on, &|| link.end(), |bytes| {
            let shared = Arc::clone(&link.shared);
            let work = work(Arc::clone(&link.shared), bytes);
            let sent = link.wait(control, async move {
                let _permit = shared.permits.acquire().await.map_err(|_| Error::Interrupted)?;
                work.await
            });
            given_up.store(!matches!(sent, Outcome::Done(Ok(_))), Ordering::Relaxed);
            sent
        });
        Ok(sent)
    }
}

/// The objects right in a folder, and the prefixes of others. Each page is a request with time and retries of its own.
async fn list(
    shared: &Shared,
    pages: &dyn PaginatedListStore,
    path: &Path,
    folder: &object_store::path::Path,
) -> Result<(Vec<ObjectMeta>, Vec<object_store::path::Path>)> {
    let prefix = (!folder.as_ref().is_empty()).then(|| format!("{folder}/"));
    let (mut objects, mut prefixes) = (Vec::new(), Vec::new());
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
        objects.extend(page.result.objects);
        prefixes.extend(page.result.common_prefixes);
        token = page.page_token;
        if token.is_none() {
            return Ok((objects, prefixes));
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
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(seen) = seen.get(path) {
                return Ok(Some(seen.size));
            }
        }
        let name = self.config.name(path)?;
        let at = path.to_owned();
        let meta = self.ask(path, control, |shared| async move {
            let _permit = shared.permits.acquire().await.map_err(|_| Error::Interrupted)?;
            shared
                .persist("look at", &at, 0, || shared.client.objects.head(&name))
                .await
        });
        let Some(meta) = if_there(meta)? else { return Ok(None) };
        let size = meta.size;
        see(&self.seen, path, Seen::of(meta)).map_err(|reason| changed(path, reason))?;
        Ok(Some(size))
    }

    fn list(&self, folder: &Path, control: &Control) -> Result<Option<Folder>> {
        let prefix = self.config.name(folder)?;
        let own = prefix.clone();
        let at = folder.to_owned();
        let listed = self.ask(folder, control, |shared| async move {
            match &shared.client.pages {
                Some(pages) => list(&shared, &**pages, &at, &prefix).await.map(Some),
                None => Ok(None),
            }
        })?;
        let now = SystemTime::now();
        let told = |object: ObjectMeta| {
            // Some tools store an object for the folder itself.
            (object.location != own).then_some(())?;
            Some(Listed {
                name: object.location.filename()?.to_owned(),
                size: object.size,
                age: now.duration_since(object.last_modified.into()).unwrap_or_default(),
                tag: object.e_tag,
            })
        };
        let named = |prefix: object_store::path::Path| Some(prefix.filename()?.to_owned());
        Ok(listed.map(|(objects, prefixes)| Folder {
            files: objects.into_iter().filter_map(told).collect(),
            folders: prefixes.into_iter().filter_map(named).collect(),
        }))
    }

    fn start(&self, path: &Path, most: u64, anew: bool, control: &Control) -> Result<Option<(Vec<u8>, u64)>> {
        let name = self.config.name(path)?;
        let at = path.to_owned();
        let started = self.ask(path, control, |shared| async move {
            let _permit = shared.permits.acquire().await.map_err(|_| Error::Interrupted)?;
            fetch::start(&shared, &at, &name, most).await
        });
        let Some((now, bytes)) = if_there(started)? else {
            return Ok(None);
        };
        let size = now.size;
        if !anew {
            see(&self.seen, path, now).map_err(|reason| changed(path, reason))?;
        }
        Ok(Some((bytes, size)))
    }

    unsafe fn fetch(&self, path: &Path, size: u64, parts: Vec<Part>, control: &Control) -> Result<()> {
        let name = self.config.name(path)?;
        let file = Arc::new(File {
            path: path.to_owned(),
            name,
            size,
        });
        self.ask(path, control, |shared| async move {
            // SAFETY: the caller's promise, for as long as this call lasts; `ask` returns once the task and with it every part has ended.
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
        let name = self.config.name(path)?;
        let work = |shared: Arc<Shared>, bytes| {
            let (path, name) = (path.to_owned(), name.clone());
            async move { store::put(&shared, &path, &name, bytes, condition).await }
        };
        if condition == Condition::Always {
            return self.send(path, pieces, control, work);
        }
        // Done twice, the second would meet the first.
        let sent = self.send_once(pieces, control, work)?;
        if matches!(sent, Outcome::Cut) {
            self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(path);
        }
        sent.result(StorageFault::Unclear, "write", path)
    }

    fn begin(&self, path: &Path, condition: Condition, control: &Control) -> Result<Upload> {
        let name = self.config.name(path)?;
        self.send(path, &[], control, |shared, _| {
            let (path, name) = (path.to_owned(), name.clone());
            async move { store::begin(&shared, &path, &name, condition).await }
        })
    }

    fn put_part(&self, upload: &Upload, number: usize, pieces: &[&[u8]], control: &Control) -> Result<String> {
        let name = self.config.name(&upload.path)?;
        self.send(&upload.path, pieces, control, |shared, bytes| {
            let (upload, name) = (upload.clone(), name.clone());
            async move { store::put_part(&shared, &upload, &name, number, bytes).await }
        })
    }

    fn complete(&self, upload: &Upload, parts: Vec<String>, size: u64, control: &Control) -> Result<()> {
        let name = self.config.name(&upload.path)?;
        // One that was cut may have been done.
        let again = AtomicBool::new(false);
        let lost = match upload.condition {
            Condition::Always => StorageFault::Failed,
            _ => StorageFault::Unclear,
        };
        self.send_or(lost, &upload.path, &[], control, |shared, _| {
            let (upload, name, parts) = (upload.clone(), name.clone(), parts.clone());
            let again = again.swap(true, Ordering::Relaxed);
            async move { store::complete(&shared, &upload, &name, parts, size, again).await }
        })
    }

    fn check_copied(&self, from: &Path, size: u64) -> Result<()> {
        if self.config.kind == Kind::S3 && size > MOST_COPIED {
            return Err(Error::Unsupported(format!(
                "{} is {size} bytes long, and stores copy {MOST_COPIED} in one go",
                from.display()
            )));
        }
        Ok(())
    }

    fn copy(&self, from: &Path, to: &Path, size: u64, control: &Control) -> Result<()> {
        let names = (self.config.name(from)?, self.config.name(to)?);
        self.check_copied(from, size)?;
        match self.look(from, control)? {
            Some(found) if found == size => {}
            Some(found) => {
                let reason = format!("it is {found} bytes long, expected {size}");
                return Err(Error::corrupt_file(from, reason));
            }
            None => return Err(Error::corrupt_file(from, "it is missing")),
        }
        self.send(from, &[], control, |shared, _| {
            let (from, names) = (from.to_owned(), names.clone());
            async move { store::copy(&shared, &from, &names.0, &names.1, size).await }
        })
    }

    fn remove(&self, files: &[PathBuf], uploads: &[Upload], within: Duration, control: &Control) -> Vec<Error> {
        let first = files.first().or(uploads.first().map(|upload| &upload.path));
        let first = first.map_or(Path::new(""), PathBuf::as_path);
        let config = &self.config;
        let files = files
            .iter()
            .map(|path| Ok(Removal::File(path.clone(), config.name(path)?)));
        let uploads = uploads
            .iter()
            .map(|upload| Ok(Removal::Upload(upload.clone(), config.name(&upload.path)?)));
        let removals: Arc<[Removal]> = match files.chain(uploads).collect::<Result<Vec<_>>>() {
            Ok(removals) => removals.into(),
            Err(error) => return vec![error],
        };
        let removed = self.send(first, &[], control, |shared, _| {
            let removals = Arc::clone(&removals);
            async move { Ok(store::remove(&shared, &removals, within).await) }
        });
        removed.unwrap_or_else(|error| vec![error])
    }

    fn remove_seen(&self, path: &Path, control: &Control) -> Result<()> {
        let name = self.config.name(path)?;
        if !self
            .seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains_key(path)
        {
            let never = format!("{} is to be removed, and was not looked at", path.display());
            return Err(Error::Internal(never));
        }
        self.send(path, &[], control, |shared, _| {
            let (path, name) = (path.to_owned(), name.clone());
            async move { store::remove_seen(&shared, &path, &name).await }
        })
    }

    fn tells_apart(&self, path: &Path) -> bool {
        as_seen(&self.config, &self.seen, path).is_some()
    }

    fn keeps_conditions(&self, folder: &Path, control: &Control) -> Result<bool> {
        let path = folder.join(format!(".dcp-rs-asks-{:016x}", random_token()?));
        let name = self.config.name(&path)?;
        self.send(&path, &[], control, |shared, _| {
            let (path, name) = (path.clone(), name.clone());
            async move { store::keeps_conditions(&shared, &path, &name).await }
        })
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
