//! The error type of this crate.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

/// `Result` with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Every error of this crate, with the file, the tensor and the offset of the fault.
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
        /// The broken rule.
        reason: String,
    },
    /// A data file is missing, of the wrong length, or does not match its digest.
    #[error(
        "corrupt data in {}{}: {reason}{}", path.display(), of_tensor(tensor), at_byte(*offset)
    )]
    CorruptData {
        /// The data file.
        path: PathBuf,
        /// FQN of the tensor; empty if the whole file is concerned.
        tensor: String,
        /// The offset in that file; `None` if the whole file is concerned.
        offset: Option<u64>,
        /// The reason, with expected and actual value.
        reason: String,
    },
    /// Another save has replaced the checkpoint since its index was opened, and removed the old
    /// data files.
    #[error(
        "the checkpoint was replaced by another save while it was being read: {}",
        path.display()
    )]
    Replaced {
        /// The index that was replaced.
        path: PathBuf,
    },
    /// Something new is at the destination of a result. It stays as it is.
    #[error("{} was created meanwhile, and is not replaced", path.display())]
    Exists {
        /// The destination.
        path: PathBuf,
    },
    /// A result could not be put in place, and the replaced folder could not be put back. That
    /// folder is complete, at another path.
    #[error(
        "could not put {} back: it is at {} now; move it back yourself: {source}",
        path.display(),
        at.display()
    )]
    Displaced {
        /// The original path of the folder.
        path: PathBuf,
        /// The present path of the folder.
        at: PathBuf,
        /// The first failure.
        source: Box<Error>,
    },
    /// A pickle names a global that is not allowed. Nothing was executed.
    #[error("unsafe pickle {}: it asks for {global}; only tensors and plain values are read. If \
        you trust the file, load it with torch and save its state_dict() again", path.display())]
    UnsafePickle {
        /// The file with the pickle.
        path: PathBuf,
        /// The global in the pickle, as `module.name`.
        global: String,
    },
    /// A quantized weight has a format that this version cannot read, or one of its parts is
    /// missing or does not fit.
    #[error("{}{}: {reason}", path.display(), of_tensor(tensor))]
    Quantization {
        /// The index with the weight, or the configuration.
        path: PathBuf,
        /// FQN of the weight, or of the part.
        tensor: String,
        /// The reason.
        reason: String,
    },
    /// The input is well-formed, but this version does not support it.
    #[error("{0}")]
    Unsupported(String),
    /// This checkpoint cannot satisfy a request.
    #[error("{0}")]
    Plan(String),
    /// Like [`Plan`](Self::Plan), about one tensor: a request for it, or the descriptions of it by
    /// the ranks of a save.
    #[error("tensor {tensor:?}: {reason}")]
    TensorPlan {
        /// The index with the tensor, if there is one.
        path: Option<PathBuf>,
        /// Its FQN.
        tensor: String,
        /// The reason; for a save, with the chunk and the rank.
        reason: String,
    },
    /// A call to the operating system failed.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// The operation, as in "read".
        action: &'static str,
        /// The file of the operation.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A store refused a request, or did not answer within the configured limits.
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
    /// Another process holds the lock of a folder.
    #[error("another process has held the lock {} for {seconds} s: it is stuck, or the file \
        system has lost the lock and must be mounted again", path.display())]
    Busy {
        /// The locked file.
        path: PathBuf,
        /// Length of the wait.
        seconds: u64,
    },
    /// A defect of this crate.
    #[error("{0}")]
    Internal(String),
    /// The caller stopped the work.
    #[error("interrupted")]
    Interrupted,
}

/// Reason for which a store did not carry out a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StorageFault {
    /// There is no such bucket, or no such object.
    NotFound,
    /// The credentials are missing, wrong, or insufficient.
    Denied,
    /// The object is not the expected one, or exists although it should not.
    Precondition,
    /// The store could not be reached, or gave no proper answer.
    Failed,
    /// The store did not answer, or the caller did not wait. The request may be carried out, now or
    /// later. After a commit with this fault, do not remove the files that its index names.
    Unclear,
}

fn after(attempts: u32) -> String {
    match attempts {
        0 | 1 => String::new(),
        n => format!(" (after {n} attempts)"),
    }
}

/// Returns the role of a file in a checkpoint. Headers of data files serve as the index if there is
/// no other.
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
    /// Returns an [`Error::Storage`] for one request.
    #[doc(hidden)]
    pub fn storage(
        kind: StorageFault,
        action: &'static str,
        path: &Path,
        reason: impl Into<String>,
    ) -> Self {
        Self::Storage { kind, action, path: path.to_owned(), attempts: 1, reason: reason.into() }
    }

    /// Returns the kind of an [`Error::Storage`].
    #[doc(hidden)]
    pub fn storage_fault(&self) -> Option<StorageFault> {
        match self {
            Self::Storage { kind, .. } => Some(*kind),
            _ => None,
        }
    }

    /// Returns an [`Error::Io`] for `path`.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    /// Returns an [`Error::TensorPlan`]. `path` is that of the index.
    pub fn tensor_plan(path: Option<&Path>, tensor: &str, reason: impl Into<String>) -> Self {
        Self::TensorPlan {
            path: path.map(Path::to_owned),
            tensor: tensor.to_owned(),
            reason: reason.into(),
        }
    }

    /// Returns an [`Error::CorruptIndex`] for `path`.
    pub fn corrupt_index(path: &Path, offset: u64, reason: impl Into<String>) -> Self {
        Self::CorruptIndex { path: path.to_owned(), offset, reason: reason.into() }
    }

    /// Returns an [`Error::CorruptData`] for `path`.
    pub fn corrupt_data(path: &Path, tensor: &str, offset: u64, reason: impl Into<String>) -> Self {
        Self::CorruptData {
            path: path.to_owned(),
            tensor: tensor.to_owned(),
            offset: Some(offset),
            reason: reason.into(),
        }
    }

    /// Returns an [`Error::CorruptData`] for the whole file at `path`: it is missing, or not the
    /// expected one.
    pub fn corrupt_file(path: &Path, reason: impl Into<String>) -> Self {
        Self::CorruptData {
            path: path.to_owned(),
            tensor: String::new(),
            offset: None,
            reason: reason.into(),
        }
    }
}
