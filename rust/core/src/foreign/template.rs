//! Files in torch's own format, with holes for the bytes of tensors.
//!
//! torch writes archives, pickles and directories in one thread, and computes CRC-32 at half a
//! gigabyte a second, so its checksums are switched off. We write the bytes of tensors ourselves,
//! with direct I/O and on all cores, and compute their checksums on the way. Finally we enter the
//! checksums, and write the rest.

use std::path::Path;

use super::fault::{Fault, FaultResult};
use super::window::{Fetched, SourceFile, Window};
use super::zip::{Archive, DESCRIPTOR_MAGIC};
use crate::store::Opened;
use crate::{Error, Result, parallel};

/// Bytes of a file that come from elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filled {
    /// First byte in the file.
    pub at: u64,
    /// Number of bytes.
    pub len: u64,
    /// Their CRC-32.
    pub crc: u32,
}

/// A file under construction: pieces in memory, and holes between them.
#[derive(Default)]
pub struct Template {
    pieces: Vec<Fetched>,
    size: u64,
}

impl Template {
    /// Returns the length of the file so far, with its holes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Appends bytes.
    pub fn append(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let at = self.size;
        self.size += bytes.len() as u64;
        match self.pieces.last_mut() {
            Some(last) if last.at + last.bytes.len() as u64 == at => {
                last.bytes.extend_from_slice(bytes);
            }
            _ => self.pieces.push(Fetched { at, bytes: bytes.to_vec() }),
        }
    }

    /// Appends a hole.
    pub fn skip(&mut self, len: u64) {
        self.size += len;
    }

    /// Iterates over the pieces in memory, in order, each with its first byte in the file.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.pieces.iter().map(|piece| (piece.at, piece.bytes.as_slice()))
    }

    /// Enters the CRC-32 of every record of the archives (first byte, length). The payload of a
    /// record must be in memory, or be exactly one of `filled`, which are sorted. `path` is for
    /// messages.
    ///
    /// # Errors
    /// [`Error::CorruptData`] if there is no archive of stored records. Then nothing was entered.
    pub fn seal(
        &mut self,
        path: &Path,
        archives: &[(u64, u64)],
        filled: &[Filled],
        threads: usize,
    ) -> Result<()> {
        let source = SourceFile { file: &Opened::Nowhere, path, size: self.size };
        let sums = parallel::map(archives.len(), threads, |i| {
            let (start, len) = archives[i];
            if start.checked_add(len).is_none_or(|end| end > self.size) {
                let reason = format!("an archive of {len} bytes leads out of the file");
                return Err(Error::corrupt_data(path, "", start, reason));
            }
            let window =
                Window { source: &source, start, len, max_piece: u64::MAX, fetched: &self.pieces };
            sums_of(&window, filled).map_err(|fault| named(fault, path, start))
        })?;
        for (at, crc) in sums.into_iter().flatten() {
            self.enter(at, crc, path)?;
        }
        Ok(())
    }

    fn enter(&mut self, at: u64, crc: u32, path: &Path) -> Result<()> {
        let next = self.pieces.partition_point(|piece| piece.at <= at);
        let place = next.checked_sub(1).and_then(|i| {
            let piece = &mut self.pieces[i];
            let begin = usize::try_from(at - piece.at).ok()?;
            piece.bytes.get_mut(begin..begin.checked_add(4)?)
        });
        let place = place.ok_or_else(|| {
            Error::corrupt_data(path, "", at, "a checksum belongs here, where a tensor is")
        })?;
        place.copy_from_slice(&crc.to_le_bytes());
        Ok(())
    }
}

/// Returns the positions of checksums in the file, and their values.
fn sums_of(window: &Window<'_>, filled: &[Filled]) -> FaultResult<Vec<(u64, u32)>> {
    let archive = Archive::open(window)?;
    let mut sums = Vec::with_capacity(2 * archive.records().len());
    for record in archive.records() {
        let payload = archive.payload(window, record)?;
        if record.has_descriptor() && *window.get(payload + record.size, 4)? != DESCRIPTOR_MAGIC {
            return Err(Fault::corrupt(
                payload + record.size,
                format!("zip record {:?} has no descriptor here", record.name),
            ));
        }
        let at = window.start + payload;
        let found = filled.binary_search_by_key(&at, |filled| filled.at);
        let crc = match found.map(|i| filled[i]) {
            Ok(filled) if filled.len == record.size => filled.crc,
            _ => crc32fast::hash(&window.get(payload, record.size)?),
        };
        sums.extend(record.checksums_at(payload).map(|at| (window.start + at, crc)));
    }
    Ok(sums)
}

fn named(fault: Fault, path: &Path, start: u64) -> Error {
    match fault {
        Fault::Read(error) => error,
        Fault::Corrupt { at, reason } => {
            Error::corrupt_data(path, "", start.saturating_add(at), reason)
        }
        Fault::Unsupported(reason) | Fault::Forbidden(reason) => {
            Error::corrupt_data(path, "", start, reason)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_what_lies_between_holes() {
        let mut template = Template::default();
        template.append(b"abc");
        template.append(b"de");
        template.skip(10);
        template.skip(1);
        template.append(b"");
        template.append(b"f");
        let pieces: Vec<(u64, &[u8])> = template.pieces().collect();
        assert_eq!(pieces, [(0, &b"abcde"[..]), (16, &b"f"[..])]);
        assert_eq!(template.size(), 17);
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        let mut template = Template::default();
        template.append(&[7; 100]);
        template.skip(50);
        for (start, len) in [(0, 100), (0, 150), (60, 90), (0, 3), (0, 151), (u64::MAX, 100)] {
            let sealed = template.seal(Path::new("x.pt"), &[(start, len)], &[], 1);
            assert!(matches!(sealed, Err(Error::CorruptData { .. })), "{start} {len}");
        }
        assert!(template.seal(Path::new("x.pt"), &[], &[], 1).is_ok());
    }
}
