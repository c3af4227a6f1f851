//! The commit on a store: one request makes a save visible, on the condition that nobody else's was faster.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::commit::{Committed, index_name, own_files};
use crate::format::{DataFileName, Identity, Index, parse_rank_index_name};
use crate::store::{Condition, Files, StoringConnection};
use crate::{Control, Error, Result, StorageFault, parallel};

/// Looks at data files at a time.
const LOOKS: usize = 32;
/// What the removal of files takes at most, after a commit or a failure. What it does not get done, `clean` does.
const CLEANING: Duration = Duration::from_secs(60);

/// What a save found where it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The number of the save: 1 + the highest that a data file or the index carries.
    pub generation: u64,
    /// Whether there is an index, which is to be replaced.
    pub replaces: bool,
    /// Whether the store refuses to replace what is not what it was. Where it does not, the last of two savers wins.
    pub keeps_conditions: bool,
}

/// Looks at what a save to the folder `dir` will replace: the commit over the same [`Remote`](crate::store::Remote) replaces that, and nothing else. With
/// `rank`, for the save of that rank alone.
///
/// # Errors
/// [`Error::Storage`], [`Error::Interrupted`]; [`Error::Unsupported`] after generation 2^64 - 1, and where nothing can be stored.
pub fn begin_remote(
    dir: &Path,
    rank: Option<u32>,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<Begun> {
    let keeps_conditions = connection.keeps_conditions(dir, control)?;
    let index = dir.join(index_name(rank));
    let found = connection.start(&index, Identity::LEN as u64, false, control)?;
    // Of a damaged index the header is enough: it does not hinder the save that replaces it.
    let mut highest = identity_of(found.as_ref()).map_or(0, |found| found.generation);
    for name in connection.names(dir, control)?.unwrap_or_default() {
        if let Some(name) = DataFileName::parse(&name) {
            highest = highest.max(name.generation);
        }
    }
    let generation = highest
        .checked_add(1)
        .ok_or_else(|| Error::Unsupported(format!("a save after generation {highest}")))?;
    Ok(Begun {
        generation,
        replaces: found.is_some(),
        keeps_conditions,
    })
}

/// Which save is published, now; `None` where none is.
fn published(connection: &dyn StoringConnection, path: &Path, control: &Control) -> Result<Option<Identity>> {
    let started = connection.start(path, Identity::LEN as u64, true, control)?;
    Ok(identity_of(started.as_ref()))
}

fn identity_of(started: Option<&(Vec<u8>, u64)>) -> Option<Identity> {
    Identity::of(started?.0.first_chunk()?)
}

/// [`commit_index`](super::commit_index) on a store: makes `index` the index of the folder `dir`, if what is there is what was there when it was `begun`, and removes
/// what only the one before it named.
///
/// `is_unclear` is true after an error where the index may be stored all the same, now or in a moment: nothing that it names is to be removed then.
///
/// # Errors
/// [`Error::CorruptData`] where a data file is not there; [`Error::Storage`] where the index could not be stored, of the kind
/// [`StorageFault::Precondition`] where another save was faster, [`StorageFault::Unclear`] where it is not known; [`Error::Interrupted`].
pub fn commit_remote(
    dir: &Path,
    rank: Option<u32>,
    index: &Index,
    begun: Begun,
    connection: &dyn StoringConnection,
    is_unclear: &AtomicBool,
    control: &Control,
) -> Result<Committed> {
    let path = dir.join(index_name(rank));
    check_written(dir, index, connection, control)?;
    let mut removed = Vec::new();
    if rank.is_none() {
        let names = connection.names(dir, control)?.unwrap_or_default();
        removed.extend(names.into_iter().filter(|name| parse_rank_index_name(name).is_some()));
    }
    let old = read_old(dir, begun.replaces.then_some(&path), &removed, connection, control)?;
    let condition = match (begun.keeps_conditions, begun.replaces) {
        (true, true) => Condition::Unchanged,
        (true, false) => Condition::New,
        (false, replaces) => {
            // Nobody else looks.
            if !replaces && connection.start(&path, 1, true, control)?.is_some() {
                return Err(another(&path));
            }
            Condition::Always
        }
    };

    is_unclear.store(true, Ordering::Relaxed);
    let put = connection.put(&path, &[index.bytes()], condition, control);
    if put.is_err() || condition == Condition::Always {
        let found = match &put {
            Err(Error::Interrupted) => return put.map(|()| Committed::default()),
            Err(Error::Storage { kind, .. }) if !matches!(kind, StorageFault::Precondition | StorageFault::Unclear) => {
                // An answer, and no other was lost: it is not stored.
                is_unclear.store(false, Ordering::Relaxed);
                return put.map(|()| Committed::default());
            }
            _ => published(connection, &path, control),
        };
        match (found, put) {
            (Ok(Some(found)), _) if found.save_id == index.save_id() && found.generation == index.generation() => {}
            (Ok(_), Err(error)) if is_refused(&error) => {
                is_unclear.store(false, Ordering::Relaxed);
                return Err(another(&path));
            }
            (Ok(_), Ok(())) => {
                is_unclear.store(false, Ordering::Relaxed);
                return Err(another(&path));
            }
            (
                Err(error),
                Ok(())
                | Err(Error::Storage {
                    kind: StorageFault::Precondition,
                    ..
                }),
            ) => {
                return Err(unclear(error));
            }
            (_, Err(error)) => return Err(error),
        }
    }
    is_unclear.store(false, Ordering::Relaxed);

    let kept = own_files(index);
    for old in &old {
        let replaced = own_files(old).into_iter().filter(|name| !kept.contains(name));
        removed.extend(replaced.map(str::to_owned));
    }
    let paths: Vec<PathBuf> = removed.iter().map(|name| dir.join(name)).collect();
    // The index is in its place: nothing takes that back.
    let left = connection.remove(&paths, &[], CLEANING, control);
    Ok(Committed { removed, left })
}

/// The indexes that will be replaced, as far as they can be read: one that cannot names nothing that may be removed.
fn read_old(
    dir: &Path,
    path: Option<&PathBuf>,
    of_ranks: &[String],
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<Vec<Index>> {
    let files = Files::Remote(connection, control);
    let mut old = Vec::new();
    if let Some(path) = path {
        let before = match files.read(path) {
            Err(error) if is_refused(&error) => return Err(another(path)),
            before => before?,
        };
        old.extend(before.and_then(|bytes| Index::from_bytes(bytes, path).ok()));
    }
    for name in of_ranks {
        let path = dir.join(name);
        old.extend(
            files
                .read(&path)?
                .and_then(|bytes| Index::from_bytes(bytes, &path).ok()),
        );
    }
    Ok(old)
}

fn is_refused(error: &Error) -> bool {
    matches!(
        error,
        Error::Storage {
            kind: StorageFault::Precondition,
            ..
        }
    )
}

fn another(path: &Path) -> Error {
    Error::Storage {
        kind: StorageFault::Precondition,
        action: "replace",
        path: path.to_owned(),
        attempts: 1,
        reason:
            "another save to this place was committed, or its index removed, since this one began; it was not touched"
                .into(),
    }
}

fn unclear(error: Error) -> Error {
    match error {
        Error::Storage {
            action,
            path,
            attempts,
            reason,
            ..
        } => Error::Storage {
            kind: StorageFault::Unclear,
            action,
            path,
            attempts,
            reason,
        },
        error => error,
    }
}

/// Checks that the files of a save are there as its ranks stored them.
fn check_written(dir: &Path, index: &Index, connection: &dyn StoringConnection, control: &Control) -> Result<()> {
    let files: Vec<_> = (0..index.file_count())
        .map(|number| index.file(number))
        .filter(|file| !file.external && DataFileName::parse(file.name).is_some())
        .collect();
    parallel::for_each(
        files.len(),
        LOOKS,
        || (),
        |(), number| {
            let file = &files[number];
            let path = dir.join(file.name);
            let wrong = |what: String| {
                let reason = format!("at the commit of its save {what}");
                Err(Error::corrupt_file(&path, reason))
            };
            match connection.look(&path, control)? {
                Some(size) if size == file.size => Ok(()),
                Some(size) => wrong(format!("it is {size} bytes long, expected {}", file.size)),
                None => wrong("it is missing".into()),
            }
        },
    )
}

/// [`discard`](super::discard) on a store.
///
/// # Errors
/// [`Error::CorruptIndex`] where the bytes are no index; [`Error::Storage`] where the published index cannot be read (nothing is removed then), or for the
/// first file that could not be removed, after trying all; [`Error::Interrupted`].
pub fn discard_remote(
    dir: &Path,
    rank: Option<u32>,
    index: impl AsRef<[u8]> + Send + Sync + 'static,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    let path = dir.join(index_name(rank));
    let index = Index::from_bytes(index, &path)?;
    let published = published(connection, &path, control)?;
    // It names these files, and is of this save.
    if published.is_some_and(|found| found.save_id == index.save_id() && found.generation == index.generation()) {
        return Ok(());
    }
    let paths: Vec<PathBuf> = own_files(&index).into_iter().map(|name| dir.join(name)).collect();
    match connection.remove(&paths, &[], CLEANING, control).into_iter().next() {
        None => Ok(()),
        Some(error) => Err(error),
    }
}

/// Whether a folder on a store has a checkpoint of all ranks, or with `rank` of that one.
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
