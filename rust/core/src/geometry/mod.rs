//! Rectangles of tensors: their overlaps, whether they tile a whole, and their bytes in memory.

mod dims;
pub mod memory;
pub mod overlap;
pub mod tiling;

pub use dims::{Dims, element_count, is_run, row_major, strided_length};
pub use overlap::{Overlap, Region};
