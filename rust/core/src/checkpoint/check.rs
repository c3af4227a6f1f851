//! Checks of some of a checkpoint, before it is read or handed out: what no chunk holds, files that are missing, digests of chunks.

#![allow(unsafe_code)] // digests are checked by a read to a buffer

use std::collections::HashSet;
use std::sync::Arc;

use super::data_files::{check_each, file_ref};
use super::gather::Gather;
use crate::format::{BLOCK_SIZE, Index};
use crate::geometry::overlap::{self, Region};
use crate::read::{Destination, ReadOptions};
use crate::{Control, Error, Result};

/// Checks that the files of some chunks are there and as long as they should be.
pub fn check_files(index: &Index, chunks: &[u64], allow_external: bool, control: &Control) -> Result<()> {
    let files: HashSet<u32> = chunks.iter().map(|&c| index.chunk_file(c)).collect();
    check_numbers(index, files, allow_external, control)
}

fn check_numbers(
    index: &Index,
    files: impl IntoIterator<Item = u32>,
    allow_external: bool,
    control: &Control,
) -> Result<()> {
    let files = files.into_iter().map(|file| file_ref(index, file, allow_external));
    check_each(index, &files.collect::<Result<Vec<_>>>()?, control)
}

/// Checks a plan before anything is read: finds what of the regions no chunk holds (by their number), and checks the data files
/// of all of them and of some values, as [`check_files`] does.
pub fn check_regions(
    index: &Index,
    regions: &[(u32, Region)],
    values: &[u32],
    allow_external: bool,
    control: &Control,
) -> Result<Vec<(usize, Region)>> {
    let mut holes = Vec::new();
    let mut files = HashSet::new();
    for (i, (tensor, region)) in regions.iter().enumerate() {
        match overlap::cover(index, *tensor, region) {
            Ok(parts) => files.extend(parts.iter().map(|part| index.chunk_file(part.chunk))),
            Err(hole) => holes.push((i, hole)),
        }
    }
    files.extend(
        values
            .iter()
            .flat_map(|&value| index.tensor(value).chunks)
            .map(|chunk| index.chunk_file(chunk)),
    );
    check_numbers(index, files, allow_external, control)?;
    Ok(holes)
}

/// Checks the digests of some chunks that have them, through a buffer of `options.max_inflight_bytes`.
pub fn verify_chunks(
    index: &Arc<Index>,
    chunks: &[u64],
    allow_external: bool,
    options: &ReadOptions,
    control: &Control,
) -> Result<()> {
    let options = ReadOptions {
        verify: true,
        ..options.clone()
    };
    let capacity = (options.max_inflight_bytes / BLOCK_SIZE).max(1) * BLOCK_SIZE;
    let mut buffer = vec![0_u8; usize::try_from(capacity).map_err(|_| Error::Plan("buffer too large".into()))?];
    let base = buffer.as_mut_ptr();
    let mut gather = Gather::new(Arc::clone(index), allow_external);
    let mut used = 0;
    for &chunk in chunks {
        let view = index.chunk(chunk);
        let length = if view.digests.is_some() { view.length } else { 0 };
        let mut from = 0;
        while from < length {
            let part = (capacity - used).min(length - from);
            // A part ends at the end of a block, so that no block is read twice.
            let part = if from + part < length {
                part / BLOCK_SIZE * BLOCK_SIZE
            } else {
                part
            };
            if part > 0 {
                let at = usize::try_from(used).expect("below the capacity");
                gather.add_bytes(chunk, from, part, Destination(base.wrapping_add(at)))?;
            } else {
                // SAFETY: the parts lie in `buffer` one after another.
                unsafe { gather.read(&options, control)? };
                gather.truncate(0);
                used = 0;
            }
            used += part;
            from += part;
        }
    }
    // SAFETY: as above.
    unsafe { gather.read(&options, control)? };
    Ok(())
}
