//! macOS, and whatever else has the calls of POSIX.

use std::fs::File;
use std::io;

use memmap2::{MmapMut, MmapOptions, MmapRaw};

/// There is none.
pub const DIRECT: Option<i32> = None;

/// Only a whole sync.
#[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
pub fn write_back(_: &File, _: u64, _: u64) -> io::Result<Option<()>> {
    Ok(None)
}

/// Unknown here.
pub fn resident_bytes(_: &File, _: u64, _: u64) -> Option<u64> {
    None
}

/// Unknown here.
#[must_use]
pub fn is_remote(_: &File) -> bool {
    false
}

/// Unknown here.
pub fn spare_address_space() -> Option<u64> {
    None
}

/// There are no direct reads.
#[must_use]
pub fn direct_align(_: &File) -> Option<u64> {
    None
}

/// It cannot.
pub fn populates() -> bool {
    false
}

/// The mapping, nothing before the file, and its length.
pub fn map(file: &File) -> io::Result<(MmapRaw, usize, usize)> {
    let raw = MmapOptions::new().map_raw_read_only(file)?;
    let len = raw.len();
    Ok((raw, 0, len))
}

/// Nothing is done ahead of the first touch.
#[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
pub fn populate(_: &MmapRaw, _: usize, _: usize) -> io::Result<()> {
    Ok(())
}

/// Left to the system.
pub fn read_ahead(_: &MmapRaw, _: usize, _: usize) {}

/// Left to the system.
pub fn ask_for_huge_pages(_: &MmapMut, _: usize, _: usize) {}

/// None that could be asked for.
pub fn has_huge_pages() -> bool {
    false
}
