//! The parts of a file of `torch.save`: its pickle, and the places of its storages.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::legacy;
use super::parts::{Parts, RULES, StorageRecord};
use super::tree::{self, Tree};
use crate::foreign::fault::{Fault, FaultResult};
use crate::foreign::pickle::Pickle;
use crate::foreign::stand_in;
use crate::foreign::tensor_pickle;
use crate::foreign::window::{Fetched, SourceFile, Window, joined};
use crate::foreign::zip::{Archive, LOCAL_MAGIC, Record};
use crate::store::{Files, Stat};
use crate::{Error, Result, parallel};

/// Limit on a directory, and on a pickle. Both are read into memory whole, and the parsed data may
/// take thirty times as much.
const LONGEST: u64 = 256 << 20;
/// Bytes at the end of a file that contain the end of the directory, and all of a small directory.
const TAIL: u64 = 64 << 10;
/// Headers that are at most this far apart are fetched together.
const NEAR: u64 = 4 << 10;
/// The magic number at the start of files of torch before 1.6, as it is pickled.
const LEGACY_MAGIC: [u8; 12] = *b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
/// Longest start that identifies a file: the magic number, with protocol and frame.
pub(crate) const START: usize = 2 + 9 + LEGACY_MAGIC.len();
/// File names with these endings belong to files of `torch.save`, or should.
const ENDINGS: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

/// A parsed file.
pub(super) struct TorchFile {
    pub path: PathBuf,
    pub stat: Stat,
    pub parts: Parts,
}

