//! Opening a checkpoint, whatever it is.

use std::path::Path;

use super::index_file::open_index;
use super::locate::{Found, find, find_data};
use crate::Result;
use crate::foreign::{Foreign, distcp, safetensors, torch_file};
use crate::format::{INDEX_NAME, Index, rank_index_name};

/// Opens the checkpoint at `path`, whatever it is: its index file, or else an index made in memory. With `rank`, what that rank wrote for itself.
/// `threads` may be 0: as many as there are cores.
pub fn open(path: &Path, rank: Option<u32>, threads: usize) -> Result<Index> {
    match find(path, rank)? {
        Found::Native => open_index(&path.join(rank.map_or(INDEX_NAME.into(), rank_index_name))),
        Found::Foreign(kind) => index(path, &kind, rank, threads),
    }
}

/// Indexes what others wrote at `path`, whatever index lies there.
pub fn open_data(path: &Path, threads: usize) -> Result<Index> {
    index(path, &find_data(path)?, None, threads)
}

/// Indexes a checkpoint that [`find`] found: in memory, over its own files, nothing is written. With `rank`, what that rank wrote for
/// itself. `threads` may be 0: as many as there are cores. The index is as one that lies in the folder of the data.
pub fn index(path: &Path, kind: &Foreign, rank: Option<u32>, threads: usize) -> Result<Index> {
    let (dir, bytes) = match kind {
        Foreign::Dcp => (path, distcp::index_folder(path, rank, threads)?),
        Foreign::Safetensors { dir, model } => (dir.as_path(), safetensors::index_model(dir, model, threads)?),
        Foreign::Torch { dir, model } => (dir.as_path(), torch_file::index_model(dir, model, threads)?),
    };
    // Its names were found by looking at the folder: links there are those of whoever made the folder (a cache of downloads).
    Ok(Index::from_bytes(bytes, &dir.join(INDEX_NAME))?.following_links())
}
