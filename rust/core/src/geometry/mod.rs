//! Rectangles of tensors: where they overlap, whether they tile a whole, and which bytes of memory
//! they are.

mod dims;
pub mod memory;
pub mod overlap;
pub mod tiling;

pub use dims::{Dims, element_count, is_run, row_major, strided_length};
pub use overlap::{Overlap, Region};
