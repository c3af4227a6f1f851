//! Locks between processes, even of different machines: on the folder of a checkpoint, and on the
//! files that a save is writing.
//!
//! They are `flock`s on files that are open for writing. Network file systems accept those, but not
//! locks on a folder. A lock ends when it is dropped, or with its process, even if that is killed.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::disk::{Disk, LOCK_NAME, Locked, Mode, is_unsupported};
use super::fork::OwnFile;
use super::publish::publish_on;
use super::{is_remote, platform, read_at};
use crate::{Control, Error, Result};

/// First and longest delay before a lock is tried again.
const SLICES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];
/// Time limit on waiting for a lock. A process that holds it for longer is stuck.
const PATIENCE: Duration = Duration::from_secs(600);

/// Bound on the bytes in the file of a lock.
const MOST_HELD: usize = 64 << 10;

/// Answer to the question whether a process claims a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claimed {
    /// A process claims it.
    Yes,
    /// No process claims it.
    No,
    /// The file system has no locks, or is on a network and may have only the locks of this
    /// machine.
    Unknown,
}

/// A lock on an open file.
#[derive(Debug)]
pub struct FileLock {
    file: OwnFile,
}

impl FileLock {
    /// Waits for the lock until `control` is cancelled, or for at most `patience`. Returns `None`
    /// if the file system has no locks.
    fn wait(
        disk: &Disk,
        file: File,
        path: &Path,
        mode: Mode,
        control: &Control,
        patience: Duration,
    ) -> Result<Option<Self>> {
        let file = OwnFile::new(file);
        let begin = Instant::now();
        let mut reminder = control.reminder();
        let mut slice = SLICES[0];
        loop {
            match disk.try_lock(&file, path, mode)? {
                Locked::Yes => return Ok(Some(Self { file })),
                Locked::Impossible => return Ok(None),
                Locked::ByOthers if begin.elapsed() >= patience => {
                    return Err(Error::Busy { path: path.to_owned(), seconds: patience.as_secs() });
                }
                Locked::ByOthers => {}
            }
            control.check()?;
            if let Some(seconds) = reminder.due() {
                control.tell(format!(
                    "{}: still waiting: another process has held this lock for {seconds} s",
                    path.display()
                ));
            }
            thread::sleep(slice);
            slice = (slice * 2).min(SLICES[1]);
        }
    }

    /// Claims the existing file at `path` for this process. Returns `None` if the file system has
    /// no locks.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Interrupted`], [`Error::Busy`].
    pub(crate) fn claim(disk: &Disk, path: &Path, control: &Control) -> Result<Option<Self>> {
        let file = disk.open_lock(path, false)?;
        Self::wait(disk, file, path, Mode::Exclusive, control, PATIENCE)
    }

    /// Returns whether a process claims the file at `path`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn is_claimed(path: &Path) -> Result<Claimed> {
        let file = super::open_file(path).map_err(|error| Error::io("open", path, error))?;
        // A shared lock, so that two checks do not take each other for a claim.
        match Disk::default().try_lock(&file, path, Mode::Shared)? {
            Locked::ByOthers => Ok(Claimed::Yes),
            Locked::Yes if !is_remote(&file) => Ok(Claimed::No),
            Locked::Yes | Locked::Impossible => Ok(Claimed::Unknown),
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        if self.file.is_own() {
            // Released explicitly and not by the close, because a child has the file open while it
            // is being forked.
            Disk::unlock(&self.file);
        }
    }
}

/// Locks the folder at `to`, so that no process commits to it or removes anything in it. Returns
/// `None` if there is no folder.
///
/// # Errors
/// [`Error::Io`], [`Error::Interrupted`], [`Error::Busy`].
pub fn lock_replaced(to: &Path, control: &Control) -> Result<Option<FolderLock>> {
    let is_folder = to.symlink_metadata().is_ok_and(|meta| meta.is_dir());
    is_folder.then(|| FolderLock::take(to, Mode::Exclusive, control)).transpose()
}

