//! What others wrote, read in place: each checkpoint becomes an index over its own files.
//!
//! Opening reads headers, archive directories and small pickles, never tensor data. No pickle is executed:
//! `pickle` is an interpreter that knows no Python and only builds plain data.

pub mod distcp;
mod fault;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
pub mod metadata_pickle;
pub(crate) mod models;
mod pickle;
pub mod safetensors;
mod seal;
mod sharding;
mod tensor_pickle;
pub mod torch_file;
mod window;
mod zip;

#[cfg(test)]
mod tests;

pub use models::Model;
pub use seal::seal;

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A checkpoint that others wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// A stock DCP folder.
    Dcp,
    /// Safetensors files.
    Safetensors {
        /// The folder they are in.
        dir: PathBuf,
        /// Which of the files there.
        model: Model,
    },
    /// Files of `torch.save`.
    Torch {
        /// The folder they are in.
        dir: PathBuf,
        /// Which of the files there.
        model: Model,
    },
}

/// Length and modification time of a data file.
#[derive(Clone, Copy, Debug)]
struct Stat {
    size: u64,
    mtime_ns: i64,
}

/// Looks at a data file that a checkpoint names.
fn stat_data_file(path: &Path) -> Result<Stat> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(Stat {
            size: found.len(),
            mtime_ns: found
                .mtime()
                .saturating_mul(1_000_000_000)
                .saturating_add(found.mtime_nsec()),
        }),
        Ok(_) => Err(Error::corrupt_file(path, "it is not a file")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(Error::corrupt_file(path, "it is missing")),
        Err(e) => Err(Error::io("look at", path, e)),
    }
}

fn open_data_file(path: &Path) -> Result<File> {
    crate::store::open_file(path).map_err(|e| Error::io("open", path, e))
}
