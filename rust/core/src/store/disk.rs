//! All changes of folders by this crate. They go through [`Disk`], so that tests can watch the
//! order of the calls and make any of them fail.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use rustix::fs::{
    CWD, FallocateFlags, FlockOperation, RenameFlags, fallocate, flock, renameat_with,
};
use rustix::io::Errno;

use super::{LOOK_AGAIN, STALE, platform};
use crate::{Control, Error, Result};

/// A call to the operating system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Creates a folder.
    CreateFolder,
    /// Creates a new file.
    Create,
    /// Reserves space for a whole file.
    Allocate,
    /// Opens a file for direct writes.
    OpenDirect,
    /// Opens a file for writing.
    Open,
    /// Writes bytes.
    Write { offset: u64, len: usize, direct: bool },
    /// Writes some of a file's bytes to the disk, before a sync.
    WriteBack,
    /// Syncs a file to stable storage.
    Sync,
    /// Makes a hard link. The path is the new name.
    Link,
    /// Renames a file. The path is the new name.
    Rename,
    /// Renames a file or folder to a free name, or exchanges it with another one. The path is the
    /// new name.
    RenameApart,
    /// Syncs a folder's entries to stable storage.
    SyncFolder,
    /// Removes a file.
    Remove,
    /// Removes a folder and its contents.
    RemoveTree,
    /// Opens a file for its lock, and may create it.
    OpenLock,
    /// Tries to lock an open file, without waiting.
    Lock(Mode),
}

/// File in a folder, whose lock is that of the folder. In the folder of a checkpoint it is empty,
/// and stays.
pub const LOCK_NAME: &str = ".dcprs.lock";

/// Modes of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Can be held together with other shared locks.
    Shared,
    /// Can only be held alone.
    Exclusive,
}

/// Larger syncs can be interrupted after each such part. A disk writes it in some tenths of a
/// second.
const WRITE_BACK: usize = 64 << 20;

/// Errors of file systems without locks. `EBADF` is for a file that is not open for writing.
const NO_LOCKS: [i32; 5] =
    [libc::ENOTSUP, libc::EOPNOTSUPP, libc::ENOLCK, libc::ENOSYS, libc::EBADF];

/// Errors of file systems that support only plain renames.
const NO_SUCH_RENAME: [i32; 4] = [libc::EINVAL, libc::ENOSYS, libc::EOPNOTSUPP, libc::ENOTSUP];

/// Returns whether there is a folder at a path, or `None` if there is nothing. A link counts as
/// what it leads to.
fn is_folder(path: &Path) -> Result<Option<bool>> {
    match fs::metadata(path) {
        Ok(found) => Ok(Some(found.is_dir())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == ErrorKind::NotADirectory => Ok(None),
        Err(error) => Err(Error::io("look at", path, error)),
    }
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let identity = |path| fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    identity(a).is_some_and(|a| Some(a) == identity(b))
}

/// Outcome of a request for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// The caller has the lock.
    Yes,
    /// Another process has it, or another open file of this process.
    ByOthers,
    /// The file system has no locks.
    Impossible,
}

/// Hook by which a test changes a call.
pub(crate) trait Hook: Send + Sync {
    /// Runs before a call. An error replaces the call. For a write, the number is a limit on its
    /// bytes.
    fn before(&self, call: Call, path: &Path) -> io::Result<usize>;
}

/// The disk, with an optional hook of a test.
#[derive(Clone, Default)]
pub(crate) struct Disk {
    hook: Option<Arc<dyn Hook>>,
}

impl Disk {
    #[cfg(test)]
    pub(crate) fn hooked(hook: Arc<dyn Hook>) -> Self {
        Self { hook: Some(hook) }
    }

    fn before(&self, call: Call, path: &Path) -> io::Result<usize> {
        self.hook.as_ref().map_or(Ok(usize::MAX), |hook| hook.before(call, path))
    }

    /// Creates a folder and its missing parents. Returns the folders that got a new entry. They
    /// must be synced before anything relies on the new folder.
    pub(crate) fn create_folder(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        if is_folder(folder)? == Some(true) {
            return Ok(Vec::new());
        }
        let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Some(parent) = parent
            && is_folder(parent)? == Some(false)
        {
            return Err(Error::io("create", parent, io::Error::from_raw_os_error(libc::ENOTDIR)));
        }
        let mut changed = parent.map_or(Ok(Vec::new()), |parent| self.create_folder(parent))?;
        let begin = Instant::now();
        loop {
            match self.before(Call::CreateFolder, folder).and_then(|_| fs::create_dir(folder)) {
                Ok(()) => {
                    changed.push(parent.unwrap_or(Path::new(".")).to_owned());
                    return Ok(changed);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    match is_folder(folder)? {
                        // Another rank was faster.
                        Some(true) => return Ok(changed),
                        // A network client may remember that there was nothing.
                        None if begin.elapsed() < STALE && folder.symlink_metadata().is_err() => {
                            thread::sleep(LOOK_AGAIN);
                        }
                        _ => return Err(Error::io("create", folder, error)),
                    }
                }
                Err(error) => return Err(Error::io("create", folder, error)),
            }
        }
    }

