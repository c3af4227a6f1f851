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

/// Returns what a file with this start is, if a download left it in place of the real one.
fn stand_in(start: &[u8]) -> Option<&'static str> {
    if start.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Some("it is a pointer of git-lfs, not the file itself: run `git lfs pull`");
    }
    let text = start.trim_ascii_start();
    let begins = |tag: &[u8]| text.get(..tag.len()).is_some_and(|t| t.eq_ignore_ascii_case(tag));
    (begins(b"<!doctype html") || begins(b"<html"))
        .then_some("it is a web page, not the file itself: download it again")
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
