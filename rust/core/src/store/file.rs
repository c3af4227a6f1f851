//! Data files: opening them with all checks (and with `O_DIRECT`), and reads that are complete or
//! fail.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::platform;
use super::remote::Remote;
use crate::paths::{Links, Verdict};
use crate::{Error, Result};

/// Reason for refusing a data file of a foreign checkpoint. Native files are not identified by
/// times.
const MODIFIED: &str = "the file was modified after it was indexed, or copied without its time";

/// A file to read from, and its expected properties.
#[derive(Clone, Debug)]
pub struct FileRef {
    /// Its path.
    pub path: PathBuf,
    /// Its length in bytes.
    pub size: u64,
    /// Its modification time in nanoseconds since 1970; 0 to skip the comparison.
    pub mtime_ns: i64,
    /// Policy for symbolic links to it.
    pub links: Links,
    /// Advice for a missing or changed file; may be empty.
    pub mend: &'static str,
    /// The store of the URL `path`, if the file is on one.
    pub remote: Option<Arc<dyn Remote>>,
    /// In a tier, counts the bytes that reads deliver from it.
    pub delivered: Option<Arc<AtomicU64>>,
}

impl FileRef {
    /// Describes a file of the file system. Links to it are followed, and its time is not compared.
    pub fn new(path: impl Into<PathBuf>, size: u64) -> Self {
        Self {
            path: path.into(),
            size,
            mtime_ns: 0,
            mend: "",
            links: Links::Any,
            remote: None,
            delivered: None,
        }
    }

    /// Counts bytes that a read has delivered.
    pub(crate) fn count(&self, bytes: u64) {
        if let Some(delivered) = &self.delivered {
            delivered.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Opens the file and checks its kind, length and time. `direct` asks for `O_DIRECT`.
    ///
    /// # Errors
    /// [`Error::CorruptData`] for a missing or changed file; [`Error::Unsupported`] for a link out
    /// of the folder; [`Error::Io`].
    pub fn open(&self, direct: bool) -> Result<File> {
        if self.links.may_turn(&self.path) {
            self.judge()?;
        }
        let unfollowed = !matches!(self.links, Links::Any);
        let file = match self.open_with(direct, if unfollowed { libc::O_NOFOLLOW } else { 0 }) {
            Err(e) if unfollowed && e.raw_os_error() == Some(libc::ELOOP) => {
                self.judge()?;
                self.open_with(direct, 0)
            }
            result => result,
        };
        let file = file.map_err(|e| self.failed("open", e))?;
        let meta = file.metadata().map_err(|e| self.failed("stat", e))?;
        self.check(&meta)?;
        Ok(file)
    }

    fn open_with(&self, direct: bool, more: libc::c_int) -> io::Result<File> {
        // Without O_NONBLOCK, opening a named pipe would wait for a writer.
        let mut flags = libc::O_CLOEXEC | libc::O_NONBLOCK | more;
        if direct {
            flags |= platform::DIRECT.unwrap_or_default();
        }
        OpenOptions::new().read(true).custom_flags(flags).open(&self.path)
    }

    /// Refuses a path with links that may not be followed.
    fn judge(&self) -> Result<()> {
        match self.links.judge(&self.path).map_err(|e| self.failed("follow", e))? {
            Verdict::Follow => Ok(()),
            Verdict::Link => {
                Err(self.corrupt("the file is a symbolic link, which is not followed here"))
            }
            Verdict::Outside => Err(Error::Unsupported(format!(
                "{} is a link to something outside its folder; pass allow_external=True to open it",
                self.path.display()
            ))),
        }
    }

    fn failed(&self, action: &'static str, error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                self.another("the file is missing")
            }
            io::ErrorKind::StaleNetworkFileHandle => {
                self.another("the file was removed on another machine")
            }
            _ => Error::io(action, &self.path, error),
        }
    }

    fn check(&self, meta: &Metadata) -> Result<()> {
        if !meta.is_file() {
            return Err(self.corrupt("not a regular file"));
        }
        if meta.len() != self.size {
            return Err(self.has_length(meta.len()));
        }
        if self.mtime_ns != 0 {
            let got = meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec());
            if got != self.mtime_ns {
                return Err(self.another(MODIFIED));
            }
        }
        Ok(())
    }

    /// Returns the error for a file of this length, which is not the expected one.
    pub fn has_length(&self, length: u64) -> Error {
        self.another(&format!("the file is {length} bytes long, expected {}", self.size))
    }

    /// Returns the error for a file that is not the indexed one.
    fn another(&self, reason: &str) -> Error {
        self.corrupt(self.with_mend(reason))
    }

    /// Returns a reason with the advice.
    pub fn with_mend(&self, reason: &str) -> String {
        let semicolon = if self.mend.is_empty() { "" } else { "; " };
        format!("{reason}{semicolon}{}", self.mend)
    }

    fn corrupt(&self, reason: impl Into<String>) -> Error {
        Error::corrupt_file(&self.path, reason)
    }
}

/// Reads all bytes of a regular file.
pub fn read_all(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_file(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a regular file for reading. Anything else is `InvalidInput`, even if opening it would
/// block, as with a named pipe.
pub fn open_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file"))
    }
}

/// Fills `buf` from `offset`, and continues after short reads and interruptions. The end of the
/// file is `UnexpectedEof`.
pub fn read_at(file: &File, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buf.is_empty() {
        match file.read_at(buf, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                buf = &mut buf[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Fills at least the first `need` bytes of `buf` from `offset` of a file opened for direct I/O.
///
/// `buf` and `offset` are aligned to `align`. After a short read, it continues from the last
/// aligned byte.
pub fn read_direct_at(
    file: &File,
    buf: &mut [u8],
    offset: u64,
    need: usize,
    align: usize,
) -> io::Result<()> {
    let mut done = 0;
    while done < need {
        let from = done / align * align;
        match file.read_at(&mut buf[from..], offset + from as u64) {
            Ok(n) if from + n > done => done = from + n,
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
