//! The commit on a store: one request makes a save visible, on the condition that nobody else's was
//! faster.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::commit::{Committed, check_found, generation_after, index_name, own_files, written};
use super::locate::check_no_rank_names;
use crate::format::{Identity, Index, parse_rank_index_name};
use crate::store::{
    Condition, Files, StoringConnection, another, has, is_refused, put_and_look, put_new, unclear,
};
use crate::{Control, Error, Result, StorageFault, parallel};

/// Looks at data files at a time.
const LOOKS: usize = 32;
/// Time limit for removing files after a commit or a failure. `clean` removes the rest.
const CLEANING: Duration = Duration::from_secs(60);

/// State of the destination when a save begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The number of the save: 1 + the highest that a data file or the index carries.
    pub generation: u64,
    /// True if there is an index that the save replaces.
    pub replaces: bool,
    /// True if single ranks have indexes there, which the save of all ranks removes.
    pub replaces_ranks: bool,
    /// True if the store refuses to replace an object that changed meanwhile. If it does not, the
    /// last of two savers wins.
    pub keeps_conditions: bool,
}

/// Looks at what a save to the folder `dir` will replace: the commit over the same
/// [`Remote`](crate::store::Remote) replaces that, and nothing else. With `rank`, for the save of
/// that rank alone.
///
/// # Errors
/// [`Error::Storage`], [`Error::Interrupted`]; [`Error::Unsupported`] after generation 2^64 - 1,
/// and where nothing can be stored.
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

/// [`commit_index`](super::commit_index) on a store: makes `index` the index of the folder `dir`,
/// if what is there is what was there when it was `begun`, and removes what only the one before it
/// named. Without `replace` the indexes of single ranks stay, and it fails if there are any.
///
/// # Errors
/// [`Error::CorruptData`] where a data file is not there; [`Error::Storage`] where the index could
/// not be stored, of the kind [`StorageFault::Precondition`] where another save was faster;
/// [`Error::Interrupted`]. The old checkpoint is whole then, and what the index names may be
/// removed. Not so after [`StorageFault::Unclear`]: the index may be stored all the same, now or in
/// a moment.
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
    let before = match begun.replaces.then(|| files.read(&path)).transpose() {
        Err(error) if is_refused(&error) => return Err(another(&path)),
        before => before?.flatten(),
    };
    // One that cannot be read names nothing that may be removed.
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
            if let Some(bytes) = files.read(&path)? {
                old.extend(Index::from_bytes(bytes, &path).ok());
                of_ranks.push(name);
            }
        }
    }
    publish_over(&path, index.bytes(), begun, connection, control)?;
    match check_written(dir, index, true, connection, control) {
        Ok(()) => {}
        Err(lost @ Error::CorruptData { .. }) => {
            // Else another save has followed, and removed what it replaced.
            return take_back(&path, index, before.as_deref(), begun, connection, lost)
                .map_or_else(|| Ok(Committed::default()), Err);
        }
        // The index is in its place, and that is all that can be known: old files stay, should new
        // ones be missing.
        Err(unknown) => {
            let stays = !old.is_empty() || !of_ranks.is_empty();
            return Ok(Committed {
                removed: Vec::new(),
                left: stays.then_some(unknown).into_iter().collect(),
            });
        }
    }

    // Indexes of ranks first: without them nothing names what goes then.
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

/// [`replace_index`](super::replace_index) on a store: makes `bytes` the index of the folder `dir`,
/// over data that is there, if what is there was there when it was `begun`. Removes nothing.
///
/// # Errors
/// [`Error::Unsupported`] where ranks have indexes of their own there; [`Error::Storage`] as of
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

/// Stores an index over what there was when its save began.
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

/// After the index was stored a file of it is missing: `lost` says which. Puts back what was there
/// `before`, and returns the error to raise; `None` where the index is another save's by now, which
/// removed what it replaced.
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

/// Returns the notice for a caller that did not wait for a request to end: the file is stored, or
/// may be. `None` if it is not.
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

/// Checks that the files of a save are there as its ranks stored them; with `again`, though they
/// were looked at before.
fn check_written(
    dir: &Path,
    index: &Index,
    again: bool,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    let files: Vec<_> = written(index).collect();
    parallel::for_each(
        files.len(),
        LOOKS,
        || (),
        |(), number| {
            let file = &files[number];
            let path = dir.join(file.name);
            let found = if again {
                connection.start(&path, 1, true, control)?.map(|(_, size)| size)
            } else {
                connection.look(&path, control)?
            };
            check_found(&path, found, file.size)
        },
    )
}

/// [`discard`](super::discard) on a store, of what several ranks wrote for one save.
///
/// # Errors
/// [`Error::CorruptIndex`] where bytes are no index; [`Error::Storage`] where the published index
/// cannot be read (nothing is removed then), or for the first file that could not be removed, after
/// trying all in a minute; [`Error::Interrupted`].
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
        // Else it names these files, and is of this save; or of another of its id, and `clean`
        // judges.
        if published.is_none_or(|found| {
            found.save_id != index.save_id() || found.generation != index.generation()
        }) {
            paths.extend(own_files(index).into_iter().map(|name| dir.join(name)));
        }
    }
    let left = connection.remove(&paths, &[], CLEANING.saturating_sub(begun.elapsed()), control);
    left.into_iter().next().map_or(Ok(()), Err)
}

/// Returns whether a folder on a store has a checkpoint of all ranks, or with `rank` of that rank.
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
