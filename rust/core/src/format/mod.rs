//! What is on disk, and nothing about how it gets there: `docs/format.md` in code, with its names.

mod build;
mod data_file;
mod digest;
mod index;
mod layout;
mod name;
pub mod safetensors;
mod validate;
mod value;

pub use build::{ChunkEntry, FileEntry, IndexBuilder, TensorEntry};
pub use data_file::DataFileName;
pub use digest::{BLOCK_SIZE, block_count, block_digest};
pub use index::{ChunkView, FileView, Index, IndexBytes, TensorView};
pub(crate) use layout::Identity;
pub use layout::{Kind, PAYLOAD_ALIGNMENT, SourceKind};
pub(crate) use name::parse_rank_index_name;
pub use name::{INDEX_NAME, from_header_name, rank_index_name, to_header_name};
pub use value::Value;

/// Sizes, offsets or strides, one for each dimension.
pub type Dims = smallvec::SmallVec<[u64; 4]>;

/// The number of elements of a shape, unless it overflows.
pub fn element_count(sizes: &[u64]) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    sizes.iter().try_fold(1_u64, |n, &size| n.checked_mul(size))
}

/// The bytes that a strided rectangle spans, from its first element to just past its last, unless that overflows.
pub fn strided_length(sizes: &[u64], strides: &[u64], itemsize: u64) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    let mut last = 0_u64;
    for (&size, &stride) in sizes.iter().zip(strides) {
        last = last.checked_add((size - 1).checked_mul(stride)?)?;
    }
    last.checked_add(1)?.checked_mul(itemsize)
}
