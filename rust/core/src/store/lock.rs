//! One at a time in a folder: those who commit a save, and those who remove one.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Held while a save is committed or its files are removed. It ends with the value, and with the process.
pub struct FolderLock {
    _file: Option<File>,
}

impl FolderLock {
    /// Waits until no one else holds it. Where the file system has no such locks (NFS, on a folder) it is held in name only: then the
    /// order in which the ranks of a save fail is all there is.
    pub fn take(folder: &Path) -> Self {
        let lock = |file: File| flock(&file, FlockOperation::LockExclusive).is_ok().then_some(file);
        Self {
            _file: File::open(folder).ok().and_then(lock),
        }
    }
}
