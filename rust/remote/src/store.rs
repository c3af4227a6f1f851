//! Storing of objects, whole and in parts, on conditions, and their removal.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use dcp_rs_core::lock;
use dcp_rs_core::store::{Body, Condition, Upload};
use dcp_rs_core::{Error, Result, StorageFault};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use md5::{Digest as _, Md5};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as Name;
use object_store::{
    CopyMode, CopyOptions, ObjectMeta, ObjectStore as _, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload, UpdateVersion,
};
use tokio::time::{Instant, timeout, timeout_at};

use crate::answers::Failure;
use crate::config::{Config, StoreKind};
use crate::retry::RetryState;
use crate::session::Shared;
use crate::{Seen, see};

/// Longest time that a store takes to join one part to the others.
const JOINING: Duration = Duration::from_millis(50);
/// Least number of bytes that a store copies in a second.
const COPYING: u64 = 4 << 20;
/// Concurrent removals.
const REMOVALS: usize = 64;
/// A tag, and a version, that no object has.
const NEVER: &str = "\"00000000000000000000000000000000\"";
const NO_VERSION: &str = "1";

/// Returns the answer to an attempt, or a failure if none came in time.
async fn answered<T>(
    retry: &mut RetryState,
    work: Duration,
    attempt: impl Future<Output = object_store::Result<T>>,
) -> std::result::Result<T, Failure> {
    match timeout(retry.answer(work), attempt).await {
        Ok(answer) => answer.map_err(|error| Failure::of(&error)),
        Err(_) => Err(retry.timed_out(work)),
    }
}

/// Returns the client that stores objects in parts. A web server has none.
fn parts(shared: &Shared, path: &Path) -> Result<Arc<dyn MultipartStore>> {
    shared
        .client
        .parts
        .clone()
        .ok_or_else(|| Error::Unsupported(format!("{}: a web server is read only", path.display())))
}

/// Returns the payload without a copy, and its length.
fn payload(body: Body) -> (PutPayload, u64) {
    struct Owner(Body);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let length = body.len() as u64;
    if length == 0 {
        return (PutPayload::new(), 0);
    }
    (Bytes::from_owner(Owner(body)).into(), length)
}

/// Stores an object.
pub async fn put(
    shared: &Shared,
    path: &Path,
    name: &Name,
    body: Body,
    condition: Condition,
) -> Result<()> {
    let mode = match condition {
        Condition::Always | Condition::Unguarded => PutMode::Overwrite,
        Condition::New => PutMode::Create,
        Condition::Unchanged => {
            let seen = shared.as_seen(path);
            let never = || {
                Error::Internal(format!(
                    "{} is to be replaced, and was not looked at",
                    path.display()
                ))
            };
            PutMode::Update(seen.ok_or_else(never)?)
        }
    };
    let (payload, length) = payload(body);
    let work = RetryState::sending(length);
    let mut retry = shared.retry();
    let mut may_be_done = false;
    loop {
        let options = PutOptions::from(mode.clone());
        let attempt = shared.client.objects.put_opts(name, payload.clone(), options);
        let Err(mut failure) = answered(&mut retry, work, attempt).await else {
            shared.forget(path);
            return Ok(());
        };
        may_be_done |= failure.may_be_done();
        if retry.wait_to_retry(&failure).await {
            continue;
        }
        if may_be_done || failure.kind == StorageFault::Precondition {
            shared.forget(path);
        }
        if condition != Condition::Always
            && may_be_done
            && failure.kind != StorageFault::Precondition
        {
            failure.kind = StorageFault::Unclear;
        }
        return Err(shared.error(failure, "write", path, retry.attempts()));
    }
}

/// Begins to store an object in parts. Records the existing object, unless no one else uses the
/// name.
pub async fn begin(
    shared: &Shared,
    path: &Path,
    name: &Name,
    condition: Condition,
) -> Result<Upload> {
    let parts = parts(shared, path)?;
    if condition == Condition::Unchanged {
        let reason = format!("{}: what has parts does not replace what was seen", path.display());
        return Err(Error::Unsupported(reason));
    }
    if condition != Condition::Always {
        shared.forget(path);
        match found(shared, path, name).await? {
            Some(_) if condition == Condition::New => return Err(there_is_one(shared, path, 1)),
            Some(before) => shared.note(path, Seen::of(before)),
            None => {}
        }
    }
    let id = shared.persist("write", path, 0, || parts.create_multipart(name)).await?;
    Ok(Upload { path: path.to_owned(), id, condition })
}

