//! Faults of an item, without the tensor and the file.

use std::path::Path;

use crate::Error;

/// Reason for which an item (an archive, or a pickle within a file) was refused. Offsets are
/// relative to its first byte.
#[derive(Debug)]
pub(super) enum Fault {
    /// The item breaks a rule of its format.
    Corrupt { at: u64, reason: String },
    /// The item is well-formed, but cannot be read in place.
    Unsupported(String),
    /// A pickle names this global (`module.name`), which is not allowed.
    Forbidden(String),
    /// Reading failed.
    Read(Error),
}

pub(super) type FaultResult<T> = Result<T, Fault>;

impl Fault {
    pub(super) fn corrupt(at: u64, reason: impl Into<String>) -> Self {
        Self::Corrupt { at, reason: reason.into() }
    }

    /// Converts the fault to an error of the file at `path`, which describes the data files.
    pub(super) fn in_index(self, path: &Path) -> Error {
        match self {
            Self::Corrupt { at, reason } => Error::corrupt_index(path, at, reason),
            Self::Unsupported(what) => Error::Unsupported(format!("{}: {what}", path.display())),
            Self::Forbidden(global) => Error::UnsafePickle { path: path.to_owned(), global },
            Self::Read(error) => error,
        }
    }
}
