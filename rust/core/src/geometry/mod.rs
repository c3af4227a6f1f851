//! Rectangles of tensors: whether they tile a whole, and their bytes in memory.

mod dims;
pub mod memory;
mod region;
pub mod tiling;

pub use dims::{Dims, element_count, is_run, row_major, strided_length};
pub use region::Region;
