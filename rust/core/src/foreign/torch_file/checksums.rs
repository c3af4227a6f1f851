//! The checksums that a file of `torch.save` has of its records.

use std::fs::File;
use std::path::Path;

use super::archive::{StorageRecord, TorchFile};
use crate::store::{open_file, read_at};
use crate::{Control, Error, Result, parallel};

const BUFFER: u64 = 1 << 20;

/// A record, and its checksum as it is and as it should be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked {
    /// First byte in the file.
    pub at: u64,
    pub size: u64,
    /// Where the file has one.
    pub expected: Option<u32>,
    /// Of what was read; where there was something to compare it with.
    pub got: Option<u32>,
}

/// Computes the checksum of each record that has one, and says whether the pickle has one too, which opening compares. `control` counts the
/// bytes.
pub(crate) fn check_records(path: &Path, threads: usize, control: &Control) -> Result<(Vec<Checked>, bool)> {
    let torch = TorchFile::open(path, threads)?;
    let file = open_file(path).map_err(|error| Error::io("open", path, error))?;
    let mut records: Vec<&StorageRecord> = torch.parts.storages.values().collect();
    records.sort_unstable_by_key(|record| record.at);
    let checked = parallel::map(records.len(), threads, |i| {
        let StorageRecord { at, size, crc } = *records[i];
        let got = match crc {
            Some(_) => Some(checksum(&file, path, (at, size), control)?),
            None => None,
        };
        Ok(Checked {
            at,
            size,
            expected: crc,
            got,
        })
    })?;
    Ok((checked, torch.parts.pickle_is_checked))
}

fn checksum(file: &File, path: &Path, (at, size): (u64, u64), control: &Control) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; usize::try_from(BUFFER.min(size)).expect("1 MiB at most")];
    let mut done = 0;
    while done < size {
        control.check()?;
        let len = BUFFER.min(size - done);
        let part = &mut buffer[..usize::try_from(len).expect("1 MiB at most")];
        read_at(file, part, at + done).map_err(|error| Error::io("read", path, error))?;
        hasher.update(part);
        control.add(len);
        done += len;
    }
    Ok(hasher.finalize())
}
