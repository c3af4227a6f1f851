//! Opening a checkpoint of any kind.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::index_file::open_index;
use super::locate::{Found, find, find_data};
use crate::foreign::{Foreign, distcp, safetensors, torch_file};
use crate::format::{INDEX_NAME, Index, derive};
use crate::store::{Files, Remote, Storage};
use crate::{Control, Error, Result};

/// Opens the checkpoint at `path`, of any kind: its index file, or otherwise an index made in
/// memory. With `rank`, opens the checkpoint that the rank wrote for itself. With `remote`, `path`
/// is a URL on that store, and an index is fetched whole. If `threads` is 0, it uses all cores.
pub fn open(
    path: &Path,
    rank: Option<u32>,
    remote: Option<Arc<dyn Remote>>,
    threads: usize,
    control: &Control,
) -> Result<Index> {
    let storage = Storage::new(remote.as_ref(), threads, control)?;
    let files = storage.files();
    let index = look(files, path, rank, threads).map_err(|error| missing(files, path, error))?;
    Ok(index.on(remote))
}

/// Opens the checkpoint at `path` as [`open`] does, and reads its data files from those `tiers`
/// that have them. If the checkpoint is not there, or cannot be reached, the index of a tier
/// counts.
///
/// # Errors
/// That of [`open`], if no tier has an index.
pub fn open_in_tiers(
    path: &Path,
    tiers: Vec<PathBuf>,
    remote: Option<Arc<dyn Remote>>,
    control: &Control,
) -> Result<Index> {
    let error = match open(path, None, remote.clone(), 0, control) {
        Err(error @ (Error::NotFound { .. } | Error::Storage { .. } | Error::Io { .. })) => error,
        found => return Ok(found?.in_tiers(tiers)),
    };
    let mut problems: Vec<(PathBuf, String)> = Vec::new();
    for copy in tiers.iter().map(|tier| tier.join(INDEX_NAME)) {
        let index = match Files::Local.read_index(&copy) {
            Ok(None) => continue,
            Ok(Some(bytes)) => Index::from_bytes(bytes, &copy),
            Err(error) => Err(error),
        };
        match index {
            Ok(index) => {
                // Data files that no tier has are read from the folder of the checkpoint.
                let index = index.copied_from(&path.join(INDEX_NAME)).on(remote).in_tiers(tiers);
                for (copy, problem) in problems {
                    index.tiers().into_iter().for_each(|tiers| tiers.note(&copy, &problem));
                }
                return Ok(index);
            }
            Err(error) => problems.push((copy, error.to_string())),
        }
    }
    Err(error)
}

/// Indexes the foreign checkpoint at `path` as [`open`] does, but ignores an index that is there.
pub fn open_data(path: &Path, remote: Option<Arc<dyn Remote>>, control: &Control) -> Result<Index> {
    let storage = Storage::new(remote.as_ref(), 0, control)?;
    let files = storage.files();
    let index = index_of(files, path, &find_data(files, path)?, None, 0)?;
    if index.is_view() {
        return Err(Error::Unsupported(format!(
            "{}: no index file can describe the files of several ranks; dcp_rs.convert writes a \
             checkpoint of its own",
            path.display()
        )));
    }
    Ok(index.on(remote))
}

fn look(files: Files<'_>, path: &Path, rank: Option<u32>, threads: usize) -> Result<Index> {
    match find(files, path, rank)? {
        Found::Native(index, Some(bytes)) => Index::from_bytes(bytes, &index),
        Found::Native(index, None) => open_index(&index),
        Found::Foreign(kind) => index_of(files, path, &kind, rank, threads),
    }
}

/// Returns [`Error::NotFound`] in place of the error of a single file that is not on the store. Its
/// name alone made it a model.
fn missing(files: Files<'_>, path: &Path, error: Error) -> Error {
    let is_of_file = matches!(&error, Error::CorruptData { path: file, .. } if file == path);
    if is_of_file && files.is_remote() && matches!(files.has(path), Ok(false)) {
        return Error::NotFound { path: path.to_owned(), reason: "nothing is there".into() };
    }
    error
}

/// Indexes a foreign checkpoint in memory, over its own files, and writes nothing. The index has
/// the paths of one in the folder of the data.
fn index_of(
    files: Files<'_>,
    path: &Path,
    kind: &Foreign,
    rank: Option<u32>,
    threads: usize,
) -> Result<Index> {
    let (dir, bytes) = match kind {
        Foreign::Dcp => (path, distcp::index_folder(files, path, rank, threads)?),
        Foreign::Safetensors { dir, model } => {
            (dir.as_path(), safetensors::index_model(files, dir, model, threads)?)
        }
        Foreign::Torch { dir, model } => {
            (dir.as_path(), torch_file::index_model(files, dir, model, threads)?)
        }
        Foreign::TorchRanks { dir, names } => {
            let mut ranks = torch_file::index_ranks(files, dir, names, threads)?;
            let bytes = std::mem::take(&mut ranks.index);
            let base = Index::from_bytes(bytes, &dir.join(INDEX_NAME))?.made_of(path);
            let (hidden, logical) = ranks.views(&base);
            return derive(&Arc::new(base), &hidden, &logical, Vec::new());
        }
    };
    Ok(Index::from_bytes(bytes, &dir.join(INDEX_NAME))?.made_of(path))
}
