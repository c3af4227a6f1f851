//! The data files of a save during the write.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::jobs::to_usize;
use super::layout::FilePlan;
use crate::store::disk::{Disk, is_unsupported, temporary_file};
use crate::store::{FileLock, FolderLock, Mode};
use crate::{Control, Error, Result};

/// Files that stay open during a save. A thread that writes to another file opens it itself.
const MAX_HELD: usize = 64;

/// The open handles of one file.
pub(super) struct Handles {
    pub plain: File,
    /// For direct I/O.
    pub direct: Option<File>,
}

struct DataFile {
    path: PathBuf,
    held: Option<Arc<Handles>>,
    /// The bytes that the file system refused at their offsets, because it takes bytes only at the
    /// end of a file.
    refused: OnceLock<File>,
}

/// Bytes to copy at a time.
const COPIED: u64 = 8 << 20;

/// The data files that a save created and linked. They are removed on drop, unless they are
/// [kept](Self::keep).
pub(super) struct DataFiles {
    disk: Disk,
    direct: bool,
    files: Vec<DataFile>,
    links: Vec<PathBuf>,
    /// Lock on the first file. While it is held, `clean` takes all of the files for those of a
    /// running save.
    claim: Option<FileLock>,
    /// The process that created the files: a forked child that drops its copy removes nothing.
    owner: u32,
}

impl DataFiles {
    /// Starts without files.
    pub(super) fn new(disk: Disk) -> Self {
        Self {
            disk,
            direct: false,
            files: Vec::new(),
            links: Vec::new(),
            claim: None,
            owner: std::process::id(),
        }
    }

    /// Links a file of `size` bytes. The caller holds the lock of the folder, because no claim
    /// protects the link yet. The inner `Err` says why the file cannot be linked.
    pub(super) fn link(
        &mut self,
        from: &Path,
        to: &Path,
        size: u64,
    ) -> Result<std::result::Result<(), Error>> {
        if let Err(error) = self.disk.link(from, to)? {
            return Ok(Err(Error::io("link", from, error)));
        }
        self.links.push(to.to_owned());
        match fs::symlink_metadata(to) {
            Ok(found) if found.is_file() && found.len() == size => Ok(Ok(())),
            Ok(_) => {
                self.disk.remove(to)?;
                self.links.pop();
                Ok(Err(Error::corrupt_file(from, format!("it is no longer {size} bytes long"))))
            }
            Err(error) => Err(Error::io("look at", to, error)),
        }
    }

    /// Syncs the linked files, because the save that wrote them may not have done so.
    pub(super) fn sync_links(&self, control: &Control) -> Result<()> {
        self.links.iter().try_for_each(|path| self.disk.sync_at(path, control))
    }

    /// Creates the files, allocates their lengths, and with `claimed` claims them. If that fails,
    /// dropping `self` removes all of them.
    pub(super) fn create(
        mut self,
        dir: &Path,
        plans: &[FilePlan],
        direct: bool,
        claimed: bool,
        control: &Control,
    ) -> Result<Self> {
        self.direct = direct;
        self.files.reserve(plans.len());
        let files = &mut self;
        // The lock keeps `clean` from removing the first file between its creation and the claim.
        // Its own file is made now and not for a later cleanup, when the disk may be full.
        let mut lock = if claimed && !plans.is_empty() {
            Some(FolderLock::take_on(&files.disk, dir, Mode::Shared, control)?)
        } else {
            None
        };
        for plan in plans {
            control.check()?;
            let path = dir.join(&plan.name);
            let plain = files.disk.create(&path)?;
            files.files.push(DataFile { path: path.clone(), held: None, refused: OnceLock::new() });
            // The folder stays locked until the file is claimed.
            if let Some(_locked) = lock.take() {
                files.claim = FileLock::claim(&files.disk, &path, control)?;
            }
            files.disk.allocate(&plain, &path, plan.size)?;
            if files.files.len() <= MAX_HELD {
                let held = Some(Arc::new(Handles { plain, direct: files.open_direct(&path)? }));
                files.files.last_mut().expect("one was just added").held = held;
            }
        }
        Ok(self)
    }

    pub(super) fn path(&self, file: u32) -> &Path {
        &self.files[file as usize].path
    }

    /// Returns the open handles of a file, or opens new ones.
    pub(super) fn handles(&self, file: u32) -> Result<Arc<Handles>> {
        let DataFile { path, held, .. } = &self.files[file as usize];
        if let Some(held) = held {
            return Ok(Arc::clone(held));
        }
        Ok(Arc::new(Handles { plain: self.disk.open(path)?, direct: self.open_direct(path)? }))
    }

    /// Writes `bytes` at `offset`. If the file system refuses the offset, they go to a temporary
    /// file until [`append_refused`](Self::append_refused).
    pub(super) fn write(
        &self,
        file: u32,
        handles: &Handles,
        bytes: &[u8],
        offset: u64,
    ) -> Result<()> {
        let DataFile { path, refused, .. } = &self.files[file as usize];
        if refused.get().is_none() {
            match self.disk.write(&handles.plain, path, bytes, offset) {
                Err(Error::Io { source, .. }) if is_unsupported(&source) => {
                    let temporary = temporary_file()?;
                    refused.get_or_init(|| temporary);
                }
                result => return result,
            }
        }
        let temporary = refused.get().expect("it was just made");
        self.disk.write(temporary, &env::temp_dir(), bytes, offset)
    }

    /// Appends the bytes that were refused at their offsets, if there are any, to a file that gets
    /// `size` bytes. The header is then written before the payload: only its length shows that a
    /// file is not complete.
    pub(super) fn append_refused(
        &self,
        file: u32,
        handles: &Handles,
        size: u64,
        control: &Control,
    ) -> Result<()> {
        let DataFile { path, refused, .. } = &self.files[file as usize];
        let Some(temporary) = refused.get() else {
            return Ok(());
        };
        let failed = |error| Error::io("write", path, error);
        let unread = |error| Error::io("read a temporary file in", &env::temp_dir(), error);
        temporary.set_len(size).map_err(unread)?; // the end may be a gap
        let mut at = handles.plain.metadata().map_err(failed)?.len();
        if at == size {
            // The length was set in advance, so that the file system refused every offset.
            handles.plain.set_len(0).map_err(failed)?;
            at = 0;
        }
        let mut buffer = vec![0; to_usize(COPIED.min(size))];
        while at < size {
            control.check()?;
            let part = &mut buffer[..to_usize(COPIED.min(size - at))];
            temporary.read_exact_at(part, at).map_err(unread)?;
            self.disk.write(&handles.plain, path, part, at)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Returns whether the handles of a file are closed after use. Closing loses errors of the page
    /// cache.
    pub(super) fn is_transient(&self, file: u32) -> bool {
        self.files[file as usize].held.is_none()
    }

    fn open_direct(&self, path: &Path) -> Result<Option<File>> {
        if self.direct { self.disk.open_direct(path) } else { Ok(None) }
    }

    /// Returns whether this process created the files.
    pub(super) fn is_own(&self) -> bool {
        self.owner == std::process::id()
    }

    /// Keeps the files. Returns the claim, to hold until an index names them.
    pub(super) fn keep(mut self) -> Option<FileLock> {
        self.files.clear();
        self.links.clear();
        self.claim.take()
    }
}

impl Drop for DataFiles {
    fn drop(&mut self) {
        if self.is_own() {
            for path in self.links.iter().chain(self.files.iter().map(|file| &file.path)) {
                // Ignored: the earlier failure is the error worth reporting, and no index names
                // these files.
                let _ = self.disk.remove(path);
            }
        }
    }
}