/// Stores a part.
pub async fn put_part(
    shared: &Shared,
    upload: &Upload,
    name: &Name,
    number: usize,
    body: Body,
) -> Result<String> {
    let parts = parts(shared, &upload.path)?;
    let (payload, length) = payload(body);
    let attempt = || parts.put_part(name, &upload.id, number, payload.clone());
    let part = shared.persist("write", &upload.path, length, attempt).await?;
    Ok(part.content_id)
}

/// Joins the parts to an object.
pub async fn complete(
    shared: &Shared,
    upload: &Upload,
    name: &Name,
    answers: Vec<String>,
    size: u64,
) -> Result<()> {
    let plain = parts(shared, &upload.path)?;
    let failed =
        |failure: Failure, attempts| shared.error(failure, "write", &upload.path, attempts);
    let mut conditional = None;
    if upload.condition == Condition::New {
        let made = Config::completing_new(&shared.client);
        conditional = made.map_err(|error| failed(Failure::of(&error), 1))?;
    }
    let made = Made { size, tag: tag_of_parts(&answers) };
    let ids: Vec<PartId> = answers.into_iter().map(|content_id| PartId { content_id }).collect();
    let work = JOINING.saturating_mul(u32::try_from(ids.len()).unwrap_or(u32::MAX));
    let mut retry = shared.retry();
    let mut may_be_done = false;
    loop {
        // Some stores ignore conditions.
        if upload.condition == Condition::New
            && !may_be_done
            && found(shared, &upload.path, name).await?.is_some()
        {
            return Err(there_is_one(shared, &upload.path, retry.attempts()));
        }
        let parts = conditional.as_ref().unwrap_or(&plain);
        let attempt = parts.complete_multipart(name, &upload.id, ids.clone());
        let Err(mut failure) = answered(&mut retry, work, attempt).await else {
            shared.forget(&upload.path);
            return Ok(());
        };
        if conditional.is_some() && matches!(failure.status, Some(400 | 501)) {
            // The store may not support the condition. If the request itself is wrong, the store
            // will say so again.
            conditional = None;
            continue;
        }
        may_be_done |= failure.may_be_done();
        // If an attempt completed the upload but its answer was lost, the upload no longer exists.
        // Stores then answer 404 or 400.
        let is_gone = failure.status == Some(404);
        let mut is_known = !may_be_done || upload.condition == Condition::Always;
        if may_be_done || is_gone {
            let is_sent = may_be_done || upload.condition == Condition::Always;
            match came_of(shared, upload, name, &made).await {
                Ok(Came::Stored) if is_sent => {
                    shared.forget(&upload.path);
                    return Ok(());
                }
                Ok(Came::Nothing) if is_gone => {
                    let reason = "the store has no such upload, and has not made it an object";
                    failure = Failure::lasting(StorageFault::NotFound, reason);
                    is_known = true;
                }
                // The store's own answer tells more.
                _ => {}
            }
        }
        if retry.wait_to_retry(&failure).await {
            continue;
        }
        if !is_known {
            shared.forget(&upload.path);
            failure.kind = StorageFault::Unclear;
        }
        return Err(failed(failure, retry.attempts()));
    }
}

/// The object that the parts will form.
struct Made {
    size: u64,
    /// Its tag on S3, if the tags of the parts determine it.
    tag: Option<String>,
}

/// Outcome of an attempt without an answer, derived from the object.
enum Came {
    Stored,
    /// The object has not changed.
    Nothing,
    Unknown,
}

async fn came_of(shared: &Shared, upload: &Upload, name: &Name, made: &Made) -> Result<Came> {
    let before = shared.before(&upload.path);
    let Some(now) = found(shared, &upload.path, name).await?.map(Seen::of) else {
        return Ok(Came::Nothing);
    };
    let is_it = made.tag.is_some() && now.tag == made.tag;
    Ok(match upload.condition {
        // No one else stores an object of this name.
        Condition::Always if now.size == made.size => Came::Stored,
        Condition::Always => Came::Nothing,
        _ if is_it => Came::Stored,
        // Without a tag, an object that was stored within the same second looks the same.
        Condition::Unguarded if before.as_ref() == Some(&now) && now.tag.is_some() => Came::Nothing,
        Condition::Unguarded if before.as_ref() == Some(&now) => Came::Unknown,
        // The object has changed: it is this one, or one that someone stored after it.
        Condition::Unguarded if now.size == made.size => Came::Stored,
        _ => Came::Unknown,
    })
}

