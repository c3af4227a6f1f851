//! Files and folders that killed saves and conversions left, and their removal.
//!
//! A save removes only files that the replaced index names, so the files of a killed save stay.
//! They have no claim, unlike those of a running save, which may be on another machine (section 1.3
//! of `docs/format.md`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::commit::give_back;
use super::locate::local_names;
use super::recover::recoverable;
use crate::format::{DataFileName, INDEX_NAME, Index, parse_rank_index_name};
use crate::store::disk::Disk;
use crate::store::{
    ASIDE, Claimed, FileLock, Files, FolderLock, LOCK_NAME, Mode, name_of_temporary,
};
use crate::{Control, Error, Result};

/// Age after which a file without a usable lock counts as left behind.
const LONG_AGO: Duration = Duration::from_secs(24 * 60 * 60);

/// Kinds of leftovers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftoverKind {
    /// A data file that no index names.
    Data,
    /// An index that was not renamed to its final name.
    TemporaryIndex,
    /// The index of a single rank next to one of all ranks, which takes precedence. The files that
    /// it names are then [`LeftoverKind::Data`].
    RankIndex,
    /// The folder in which a conversion built its result, or what the result replaced.
    Conversion,
}

/// Decision about a leftover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No process needs it, and it can be removed.
    Left,
    /// A process uses it.
    InUse,
    /// It is too recent to be sure.
    Young,
    /// It belongs to a complete checkpoint that lacks its index or its final name.
    Whole,
}

/// A file or folder that no checkpoint needs.
#[derive(Clone, Debug)]
pub struct Leftover {
    /// Its path.
    pub path: PathBuf,
    /// Its length in bytes; for a folder, the length of all files in it.
    pub bytes: u64,
    /// Its kind.
    pub kind: LeftoverKind,
    /// The decision: removable or not.
    pub verdict: Verdict,
}

/// Result of [`clean`].
#[derive(Debug, Default)]
pub struct Cleaned {
    /// Leftovers that were removed.
    pub removed: Vec<Leftover>,
    /// Leftovers that were kept, because of their verdict.
    pub kept: Vec<Leftover>,
    /// Errors of removals.
    pub failed: Vec<Error>,
}

/// Returns leftovers of killed saves in the folder at `path`, and of killed conversions to `path`,
/// which are beside it. They are sorted by name. This changes nothing and waits for no lock, so the
/// result may include files of a save that begins or ends at the same time.
///
/// Anything modified within `older_than` counts as young. The default is no time if locks show
/// which processes are running. If they do not, as on a network file system, it is a day.
///
/// # Errors
/// [`Error::NotFound`] if there is neither; [`Error::CorruptIndex`] if an index cannot be read,
/// since it is then unknown which files it names; [`Error::Io`].
pub fn leftovers(path: &Path, older_than: Option<Duration>) -> Result<Vec<Leftover>> {
    find(path, older_than, None)
}

