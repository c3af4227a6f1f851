//! The commit: one rename makes a save visible, and what it replaced goes. And the number of the
//! next save.

use std::collections::HashSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use super::index_file::identity_of;
use super::locate::check_no_rank_indexes;
use crate::format::{
    DataFileName, FileView, INDEX_NAME, Identity, Index, parse_rank_index_name, rank_index_name,
};
use crate::store::disk::Disk;
use crate::store::{Fingerprint, FolderLock, LOCK_NAME, Mode, publish_on, read_all};
use crate::{Control, Error, Result};

/// Longest wait of a discard for the folder's lock. `clean` removes the rest.
const DISCARD_PATIENCE: Duration = Duration::from_secs(5);

/// Side effects of a commit.
#[derive(Debug, Default)]
pub struct Committed {
    /// Data files of the checkpoint that was replaced, which are gone now.
    pub removed: Vec<String>,
    /// Errors of removals. The new checkpoint is whole all the same.
    pub left: Vec<Error>,
}

/// Makes `index` the index of the folder (with `rank`, that rank's of a rank-local save), and
/// removes the data files that the one before it named as its own and this one does not. The index
/// of a whole save also replaces those of single ranks. No other file is touched. Without
/// `replace`, what is there stays.
///
/// `control` can stop it until the index is in its place.
///
/// # Errors
/// [`Error::CorruptData`] where a data file is not there; [`Error::Io`] where it could not be
/// published; [`Error::Interrupted`], [`Error::Busy`]; [`Error::Exists`] where a save was committed
/// that this one does not replace: without `replace` any that it would, and one of all ranks before
/// that of a single one.
pub fn commit_index(
    dir: &Path,
    rank: Option<u32>,
    index: &Index,
    replace: bool,
    fsync: bool,
    control: &Control,
) -> Result<Committed> {
    commit_index_on(&Disk::default(), dir, rank, index, replace, fsync, control)
}

pub(super) fn commit_index_on(
    disk: &Disk,
    dir: &Path,
    rank: Option<u32>,
    index: &Index,
    replace: bool,
    fsync: bool,
    control: &Control,
) -> Result<Committed> {
    let name = index_name(rank);
    // A rank that takes the save for failed removes what it wrote: before this, and then there is
    // nothing to commit, or never.
    let lock = FolderLock::take_on(disk, dir, Mode::Exclusive, control)?;
    let kept = [(!replace).then_some(name.as_str()), rank.map(|_| INDEX_NAME)];
    let of_ranks = if rank.is_none() { rank_indexes(dir)? } else { Vec::new() };
    let mut exists = !replace && !of_ranks.is_empty();
    for name in kept.into_iter().flatten() {
        // A look that fails says nothing of what is there.
        exists |= Fingerprint::at(&dir.join(name))?.is_some();
    }
    if exists {
        return Err(Error::Exists { path: dir.to_owned() });
    }
    check_written(dir, index, control)?;
    let before = read_all(&dir.join(&name)).ok();
    // One that cannot be read names nothing that may be removed.
    let old: Vec<Index> = std::iter::once(before.clone())
        .chain(of_ranks.iter().map(|name| read_all(&dir.join(name)).ok()))
        .filter_map(|bytes| Index::from_bytes(bytes?, &dir.join(&name)).ok())
        .collect();
    publish_on(disk, dir, &name, index.bytes(), fsync, control)?;
    if !lock.is_certain()
        && let Err(lost) = check_written(dir, index, &Control::new())
    {
        // Its files went after the first look. Those of the old one are there still.
        match before {
            Some(bytes) => publish_on(disk, dir, &name, &bytes, fsync, &Control::new())?,
            None => disk.remove(&dir.join(&name))?,
        }
        return Err(lost);
    }

    let kept = own_files(index);
    let replaced = old.iter().flat_map(own_files).filter(|name| !kept.contains(name));
    let mut committed = Committed::default();
    for name in of_ranks.iter().map(String::as_str).chain(replaced) {
        match disk.remove(&dir.join(name)) {
            Ok(()) => committed.removed.push(name.to_owned()),
            Err(error) => committed.left.push(error),
        }
    }
    Ok(committed)
}

