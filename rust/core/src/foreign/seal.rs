//! Checksums for zip archives that were written without them.
//!
//! torch computes CRC-32 on its way at about half a gigabyte a second, which is most of what `torch.save` takes. Here it is done after the
//! writing, with the instructions that processors have for it, and on all cores.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::fault::{Fault, FaultResult};
use super::window::{Source, Window};
use super::zip::{Archive, DESCRIPTOR_MAGIC};
use crate::store::{Opened, read_at};
use crate::{Control, Error, Result, parallel};

const BUFFER: usize = 1 << 20;

/// A record of an archive; places in the file.
struct Unsealed {
    payload: u64,
    size: u64,
    checksums: [u64; 2],
}

/// Writes the CRC-32 of every record into the archives (first byte, length) of the file. The file is ours: no bound is set on directories.
///
/// # Errors
/// [`Error::CorruptData`] where no archive of stored records is; [`Error::Io`].
pub fn seal(path: &Path, archives: &[(u64, u64)], threads: usize, control: &Control) -> Result<()> {
    let io = |what| move |error| Error::io(what, path, error);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(io("open"))?;
    let source = Source {
        file: &Opened::Lent(&file),
        path,
        size: file.metadata().map_err(io("look at"))?.len(),
    };
    let records: Vec<Unsealed> = parallel::map(archives.len(), threads, |i| find(&source, archives[i]))?
        .into_iter()
        .flatten()
        .collect();
    let workers = if threads == 0 { parallel::available() } else { threads };
    parallel::for_each(
        records.len(),
        workers,
        || vec![0; BUFFER],
        |buffer, i| {
            control.check()?;
            let record = &records[i];
            let crc = checksum(&file, record, buffer).map_err(io("read"))?;
            for at in record.checksums {
                file.write_all_at(&crc.to_le_bytes(), at).map_err(io("write"))?;
            }
            Ok(())
        },
    )
}

fn find(source: &Source<'_>, (start, len): (u64, u64)) -> Result<Vec<Unsealed>> {
    let window = Window {
        source,
        start,
        len,
        max_piece: u64::MAX,
        fetched: &[],
    };
    let all = || -> FaultResult<Vec<Unsealed>> {
        let archive = Archive::open(&window)?;
        let of = |record| {
            let payload = archive.payload(&window, record)?;
            if record.has_descriptor() && *window.get(payload + record.size, 4)? != DESCRIPTOR_MAGIC {
                return Err(Fault::corrupt(
                    payload + record.size,
                    format!("zip record {:?} has no descriptor here", record.name),
                ));
            }
            Ok(Unsealed {
                payload: start + payload,
                size: record.size,
                checksums: record.checksums_at(payload).map(|at| start + at),
            })
        };
        archive.records().iter().map(of).collect()
    };
    all().map_err(|fault| match fault {
        Fault::Read(error) => error,
        Fault::Corrupt { at, reason } => Error::corrupt_data(source.path, "", start + at, reason),
        Fault::Unsupported(reason) | Fault::Forbidden(reason) => Error::corrupt_data(source.path, "", start, reason),
    })
}

fn checksum(file: &File, record: &Unsealed, buffer: &mut [u8]) -> std::io::Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    let (mut at, end) = (record.payload, record.payload + record.size);
    while at < end {
        let len = usize::try_from(end - at).map_or(buffer.len(), |left| left.min(buffer.len()));
        read_at(file, &mut buffer[..len], at)?;
        hasher.update(&buffer[..len]);
        at += len as u64;
    }
    Ok(hasher.finalize())
}
