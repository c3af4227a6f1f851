//! The one error type of this crate.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

/// `Result` with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong, with the file, the tensor and the place where it did.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no checkpoint at the path.
    #[error("no checkpoint at {}: {reason}", path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
        /// Why it does not count as a checkpoint.
        reason: String,
    },
    /// The index (or a header that serves as one) breaks a rule of the format.
    #[error("corrupt {} {}: {reason} (at byte {offset})", kind_of(path), path.display())]
    CorruptIndex {
        /// The index or header file.
        path: PathBuf,
        /// The offset in that file.
        offset: u64,
        /// The rule that does not hold.
        reason: String,
    },
    /// A data file is missing, of the wrong length, or does not match its digest.
    #[error("corrupt data in {}{}: {reason}{}", path.display(), of_tensor(tensor), at_byte(*offset))]
    CorruptData {
        /// The data file.
        path: PathBuf,
        /// FQN of the tensor concerned; empty where the whole file is.
        tensor: String,
        /// The offset in that file; `None` if the whole file is concerned.
        offset: Option<u64>,
        /// The reason: expected and got.
        reason: String,
    },
    /// Another save replaced the checkpoint since its index was opened, and removed the data files
    /// of the old one.
    #[error("the checkpoint was replaced by another save while it was being read: {}", path.display())]
    Replaced {
        /// The index that was replaced.
        path: PathBuf,
    },
    /// Something has come, since this work began, to the place where its result was to go. It stays
    /// as it is.
    #[error("{} was created meanwhile, and is not replaced", path.display())]
    Exists {
        /// The place.
        path: PathBuf,
    },
    /// A result could not be put in place, and the replaced folder could not be put back. That
    /// folder is whole, at another path.
    #[error("could not put {} back: it is at {} now; move it back yourself: {source}", path.display(), at.display())]
    Displaced {
        /// The original path.
        path: PathBuf,
        /// The present path.
        at: PathBuf,
        /// The first failure.
        source: Box<Error>,
    },
    /// A pickle asks for something that is not on the list of what is taken from one. Nothing was
    /// executed.
    #[error("unsafe pickle {}: it asks for {global}; only tensors and plain values are read. If you trust the file, load it with torch and save its state_dict() again", path.display())]
    UnsafePickle {
        /// The file the pickle is in.
        path: PathBuf,
        /// The global in the pickle, as `module.name`.
        global: String,
    },
    /// A quantized weight of a format that this version cannot read, or a part of one that is
    /// missing or does not fit.
    #[error("{}{}: {reason}", path.display(), of_tensor(tensor))]
    Quantization {
        /// The index that it is in, or the configuration.
        path: PathBuf,
        /// FQN of the weight, or of the part.
        tensor: String,
        /// The reason.
        reason: String,
    },
    /// Well-formed, but something this version cannot do.
    #[error("{0}")]
    Unsupported(String),
    /// A request that cannot be satisfied by this checkpoint.
    #[error("{0}")]
    Plan(String),
    /// The same, about one tensor: what is asked of it, or what ranks say of it that save together.
    #[error("tensor {tensor:?}: {reason}")]
    TensorPlan {
        /// The index that it is in, where there is one.
        path: Option<PathBuf>,
        /// Its FQN.
        tensor: String,
        /// The reason; for a save, with the chunk and the rank.
        reason: String,
    },
    /// The operating system failed a call.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// The operation, as in "read".
        action: &'static str,
        /// The file it was done to.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A store refused a request, or did not answer it within the limits that were set.
    #[error("{action} {}: {reason}{}", path.display(), after(*attempts))]
    Storage {
        /// The kind of fault, which decides what a caller can do.
        kind: StorageFault,
        /// The operation, as in "read".
        action: &'static str,
        /// The URL.
        path: PathBuf,
        /// Number of attempts.
        attempts: u32,
        /// The store's message, without secrets.
        reason: String,
    },
    /// Another process keeps a folder locked.
    #[error("another process has held the lock {} for {seconds} s: it is stuck, or the file system has lost the lock and must be mounted again", path.display())]
    Busy {
        /// The file that is locked.
        path: PathBuf,
        /// Length of the wait.
        seconds: u64,
    },
    /// A defect of this crate.
    #[error("{0}")]
    Internal(String),
    /// The caller asked for the work to stop.
    #[error("interrupted")]
    Interrupted,
}

/// Why a store did not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StorageFault {
    /// There is no such bucket, or no such object.
    NotFound,
    /// The credentials are missing, wrong, or not enough.
    Denied,
    /// The object is another one than it was, or was to be.
    Precondition,
    /// It could not be reached, or did not answer properly.
    Failed,
    /// It did not answer, or was not waited for, and may have done what it was asked, now or in a
    /// moment. Of a commit: what it names is not to be removed.
    Unclear,
}

fn after(attempts: u32) -> String {
    match attempts {
        0 | 1 => String::new(),
        n => format!(" (after {n} attempts)"),
    }
}

/// Returns the role of a file in a checkpoint. The headers of data files serve as an index if there
/// is no other.
fn kind_of(path: &Path) -> &'static str {
    match path.extension().and_then(OsStr::to_str) {
        Some("safetensors" | "distcp") => "header of the data file",
        Some("metadata") => "metadata",
        _ if path.ends_with(".metadata") => "metadata",
        _ => "index",
    }
}

fn of_tensor(tensor: &str) -> String {
    if tensor.is_empty() { String::new() } else { format!(", tensor {tensor:?}") }
}

fn at_byte(offset: Option<u64>) -> String {
    offset.map_or_else(String::new, |offset| format!(" (at byte {offset})"))
}

#[doc(hidden)] // for the crates of this repository
impl Error {
    /// Outcome of one request to a store.
    #[doc(hidden)]
    pub fn storage(
        kind: StorageFault,
        action: &'static str,
        path: &Path,
        reason: impl Into<String>,
    ) -> Self {
        Self::Storage { kind, action, path: path.to_owned(), attempts: 1, reason: reason.into() }
    }

    /// Why a store did not do what it was asked, if that is what this says.
    #[doc(hidden)]
    pub fn storage_fault(&self) -> Option<StorageFault> {
        match self {
            Self::Storage { kind, .. } => Some(*kind),
            _ => None,
        }
    }

    /// An [`Error::Io`] for `path`.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    /// An [`Error::TensorPlan`]; `path`: of the index.
    pub fn tensor_plan(path: Option<&Path>, tensor: &str, reason: impl Into<String>) -> Self {
        Self::TensorPlan {
            path: path.map(Path::to_owned),
            tensor: tensor.to_owned(),
            reason: reason.into(),
        }
    }

    /// An [`Error::CorruptIndex`] for `path`.
    pub fn corrupt_index(path: &Path, offset: u64, reason: impl Into<String>) -> Self {
        Self::CorruptIndex { path: path.to_owned(), offset, reason: reason.into() }
    }

    /// An [`Error::CorruptData`] for `path`.
    pub fn corrupt_data(path: &Path, tensor: &str, offset: u64, reason: impl Into<String>) -> Self {
        Self::CorruptData {
            path: path.to_owned(),
            tensor: tensor.to_owned(),
            offset: Some(offset),
            reason: reason.into(),
        }
    }

    /// An [`Error::CorruptData`] for all of the file at `path`: it is missing, or another one.
    pub fn corrupt_file(path: &Path, reason: impl Into<String>) -> Self {
        Self::CorruptData {
            path: path.to_owned(),
            tensor: String::new(),
            offset: None,
            reason: reason.into(),
        }
    }
}
