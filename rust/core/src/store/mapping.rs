//! Read-only shared mappings of whole files.

use std::fs::File;
use std::io;

use memmap2::MmapRaw;

use super::platform;

/// A mapping of a whole file, for raw access. Its bytes are never handed out as a slice, because no
/// one can guarantee that no other process changes the file.
#[derive(Debug)]
pub struct Mapping {
    /// The mapped range: the file, or a larger range in which the file begins at an offset.
    raw: MmapRaw,
    skip: usize,
    len: usize,
}

impl Mapping {
    /// Maps the whole file.
    pub fn new(file: &File) -> io::Result<Self> {
        let (raw, skip, len) = platform::map(file)?;
        Ok(Self { raw, skip, len })
    }

    /// Returns whether the file system lets a file be mapped.
    #[must_use]
    pub fn is_possible(file: &File) -> bool {
        memmap2::MmapOptions::new().len(1).map_raw_read_only(file).is_ok()
    }

    /// Returns the address of the first byte of the file. [`len`](Self::len) bytes are mapped.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.raw.as_ptr().wrapping_add(self.skip)
    }

    /// Returns the number of mapped bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether [`populate`](Self::populate) works here. Without it, a failing disk causes a
    /// signal at the first access.
    #[must_use]
    pub fn tells_errors() -> bool {
        platform::populates()
    }

    /// Asks the system to read `[start, end)` into the page cache in large requests, and does not
    /// wait. An error only shows at the access.
    pub fn read_ahead(&self, start: u64, end: u64) {
        if let (Ok(start), Ok(end)) = (usize::try_from(start), usize::try_from(end)) {
            platform::read_ahead(&self.raw, self.skip + start, end.saturating_sub(start));
        }
    }

    /// Loads `[start, end)` into memory and into the page table. This takes one call instead of a
    /// page fault every few pages. A truncated file or a failing disk is then an error, and not a
    /// signal at the first access.
    ///
    /// Does nothing if the system lacks the call (Linux before 5.14).
    pub fn populate(&self, start: u64, end: u64) -> io::Result<()> {
        let (Ok(start), Ok(end)) = (usize::try_from(start), usize::try_from(end)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        platform::populate(&self.raw, self.skip + start, end.saturating_sub(start))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_cut_short_is_an_error_and_not_a_signal() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        let mapping = Mapping::new(&file).unwrap();
        assert_eq!((mapping.len(), mapping.is_empty()), (1 << 20, false));
        mapping.populate(5, 1 << 20).unwrap();
        file.set_len(100_000).unwrap();
        mapping.populate(0, 100_000).unwrap();
        let result = mapping.populate(500_000, 600_000);
        // Before Linux 5.14 this does nothing, and returns success.
        assert!(result.is_ok() || result.unwrap_err().raw_os_error() == Some(libc::EFAULT));
    }
}
