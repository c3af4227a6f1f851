//! Zip archives as `torch.save` writes them: records that are stored, not compressed.
//!
//! ```text
//! local header (30 bytes, name, extra), payload, descriptor     for every record
//! central directory: 46 bytes, name, extra, comment             for every record
//! zip64 end of directory (56), its locator (20)                 where there is a zip64 one
//! end of directory (22), comment
//! whatever follows, which is no part of it
//! ```
//!
//! Like torch, we rely on the central directory. The local header is read only for the position of
//! the payload, and must name the same record.

use super::fault::{Fault, FaultResult};
use super::window::Window;

const END_LEN: u64 = 22;
const END_MAGIC: [u8; 4] = *b"PK\x05\x06";
/// Longest distance of the end record from the end of a file, given by the longest comment. torch
/// searches as far.
const LONGEST_COMMENT: u64 = 0xffff;
const LOCATOR_LEN: u64 = 20;
const END64_LEN: u64 = 56;
const ENTRY_LEN: usize = 46;
const LOCAL_LEN: u64 = 30;
const ZIP64_EXTRA: u16 = 1;
/// Value of a 16 or 32 bit field whose real value is in the zip64 part.
const IN_ZIP64: u64 = 0xffff_ffff;

/// Start of every archive.
pub(super) const LOCAL_MAGIC: [u8; 4] = *b"PK\x03\x04";
/// Start of a descriptor.
pub(super) const DESCRIPTOR_MAGIC: [u8; 4] = *b"PK\x07\x08";

/// A record's entry in the directory.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub name: String,
    pub size: u64,
    /// CRC-32 of its payload; 0 if none was computed.
    pub crc: u32,
    /// Offset of its entry in the directory.
    entry_at: u64,
    header_at: u64,
    method: u16,
    flags: u16,
}

impl Record {
    /// Returns the two positions of its checksum: in the directory, and in the descriptor after the
    /// payload or, without a descriptor, in the local header.
    pub(super) fn checksums_at(&self, payload: u64) -> [u64; 2] {
        let beside =
            if self.has_descriptor() { payload + self.size + 4 } else { self.header_at + 14 };
        [self.entry_at + 16, beside]
    }

    /// Returns the offset of its local header.
    pub(super) fn header_at(&self) -> u64 {
        self.header_at
    }

    /// Returns the range of its local header: the start, and the least possible end.
    pub(super) fn header(&self) -> (u64, u64) {
        let length = LOCAL_LEN + self.name.len() as u64;
        (self.header_at, self.header_at.saturating_add(length))
    }

    /// Returns whether a descriptor follows the payload.
    pub(super) fn has_descriptor(&self) -> bool {
        self.flags & 8 != 0
    }
}

/// The directory of an archive.
#[derive(Debug)]
pub(super) struct Archive {
    records: Vec<Record>,
    directory_at: u64,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u16::from_le_bytes(*b))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u32::from_le_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u64::from_le_bytes(*b))
}

impl Archive {
    /// Reads the directory of the archive in `window`. A comment or a few bytes may follow it.
    pub(super) fn open(window: &Window<'_>) -> FaultResult<Self> {
        let end_at = find_end(window)?;
        let end = window.get(end_at, END_LEN)?;
        let mut count = u64::from(u16_at(&end, 10));
        let mut size = u64::from(u32_at(&end, 12));
        let mut directory_at = u64::from(u32_at(&end, 16));
        let mut directory_end = end_at;
        if let Some(at) = end_at.checked_sub(LOCATOR_LEN + END64_LEN) {
            let both = window.get(at, LOCATOR_LEN + END64_LEN)?;
            let (end64, locator) = both.split_at(56);
            if locator.starts_with(b"PK\x06\x07") {
                if !end64.starts_with(b"PK\x06\x06") || u64_at(locator, 8) != at {
                    return Err(Fault::corrupt(
                        at,
                        "zip64 end of directory is not where it should be",
                    ));
                }
                count = u64_at(end64, 32);
                size = u64_at(end64, 40);
                directory_at = u64_at(end64, 48);
                directory_end = at;
            }
        }
        if directory_at.checked_add(size) != Some(directory_end) {
            return Err(Fault::corrupt(end_at, "zip directory does not lie before its end record"));
        }
        let directory = window.get(directory_at, size)?;
        let records = read_directory(&directory, directory_at, count)?;
        Ok(Self { records, directory_at })
    }

