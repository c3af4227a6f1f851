//! The bytes of one item of a file. Most are fetched in advance, together with those of its
//! neighbours.

use std::borrow::Cow;
use std::path::Path;

use super::fault::{Fault, FaultResult};
use crate::Result;
use crate::store::Opened;

/// A part of a file that is in memory.
pub(super) struct Fetched {
    pub at: u64,
    pub bytes: Vec<u8>,
}

/// A file to read ranges of.
pub(super) struct SourceFile<'a> {
    pub file: &'a Opened<'a>,
    pub path: &'a Path,
    pub size: u64,
}

impl SourceFile<'_> {
    /// Reads `[at, at + len)`, which must lie in the file.
    pub(super) fn fetch(&self, at: u64, len: u64) -> Result<Fetched> {
        let bytes = self.file.fetch(self.path, self.size, at, len)?;
        Ok(Fetched { at, bytes })
    }

    /// Reads several ranges (first byte, the byte after the last).
    pub(super) fn fetch_all(&self, ranges: &[(u64, u64)]) -> Result<Vec<Fetched>> {
        let lengths: Vec<_> = ranges.iter().map(|&(begin, end)| (begin, end - begin)).collect();
        let read = self.file.fetch_all(self.path, self.size, &lengths)?;
        let fetched = read.into_iter().zip(ranges);
        Ok(fetched.map(|(bytes, &(at, _))| Fetched { at, bytes }).collect())
    }
}

/// Joins ranges (first byte, the byte after the last) that are at most `gap` bytes apart, to at most
/// `longest` bytes each. Returns them in order.
pub(super) fn joined(mut ranges: Vec<(u64, u64)>, gap: u64, longest: u64) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let end = next.1.max(last.1);
        let is_near = next.0 <= last.1.saturating_add(gap) && end - last.0 <= longest;
        if is_near {
            last.1 = end;
        }
        is_near
    });
    ranges
}

/// Calls `read` with a file of these bytes in memory.
#[cfg(any(test, fuzzing))]
pub(super) fn in_memory<T>(
    path: &str,
    bytes: &[u8],
    read: impl FnOnce(&SourceFile<'_>, &[Fetched]) -> T,
) -> T {
    let source =
        SourceFile { file: &Opened::Nowhere, path: Path::new(path), size: bytes.len() as u64 };
    let bytes = bytes.to_vec();
    read(&source, &[Fetched { at: 0, bytes }])
}

/// Longest piece that a parser may request of an untrusted file. Directories and pickles of single
/// tensors are far smaller.
pub(super) const MAX_PIECE: u64 = 16 << 20;

/// The bytes `[start, start + len)` of a file. Positions are relative to `start`.
pub(super) struct Window<'a> {
    pub source: &'a SourceFile<'a>,
    pub start: u64,
    pub len: u64,
    /// Longest piece that a parser may request.
    pub max_piece: u64,
    /// Sorted by position. Bytes outside of them are read separately.
    pub fetched: &'a [Fetched],
}

impl<'a> Window<'a> {
    /// Returns a whole file as one item.
    #[cfg(any(test, fuzzing))]
    pub(super) fn whole(source: &'a SourceFile<'a>, fetched: &'a [Fetched]) -> Self {
        Self { source, start: 0, len: source.size, max_piece: MAX_PIECE, fetched }
    }

    /// Returns the bytes `[at, at + len)` of the item.
    pub(super) fn get(&self, at: u64, len: u64) -> FaultResult<Cow<'a, [u8]>> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Fault::corrupt(at, format!("{len} bytes here lead out of the item")));
        }
        if len > self.max_piece {
            return Err(Fault::Unsupported(format!("a directory or pickle of {len} bytes")));
        }
        let from = self.start + at;
        let next = self.fetched.partition_point(|piece| piece.at <= from);
        if let Some(piece) = next.checked_sub(1).map(|i| &self.fetched[i]) {
            let skip = usize::try_from(from - piece.at).unwrap_or(usize::MAX);
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            if let Some(bytes) = skip.checked_add(len).and_then(|end| piece.bytes.get(skip..end)) {
                return Ok(Cow::Borrowed(bytes));
            }
        }
        let piece = self.source.fetch(from, len).map_err(Fault::Read)?;
        Ok(Cow::Owned(piece.bytes))
    }
}
