//! The checksums that a file of `torch.save` has of its records.

use std::collections::HashMap;
use std::path::Path;

use super::archive::{StorageRecord, TorchFile};
use super::tree::Content;
use crate::foreign::pickle::Item;
use crate::foreign::tensor_pickle;
use crate::store::{Files, Opened, read_at};
use crate::{Control, Error, Result, parallel};

const BUFFER: u64 = 1 << 20;
/// Bytes of a request to a store.
const REQUEST: u64 = 8 << 20;

/// A record, and its checksum as it is and as it should be.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    /// First byte in the file.
    pub at: u64,
    pub size: u64,
    /// Where the file has one.
    pub expected: Option<u32>,
    /// Of what was read; where there was something to compare it with.
    pub got: Option<u32>,
    /// Where it is damaged: the values that it is part of, without those that other damage was found in.
    pub values: Vec<String>,
}

/// Computes the checksum of each record that has one, and says whether the pickle has one too, which opening compares. `control` counts the
/// bytes.
pub(crate) fn check_records(
    files: Files<'_>,
    path: &Path,
    threads: usize,
    control: &Control,
) -> Result<(Vec<Checked>, bool)> {
    let torch = TorchFile::open(files, path, threads)?;
    let file = files.open(path)?;
    let threads = files.threads(threads);
    let mut records: Vec<(&String, &StorageRecord)> = torch.parts.storages.iter().collect();
    records.sort_unstable_by_key(|(_, record)| record.at);
    let mut checked = parallel::map(records.len(), threads, |i| {
        let StorageRecord { at, size, crc } = *records[i].1;
        let got = match crc {
            Some(_) => Some(checksum(&file, &torch, (at, size), control)?),
            None => None,
        };
        Ok(Checked {
            at,
            size,
            expected: crc,
            got,
            values: Vec::new(),
        })
    })?;
    let keys = records.iter().map(|(key, _)| key.as_str());
    let damaged = keys
        .zip(0..)
        .filter(|&(_, i): &(_, usize)| checked[i].got != checked[i].expected);
    name_values(&torch, &damaged.collect(), &mut checked)?;
    Ok((checked, torch.parts.pickle_is_checked))
}

/// Enters the values that hold damaged storages, whose numbers are by key.
fn name_values(torch: &TorchFile, damaged: &HashMap<&str, usize>, checked: &mut [Checked]) -> Result<()> {
    if damaged.is_empty() {
        return Ok(());
    }
    let pickle = &torch.parts.pickle;
    let holders = pickle.leading_to(|id| damaged.get(tensor_pickle::storage_key(pickle, id)?).copied());
    for leaf in torch.leaves()?.0 {
        if let (Content::Value, Item::Node(node)) = (&leaf.content, leaf.item)
            && let Some(&record) = holders.get(&node)
        {
            checked[record].values.push(leaf.name);
        }
    }
    Ok(())
}

fn checksum(file: &Opened<'_>, torch: &TorchFile, (at, size): (u64, u64), control: &Control) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = Vec::new();
    let mut done = 0;
    while done < size {
        control.check()?;
        let len = if let Opened::File(file) = file {
            let len = BUFFER.min(size - done);
            buffer.resize(usize::try_from(len).expect("1 MiB at most"), 0);
            read_at(file, &mut buffer, at + done).map_err(|error| Error::io("read", &torch.path, error))?;
            len
        } else {
            let len = REQUEST.min(size - done);
            buffer = file.fetch(&torch.path, torch.stat.size, at + done, len)?;
            len
        };
        hasher.update(&buffer);
        control.add(len);
        done += len;
    }
    Ok(hasher.finalize())
}
