//! The dcp-rs checkpoint format, its files, and the reads and writes. Knows no Python and no torch.
//!
//! `format` and `geometry` do no I/O; `store` knows no format; `read` and `write` know files, ranges and memory; `foreign` makes
//! indexes of what others wrote; `checkpoint` joins them. What may lie outside a checkpoint's folder is decided in `paths`, for all.
//! `docs/format.md` defines what is on disk.

pub mod checkpoint;
#[cfg(target_endian = "big")]
compile_error!(
    "the format is little-endian, and tensors are copied to and from files as they lie in memory: big-endian machines would get wrong numbers"
);

mod control;
pub mod copy;
mod dtype;
mod error;
pub mod foreign;
pub mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod geometry;
mod names;
mod parallel;
pub mod paths;
pub mod read;
pub mod save_plan;
pub mod slabs;
pub mod store;
pub mod write;

pub use control::Control;
pub use dtype::Dtype;
pub use error::{Error, Result, StorageFault};
pub use parallel::available as available_cores;
