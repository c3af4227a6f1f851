//! The dcp-rs checkpoint format, its files, and the reads and writes. Knows no Python and no torch.
//!
//! `format` does no I/O; `store` knows no format; `read` and `write` know files, ranges and memory; `source`
//! joins them. `docs/format.md` defines what is on disk.

mod control;
pub mod copy;
mod dtype;
mod error;
pub mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod load;
pub mod overlap;
mod parallel;
pub mod read;
pub mod save_plan;
pub mod slabs;
pub mod source;
pub mod store;
pub mod verify;
pub mod write;

pub use control::Control;
pub use dtype::Dtype;
pub use error::{Error, Result};