fn find(
    path: &Path,
    older_than: Option<Duration>,
    lock: Option<&FolderLock>,
) -> Result<Vec<Leftover>> {
    let mut found = of_conversions(path, older_than)?;
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => found.extend(of_saves(path, older_than, lock)?),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound && found.is_empty() => {
            return Err(Error::NotFound {
                path: path.to_owned(),
                reason: "there is no such path".into(),
            });
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(Error::io("look at", path, error)),
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Removes what [`leftovers`] finds with the verdict [`Verdict::Left`]. No save can commit
/// meanwhile.
///
/// # Errors
/// Those of [`leftovers`], and [`Error::Interrupted`] or [`Error::Busy`] while waiting for the
/// folder's lock. Then nothing was removed.
pub fn clean(path: &Path, older_than: Option<Duration>, control: &Control) -> Result<Cleaned> {
    clean_on(&Disk::default(), path, older_than, control)
}

fn clean_on(
    disk: &Disk,
    path: &Path,
    older_than: Option<Duration>,
    control: &Control,
) -> Result<Cleaned> {
    let is_folder = path.is_dir();
    let lock =
        is_folder.then(|| FolderLock::take_on(disk, path, Mode::Exclusive, control)).transpose()?;
    let cleaned = clean_locked(disk, path, older_than, lock.as_ref(), control);
    if let Some(lock) = lock {
        give_back(lock, disk, path);
    }
    cleaned
}

fn clean_locked(
    disk: &Disk,
    path: &Path,
    older_than: Option<Duration>,
    lock: Option<&FolderLock>,
    control: &Control,
) -> Result<Cleaned> {
    let mut cleaned = Cleaned::default();
    for leftover in find(path, older_than, lock)? {
        if leftover.verdict != Verdict::Left {
            cleaned.kept.push(leftover);
            continue;
        }
        control.check()?;
        let removed = match leftover.kind {
            LeftoverKind::Conversion => disk.remove_tree(&leftover.path),
            _ => disk.remove(&leftover.path),
        };
        match removed {
            Ok(()) => cleaned.removed.push(leftover),
            Err(error) => cleaned.failed.push(error),
        }
    }
    Ok(cleaned)
}

/// A file that no index of its folder needs.
pub(super) struct Unneeded<'a> {
    pub name: &'a str,
    pub kind: LeftoverKind,
    /// Its parsed name, if it is a data file.
    pub data: Option<DataFileName>,
    /// True if only the index of its save is missing.
    pub is_whole: bool,
}

/// Returns the files with these names in a folder that no index needs. Ignores temporary files,
/// except those of indexes.
pub(super) fn unneeded<'a>(
    files: Files<'_>,
    dir: &Path,
    names: &BTreeSet<&'a str>,
) -> Result<Vec<Unneeded<'a>>> {
    let has_index = names.contains(INDEX_NAME);
    let is_rank_index = |name: &str| parse_rank_index_name(name).is_some();
    let (mut named, mut has_live) = (HashSet::new(), false);
    for name in
        names.iter().filter(|&&name| name == INDEX_NAME || !has_index && is_rank_index(name))
    {
        has_live = true;
        let path = dir.join(name);
        let bytes = files.read_index(&path)?;
        let bytes = bytes.ok_or_else(|| Error::io("read", &path, ErrorKind::NotFound.into()))?;
        let index = Index::from_bytes(bytes, &path)?;
        // Ignores the folder of the name: it is safer to keep a file too many.
        let last = |number| Path::new(index.file(number).name).file_name().map(OsStr::to_owned);
        named.extend((0..index.file_count()).filter_map(last));
    }
    let whole =
        if has_live { BTreeSet::new() } else { recoverable(files, dir, names.iter().copied())? };
    let judge = |&name: &&'a str| {
        let data = DataFileName::parse(name);
        let kind = match name_of_temporary(name) {
            _ if named.contains(OsStr::new(name)) => return None,
            Some(of) if of == INDEX_NAME || is_rank_index(of) => LeftoverKind::TemporaryIndex,
            _ if data.is_some() => LeftoverKind::Data,
            _ if has_index && is_rank_index(name) => LeftoverKind::RankIndex,
            _ => return None,
        };
        Some(Unneeded {
            name,
            kind,
            data,
            is_whole: data.is_some_and(|data| whole.contains(&data)),
        })
    };
    Ok(names.iter().filter_map(judge).collect())
}

/// Returns leftovers of saves into the folder. `lock` is the folder's lock, if the caller holds it.
fn of_saves(
    dir: &Path,
    older_than: Option<Duration>,
    lock: Option<&FolderLock>,
) -> Result<Vec<Leftover>> {
    let names = local_names(dir)?;
    let mut claims = Claims::new(dir, lock);
    let mut found = Vec::new();
    for file in unneeded(Files::Local, dir, &names.iter().map(String::as_str).collect())? {
        let path = dir.join(file.name);
        let Some(meta) = look(&path)?.filter(Metadata::is_file) else {
            continue;
        };
        let verdict = match judge(claims.of(file.data)?, age(&meta), older_than) {
            // A save that is about to commit is complete as well.
            Verdict::InUse => Verdict::InUse,
            _ if file.is_whole => Verdict::Whole,
            verdict => verdict,
        };
        found.push(Leftover { bytes: meta.len(), path, kind: file.kind, verdict });
    }
    Ok(found)
}

