//! Checksums of records in a file of `torch.save`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};

use super::archive::TorchFile;
use super::parts::StorageRecord;
use super::tree::Content;
use crate::foreign::pickle::Item;
use crate::foreign::tensor_pickle;
use crate::format::{BLOCK_SIZE, block_count};
use crate::read::{self, FileRange};
use crate::store::{FileRef, Files};
use crate::{Control, Result};

/// A record, with its actual and its expected checksum.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    /// First byte in the file.
    pub at: u64,
    pub size: u64,
    /// The checksum in the file, if it has one.
    pub expected: Option<u32>,
    /// The checksum of the bytes, if there was one to compare with.
    pub got: Option<u32>,
    /// For a damaged record, the values that use it. A value is listed only at its first damaged
    /// record.
    pub values: Vec<String>,
}

/// Computes the checksum of each record that has one. Also returns whether the pickle has one,
/// which was compared when the file was opened. `control` counts the bytes.
pub(crate) fn check_records(
    files: Files<'_>,
    file: &FileRef,
    threads: usize,
    control: &Control,
) -> Result<(Vec<Checked>, bool)> {
    let torch = TorchFile::open(files, &file.path, threads)?;
    let mut records: Vec<(&String, &StorageRecord)> = torch.parts.storages.iter().collect();
    records.sort_unstable_by_key(|(_, record)| record.at);
    // In the order of the records: the checksum of a record is combined from those of its parts.
    let mut parts = Vec::new();
    for (_, record) in records.iter().filter(|(_, record)| record.crc.is_some()) {
        parts.extend((0..block_count(record.size)).map(|i| FileRange {
            file: 0,
            offset: record.at + i * BLOCK_SIZE,
            length: BLOCK_SIZE.min(record.size - i * BLOCK_SIZE),
        }));
    }
    let sums: Vec<AtomicU32> = parts.iter().map(|_| AtomicU32::new(0)).collect();
    let visitor = |number: u32, bytes: &[u8]| {
        sums[number as usize].store(crc32fast::hash(bytes), Ordering::Relaxed);
        Ok(())
    };
    read::visit(std::slice::from_ref(file), &parts, threads, &visitor, control)?;
    let mut rest = parts.iter().zip(&sums);
    let mut checksum = |size| {
        let mut hasher = crc32fast::Hasher::new();
        for (part, sum) in rest
            .by_ref()
            .take(usize::try_from(block_count(size)).expect("their sums are in memory"))
        {
            hasher.combine(&crc32fast::Hasher::new_with_initial_len(
                sum.load(Ordering::Relaxed),
                part.length,
            ));
        }
        hasher.finalize()
    };
    let checked = |&(_, record): &(&String, &StorageRecord)| Checked {
        at: record.at,
        size: record.size,
        expected: record.crc,
        got: record.crc.map(|_| checksum(record.size)),
        values: Vec::new(),
    };
    let mut checked: Vec<Checked> = records.iter().map(checked).collect();
    let keys = records.iter().map(|(key, _)| key.as_str());
    let damaged =
        keys.zip(0..).filter(|&(_, i): &(_, usize)| checked[i].got != checked[i].expected);
    name_values(&torch, &damaged.collect(), &mut checked)?;
    Ok((checked, torch.parts.pickle_is_checked))
}

/// Adds the values that use damaged storages to the records. `damaged` has the number of each
/// damaged record by its key.
fn name_values(
    torch: &TorchFile,
    damaged: &HashMap<&str, usize>,
    checked: &mut [Checked],
) -> Result<()> {
    if damaged.is_empty() {
        return Ok(());
    }
    let pickle = &torch.parts.pickle;
    for leaf in
        torch.tree()?.leaves.into_iter().filter(|leaf| matches!(leaf.content, Content::Value))
    {
        // A value that cannot be written is never loaded.
        let Ok((_, storages)) = pickle.write(leaf.item) else {
            continue;
        };
        let damaged = |id: &Item| damaged.get(tensor_pickle::storage_key(pickle, *id)?).copied();
        if let Some(record) = storages.iter().find_map(damaged) {
            checked[record].values.push(leaf.name);
        }
    }
    Ok(())
}
