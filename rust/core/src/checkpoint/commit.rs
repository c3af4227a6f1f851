//! The commit: one rename makes a save visible, and then the files that it replaced are removed.
//! Also the generation of the next save.

use std::collections::HashSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::index_file::identity_of;
use super::locate::{check_no_rank_indexes, local_names};
use crate::format::{
    DataFileName, FileView, INDEX_NAME, Identity, Index, parse_rank_index_name, rank_index_name,
};
use crate::store::disk::Disk;
use crate::store::{
    Fingerprint, FolderLock, LOCK_NAME, LOOK_AGAIN, Mode, patience_at, publish_on, read_all,
};
use crate::{Control, Error, Result};

/// Time limit for a discard to wait for the folder's lock. `clean` removes what it leaves.
const DISCARD_PATIENCE: Duration = Duration::from_secs(5);

/// Side effects of a commit.
#[derive(Debug, Default)]
pub struct Committed {
    /// Removed files of the checkpoint that was replaced.
    pub removed: Vec<String>,
    /// Errors of removals. They do not affect the new checkpoint.
    pub left: Vec<Error>,
}

/// Publishes `index` as the index of the folder, or with `rank` as that of a rank-local save. Then
/// removes the data files that the replaced index named as its own and that `index` does not name.
/// The index of a save by all ranks also replaces those of single ranks. No other file is touched.
/// Without `replace`, nothing is replaced.
///
/// `control` can stop it until the index is published.
///
/// # Errors
/// - [`Error::CorruptData`] if a data file is missing or has the wrong length.
/// - [`Error::Exists`] if there is an index that this one may not replace. With `rank`, that
///   includes the index of all ranks.
/// - [`Error::Io`], [`Error::Interrupted`], [`Error::Busy`].
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
    // A rank that considers the save failed removes its files under this lock: before the commit,
    // which then fails, or never.
    let lock = FolderLock::take_on(disk, dir, Mode::Exclusive, control)?;
    let kept = [(!replace).then_some(name.as_str()), rank.map(|_| INDEX_NAME)];
    let of_ranks = if rank.is_none() { rank_indexes(dir)? } else { Vec::new() };
    let mut exists = !replace && !of_ranks.is_empty();
    for name in kept.into_iter().flatten() {
        // If the look fails, an index may be there.
        exists |= Fingerprint::at(&dir.join(name))?.is_some();
    }
    if exists {
        return Err(Error::Exists { path: dir.to_owned() });
    }
    check_written(dir, index, control)?;
    let before = read_all(&dir.join(&name)).ok();
    // An index that cannot be read names no file that may be removed.
    let old: Vec<Index> = std::iter::once(before.clone())
        .chain(of_ranks.iter().map(|name| read_all(&dir.join(name)).ok()))
        .filter_map(|bytes| Index::from_bytes(bytes?, &dir.join(&name)).ok())
        .collect();
    publish_on(disk, dir, &name, index.bytes(), fsync, control)?;
    if !lock.is_certain()
        && let Err(lost) = check_written(dir, index, &Control::new())
    {
        // Its files were removed after the first check. Those of the old checkpoint are still
        // there.
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

/// Publishes `index` in a folder whose data files stay: foreign files, or those of a save whose
/// index was lost. Removes no file. `before` is the index that was there before the data was read,
/// if any. An index that was published since is not replaced.
///
/// # Errors
/// [`Error::Exists`] or [`Error::Replaced`] if a save was committed meanwhile, or the data was
/// removed; [`Error::CorruptIndex`], [`Error::Io`], [`Error::Interrupted`], [`Error::Busy`]. After
/// any error the folder is unchanged.
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
    // The files may have been those of a failed save, which removed them.
    for file in written(index) {
        control.check()?;
        if fs::metadata(dir.join(file.name)).is_ok_and(|found| found.len() == file.size) {
            continue;
        }
        return Err(Error::Replaced { path });
    }
    publish_on(disk, dir, INDEX_NAME, index.bytes(), fsync, control)
}

/// Releases an exclusive lock. In a folder without data of this package it also removes the lock's
/// file, which would otherwise be copied along with foreign data.
pub(super) fn give_back(lock: FolderLock, disk: &Disk, dir: &Path) {
    let is_own = |name: &str| DataFileName::parse(name).is_some();
    // Keep the file if the folder cannot be listed.
    let has_own = fs::read_dir(dir).map_or(true, |mut entries| {
        entries
            .any(|entry| entry.map_or(true, |entry| entry.file_name().to_str().is_some_and(is_own)))
    });
    let is_empty = fs::metadata(dir.join(LOCK_NAME)).is_ok_and(|found| found.len() == 0);
    if !has_own && is_empty {
        // Removed under the lock: a process that waits for it checks afterwards that the file is
        // still there.
        let _ = disk.remove(&dir.join(LOCK_NAME));
    }
    drop(lock);
}