/// Returns whether a file with this name and start is one of `torch.save`. A safetensors file has a
/// `{` at the position of a zip archive's first compression method.
pub(crate) fn is_torch_file(name: &str, start: &[u8]) -> bool {
    let is_zip = start.starts_with(&LOCAL_MAGIC) && start.get(8) != Some(&b'{');
    is_zip || is_legacy(start) || ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Returns whether a file begins with the magic number, in a pickle of any protocol. From protocol
/// 4 on, the number is in a frame.
fn is_legacy(start: &[u8]) -> bool {
    match start {
        [0x80, 2 | 3, number @ ..] | [0x80, 4 | 5, 0x95, _, _, _, _, _, _, _, _, number @ ..] => {
            number.starts_with(&LEGACY_MAGIC)
        }
        _ => false,
    }
}

impl TorchFile {
    /// Parses a file. If `threads` is 0, it uses all cores.
    pub(super) fn open(files: Files<'_>, path: &Path, threads: usize) -> Result<Self> {
        let stat = files.stat(path)?;
        let file = files.open(path)?;
        let source = SourceFile { file: &file, path, size: stat.size };
        let from = stat.size.saturating_sub(TAIL);
        let fetched = [source.fetch(from, stat.size - from)?];
        let parts =
            look_at(&source, &fetched, threads).map_err(|fault| name_fault(fault, path, ""))?;
        let path = path.to_owned();
        Ok(Self { path, stat, parts })
    }

    /// Returns the saved state dict.
    pub(super) fn tree(&self) -> Result<Tree> {
        tree::read(&self.parts.pickle)
            .map_err(|fault| self.name_fault(shift(fault, self.parts.pickle_at), ""))
    }

    pub(super) fn name_fault(&self, fault: Fault, tensor: &str) -> Error {
        name_fault(fault, &self.path, tensor)
    }
}

fn name_fault(fault: Fault, path: &Path, tensor: &str) -> Error {
    match fault {
        Fault::Corrupt { at, reason } => Error::corrupt_data(path, tensor, at, reason),
        Fault::Unsupported(what) if tensor.is_empty() => {
            Error::Unsupported(format!("{}: {what}", path.display()))
        }
        Fault::Unsupported(what) => {
            Error::Unsupported(format!("tensor {tensor:?} in {}: {what}", path.display()))
        }
        Fault::Forbidden(global) => Error::UnsafePickle { path: path.to_owned(), global },
        Fault::Read(error) => error,
    }
}

/// Parses a file, without reading its tensors.
pub(super) fn look_at(
    source: &SourceFile<'_>,
    fetched: &[Fetched],
    threads: usize,
) -> FaultResult<Parts> {
    let window = Window { source, start: 0, len: source.size, max_piece: LONGEST, fetched };
    match kind_of(&window)? {
        Format::Zip => look_at_archive(&window, threads),
        Format::Legacy => legacy::look_at(&window),
    }
}

/// Parses a value: a file of `torch.save` in memory, whose directory and pickle may have any
/// length.
pub(super) fn look_at_value(source: &SourceFile<'_>) -> FaultResult<Parts> {
    let window =
        Window { source, start: 0, len: source.size, max_piece: source.size, fetched: &[] };
    match kind_of(&window)? {
        Format::Zip => look_at_archive(&window, 1),
        Format::Legacy => Err(Fault::Unsupported("it is not a zip archive".into())),
    }
}

fn look_at_archive(window: &Window<'_>, threads: usize) -> FaultResult<Parts> {
    let source = window.source;
    let archive = Archive::open(window)?;
    let records = archive.records();
    if archive.find("constants.pkl").is_some() {
        return Err(Fault::Unsupported(
            "it is a TorchScript archive, of torch.jit.save: torch.jit.load it, and torch.save \
            its state_dict()"
                .into(),
        ));
    }
    let headers = if source.file.is_remote() {
        fetch_headers(source, records).map_err(Fault::Read)?
    } else {
        Vec::new()
    };
    let of_headers = Window {
        fetched: if source.file.is_remote() { &headers } else { window.fetched },
        ..*window
    };
    let places = parallel::map(records.len(), threads_for(records.len(), threads), |i| {
        archive
            .payload(&of_headers, &records[i])
            .map_err(|fault| name_fault(fault, source.path, ""))
    })
    .map_err(Fault::Read)?;
    check_apart(records, &places)?;
    let folder = format!("{}/", archive.folder());
    let mut by_name: HashMap<&str, usize> = HashMap::with_capacity(records.len());
    // torch ignores case when it looks up records.
    let mut lower = HashSet::with_capacity(records.len());
    for (i, record) in records.iter().enumerate() {
        if let Some(name) = record.name.strip_prefix(&folder)
            && by_name
                .insert(name, i)
                .or((!lower.insert(name.to_ascii_lowercase())).then_some(i))
                .is_some()
        {
            let reason = format!("zip record {:?} is there twice", record.name);
            return Err(Fault::corrupt(places[i], reason));
        }
    }
    if let Some(&i) = by_name.get("byteorder") {
        let order = if records[i].size <= 16 {
            checked(window, &records[i], places[i], "byte order")?
        } else {
            window.get(places[i], 16)?
        };
        if *order != *b"little" {
            let order = String::from_utf8_lossy(&order).into_owned();
            return Err(Fault::Unsupported(format!("stored in byte order {order:?}")));
        }
    }
    let Some(&of_pickle) = by_name.get("data.pkl") else {
        return Err(Fault::corrupt(
            0,
            "a zip archive without data.pkl: torch.save did not write it",
        ));
    };
    let bytes = checked(window, &records[of_pickle], places[of_pickle], "pickle")?.into_owned();
    let pickle = Pickle::parse(bytes, &RULES).map_err(|fault| shift(fault, places[of_pickle]))?;
    tensor_pickle::check_storages_agree(&pickle)?;
    let storages = by_name.iter().filter_map(|(name, &i)| {
        let record = StorageRecord {
            at: places[i],
            size: records[i].size,
            crc: Some(records[i].crc).filter(|&crc| crc != 0),
        };
        Some((name.strip_prefix("data/")?.to_owned(), record))
    });
    Ok(Parts {
        pickle,
        pickle_at: places[of_pickle],
        pickle_is_checked: records[of_pickle].crc != 0,
        storages: storages.collect(),
    })
}

/// Fetches the headers of all records at the same time, since on a store each read is a request.
/// Headers that are near each other are fetched together.
fn fetch_headers(source: &SourceFile<'_>, records: &[Record]) -> Result<Vec<Fetched>> {
    let headers = records.iter().map(Record::header);
    let headers = headers.filter(|&(begin, end)| begin < end && end <= source.size).collect();
    source.fetch_all(&joined(headers, NEAR, u64::MAX))
}

/// Reads a small record that determines the meaning of other bytes, and compares its checksum.
fn checked<'a>(
    window: &Window<'a>,
    record: &Record,
    at: u64,
    what: &str,
) -> FaultResult<Cow<'a, [u8]>> {
    let bytes = window.get(at, record.size)?;
    let (crc, got) = (record.crc, crc32fast::hash(&bytes));
    if crc != 0 && crc != got {
        let reason = format!("its {what} has CRC-32 {got:08x}, expected {crc:08x}");
        return Err(Fault::corrupt(at, reason));
    }
    Ok(bytes)
}