/// Makes `index` the index of a folder whose data files stay as they are: foreign ones, or those of
/// a save whose index was lost. No file is removed. `before`: the index that was there before the
/// data was looked at, if any: what has come since is not replaced.
///
/// # Errors
/// [`Error::Exists`], [`Error::Replaced`]: a save was committed meanwhile, or the data is gone;
/// [`Error::CorruptIndex`], [`Error::Io`], [`Error::Interrupted`], [`Error::Busy`]. What is there
/// stays then.
pub fn replace_index(
    dir: &Path,
    index: Vec<u8>,
    before: Option<&Fingerprint>,
    fsync: bool,
    control: &Control,
) -> Result<()> {
    let disk = Disk::default();
    let path = dir.join(INDEX_NAME);
    let index = Index::from_bytes(index, &path)?;
    let lock = FolderLock::take_on(&disk, dir, Mode::Exclusive, control)?;
    let replaced = replace_locked(&disk, dir, &index, before, fsync, control);
    give_back(lock, &disk, dir);
    replaced
}

fn replace_locked(
    disk: &Disk,
    dir: &Path,
    index: &Index,
    before: Option<&Fingerprint>,
    fsync: bool,
    control: &Control,
) -> Result<()> {
    let path = dir.join(INDEX_NAME);
    let found = Fingerprint::at(&path)?;
    if found.as_ref() != before {
        return Err(match before {
            None => Error::Exists { path },
            Some(_) => Error::Replaced { path },
        });
    }
    check_no_rank_indexes(dir)?;
    // Files of a save that failed.
    for file in written(index) {
        control.check()?;
        if fs::metadata(dir.join(file.name)).is_ok_and(|found| found.len() == file.size) {
            continue;
        }
        return Err(Error::Replaced { path });
    }
    publish_on(disk, dir, INDEX_NAME, index.bytes(), fsync, control)
}

/// Gives an exclusive lock back. In a folder without data of this package its file goes too: it
/// would be copied along with foreign data.
pub(super) fn give_back(lock: FolderLock, disk: &Disk, dir: &Path) {
    let is_own = |name: &str| DataFileName::parse(name).is_some();
    // Nothing is removed from a folder that cannot be listed.
    let has_own = fs::read_dir(dir).map_or(true, |mut entries| {
        entries
            .any(|entry| entry.map_or(true, |entry| entry.file_name().to_str().is_some_and(is_own)))
    });
    if !has_own {
        // While it is locked: who waits for it looks whether its file is still there.
        let _ = disk.remove(&dir.join(LOCK_NAME));
    }
    drop(lock);
}

/// Checks that the files of a save are there as its ranks wrote them.
fn check_written(dir: &Path, index: &Index, control: &Control) -> Result<()> {
    for file in written(index) {
        control.check()?;
        let path = dir.join(file.name);
        let found = match fs::symlink_metadata(&path) {
            Ok(found) if !found.is_file() => return Err(unfit(&path, "it is not a regular file")),
            Ok(found) => Some(found.len()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(Error::io("look at", &path, error)),
        };
        check_found(&path, found, file.size)?;
    }
    Ok(())
}

/// The data files that a save wrote for this index. Their names are those of data files, whatever
/// the index says: one that was tampered with gets nothing else looked for, or removed.
pub(super) fn written(index: &Index) -> impl Iterator<Item = FileView<'_>> {
    let files = (0..index.file_count()).map(move |number| index.file(number));
    files.filter(|file| !file.external && DataFileName::parse(file.name).is_some())
}

/// Checks what a commit found of a file: its length, if it is there.
pub(super) fn check_found(path: &Path, found: Option<u64>, expected: u64) -> Result<()> {
    match found {
        Some(size) if size == expected => Ok(()),
        Some(size) => Err(unfit(path, &format!("it is {size} bytes long, expected {expected}"))),
        None => Err(unfit(path, "it is missing")),
    }
}

