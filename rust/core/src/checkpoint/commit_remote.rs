//! The commit on a store: one request makes a save visible, on the condition that no other save was
//! committed first.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::commit::{Committed, check_found, generation_after, index_name, own_files, written};
use super::locate::check_no_rank_names;
use crate::format::{Identity, Index, parse_rank_index_name};
use crate::store::{
    Condition, Files, StoringConnection, another, has, is_refused, put_and_look, put_new, unclear,
};
use crate::{Control, Error, Result, StorageFault, parallel};

/// Concurrent checks of data files.
const LOOKS: usize = 32;
/// Time limit for the removal of files after a commit or a failure. `clean` removes what is left.
const CLEANING: Duration = Duration::from_secs(60);

/// State of the destination when a save begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// Generation of the save: one more than the highest of the data files and the index.
    pub generation: u64,
    /// True if there is an index that the save replaces.
    pub replaces: bool,
    /// True if there are indexes of single ranks, which the save of all ranks removes.
    pub replaces_ranks: bool,
    /// True if the store refuses to replace an object that changed meanwhile. Otherwise the last of
    /// two concurrent saves wins.
    pub keeps_conditions: bool,
}

/// Looks at what a save to the folder `dir` will replace; with `rank`, a save of that rank alone. A
/// later commit with the same [`Remote`](crate::store::Remote) replaces only that.
///
/// # Errors
/// [`Error::Storage`], [`Error::Interrupted`]; [`Error::Unsupported`] after generation 2^64 - 1,
/// and if the store is read-only.
pub fn begin_remote(
    dir: &Path,
    rank: Option<u32>,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<Begun> {
    let index = dir.join(index_name(rank));
    let found = connection.start(&index, Identity::LEN as u64, false, control)?;
    let keeps_conditions = connection.keeps_conditions(dir, control)?
        && (found.is_none() || connection.tells_apart(&index));
    let names = connection.names(dir, control)?.unwrap_or_default();
    Ok(Begun {
        generation: generation_after(identity_of(found.as_ref()), &names)?,
        replaces: found.is_some(),
        replaces_ranks: rank.is_none()
            && names.iter().any(|name| parse_rank_index_name(name).is_some()),
        keeps_conditions,
    })
}

/// Returns the identity of the published save, if there is one.
fn published(
    connection: &dyn StoringConnection,
    path: &Path,
    control: &Control,
) -> Result<Option<Identity>> {
    let started = connection.start(path, Identity::LEN as u64, true, control)?;
    Ok(identity_of(started.as_ref()))
}

fn identity_of(started: Option<&(Vec<u8>, u64)>) -> Option<Identity> {
    Identity::of(started?.0.first_chunk()?)
}

/// Does what [`commit_index`](super::commit_index) does, for the folder `dir` on a store. Replaces
/// only the index that was there when the save was `begun`, and removes the files that only that
/// index named. Without `replace` it fails if there are indexes of single ranks.
///
/// # Errors
/// - [`Error::CorruptData`] if a data file is missing or has the wrong length.
/// - [`Error::Storage`] if the index could not be stored. It has the kind
///   [`StorageFault::Precondition`] if another save was committed first.
/// - [`Error::Interrupted`].
///
/// After these errors the old checkpoint is complete, and the files that `index` names may be
/// removed. [`StorageFault::Unclear`] is different: the index may be stored, or may still appear.
pub fn commit_remote(
    dir: &Path,
    rank: Option<u32>,
    index: &Index,
    begun: Begun,
    replace: bool,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<Committed> {
    let path = dir.join(index_name(rank));
    check_written(dir, index, false, connection, control)?;
    let files = Files::Remote(connection, control);
    let before = match begun.replaces.then(|| files.read_index(&path)).transpose() {
        Err(error) if is_refused(&error) => return Err(another(&path)),
        before => before?.flatten(),
    };
    // An index that cannot be read names no file that may be removed.
    let mut old: Vec<Index> =
        (before.iter()).filter_map(|bytes| Index::from_bytes(bytes.clone(), &path).ok()).collect();
    let mut of_ranks = Vec::new();
    if rank.is_none() {
        let names = connection.names(dir, control)?.unwrap_or_default();
        for name in names.into_iter().filter(|name| parse_rank_index_name(name).is_some()) {
            if !replace {
                return Err(another(&path));
            }
            let path = dir.join(&name);
            if let Some(bytes) = files.read_index(&path)? {
                old.extend(Index::from_bytes(bytes, &path).ok());
                of_ranks.push(name);
            }
        }
    }
    publish_over(&path, index.bytes(), begun, connection, control)?;
    match check_written(dir, index, true, connection, control) {
        Ok(()) => {}
        Err(lost @ Error::CorruptData { .. }) => {
            // If it returns no error, another save has followed and removed the files that it
            // replaced.
            return take_back(&path, index, before.as_deref(), begun, connection, lost)
                .map_or_else(|| Ok(Committed::default()), Err);
        }
        // The index is published, but its files could not be checked. Keep the old files, in case
        // new ones are missing.
        Err(unknown) => {
            let stays = !old.is_empty() || !of_ranks.is_empty();
            return Ok(Committed {
                removed: Vec::new(),
                left: stays.then_some(unknown).into_iter().collect(),
            });
        }
    }

    // Remove the indexes of ranks first, so that no index names the files that are removed next.
    let gone = parallel::map(of_ranks.len(), LOOKS, |number| {
        Ok(connection.remove_seen(&dir.join(&of_ranks[number]), control).err())
    })?;
    let mut left: Vec<Error> = gone.into_iter().flatten().collect();
    let kept = own_files(index);
    let replaced = old.iter().flat_map(own_files).filter(|name| !kept.contains(name));
    let removed: Vec<String> = replaced.map(str::to_owned).collect();
    let paths: Vec<PathBuf> = removed.iter().map(|name| dir.join(name)).collect();
    left.extend(connection.remove(&paths, &[], CLEANING, control));
    of_ranks.extend(removed);
    Ok(Committed { removed: of_ranks, left })
}

/// Does what [`replace_index`](super::replace_index) does, for the folder `dir` on a store.
/// Publishes `bytes` over existing data, in place of the index that was there when this was
/// `begun`. Removes nothing.
///
/// # Errors
/// [`Error::Unsupported`] if single ranks have indexes there; [`Error::Storage`] as in
/// [`commit_remote`]; [`Error::Interrupted`].
pub fn replace_index_remote(
    dir: &Path,
    bytes: &[u8],
    begun: Begun,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    let path = dir.join(index_name(None));
    check_no_rank_names(dir, &connection.names(dir, control)?.unwrap_or_default())?;
    publish_over(&path, bytes, begun, connection, control)
}

/// Stores an index in place of the one that was there when its save began.
fn publish_over(
    path: &Path,
    bytes: &[u8],
    begun: Begun,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    if !begun.replaces {
        return put_new(path, bytes, begun.keeps_conditions, connection, control);
    }
    let condition =
        if begun.keeps_conditions { Condition::Unchanged } else { Condition::Unguarded };
    put_and_look(path, bytes, condition, connection, control)
}

/// Restores what was there `before`, since a file of the new index is missing (`lost`). Returns the
/// error to raise. Returns `None` if another save has replaced the index by now, and removed the
/// files.
fn take_back(
    path: &Path,
    index: &Index,
    before: Option<&[u8]>,
    begun: Begun,
    connection: &dyn StoringConnection,
    lost: Error,
) -> Option<Error> {
    let control = Control::new();
    match has(path, index.bytes(), connection, &control) {
        Ok(Some(true)) => {}
        Ok(Some(false)) => return None,
        Ok(None) => return Some(unclear(path, lost)),
        Err(error) => return Some(unclear(path, error)),
    }
    let condition = if begun.keeps_conditions && connection.tells_apart(path) {
        Condition::Unchanged
    } else {
        Condition::Unguarded
    };
    let back = if let Some(bytes) = before {
        put_and_look(path, bytes, condition, connection, &control)
    } else {
        connection.remove_seen(path, &control)
    };
    Some(match back {
        Err(error) if !is_refused(&error) => unclear(path, error),
        _ => lost,
    })
}

/// Returns a notice for a caller that did not wait for a request to end: the file is stored, or may
/// be. Returns `None` if it is not stored.
#[must_use]
pub fn may_be_stored<T>(path: &Path, stored: &Result<T>) -> Option<Error> {
    let (path, attempts, reason) = match stored {
        Ok(_) => (path, 1, "it was stored before the interruption"),
        Err(error @ Error::Storage { path, attempts, reason, .. })
            if error.storage_fault() == Some(StorageFault::Unclear) =>
        {
            (path.as_path(), *attempts, reason.as_str())
        }
        Err(_) => return None,
    };
    Some(Error::Storage {
        kind: StorageFault::Unclear,
        action: "write",
        path: path.to_owned(),
        attempts,
        reason: reason.to_owned(),
    })
}

/// Checks that the files of a save are as its ranks stored them. `again` repeats the requests of an
/// earlier check.
fn check_written(
    dir: &Path,
    index: &Index,
    again: bool,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    let files: Vec<_> = written(index).collect();
    parallel::for_each(files.len(), LOOKS, |number| {
        let file = &files[number];
        let path = dir.join(file.name);
        let found = if again {
            connection.start(&path, 1, true, control)?.map(|(_, size)| size)
        } else {
            connection.look(&path, control)?
        };
        check_found(&path, found, file.size)
    })
}

/// Does what [`discard`](super::discard) does, on a store and for several ranks of one save.
///
/// # Errors
/// - [`Error::CorruptIndex`] if bytes are not an index.
/// - [`Error::Storage`] if the published index cannot be read; then nothing was removed. Also for
///   the first file that could not be removed, after all were tried for up to a minute.
/// - [`Error::Interrupted`].
pub fn discard_remote(
    dir: &Path,
    rank: Option<u32>,
    indexes: Vec<impl AsRef<[u8]> + Send + Sync + 'static>,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    let begun = Instant::now();
    let path = dir.join(index_name(rank));
    let indexes: Vec<Index> = (indexes.into_iter())
        .map(|bytes| Index::from_bytes(bytes, &path))
        .collect::<Result<_>>()?;
    let published = published(connection, &path, control)?;
    let mut paths: Vec<PathBuf> = Vec::new();
    for index in &indexes {
        // Otherwise the published index is of this save and names these files. It may also be of
        // another save with the same id, and then `clean` decides.
        if published.is_none_or(|found| {
            found.save_id != index.save_id() || found.generation != index.generation()
        }) {
            paths.extend(own_files(index).into_iter().map(|name| dir.join(name)));
        }
    }
    let left = connection.remove(&paths, &[], CLEANING.saturating_sub(begun.elapsed()), control);
    left.into_iter().next().map_or(Ok(()), Err)
}

/// Returns whether a folder on a store has an index of all ranks, or with `rank` of that rank.
///
/// # Errors
/// [`Error::Storage`], [`Error::Interrupted`].
pub fn is_there_remote(
    dir: &Path,
    rank: Option<u32>,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<bool> {
    Ok(connection.look(&dir.join(index_name(rank)), control)?.is_some())
}