/// The lock of a folder. It is exclusive while an index is published or files are removed. It is
/// shared while a save creates its first file.
#[derive(Debug)]
pub struct FolderLock {
    lock: Option<FileLock>,
    path: PathBuf,
}

impl FolderLock {
    /// Waits for the lock. On a file system without locks it protects nothing.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Interrupted`] from `control`; [`Error::Busy`] if another process has
    /// held it for ten minutes.
    pub fn take(folder: &Path, mode: Mode, control: &Control) -> Result<Self> {
        Self::take_on(&Disk::default(), folder, mode, control)
    }

    pub(crate) fn take_on(
        disk: &Disk,
        folder: &Path,
        mode: Mode,
        control: &Control,
    ) -> Result<Self> {
        Self::take_within(disk, folder, mode, control, PATIENCE)
    }

    /// Does the same as [`take`](Self::take), and waits for at most `patience`.
    pub(crate) fn take_within(
        disk: &Disk,
        folder: &Path,
        mode: Mode,
        control: &Control,
        patience: Duration,
    ) -> Result<Self> {
        let path = folder.join(LOCK_NAME);
        loop {
            let lock =
                FileLock::wait(disk, disk.open_lock(&path, true)?, &path, mode, control, patience)?;
            // If a process removed or replaced the file or the folder meanwhile, there could be a
            // second holder.
            if lock.as_ref().is_none_or(|lock| is_at(&lock.file, &path)) {
                return Ok(Self { lock, path });
            }
        }
    }

    /// Returns the bytes in the lock's file. They are read through the descriptor that is locked,
    /// because a network client may cache what a name leads to, but not a lock.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read(&self) -> Result<Vec<u8>> {
        let failed = |error| Error::io("read", &self.path, error);
        let opened;
        let file = if let Some(lock) = &self.lock {
            &*lock.file
        } else {
            opened = super::open_file(&self.path).map_err(failed)?;
            &opened
        };
        // A page may have been cached before the lock was taken.
        platform::drop_cached(file);
        let length = file.metadata().map_err(failed)?.len();
        let mut bytes = vec![0; usize::try_from(length).map_or(MOST_HELD, |n| n.min(MOST_HELD))];
        read_at(file, &mut bytes, 0).map_err(failed)?;
        Ok(bytes)
    }

    /// Stores bytes in the lock's file, durably with `fsync`. Later bytes must have the same
    /// length, because a network client may cache the length.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, bytes: &[u8], fsync: bool, control: &Control) -> Result<()> {
        let disk = Disk::default();
        let stored = disk.open(&self.path).and_then(|file| {
            disk.write(&file, &self.path, bytes, 0)?;
            if fsync { disk.sync(&file, &self.path, control) } else { Ok(()) }
        });
        match (stored, self.path.parent()) {
            // A file of another user, or a file system that takes bytes only at the end of a file.
            // Those who wait for its lock see that it was replaced.
            (Err(Error::Io { source, .. }), Some(folder))
                if source.kind() == std::io::ErrorKind::PermissionDenied
                    || is_unsupported(&source) =>
            {
                publish_on(&disk, folder, LOCK_NAME, bytes, fsync, control)
            }
            (stored, _) => stored,
        }
    }

    /// Returns whether the lock excludes every process: the file system has locks, and they are not
    /// limited to one machine.
    pub(crate) fn is_certain(&self) -> bool {
        self.lock.as_ref().is_some_and(|lock| !is_remote(&lock.file))
    }
}

/// Returns whether the file at `path` is this one.
fn is_at(file: &File, path: &Path) -> bool {
    let at = |found: &std::fs::Metadata| (found.dev(), found.ino());
    match (file.metadata(), path.symlink_metadata()) {
        (Ok(here), Ok(there)) => at(&here) == at(&there),
        _ => false,
    }
}

#[cfg(test)]
#[path = "lock_tests.rs"]
mod tests;