    /// Creates a new file for writing.
    pub(crate) fn create(&self, path: &Path) -> Result<File> {
        self.before(Call::Create, path)
            .and_then(|_| OpenOptions::new().write(true).create_new(true).open(path))
            .map_err(|error| Error::io("create", path, error))
    }

    /// Sets the length of a file, and reserves the space if the file system can. A full disk is
    /// then noticed here, and writers of different parts do not wait for each other.
    pub(crate) fn allocate(&self, file: &File, path: &Path, size: u64) -> Result<()> {
        let reserve = || {
            self.before(Call::Allocate, path)?;
            match fallocate(file, FallocateFlags::empty(), 0, size) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => match file.set_len(size) {
                    // The writes give the file its length.
                    Err(error) if is_unsupported(&error) => Ok(()),
                    result => result,
                },
                result => Ok(result?),
            }
        };
        retry(reserve).map_err(|error| Error::io("allocate space for", path, error))
    }

    /// Opens an existing file for writing.
    pub(crate) fn open(&self, path: &Path) -> Result<File> {
        self.before(Call::Open, path)
            .and_then(|_| OpenOptions::new().write(true).open(path))
            .map_err(|error| Error::io("open", path, error))
    }

    /// Opens an existing file for direct writes. Returns `None` if the system or the file system
    /// does not support them.
    pub(crate) fn open_direct(&self, path: &Path) -> Result<Option<File>> {
        let Some(flag) = platform::DIRECT else {
            return Ok(None);
        };
        let open = |_| OpenOptions::new().write(true).custom_flags(flag).open(path);
        match self.before(Call::OpenDirect, path).and_then(open) {
            Ok(file) => Ok(Some(file)),
            Err(error) if is_unsupported(&error) => Ok(None),
            Err(error) => Err(Error::io("open", path, error)),
        }
    }

    /// Writes all of `bytes` at `offset`.
    pub(crate) fn write(&self, file: &File, path: &Path, bytes: &[u8], offset: u64) -> Result<()> {
        let written = self.write_while(file, path, bytes, offset, 1)?;
        debug_assert_eq!(written, bytes.len());
        Ok(())
    }

    /// Writes `bytes` at `offset` through a handle from [`open_direct`](Self::open_direct). Memory,
    /// offset and length are multiples of `alignment`. Returns the number of bytes written. It is
    /// smaller if the file system refuses direct writes after all (for this memory, or always), or
    /// stops inside a block.
    pub(crate) fn write_direct(
        &self,
        file: &File,
        path: &Path,
        bytes: &[u8],
        offset: u64,
        alignment: usize,
    ) -> Result<usize> {
        self.write_while(file, path, bytes, offset, alignment)
    }

    fn write_while(
        &self,
        file: &File,
        path: &Path,
        bytes: &[u8],
        offset: u64,
        alignment: usize,
    ) -> Result<usize> {
        let mut at = 0;
        while at < bytes.len() && at.is_multiple_of(alignment) {
            let (rest, offset) = (&bytes[at..], offset + at as u64);
            let call = Call::Write { offset, len: rest.len(), direct: alignment > 1 };
            let write = || {
                let most = self.before(call, path)?;
                file.write_at(&rest[..most.min(rest.len())], offset)
            };
            match retry(write) {
                Ok(0) => return Err(Error::io("write", path, ErrorKind::WriteZero.into())),
                Ok(n) => at += n,
                Err(error) if alignment > 1 && is_refused(&error) => return Ok(at),
                Err(error) => return Err(Error::io("write", path, error)),
            }
        }
        Ok(at)
    }

    /// Syncs a file's bytes and length to stable storage. The final sync cannot be interrupted. So
    /// the bytes in the page cache are written first, part by part, which `control` can stop.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Interrupted`].
    pub(crate) fn sync(&self, file: &File, path: &Path, control: &Control) -> Result<()> {
        let failed = |error| Error::io("sync", path, error);
        let size = file.metadata().map_err(failed)?.len();
        // A small file is not worth two waits.
        let pieces = if size > WRITE_BACK as u64 { 0..size } else { 0..0 };
        for start in pieces.step_by(WRITE_BACK) {
            control.check()?;
            let write_back = || {
                self.before(Call::WriteBack, path)?;
                platform::write_back(file, start, (size - start).min(WRITE_BACK as u64))
            };
            // The kernel reports a failed write-back only once, so the sync would not see it.
            if retry(write_back).map_err(failed)?.is_none() {
                break;
            }
        }
        control.check()?;
        let sync = || {
            self.before(Call::Sync, path)?;
            file.sync_all()
        };
        retry(sync).map_err(failed)
    }

    /// Makes a hard link. The inner `Err` is the reason why that is impossible. The file can still
    /// be copied.
    ///
    /// # Errors
    /// [`Error::Io`] if another file has the name.
    pub(crate) fn link(
        &self,
        from: &Path,
        to: &Path,
    ) -> Result<std::result::Result<(), io::Error>> {
        match self.before(Call::Link, to).and_then(|_| fs::hard_link(from, to)) {
            Ok(()) => Ok(Ok(())),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // A file server may repeat a request whose answer was lost. Then it reports this
                // although it made the link.
                if is_same_file(from, to) { Ok(Ok(())) } else { Err(Error::io("link", to, error)) }
            }
            Err(error) => Ok(Err(error)),
        }
    }

    /// Calls [`sync`](Self::sync) for a file that is not open.
    pub(crate) fn sync_at(&self, path: &Path, control: &Control) -> Result<()> {
        let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
        self.sync(&file, path, control)
    }

    /// Renames a file over another one.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.before(Call::Rename, to)
            .and_then(|_| fs::rename(from, to))
            .map_err(|error| Error::io("rename to", to, error))
    }

    /// Renames a file or folder to a free name, or exchanges it with the one of that name. Returns
    /// false if the file system cannot do this in one step.
    pub(crate) fn rename_apart(&self, from: &Path, to: &Path, exchange: bool) -> Result<bool> {
        let flags = if exchange { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
        let rename = |_| Ok(renameat_with(CWD, from, CWD, to, flags)?);
        let renamed: io::Result<()> = self.before(Call::RenameApart, to).and_then(rename);
        match renamed {
            Ok(()) => Ok(true),
            Err(error)
                if error.raw_os_error().is_some_and(|code| NO_SUCH_RENAME.contains(&code)) =>
            {
                Ok(false)
            }
            Err(error) => Err(Error::io("rename to", to, error)),
        }
    }

    /// Syncs the entries of a folder to stable storage.
    pub(crate) fn sync_folder(&self, folder: &Path) -> Result<()> {
        let sync = |_| match retry(|| File::open(folder)?.sync_all()) {
            // Some network file systems cannot sync a folder, and need not: a rename is durable
            // when it returns.
            Err(error) if is_unsupported(&error) => Ok(()),
            result => result,
        };
        self.before(Call::SyncFolder, folder)
            .and_then(sync)
            .map_err(|error| Error::io("sync", folder, error))
    }

    /// Removes a folder and its contents. Links in it are removed, and not followed.
    pub(crate) fn remove_tree(&self, path: &Path) -> Result<()> {
        match self.before(Call::RemoveTree, path).and_then(|_| fs::remove_dir_all(path)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(Error::io("remove", path, error))
            }
            _ => Ok(()),
        }
    }

    /// Opens a file for its lock, and with `create` creates a missing one. A file of another user,
    /// in a shared folder, may be read-only.
    pub(crate) fn open_lock(&self, path: &Path, create: bool) -> Result<File> {
        let open = |write: bool| {
            OpenOptions::new()
                .read(true)
                .write(write)
                .create(write && create)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(path)
        };
        let open = |_| match open(true) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                open(false).map_err(|_| error)
            }
            result => result,
        };
        self.before(Call::OpenLock, path)
            .and_then(open)
            .map_err(|error| Error::io("open", path, error))
    }

    /// Takes the lock of an open file, if it is free.
    pub(crate) fn try_lock(&self, file: &File, path: &Path, mode: Mode) -> Result<Locked> {
        let operation = match mode {
            Mode::Shared => FlockOperation::NonBlockingLockShared,
            Mode::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        let ask = || {
            self.before(Call::Lock(mode), path)?;
            Ok(flock(file, operation)?)
        };
        match retry(ask) {
            Ok(()) => Ok(Locked::Yes),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Locked::ByOthers),
            Err(error) if error.raw_os_error().is_some_and(|code| NO_LOCKS.contains(&code)) => {
                Ok(Locked::Impossible)
            }
            Err(error) => Err(Error::io("lock", path, error)),
        }
    }

    /// Releases the lock of an open file, for all processes that share the open file.
    pub(crate) fn unlock(file: &File) {
        // If this fails, the lock ends with the file.
        let _ = retry(|| Ok(flock(file, FlockOperation::Unlock)?));
    }

    /// Removes a file, if it exists.
    pub(crate) fn remove(&self, path: &Path) -> Result<()> {
        match self.before(Call::Remove, path).and_then(|_| fs::remove_file(path)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(Error::io("remove", path, error))
            }
            _ => Ok(()),
        }
    }
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Creates a file in the folder for temporary files. It has no name, so it lasts until it is closed.
pub(crate) fn temporary_file() -> Result<File> {
    let path = env::temp_dir().join(format!("dcp-rs.{:016x}", super::random_token()?));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
    let removed = file.and_then(|file| fs::remove_file(&path).map(|()| file));
    removed.map_err(|error| Error::io("create", &path, error))
}

/// Returns whether a file system does not support what it was asked for.
pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
}

/// Returns whether a buffered write of the same bytes may succeed after the direct one failed,
/// because of alignment or of memory that a device driver mapped.
fn is_refused(error: &io::Error) -> bool {
    is_unsupported(error) || error.raw_os_error() == Some(libc::EFAULT)
}
