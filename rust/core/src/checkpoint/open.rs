//! Opening a checkpoint, whatever it is.

use std::path::Path;
use std::sync::Arc;

use super::index_file::open_index;
use super::locate::{Found, FoundRemote, find, find_data, find_remote, find_remote_data};
use crate::foreign::{Foreign, distcp, safetensors, torch_file};
use crate::format::{INDEX_NAME, Index, rank_index_name};
use crate::store::{Files, Remote};
use crate::{Control, Result};

/// Opens the checkpoint at `path`, whatever it is: its index file, or else an index made in memory. With `rank`, what that rank wrote for itself.
/// `threads` may be 0: as many as there are cores.
pub fn open(path: &Path, rank: Option<u32>, threads: usize) -> Result<Index> {
    match find(path, rank)? {
        Found::Native => open_index(&path.join(rank.map_or(INDEX_NAME.into(), rank_index_name))),
        Found::Foreign(kind) => index(path, &kind, rank, threads),
    }
}

/// The same of a URL, by way of `remote`. The index is fetched whole.
pub fn open_remote(path: &Path, rank: Option<u32>, remote: Arc<dyn Remote>, control: &Control) -> Result<Index> {
    let connection = remote.connect(0)?;
    match find_remote(&*connection, path, rank, control)? {
        FoundRemote::Native { index, bytes } => {
            let index = Index::from_bytes(bytes, &index)?;
            Ok(index.on(remote))
        }
        FoundRemote::Foreign(kind) => {
            let files = Files::Remote(&*connection, control);
            Ok(index_of(files, path, &kind, rank, 0)?.on(Arc::clone(&remote)))
        }
    }
}

/// Indexes what others wrote at `path`, whatever index lies there.
pub fn open_data(path: &Path, threads: usize) -> Result<Index> {
    index(path, &find_data(path)?, None, threads)
}

/// The same of a URL, by way of `remote`.
pub fn open_remote_data(path: &Path, remote: Arc<dyn Remote>, control: &Control) -> Result<Index> {
    let connection = remote.connect(0)?;
    let kind = find_remote_data(&*connection, path, control)?;
    let files = Files::Remote(&*connection, control);
    Ok(index_of(files, path, &kind, None, 0)?.on(remote))
}

/// Indexes a checkpoint that [`find`] found: in memory, over its own files, nothing is written. With `rank`, what that rank wrote for
/// itself. `threads` may be 0: as many as there are cores. The index is as one that lies in the folder of the data.
pub fn index(path: &Path, kind: &Foreign, rank: Option<u32>, threads: usize) -> Result<Index> {
    index_of(Files::Local, path, kind, rank, threads)
}

fn index_of(files: Files<'_>, path: &Path, kind: &Foreign, rank: Option<u32>, threads: usize) -> Result<Index> {
    let (dir, bytes) = match kind {
        Foreign::Dcp => (path, distcp::index_folder(files, path, rank, threads)?),
        Foreign::Safetensors { dir, model } => (dir.as_path(), safetensors::index_model(files, dir, model, threads)?),
        Foreign::Torch { dir, model } => (dir.as_path(), torch_file::index_model(files, dir, model, threads)?),
    };
    Ok(Index::from_bytes(bytes, &dir.join(INDEX_NAME))?.made_of(path))
}