    /// Returns the folder of all records: the text before the first `/` of the first name.
    pub(super) fn folder(&self) -> &str {
        let first = self.records.first().map_or("", |record| record.name.as_str());
        first.split_once('/').map_or("", |(folder, _)| folder)
    }

    /// Returns the record `name` in the archive's folder.
    pub(super) fn find(&self, name: &str) -> Option<&Record> {
        let folder = self.folder();
        self.records.iter().find(|record| {
            let rest = record.name.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/'));
            rest == Some(name)
        })
    }

    pub(super) fn records(&self) -> &[Record] {
        &self.records
    }

    /// Returns the offset of the payload of `record`, and checks that all of it is before the
    /// directory.
    pub(super) fn payload(&self, window: &Window<'_>, record: &Record) -> FaultResult<u64> {
        let at = record.header_at;
        if record.flags & 1 != 0 {
            return Err(Fault::Unsupported(format!("zip record {:?} is encrypted", record.name)));
        }
        if record.method != 0 {
            return Err(Fault::Unsupported(format!(
                "zip record {:?} is compressed (method {})",
                record.name, record.method
            )));
        }
        let name_len = record.name.len() as u64;
        let local = window.get(at, LOCAL_LEN + name_len)?;
        let (fixed, name) = local.split_at(30);
        if !fixed.starts_with(&LOCAL_MAGIC)
            || u64::from(u16_at(fixed, 26)) != name_len
            || name != record.name.as_bytes()
        {
            return Err(Fault::corrupt(
                at,
                format!("zip record {:?} has no header of that name here", record.name),
            ));
        }
        let payload = at + LOCAL_LEN + name_len + u64::from(u16_at(fixed, 28));
        match payload.checked_add(record.size) {
            Some(end) if end <= self.directory_at => Ok(payload),
            _ => Err(Fault::corrupt(
                at,
                format!(
                    "zip record {:?} of {} bytes leads into the directory",
                    record.name, record.size
                ),
            )),
        }
    }
}

/// Returns the offset of the last end record.
fn find_end(window: &Window<'_>) -> FaultResult<u64> {
    let Some(last) = window.len.checked_sub(END_LEN) else {
        return Err(Fault::corrupt(
            0,
            format!("{} bytes are too few for a zip archive", window.len),
        ));
    };
    // The usual position.
    if window.get(last, END_LEN)?.starts_with(&END_MAGIC) {
        return Ok(last);
    }
    let from = last.saturating_sub(LONGEST_COMMENT);
    let tail = window.get(from, window.len - from)?;
    let found = (0..last - from)
        .zip(tail.windows(END_MAGIC.len()))
        .filter(|(_, bytes)| *bytes == END_MAGIC)
        .last();
    match found {
        Some((at, _)) => Ok(from + at),
        None => Err(Fault::corrupt(
            last,
            "the zip archive does not end here, with its directory: it was cut short, or more \
            than a comment follows it",
        )),
    }
}