/// Returns the tag of an object with parts of these tags: the digest of their digests, and their
/// number.
fn tag_of_parts(tags: &[String]) -> Option<String> {
    let mut digest = Md5::new();
    for tag in tags {
        let text = tag.trim_matches('"');
        let number = (text.len() == 32).then(|| u128::from_str_radix(text, 16).ok())??;
        digest.update(number.to_be_bytes());
    }
    let digest = u128::from_be_bytes(digest.finalize().into());
    Some(format!("\"{digest:032x}-{}\"", tags.len()))
}

fn there_is_one(shared: &Shared, path: &Path, attempts: u32) -> Error {
    let reason = "another one is there now; nothing was changed";
    let failure = Failure::lasting(StorageFault::Precondition, reason);
    shared.error(failure, "write", path, attempts)
}

/// Returns the longest time that a store takes to copy this many bytes. It sends nothing meanwhile.
const fn copying(bytes: u64) -> Duration {
    Duration::from_millis(bytes.saturating_mul(1000) / COPYING)
}

/// Makes the store copy an object of this length, in the version that was seen.
pub async fn copy(shared: &Shared, path: &Path, from: &Name, to: &Name, size: u64) -> Result<()> {
    let refused = |failure: Failure, attempts| shared.error(failure, "copy", path, attempts);
    let (objects, mode) = match (&shared.client.copying, shared.tag(path)) {
        (Some(copying), Some(tag)) => {
            let objects = copying.only(&tag);
            let objects = objects.map_err(|error| refused(Failure::of(&error), 1))?;
            // In this mode the client sends the condition of `only`.
            (objects, CopyMode::Create)
        }
        _ => (Arc::clone(&shared.client.objects), CopyMode::Overwrite),
    };
    let work = copying(size);
    let mut retry = shared.retry();
    let mut may_be_done = false;
    loop {
        let attempt = objects.copy_opts(from, to, CopyOptions::new().with_mode(mode));
        let failure = match answered(&mut retry, work, attempt).await {
            // Azure may only have begun the copy.
            Ok(()) if shared.config.kind != StoreKind::Azure => return Ok(()),
            Ok(()) => {
                may_be_done = true;
                Failure::passing("the store has not done it yet")
            }
            Err(failure) => failure,
        };
        may_be_done |= failure.may_be_done();
        if may_be_done && is_stored(shared, path, to, size).await? {
            return Ok(());
        }
        if !retry.wait_to_retry(&failure).await {
            return Err(refused(failure, retry.attempts()));
        }
    }
}

/// Returns whether an object of this length exists. No other save stores one of this name.
async fn is_stored(shared: &Shared, path: &Path, name: &Name, size: u64) -> Result<bool> {
    let found = found(shared, path, name).await?;
    Ok(found.is_some_and(|found| found.size == size))
}

/// Returns the current metadata of an object; `None` if it does not exist.
async fn found(shared: &Shared, path: &Path, name: &Name) -> Result<Option<ObjectMeta>> {
    let looked = shared.persist("look at", path, 0, || shared.client.objects.head(name)).await;
    match looked {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.storage_fault() == Some(StorageFault::NotFound) => Ok(None),
        Err(error) => Err(error),
    }
}

/// An object or an upload to remove.
pub enum Removal {
    File(PathBuf, Name),
    Upload(Upload, Name),
}

impl Removal {
    fn path(&self) -> &Path {
        match self {
            Self::File(path, _) => path,
            Self::Upload(upload, _) => &upload.path,
        }
    }

    async fn done(&self, shared: &Shared) -> Result<()> {
        let done = match self {
            Self::File(path, name) => {
                let attempt = || shared.client.objects.delete(name);
                shared.persist("remove", path, 0, attempt).await
            }
            Self::Upload(upload, name) => {
                let parts = parts(shared, &upload.path)?;
                let attempt = || parts.abort_multipart(name, &upload.id);
                shared.persist("abort the upload of", &upload.path, 0, attempt).await
            }
        };
        match done {
            Err(error) if error.storage_fault() == Some(StorageFault::NotFound) => Ok(()),
            done => done,
        }
    }
}

