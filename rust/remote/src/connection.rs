//! Connection to a store, which lasts as long as a call.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use dcp_rs_core::store::{
    Body, Condition, Connection, FetchRange, Folder, Listed, StoringConnection, Upload,
    random_token,
};
use dcp_rs_core::{Control, Error, Result, StorageFault};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::{ObjectMeta, ObjectStoreExt as _};

use crate::answers::Failure;
use crate::config::{Config, StoreKind};
use crate::fetch::{self, File};
use crate::session::{Session, Shared};
use crate::store::{self, Removal};
use crate::{Seen, see};

/// Limit on receiving threads, enough for a fast network card.
const MOST_THREADS: usize = 32;
/// Limit on the bytes of an object that S3 copies.
const MOST_COPIED: u64 = 5 << 30;

/// A connection. On drop it ends its threads.
pub struct Connected(Session);

impl Connected {
    pub fn new(
        config: Arc<Config>,
        seen: Arc<Mutex<HashMap<PathBuf, Seen>>>,
        threads: usize,
    ) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads }.clamp(1, MOST_THREADS);
        Session::new(config, seen, threads).map(Self)
    }

    fn config(&self) -> &Config {
        &self.0.shared.config
    }

    /// Records the version of a file, and refuses a version that differs from an earlier one.
    fn see(&self, path: &Path, now: Seen) -> Result<()> {
        see(&self.0.shared.seen, path, now)
            .map_err(|reason| Error::storage(StorageFault::Precondition, "read", path, reason))
    }

    /// Sends a request and waits for its answer.
    fn ask<T: Send + 'static, F>(
        &self,
        control: &Control,
        question: impl FnOnce(Arc<Shared>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.0.wait(control, question(Arc::clone(&self.0.shared)))
    }

    /// Does the same as [`ask`](Self::ask), within the limit on requests in flight.
    fn send<T: Send + 'static, F>(
        &self,
        control: &Control,
        work: impl FnOnce(Arc<Shared>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let shared = Arc::clone(&self.0.shared);
        let work = work(Arc::clone(&shared));
        self.0.wait(control, async move {
            let _permit = shared.permits.acquire().await.map_err(|_| Error::Interrupted)?;
            work.await
        })
    }
}

/// Limits on the pages of a listing, and on its entries.
const MOST_PAGES: usize = 100_000;
const MOST_LISTED: usize = 10_000_000;

/// Returns the objects directly in a folder, and the prefixes of all others. Each page is a request
/// with its own time and retries.
async fn list(
    shared: &Shared,
    pages: &dyn PaginatedListStore,
    path: &Path,
    folder: &object_store::path::Path,
) -> Result<(Vec<ObjectMeta>, Vec<object_store::path::Path>)> {
    let prefix = (!folder.as_ref().is_empty()).then(|| format!("{folder}/"));
    let (mut objects, mut prefixes) = (Vec::new(), Vec::new());
    let (mut token, mut tokens) = (None, HashSet::new());
    let endless = |reason: &str| {
        let failure = Failure::lasting(StorageFault::Failed, reason);
        Err(shared.error(failure, "list", path, 1))
    };
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
        let Some(next) = &token else {
            return Ok((objects, prefixes));
        };
        if !tokens.insert(next.clone()) {
            return endless("the listing has no end: the store sends the same page again");
        }
        if tokens.len() > MOST_PAGES || objects.len() + prefixes.len() > MOST_LISTED {
            return endless("the listing has no end: the folder has too many files");
        }
    }
}

