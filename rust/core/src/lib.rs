#![doc = include_str!("../README.md")]
// The public interface is `api` and the re-exports below. Modules marked `doc(hidden)` are shared
// with the other crates of this workspace, and are not stable. `format` and `geometry` do no I/O.
// `store` does not know the format. `read` and `write` know files, ranges and memory. `foreign`
// makes indexes of foreign checkpoints, and `checkpoint` combines them all. `paths` decides for all
// of them what may be outside of a checkpoint's folder. `docs/format.md` defines the format on
// disk.

mod api;
#[cfg(target_endian = "big")]
compile_error!(
    "the format is little-endian, and tensors are copied to and from files as they lie in \
    memory: big-endian machines would get wrong numbers"
);

#[doc(hidden)]
pub mod checkpoint;
mod control;
#[doc(hidden)]
pub mod copy;
mod dtype;
mod error;
#[doc(hidden)]
pub mod foreign;
#[doc(hidden)]
pub mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
#[doc(hidden)]
pub mod geometry;
mod json;
mod names;
mod parallel;
#[doc(hidden)]
pub mod paths;
#[doc(hidden)]
pub mod quant;
#[doc(hidden)]
pub mod read;
#[doc(hidden)]
pub mod save_plan;
#[doc(hidden)]
pub mod slabs;
#[doc(hidden)]
pub mod store;
#[doc(hidden)]
pub mod write;

pub use api::{Checkpoint, OpenOptions, ReadBatch, TensorInfo};
pub use checkpoint::verify::{Problem, Verified};
pub use control::Control;
#[doc(hidden)]
pub use control::{NOTICE, NOTICE_AGAIN};
pub use dtype::Dtype;
pub use error::{Error, Result, StorageFault};
#[doc(hidden)]
pub use parallel::{available as available_cores, lock};
