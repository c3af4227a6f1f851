//! Locks between processes, also of different machines: on the folder of a checkpoint, and on what
//! a save is writing.
//!
//! They are `flock`s on files opened for writing, which is what network file systems take: on a
//! folder they have none. Each ends with its value and with its process, however that ends.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::disk::{Disk, Locked};
use super::fork::OwnFile;
use super::is_remote;
use crate::{Control, Error, Result};

/// The file in the folder of a checkpoint whose lock is the folder's. It is empty, and stays.
pub const LOCK_NAME: &str = ".dcprs.lock";

/// A lock is asked for again after so long, and longer and longer up to this.
const SLICES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];
/// A process that keeps the lock of a folder for longer is stuck.
const PATIENCE: Duration = Duration::from_secs(600);

/// Modes of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A lock that others may share.
    Shared,
    /// A lock of one holder.
    Exclusive,
}

/// Claim of a process on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claimed {
    /// One is.
    Yes,
    /// None is.
    No,
    /// The file system has no locks, or it is on a network, where they may be those of this machine
    /// alone.
    Unknown,
}

/// A lock on an open file.
#[derive(Debug)]
pub struct FileLock {
    file: OwnFile,
}

impl FileLock {
    /// Waits for the lock, for as long as `control` lets it, and at most `patience`. `None` where
    /// the file system has no locks.
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

    /// Claims the existing file at `path` for this process. `None` where the file system has no
    /// locks.
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
        // Shared: of two that look, neither takes the other for one that is at work.
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
            // Said, and not left to the close: a child that is being forked has the file open for a
            // moment.
            Disk::unlock(&self.file);
        }
    }
}

/// The lock of a folder. Exclusive while what it holds is published or removed; shared while a save
/// makes its first file there.
#[derive(Debug)]
pub struct FolderLock {
    lock: Option<FileLock>,
}

impl FolderLock {
    /// Waits until no one else holds it. Where the file system has no locks, it is held in name
    /// only.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Interrupted`] from `control`; [`Error::Busy`] where another process
    /// has held it for ten minutes.
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

    /// [`take`](Self::take) by who has other things to do than to wait for long.
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
            // A process that removed or replaced it meanwhile, or the folder, made room for a
            // second holder.
            if lock.as_ref().is_none_or(|lock| is_at(&lock.file, &path)) {
                return Ok(Self { lock });
            }
        }
    }

    /// Returns whether the lock excludes every process: the file system has locks, and no other
    /// machine may have locks of its own.
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
