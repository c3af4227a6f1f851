//! Checks of some of a checkpoint, before it is read or handed out: what no chunk holds, files that
//! are missing.

use std::collections::HashSet;

use super::data_files::{check_each, file_ref};
use crate::format::Index;
use crate::geometry::overlap::{self, Region};
use crate::{Control, Result};

/// Checks that the files of some chunks are there and as long as they should be.
pub fn check_files(
    index: &Index,
    chunks: &[u64],
    allow_external: bool,
    control: &Control,
) -> Result<()> {
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

/// Checks a plan before anything is read: finds what of the regions no chunk holds (by their
/// number), and checks the data files of all of them and of some values, as [`check_files`] does.
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