/// Converts the error for a missing object to `None`.
fn none_if_missing<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(Error::Storage { kind: StorageFault::NotFound, ref reason, .. })
            if !reason.contains("NoSuchBucket") && !reason.contains("ContainerNotFound") =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl Connection for Connected {
    fn look(&self, path: &Path, control: &Control) -> Result<Option<u64>> {
        if let Some(seen) = self.0.shared.before(path) {
            return Ok(Some(seen.size));
        }
        let (at, name) = (path.to_owned(), self.config().name(path)?);
        let meta = self.send(control, |shared| async move {
            shared.persist("look at", &at, 0, || shared.client.objects.head(&name)).await
        });
        let Some(meta) = none_if_missing(meta)? else {
            return Ok(None);
        };
        let size = meta.size;
        self.see(path, Seen::of(meta))?;
        Ok(Some(size))
    }

    fn list(&self, folder: &Path, control: &Control) -> Result<Option<Folder>> {
        let prefix = self.config().name(folder)?;
        let own = prefix.clone();
        let at = folder.to_owned();
        let listed = self.ask(control, |shared| async move {
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

    fn start(
        &self,
        path: &Path,
        most: u64,
        anew: bool,
        control: &Control,
    ) -> Result<Option<(Vec<u8>, u64)>> {
        let name = self.config().name(path)?;
        let at = path.to_owned();
        let started = self
            .send(control, |shared| async move { fetch::start(&shared, &at, &name, most).await });
        let Some((now, bytes)) = none_if_missing(started)? else {
            return Ok(None);
        };
        let size = now.size;
        if !anew {
            self.see(path, now)?;
        }
        Ok(Some((bytes, size)))
    }

    fn fetch(
        &self,
        path: &Path,
        size: u64,
        ranges: Vec<FetchRange>,
        control: &Control,
    ) -> Result<()> {
        let name = self.config().name(path)?;
        let file = Arc::new(File { path: path.to_owned(), name, size });
        self.ask(control, |shared| async move {
            let each = |range| fetch::fetch(Arc::clone(&shared), Arc::clone(&file), range);
            let mut fetches: FuturesUnordered<_> = ranges.into_iter().map(each).collect();
            while let Some(fetched) = fetches.next().await {
                fetched?;
            }
            Ok(())
        })
    }
}

impl StoringConnection for Connected {
    fn put(&self, path: &Path, body: &Body, condition: Condition, control: &Control) -> Result<()> {
        let name = self.config().name(path)?;
        let (path, body) = (path.to_owned(), Arc::clone(body));
        self.send(control, |shared| async move {
            store::put(&shared, &path, &name, body, condition).await
        })
    }

    fn begin(&self, path: &Path, condition: Condition, control: &Control) -> Result<Upload> {
        let (path, name) = (path.to_owned(), self.config().name(path)?);
        self.send(
            control,
            |shared| async move { store::begin(&shared, &path, &name, condition).await },
        )
    }

    fn put_part(
        &self,
        upload: &Upload,
        number: usize,
        body: &Body,
        control: &Control,
    ) -> Result<String> {
        let name = self.config().name(&upload.path)?;
        let (upload, body) = (upload.clone(), Arc::clone(body));
        self.send(control, |shared| async move {
            store::put_part(&shared, &upload, &name, number, body).await
        })
    }

    fn complete(
        &self,
        upload: &Upload,
        parts: Vec<String>,
        size: u64,
        control: &Control,
    ) -> Result<()> {
        let (upload, name) = (upload.clone(), self.config().name(&upload.path)?);
        self.send(control, |shared| async move {
            store::complete(&shared, &upload, &name, parts, size).await
        })
    }

    fn check_copied(&self, from: &Path, size: u64) -> Result<()> {
        if self.config().kind == StoreKind::S3 && size > MOST_COPIED {
            return Err(Error::Unsupported(format!(
                "{} is {size} bytes long, and stores copy at most {MOST_COPIED} at once",
                from.display()
            )));
        }
        Ok(())
    }

    fn copy(&self, from: &Path, to: &Path, size: u64, control: &Control) -> Result<()> {
        let names = (self.config().name(from)?, self.config().name(to)?);
        self.check_copied(from, size)?;
        match self.look(from, control)? {
            Some(found) if found == size => {}
            Some(found) => {
                let reason = format!("it is {found} bytes long, expected {size}");
                return Err(Error::corrupt_file(from, reason));
            }
            None => return Err(Error::corrupt_file(from, "it is missing")),
        }
        let from = from.to_owned();
        self.send(control, |shared| async move {
            store::copy(&shared, &from, &names.0, &names.1, size).await
        })
    }

    fn remove(
        &self,
        files: &[PathBuf],
        uploads: &[Upload],
        within: Duration,
        control: &Control,
    ) -> Vec<Error> {
        let config = self.config();
        let files = files.iter().map(|path| Ok(Removal::File(path.clone(), config.name(path)?)));
        let uploads = uploads
            .iter()
            .map(|upload| Ok(Removal::Upload(upload.clone(), config.name(&upload.path)?)));
        let removals: Vec<Removal> = match files.chain(uploads).collect::<Result<_>>() {
            Ok(removals) => removals,
            Err(error) => return vec![error],
        };
        let removed = self.send(control, |shared| async move {
            Ok(store::remove(&shared, &removals, within).await)
        });
        removed.unwrap_or_else(|error| vec![error])
    }

    fn remove_seen(&self, path: &Path, control: &Control) -> Result<()> {
        let name = self.config().name(path)?;
        if self.0.shared.before(path).is_none() {
            let never = format!("{} is to be removed, and was not looked at", path.display());
            return Err(Error::Internal(never));
        }
        let path = path.to_owned();
        self.send(control, |shared| async move { store::remove_seen(&shared, &path, &name).await })
    }

    fn tells_apart(&self, path: &Path) -> bool {
        self.0.shared.as_seen(path).is_some()
    }

    fn keeps_conditions(&self, folder: &Path, control: &Control) -> Result<bool> {
        let path = folder.join(format!(".dcp-rs-asks-{:016x}", random_token()?));
        let name = self.config().name(&path)?;
        self.send(
            control,
            |shared| async move { store::keeps_conditions(&shared, &path, &name).await },
        )
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
