//! The file of an index: read or mapped and then checked, or only identified.

#![allow(unsafe_code)] // a mapping is used as bytes

use std::io::Read as _;
use std::path::Path;

use crate::format::{Identity, Index};
use crate::store::{Mapping, is_remote, open_file, read_at};
use crate::{Error, Result};

/// Indexes of up to this many bytes are read, because bytes in memory cannot be truncated or
/// overwritten after the check.
const MOST_READ: u64 = 64 << 20;

/// Opens the index file at `path`, and checks it. A large one is mapped, except on a network file
/// system, where a page fault may wait or fail.
pub fn open_index(path: &Path) -> Result<Index> {
    let mut file = open_file(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Error::NotFound { path: path.to_owned(), reason: "no such file".into() }
        }
        std::io::ErrorKind::InvalidInput => Error::corrupt_index(path, 0, error.to_string()),
        _ => Error::io("open", path, error),
    })?;
    let len = file.metadata().map_err(|error| Error::io("stat", path, error))?.len();
    if len <= MOST_READ || is_remote(&file) || !Mapping::is_possible(&file) {
        let mut bytes = Vec::new();
        let length = usize::try_from(len).unwrap_or(usize::MAX);
        bytes
            .try_reserve_exact(length)
            .map_err(|error| Error::io("take memory to read", path, error.into()))?;
        file.read_to_end(&mut bytes).map_err(|error| Error::io("read", path, error))?;
        return Index::from_bytes(bytes, path);
    }
    let mapping = Mapping::new(&file).map_err(|error| Error::io("map", path, error))?;
    Index::from_bytes(IndexMapping(mapping), path)
}

/// Returns the identity of an index file without reading the rest of it.
pub(crate) fn identity_of(path: &Path) -> Option<Identity> {
    let mut start = [0; Identity::LEN];
    read_at(&open_file(path).ok()?, &mut start, 0).ok()?;
    Identity::of(&start)
}

/// A large index file, mapped. A slice of it is sound because published indexes are never changed
/// in place (section 9 of the format).
struct IndexMapping(Mapping);

impl AsRef<[u8]> for IndexMapping {
    fn as_ref(&self) -> &[u8] {
        if self.0.is_empty() {
            return &[];
        }
        // SAFETY: the mapping is readable for its length, and lives as long as `self`. No one
        // writes to a published index: a save replaces it by rename, and leaves the mapped file as
        // it is.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}