/// Returns the number of threads. Each record takes one short read, so a few are not worth a
/// thread.
fn threads_for(records: usize, threads: usize) -> usize {
    if records < 1000 { 1 } else { threads }
}

/// Converts an offset in a pickle to an offset in the file.
fn shift(fault: Fault, by: u64) -> Fault {
    match fault {
        Fault::Corrupt { at, reason } => Fault::corrupt(by + at, reason),
        other => other,
    }
}

/// Layouts of a file.
enum Format {
    Zip,
    /// The layout of torch before 1.6.
    Legacy,
}

fn kind_of(window: &Window<'_>) -> FaultResult<Format> {
    let start = window.get(0, window.len.min(START as u64))?;
    if start.starts_with(&LOCAL_MAGIC) {
        return Ok(Format::Zip);
    }
    if is_legacy(&start) {
        return Ok(Format::Legacy);
    }
    let beginning = window.get(0, window.len.min(64))?;
    if let Some(what) = stand_in(&beginning) {
        return Err(Fault::corrupt(0, what));
    }
    let ustar = window.get(257, 5);
    if ustar.is_ok_and(|magic| *magic == *b"ustar") {
        return Err(Fault::Unsupported(
            "it is a tar archive, as torch before 0.1.10 wrote them: torch.load it, and \
            torch.save it again"
                .into(),
        ));
    }
    let why = if window.len == 0 { "it is empty" } else { "it does not begin like one" };
    Err(Fault::corrupt(0, format!("it is not a file of torch.save: {why}")))
}

/// Refuses records that share bytes.
fn check_apart(records: &[Record], payloads: &[u64]) -> FaultResult<()> {
    let mut extents: Vec<(u64, u64, &str)> = records
        .iter()
        .zip(payloads)
        .map(|(record, payload)| (record.header_at(), payload + record.size, record.name.as_str()))
        .collect();
    extents.sort_unstable();
    for pair in extents.windows(2) {
        let ((_, end, one), (begin, _, other)) = (pair[0], pair[1]);
        if begin < end {
            return Err(Fault::corrupt(
                begin,
                format!("zip records {one:?} and {other:?} share bytes"),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_torch_before_1_6_begin_with_a_number_of_any_protocol() {
        let frame = b"\x95\x0d\0\0\0\0\0\0\0";
        for (start, is_one) in [
            ([b"\x80\x02", &LEGACY_MAGIC[..]].concat(), true),
            ([b"\x80\x03", &LEGACY_MAGIC[..], b".more"].concat(), true),
            ([b"\x80\x04", &frame[..], &LEGACY_MAGIC].concat(), true),
            ([b"\x80\x05", &frame[..], &LEGACY_MAGIC].concat(), true),
            ([b"\x80\x06", &frame[..], &LEGACY_MAGIC].concat(), false),
            ([b"\x80\x04", &frame[..], &LEGACY_MAGIC[..11]].concat(), false),
            (b"\x80\x02N.".to_vec(), false),
        ] {
            assert_eq!(is_torch_file("x", &start), is_one, "{start:?}");
        }
    }
}
