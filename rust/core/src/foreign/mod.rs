//! Foreign checkpoints, read in place: each becomes an index over its own files.
//!
//! Opening reads headers, archive directories and small pickles, never tensor data. No pickle is
//! executed: `pickle` is an interpreter that knows no Python and only builds plain data.

pub mod distcp;
mod dtensor;
mod fault;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
pub mod metadata_pickle;
pub(crate) mod models;
mod pickle;
pub(crate) mod rank_files;
pub mod safetensors;
mod sharded_tensor;
mod sharding;
mod template;
mod tensor_pickle;
pub mod torch_file;
mod window;
mod zip;

#[cfg(test)]
mod tests;

pub use models::Model;
pub use template::{Filled, Template};

use std::path::PathBuf;

/// Reason for refusing a file that git-lfs left in place of the real one.
const LFS_POINTER: &str = "it is a pointer of git-lfs, not the file itself: run `git lfs pull`";

/// Returns whether a file with this start is a pointer of git-lfs.
fn is_lfs_pointer(start: &[u8]) -> bool {
    start.starts_with(b"version https://git-lfs.github.com/spec/")
}

/// A foreign checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// A stock DCP folder.
    Dcp,
    /// Safetensors files.
    Safetensors {
        /// The folder they are in.
        dir: PathBuf,
        /// The files of the model.
        model: Model,
    },
    /// Files of `torch.save`.
    Torch {
        /// The folder they are in.
        dir: PathBuf,
        /// The files of the model.
        model: Model,
    },
    /// Files of `torch.save` of each rank.
    TorchRanks {
        /// The folder they are in.
        dir: PathBuf,
        /// Their names, in the order of the ranks.
        names: Vec<String>,
    },
}
