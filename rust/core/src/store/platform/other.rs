//! macOS, and other systems with POSIX calls.

use std::fs::File;
use std::io;

use memmap2::{MmapMut, MmapOptions, MmapRaw};

/// There is no such flag.
pub const DIRECT: Option<i32> = None;

/// Unsupported: only a whole sync is possible.
#[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
pub fn write_back(_: &File, _: u64, _: u64) -> io::Result<Option<()>> {
    Ok(None)
}

/// Unknown here.
pub fn resident_bytes(_: &File, _: u64, _: u64) -> Option<u64> {
    None
}

/// Every file counts as local.
#[must_use]
pub fn is_remote(_: &File) -> bool {
    false
}

/// Does nothing.
pub fn drop_cached(_: &File) {}

/// No limit is assumed.
pub fn spare_address_space() -> Option<u64> {
    None
}

/// Direct reads are not supported.
#[must_use]
pub fn direct_align(_: &File) -> Option<u64> {
    None
}

/// Populating is not supported.
pub fn populates() -> bool {
    false
}

/// Maps a whole file. Returns the mapping, 0 bytes before the file, and its length.
pub fn map(file: &File) -> io::Result<(MmapRaw, usize, usize)> {
    let raw = MmapOptions::new().map_raw_read_only(file)?;
    let len = raw.len();
    Ok((raw, 0, len))
}

/// Does nothing: pages are loaded at the first access.
#[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
pub fn populate(_: &MmapRaw, _: usize, _: usize) -> io::Result<()> {
    Ok(())
}

/// Does nothing.
pub fn read_ahead(_: &MmapRaw, _: usize, _: usize) {}

/// Does nothing.
pub fn ask_for_huge_pages(_: &MmapMut, _: usize, _: usize) {}

/// Returns false: they cannot be requested.
pub fn has_huge_pages() -> bool {
    false
}
