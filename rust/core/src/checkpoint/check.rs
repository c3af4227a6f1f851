//! Checks of parts of a checkpoint before they are read: regions that no chunk holds, and missing
//! files.

use std::collections::HashSet;

use super::data_files::{check_each, file_ref, passing_over};
use crate::format::{Index, cover};
use crate::geometry::Region;
use crate::geometry::element_count;
use crate::{Control, Dtype, Error, Result};

/// Largest honest ratio of tensors to their data files: 4-bit codes that are decoded to float32,
/// under two names.
const EXPANSION: u64 = 16;
/// Bytes that tensors may always have.
const MOST_EXPANDED: u64 = 256 << 20;

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
    let numbers: Vec<u32> = files.into_iter().collect();
    passing_over(index, || {
        let files = numbers.iter().map(|&file| file_ref(index, file, allow_external));
        check_each(index, &files.collect::<Result<Vec<_>>>()?, control)
    })
}

/// Checks that tensors are not much larger than the data files when they are written out. A file of
/// `torch.save` may hold a tensor of any size in a few bytes, by strides of 0.
///
/// # Errors
/// [`Error::Unsupported`] with the name of the tensor that is too much.
pub fn check_expanded(index: &Index, tensors: &[u32]) -> Result<()> {
    let files = (0..index.file_count()).map(|file| index.file(file).size);
    let files = files.fold(0, u64::saturating_add);
    let most = files.saturating_mul(EXPANSION).max(MOST_EXPANDED);
    let mut total = 0_u64;
    for &tensor in tensors {
        let view = index.tensor(tensor);
        let size = view.dtype.map_or(0, Dtype::size);
        let count = element_count(&view.shape).unwrap_or(u64::MAX);
        total = total.saturating_add(count.saturating_mul(size));
        if total > most {
            return Err(Error::Unsupported(format!(
                "tensor {:?} of {}: its {} bytes, or those of all tensors together, are more than \
                 {EXPANSION} times the {files} bytes of the data files, as strides of 0 make them; \
                 leave it out with exclude=, or read it by its name",
                view.name,
                index.path().display(),
                count.saturating_mul(size),
            )));
        }
    }
    Ok(())
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
        match cover(index, *tensor, region) {
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
