//! Read-only shared mappings of whole files.

use std::fs::File;
use std::io;

use memmap2::{MmapOptions, MmapRaw};

/// A mapping of a file from its first byte, for raw access: its bytes are never handed out as a slice, because
/// nothing can promise that no other process changes the file.
#[derive(Debug)]
pub struct Mapping {
    raw: MmapRaw,
}

impl Mapping {
    /// Maps the whole file.
    pub fn new(file: &File) -> io::Result<Self> {
        Ok(Self {
            raw: MmapOptions::new().map_raw_read_only(file)?,
        })
    }

    /// The first byte of the file; [`len`](Self::len) bytes are mapped.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.raw.as_ptr()
    }

    /// Bytes mapped.
    #[must_use]
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.raw.len() == 0
    }

    /// Brings `[start, end)` into memory and into the page table: one call in place of a fault every few pages, and a
    /// file that was cut short or a disk that fails is an error here and not a signal at the first touch.
    ///
    /// Does nothing where the system lacks it (Linux before 5.14).
    pub fn populate(&self, start: u64, end: u64) -> io::Result<()> {
        #[cfg(target_os = "linux")]
        {
            let (Ok(start), Ok(end)) = (usize::try_from(start), usize::try_from(end)) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            let result = self
                .raw
                .advise_range(memmap2::Advice::PopulateRead, start, end.saturating_sub(start));
            match result.as_ref().map_err(io::Error::raw_os_error) {
                Err(Some(libc::EINVAL | libc::ENOSYS)) => Ok(()),
                _ => result,
            }
        }
        #[cfg(not(target_os = "linux"))]
        {
            let _ = (start, end);
            Ok(())
        }
    }
}
