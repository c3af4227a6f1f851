//! Checkpoints as they are found: what others wrote, read in place (each becomes an index over its own files), and native data files
//! whose index was lost.
//!
//! Opening reads headers, archive directories and small pickles, never tensor data. No pickle is executed:
//! `pickle` is an interpreter that knows no Python and only builds plain data.

mod data_header;
pub mod distcp;
mod fault;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod kind;
pub mod metadata_pickle;
mod payload;
mod pickle;
mod recover;
pub mod safetensors;
mod seal;
mod sharding;
mod tensor_pickle;
mod window;
mod zip;

#[cfg(test)]
mod tests;

pub use kind::{Foreign, Found, check_no_rank_indexes, find, find_data, has_native_data};
pub use recover::{RecoverOptions, recover};
pub use seal::seal;

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::format::{INDEX_NAME, Index, rank_index_name};
use crate::{Error, Result, load};

/// Opens the checkpoint at `path`, whatever it is: its index file, or else an index made in memory. With `rank`, what that rank wrote for itself.
/// `threads` may be 0: as many as there are cores.
pub fn open(path: &Path, rank: Option<u32>, threads: usize) -> Result<Index> {
    match find(path, rank)? {
        Found::Native => load::open_index(&path.join(rank.map_or(INDEX_NAME.into(), rank_index_name))),
        Found::Foreign(kind) => index(path, kind, rank, threads),
    }
}

/// Indexes what others wrote at `path`, whatever index lies there.
pub fn open_data(path: &Path, threads: usize) -> Result<Index> {
    index(path, find_data(path)?, None, threads)
}

/// Indexes a checkpoint that [`find`] found: in memory, over its own files, nothing is written. With `rank`, what that rank wrote for
/// itself. `threads` may be 0: as many as there are cores. The index is as one that lies in the folder of the data.
pub fn index(path: &Path, kind: Foreign, rank: Option<u32>, threads: usize) -> Result<Index> {
    let (dir, bytes) = match kind {
        Foreign::Dcp => (path, distcp::index_folder(path, rank, threads)?),
        Foreign::SafetensorsFolder => (path, safetensors::index_folder(path, threads)?),
        Foreign::SafetensorsFile => (path.parent().unwrap_or(Path::new("")), safetensors::index_file(path)?),
    };
    // Its names were found by looking at the folder: links there are those of whoever made the folder (a cache of downloads).
    Ok(Index::from_bytes(bytes, &dir.join(INDEX_NAME))?.following_links())
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
