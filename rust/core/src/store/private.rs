//! Private mappings: memory that begins as a file's bytes, and can be written without changing the
//! file.

#![allow(unsafe_code)] // mapping a file is unsafe

use std::fs::File;
use std::io;

use memmap2::{MmapMut, MmapOptions};

/// A copy-on-write mapping of a whole file.
pub struct PrivateMapping {
    map: MmapMut,
}

impl PrivateMapping {
    /// Maps the whole file.
    pub fn new(file: &File) -> io::Result<Self> {
        // SAFETY: a published data file is never changed or truncated (section 9 of
        // docs/format.md), and its length was checked when it was opened. The bytes are handed out
        // only as an address.
        let map = unsafe { MmapOptions::new().map_copy(file)? };
        Ok(Self { map })
    }

    /// Returns the address of the first of [`len`](Self::len) bytes, which are valid for reads and
    /// writes as long as `self` lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.as_ptr().cast_mut()
    }

    /// Returns the number of mapped bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}