/// Returns leftovers of conversions to `path`.
fn of_conversions(path: &Path, older_than: Option<Duration>) -> Result<Vec<Leftover>> {
    let Some(name) = path.file_name().and_then(OsStr::to_str) else {
        return Ok(Vec::new());
    };
    let short: String = name.chars().take(LONG_NAME).collect();
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let entries = match fs::read_dir(parent) {
        // We cannot have written to a folder that we may not list.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            return Ok(Vec::new());
        }
        entries => entries.map_err(|error| Error::io("list", parent, error))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| Error::io("list", parent, error))?.file_name();
        let of = entry.to_str().and_then(name_of_temporary);
        if of.and_then(|of| of.strip_prefix('.')) != Some(short.as_str()) {
            continue;
        }
        let place = parent.join(&entry);
        let Some(meta) = look(&place)?.filter(Metadata::is_dir) else {
            continue;
        };
        let (bytes, newest, aside) = measure(&place)?;
        let claimed = match FileLock::is_claimed(&place.join(LOCK_NAME)) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                Claimed::Unknown
            }
            claimed => claimed?,
        };
        let verdict = if aside && path.symlink_metadata().is_err() {
            Verdict::Whole
        } else {
            judge(claimed, newest.min(age(&meta)), older_than)
        };
        found.push(Leftover { path: place, bytes, kind: LeftoverKind::Conversion, verdict });
    }
    Ok(found)
}

/// A conversion's folder name holds at most this many characters of the destination's name.
const LONG_NAME: usize = 200;

/// Claims on the files of a folder.
struct Claims<'a> {
    dir: &'a Path,
    of_parts: HashMap<(u64, u64, u32), Claimed>,
    of_folder: Option<Claimed>,
}

impl<'a> Claims<'a> {
    fn new(dir: &'a Path, lock: Option<&FolderLock>) -> Self {
        Self {
            dir,
            of_parts: HashMap::new(),
            // The holder of the exclusive lock knows that no other process works here.
            of_folder: lock.map(
                |lock| {
                    if lock.is_certain() { Claimed::No } else { Claimed::Unknown }
                },
            ),
        }
    }

    /// Returns the claim on the first file of the same rank and save; for an index, the claim on
    /// the folder.
    fn of(&mut self, data: Option<DataFileName>) -> Result<Claimed> {
        let dir = self.dir;
        let look = |path: PathBuf| match FileLock::is_claimed(&path) {
            // The first file of a rank exists as long as its save runs.
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                Ok(Claimed::No)
            }
            claimed => claimed,
        };
        let Some(data) = data else {
            let claimed = match self.of_folder {
                Some(known) => known,
                None => look(dir.join(LOCK_NAME))?,
            };
            self.of_folder = Some(claimed);
            return Ok(claimed);
        };
        let part = (data.generation, data.token, data.rank);
        if let Some(&known) = self.of_parts.get(&part) {
            return Ok(known);
        }
        let claimed = look(dir.join(DataFileName { file: 0, ..data }.to_string()))?;
        self.of_parts.insert(part, claimed);
        Ok(claimed)
    }
}

pub(super) fn judge(claimed: Claimed, age: Duration, older_than: Option<Duration>) -> Verdict {
    let enough =
        older_than.unwrap_or(if claimed == Claimed::Unknown { LONG_AGO } else { Duration::ZERO });
    match claimed {
        Claimed::Yes => Verdict::InUse,
        _ if age < enough => Verdict::Young,
        _ => Verdict::Left,
    }
}

/// Returns the time since the file was modified or, for a hard link, since it was linked: a link
/// keeps its modification time.
fn age(meta: &Metadata) -> Duration {
    let modified = meta.modified().unwrap_or_else(|_| SystemTime::now());
    let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(meta.ctime().max(0).unsigned_abs());
    let since = if meta.nlink() > 1 { modified.max(changed) } else { modified };
    since.elapsed().unwrap_or_default()
}

/// Returns the metadata of a path, or `None` if the file vanished since the folder was listed.
fn look(path: &Path) -> Result<Option<Metadata>> {
    match path.symlink_metadata() {
        Ok(meta) => Ok(Some(meta)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("look at", path, error)),
    }
}

/// Returns the length of all files in a folder, the age of the newest, and whether a replaced
/// result is among them.
fn measure(folder: &Path) -> Result<(u64, Duration, bool)> {
    let failed = |error| Error::io("list", folder, error);
    let (mut bytes, mut newest, mut aside) = (0, Duration::MAX, false);
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok((bytes, newest, aside)),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let Some(meta) = look(&path)? else { continue };
        aside |= path.extension() == Some(OsStr::new(ASIDE));
        newest = newest.min(age(&meta));
        if meta.is_dir() {
            let (more, age, _) = measure(&path)?;
            (bytes, newest) = (bytes + more, newest.min(age));
        } else {
            bytes += meta.len();
        }
    }
    Ok((bytes, newest, aside))
}

#[cfg(test)]
#[path = "clean_tests.rs"]
mod tests;
