//! What can be wrong with an item, before anyone knows which tensor of which file it is.

use crate::Error;

/// Why an item (an archive or a pickle within a file) was refused. Offsets count from its first byte.
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
        Self::Corrupt {
            at,
            reason: reason.into(),
        }
    }
}