/// Checks that the files of a save are as its ranks wrote them.
fn check_written(dir: &Path, index: &Index, control: &Control) -> Result<()> {
    let begin = Instant::now();
    for file in written(index) {
        let path = dir.join(file.name);
        loop {
            control.check()?;
            let found = match fs::symlink_metadata(&path) {
                Ok(found) if !found.is_file() => {
                    return Err(unfit(&path, "it is not a regular file"));
                }
                Ok(found) => Some(found.len()),
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => return Err(Error::io("look at", &path, error)),
            };
            // A rank of another machine may just have written it.
            if found == Some(file.size) || begin.elapsed() >= patience_at(dir) {
                check_found(&path, found, file.size)?;
                break;
            }
            thread::sleep(LOOK_AGAIN);
        }
    }
    Ok(())
}

/// Returns the data files that a save wrote for this index. Only names of data files count, so that
/// a forged index cannot get another file checked or removed.
pub(super) fn written(index: &Index) -> impl Iterator<Item = FileView<'_>> {
    let files = (0..index.file_count()).map(move |number| index.file(number));
    files.filter(|file| !file.external && DataFileName::parse(file.name).is_some())
}

/// Checks the length of a file that a commit found, if it found one.
pub(super) fn check_found(path: &Path, found: Option<u64>, expected: u64) -> Result<()> {
    match found {
        Some(size) if size == expected => Ok(()),
        Some(size) => Err(unfit(path, &format!("it is {size} bytes long, expected {expected}"))),
        None => Err(unfit(path, &missing(path))),
    }
}

fn missing(path: &Path) -> String {
    let name = path.file_name().and_then(|name| DataFileName::parse(name.to_str()?));
    let Some(name) = name else { return "it is missing".to_owned() };
    format!(
        "it is missing: rank {} wrote it, and this machine does not see it. Do all ranks save to \
         this path, and do all machines share it?",
        name.rank
    )
}

fn unfit(path: &Path, what: &str) -> Error {
    Error::corrupt_file(path, format!("at the commit of its save {what}"))
}

pub(super) fn index_name(rank: Option<u32>) -> String {
    rank.map_or(INDEX_NAME.to_owned(), rank_index_name)
}

/// Returns the names of single ranks' indexes in a folder.
fn rank_indexes(dir: &Path) -> Result<Vec<String>> {
    let mut names = local_names(dir)?;
    names.retain(|name| parse_rank_index_name(name).is_some());
    names.sort();
    Ok(names)
}

/// Removes the data files of a save that was not committed because another rank failed: those that
/// `index` names as its own. Keeps files that the published index of the folder (with `rank`, of
/// that rank) names, in case the save was committed after all.
///
/// # Errors
/// - [`Error::CorruptIndex`] if the bytes are not an index.
/// - [`Error::Io`] if the published index cannot be read; then nothing was removed. Also for the
///   first file that could not be removed, after all were tried.
/// - [`Error::Interrupted`] or [`Error::Busy`] while waiting for the folder's lock.
pub fn discard(
    dir: &Path,
    rank: Option<u32>,
    index: impl AsRef<[u8]> + Send + Sync + 'static,
    control: &Control,
) -> Result<()> {
    let path = dir.join(index_name(rank));
    let index = Index::from_bytes(index, &path)?;
    // Shows a rank that did not commit whether the save succeeded. This needs no lock, for which
    // all ranks would queue.
    let is_of_this_save = |found: Identity| {
        found.save_id == index.save_id() && found.generation == index.generation()
    };
    if !dir.exists() || identity_of(&path).is_some_and(is_of_this_save) {
        return Ok(());
    }
    // Limited, because the caller has an error to raise.
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

/// Returns the names of the files that it [wrote](written).
pub(super) fn own_files(index: &Index) -> HashSet<&str> {
    written(index).map(|file| file.name).collect()
}

/// Returns the generation of the next save into a folder: one more than the highest of its data
/// files and its index, or 1 if the folder does not exist.
///
/// # Errors
/// [`Error::Io`] if the folder cannot be read; [`Error::Unsupported`] after generation 2^64 - 1.
pub fn next_generation(dir: &Path) -> Result<u64> {
    match local_names(dir) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(1),
        names => generation_after(identity_of(&dir.join(INDEX_NAME)), &names?),
    }
}

/// Returns one more than the highest generation of the index and of names of data files. Only the
/// header of the index is needed, so a damaged index does not prevent the save that replaces it.
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