fn read_directory(directory: &[u8], directory_at: u64, count: u64) -> FaultResult<Vec<Record>> {
    let mut records: Vec<Record> = Vec::new();
    let mut rest = directory;
    while !rest.is_empty() {
        let at = directory_at + (directory.len() - rest.len()) as u64;
        let bad = |reason: &str| Err(Fault::corrupt(at, format!("zip directory: {reason}")));
        if rest.len() < ENTRY_LEN || !rest.starts_with(b"PK\x01\x02") {
            return bad("an entry was expected here");
        }
        let (fixed, more) = rest.split_at(ENTRY_LEN);
        let [name_len, extra_len, comment_len] =
            [28, 30, 32].map(|at| usize::from(u16_at(fixed, at)));
        let Some(after) = more.get(name_len + extra_len + comment_len..) else {
            return bad("an entry leads out of it");
        };
        let Ok(name) = std::str::from_utf8(&more[..name_len]) else {
            return bad("a name that is not UTF-8");
        };
        let [mut packed, mut size, mut header_at] =
            [20, 24, 42].map(|at| u64::from(u32_at(fixed, at)));
        let mut wide = zip64_fields(&more[name_len..name_len + extra_len]);
        // In this order, and only the fields that did not fit.
        for field in [&mut size, &mut packed, &mut header_at] {
            if *field == IN_ZIP64 {
                match wide.split_first_chunk::<8>() {
                    Some((value, left)) => {
                        *field = u64::from_le_bytes(*value);
                        wide = left;
                    }
                    None => return bad("a 64-bit field is missing"),
                }
            }
        }
        let method = u16_at(fixed, 10);
        if method == 0 && packed != size {
            return bad("a stored record with two sizes");
        }
        if header_at >= directory_at {
            return bad("a record after the directory");
        }
        records.push(Record {
            name: name.to_owned(),
            size,
            crc: u32_at(fixed, 16),
            entry_at: at,
            header_at,
            method,
            flags: u16_at(fixed, 8),
        });
        rest = after;
    }
    if records.len() as u64 != count {
        let reason = format!("zip directory: {} entries, and its end says {count}", records.len());
        return Err(Fault::corrupt(directory_at, reason));
    }
    Ok(records)
}

/// Returns the 64-bit fields among the extra fields of an entry; empty if there are none.
fn zip64_fields(mut extra: &[u8]) -> &[u8] {
    while let Some((head, rest)) = extra.split_first_chunk::<4>() {
        let len = usize::from(u16_at(head, 2));
        if u16_at(head, 0) == ZIP64_EXTRA {
            return rest.get(..len).unwrap_or_default();
        }
        extra = rest.get(len..).unwrap_or_default();
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::window::in_memory;

    /// Returns the names of the records.
    fn names(bytes: &[u8]) -> FaultResult<Vec<String>> {
        in_memory("x.pt", bytes, |source, fetched| {
            let archive = Archive::open(&Window::whole(source, fetched))?;
            Ok(archive.records().iter().map(|record| record.name.clone()).collect())
        })
    }

    /// Returns an archive of one empty record.
    fn archive(comment: &[u8]) -> Vec<u8> {
        let entry = [&b"PK\x01\x02"[..], &[0; 24], b"\x01\0", &[0; 16], b"a"].concat();
        let local = [&LOCAL_MAGIC[..], &[0; 22], b"\x01\0\0\0a"].concat();
        let [len, at] = [entry.len(), local.len()].map(|n| u32::try_from(n).unwrap().to_le_bytes());
        let comment_len = u16::try_from(comment.len()).unwrap().to_le_bytes();
        let end =
            [&END_MAGIC[..], &[0, 0, 0, 0, 1, 0, 1, 0], &len, &at, &comment_len, comment].concat();
        [local, entry, end].concat()
    }

    #[test]
    fn a_comment_or_something_short_may_follow() {
        let longest = vec![b'.'; 0xffff];
        for bytes in [
            archive(b""),
            archive(b"a comment"),
            archive(&longest),
            [archive(b""), vec![0; 100]].concat(),
            [archive(b""), longest.clone()].concat(),
            [archive(b""), b"PK\x05\x06".to_vec()].concat(), // too short for another end
        ] {
            assert_eq!(names(&bytes).unwrap(), ["a"], "{}", bytes.len());
        }
        for (bytes, part) in [
            ([archive(b""), longest, vec![0]].concat(), "does not end here"),
            (archive(b"")[1..].to_vec(), "does not lie before"),
            ([archive(b""), b"PK\x05\x06".to_vec(), vec![0; 18]].concat(), "does not lie before"),
            ([archive(b""), b"PK\x05\x06".to_vec(), vec![0; 30]].concat(), "does not lie before"),
            (archive(b"")[..60].to_vec(), "does not end here"),
            (vec![0; 21], "too few"),
        ] {
            match names(&bytes) {
                Err(Fault::Corrupt { reason, .. }) => {
                    assert!(reason.contains(part), "{part}: {reason}");
                }
                other => panic!("{part}: {other:?}"),
            }
        }
    }
}
