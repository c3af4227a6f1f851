//! Checks of parts of a checkpoint before they are read: regions that no chunk holds, and missing
//! files.

use std::collections::HashSet;

use super::data_files::{check_each, file_ref};
use crate::format::Index;
use crate::geometry::overlap::{self, Region};
use crate::{Control, Result};

/// Checks that the files of some chunks exist and have the expected length.
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

/// Checks a plan before anything is read. Returns the parts of regions that no chunk holds, each
/// with the number of its region. Checks the data files of all regions and values, as
/// [`check_files`] does.
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