/// Removes as much as is possible in time. Returns the errors of what is left.
pub async fn remove(shared: &Shared, removals: &[Removal], within: Duration) -> Vec<Error> {
    let until = Instant::now() + within;
    let mut failed = Vec::new();
    let mut waiting = removals.iter().enumerate();
    let mut left: HashMap<usize, &Removal> = removals.iter().enumerate().collect();
    let each = async |number: usize, removal: &Removal| (number, removal.done(shared).await);
    let first = waiting.by_ref().take(REMOVALS);
    let mut under_way: FuturesUnordered<_> =
        first.map(|(number, removal)| each(number, removal)).collect();
    while let Ok(Some((number, done))) = timeout_at(until, under_way.next()).await {
        left.remove(&number);
        failed.extend(done.err());
        under_way.extend(waiting.next().map(|(number, removal)| each(number, removal)));
    }
    failed.extend(left.into_values().map(|removal| {
        let failure = Failure::passing("there was no time for it");
        shared.error(failure, "remove", removal.path(), 1)
    }));
    failed
}

/// Removes an object if it is the one that was seen. It looks before each attempt, because another
/// object may have been stored since an attempt with an unknown outcome. The request also has a
/// condition, but some stores ignore it.
pub async fn remove_seen(shared: &Shared, path: &Path, name: &Name) -> Result<()> {
    let refused = |failure: Failure, attempts| shared.error(failure, "remove", path, attempts);
    let conditional = match shared.tag(path) {
        Some(tag) => Config::removing(&shared.client, &tag),
        None => Ok(None),
    };
    let mut conditional = conditional.map_err(|error| refused(Failure::of(&error), 1))?;
    let mut retry = shared.retry();
    while is_as_seen(shared, path, name, retry.attempts()).await? {
        let objects = conditional.as_ref().unwrap_or(&shared.client.objects);
        let Err(failure) = answered(&mut retry, Duration::ZERO, objects.delete(name)).await else {
            shared.forget(path);
            return Ok(());
        };
        match (failure.kind, failure.status) {
            (StorageFault::NotFound, _) => return Ok(()),
            // The object was replaced or removed, or the store compares something other than the
            // tag, or it does not support the condition. Look again, and then remove without a
            // condition.
            (StorageFault::Precondition, _) | (_, Some(400 | 501)) if conditional.is_some() => {
                conditional = None;
            }
            _ if retry.wait_to_retry(&failure).await => {}
            _ => return Err(refused(failure, retry.attempts())),
        }
    }
    Ok(())
}

/// Returns whether the object exists and is the version that was seen.
///
/// # Errors
/// [`StorageFault::Precondition`] if it is another version.
async fn is_as_seen(shared: &Shared, path: &Path, name: &Name, attempts: u32) -> Result<bool> {
    let Some(found) = found(shared, path, name).await? else {
        return Ok(false);
    };
    let another = |reason: String| {
        let failure =
            Failure::lasting(StorageFault::Precondition, format!("it was left alone: {reason}"));
        shared.error(failure, "remove", path, attempts)
    };
    see(&shared.seen, path, Seen::of(found)).map_err(another)?;
    Ok(true)
}

/// Returns whether the store checks conditions. It asks once per process, with an object that a
/// checking store refuses.
pub async fn keeps_conditions(shared: &Shared, path: &Path, name: &Name) -> Result<bool> {
    static KNOWN: Mutex<Option<HashMap<u64, bool>>> = Mutex::new(None);
    let known = || lock(&KNOWN);
    let store = shared.config.fingerprint();
    if let Some(&keeps) = known().as_ref().and_then(|known| known.get(&store)) {
        return Ok(keeps);
    }
    let keeps = ask(shared, path, name).await?;
    known().get_or_insert_default().insert(store, keeps);
    Ok(keeps)
}

async fn ask(shared: &Shared, path: &Path, name: &Name) -> Result<bool> {
    let mut retry = shared.retry();
    let mode = PutMode::Update(UpdateVersion {
        e_tag: Some(NEVER.into()),
        version: Some(NO_VERSION.into()),
    });
    loop {
        let attempt =
            shared.client.objects.put_opts(name, PutPayload::new(), PutOptions::from(mode.clone()));
        let failure = match timeout(retry.answer(Duration::ZERO), attempt).await {
            Ok(Ok(_)) => {
                let removal = Removal::File(path.to_owned(), name.clone());
                removal.done(shared).await?;
                return Ok(false);
            }
            Ok(Err(object_store::Error::NotImplemented { .. })) => return Ok(false),
            Ok(Err(error)) => Failure::of(&error),
            Err(_) => Failure::passing("no answer in time"),
        };
        match (failure.kind, failure.status) {
            (StorageFault::Precondition, _) => return Ok(true),
            (_, Some(501)) => return Ok(false),
            _ => {}
        }
        if !retry.wait_to_retry(&failure).await {
            return Err(shared.error(failure, "write", path, retry.attempts()));
        }
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
