//! Faults of an item, before the tensor and the file are known.

use std::path::Path;

use crate::Error;

/// Why an item (an archive or a pickle within a file) was refused. Offsets count from its first
/// byte.
#[derive(Debug)]
pub(super) enum Fault {
    /// A rule of the item's format does not hold.
    Corrupt { at: u64, reason: String },
    /// Well-formed, but not something that can be read in place.
    Unsupported(String),
    /// A pickle asks for this global (`module.name`), which is not on its list.
    Forbidden(String),
    /// Reading failed.
    Read(Error),
}

pub(super) type FaultResult<T> = Result<T, Fault>;

impl Fault {
    pub(super) fn corrupt(at: u64, reason: impl Into<String>) -> Self {
        Self::Corrupt { at, reason: reason.into() }
    }

    /// As an error of the file at `path` that says what the others hold.
    pub(super) fn in_index(self, path: &Path) -> Error {
        match self {
            Self::Corrupt { at, reason } => Error::corrupt_index(path, at, reason),
            Self::Unsupported(what) => Error::Unsupported(format!("{}: {what}", path.display())),
            Self::Forbidden(global) => Error::UnsafePickle { path: path.to_owned(), global },
            Self::Read(error) => error,
        }
    }
}