fn unfit(path: &Path, what: &str) -> Error {
    Error::corrupt_file(path, format!("at the commit of its save {what}"))
}

pub(super) fn index_name(rank: Option<u32>) -> String {
    rank.map_or(INDEX_NAME.to_owned(), rank_index_name)
}

/// The indexes of single ranks in a folder.
fn rank_indexes(dir: &Path) -> Result<Vec<String>> {
    let failed = |error| Error::io("list", dir, error);
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        names.extend(
            name.to_str().filter(|name| parse_rank_index_name(name).is_some()).map(str::to_owned),
        );
    }
    names.sort();
    Ok(names)
}

/// Removes the data files that an index names as its own: those of a save that was not committed,
/// because another rank failed. What the published index of the folder (with `rank`, of that rank)
/// names stays, should the save have been committed after all.
///
/// # Errors
/// [`Error::CorruptIndex`] where the bytes are no index; [`Error::Io`] where the published index
/// cannot be read (nothing is removed then), or for the first file that could not be removed, after
/// trying all; [`Error::Interrupted`], [`Error::Busy`] while waiting for the folder.
pub fn discard(
    dir: &Path,
    rank: Option<u32>,
    index: impl AsRef<[u8]> + Send + Sync + 'static,
    control: &Control,
) -> Result<()> {
    let path = dir.join(index_name(rank));
    let index = Index::from_bytes(index, &path)?;
    // A rank that did not commit learns so that the save went well, without the lock that all ranks
    // would queue for.
    let is_of_this_save = |found: Identity| {
        found.save_id == index.save_id() && found.generation == index.generation()
    };
    if !dir.exists() || identity_of(&path).is_some_and(is_of_this_save) {
        return Ok(());
    }
    // The caller has an error to raise.
    let _lock =
        FolderLock::take_within(&Disk::default(), dir, Mode::Exclusive, control, DISCARD_PATIENCE)?;
    let published = match read_all(&path) {
        Ok(bytes) => Some(Index::from_bytes(bytes, &path)?),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(Error::io("read", &path, error)),
    };
    let kept = published.as_ref().map(own_files).unwrap_or_default();
    let disk = Disk::default();
    own_files(&index)
        .into_iter()
        .filter(|name| !kept.contains(name))
        .map(|name| disk.remove(&dir.join(name)))
        .fold(Ok(()), Result::and)
}

/// The names of what it [wrote](written).
pub(super) fn own_files(index: &Index) -> HashSet<&str> {
    written(index).map(|file| file.name).collect()
}

/// The generation of the next save into a folder: 1 + the highest that a data file or the index
/// carries. 1 where there is no such folder.
///
/// # Errors
/// [`Error::Io`] where the folder cannot be read; [`Error::Unsupported`] after generation 2^64 - 1.
pub fn next_generation(dir: &Path) -> Result<u64> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(1),
        entries => entries.map_err(|error| Error::io("list", dir, error))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(|error| Error::io("list", dir, error))?.file_name();
        names.extend(name.into_string());
    }
    generation_after(identity_of(&dir.join(INDEX_NAME)), &names)
}

/// 1 + the highest generation that the index or a name of a data file carries. Of a damaged index
/// the header is enough: it does not hinder the save that replaces it.
pub(super) fn generation_after(index: Option<Identity>, names: &[String]) -> Result<u64> {
    let of_names = names.iter().filter_map(|name| DataFileName::parse(name));
    let all = of_names.map(|name| name.generation).chain(index.map(|index| index.generation));
    let highest = all.max().unwrap_or(0);
    highest
        .checked_add(1)
        .ok_or_else(|| Error::Unsupported(format!("no generation can follow {highest}")))
}

#[cfg(test)]
#[path = "commit_tests.rs"]
mod tests;
