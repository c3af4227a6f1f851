//! Detection of the kind of checkpoint at a path.

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use crate::foreign::distcp::{METADATA_NAME, rank_metadata_name};
use crate::foreign::models::{self, Model};
use crate::foreign::{Foreign, rank_files, torch_file};
use crate::format::{DataFileName, INDEX_NAME, parse_rank_index_name, rank_index_name};
use crate::store::{self, Files, LOCK_NAME};
use crate::{Error, Result};

/// Reason for an error about a pattern without matches.
const NO_RANKS: &str = "no files of ranks (..._rank_0.pt) are named like that";

/// Kinds of checkpoints.
pub(super) enum Found {
    /// The index file of this crate, over data of any kind, and its bytes if they were read to find
    /// it.
    Native(PathBuf, Option<Vec<u8>>),
    /// A checkpoint without such an index.
    Foreign(Foreign),
}

/// Detects the checkpoint at `path`; with `rank`, the rank-local one. An index takes precedence,
/// because it may describe data of any other kind.
///
/// A folder may hold a hundred thousand files, so it is listed only if it has neither an index nor
/// DCP metadata. On a store each look is a request, so an index is read at once.
pub(super) fn find(files: Files<'_>, path: &Path, rank: Option<u32>) -> Result<Found> {
    if let Some(model) = file(files, path)? {
        return Ok(Found::Foreign(model));
    }
    let name =
        |of_rank: fn(u32) -> String, of_all: &str| rank.map_or_else(|| of_all.to_owned(), of_rank);
    let index = path.join(name(rank_index_name, INDEX_NAME));
    if files.is_remote() {
        if let Some(bytes) = files.read_index(&index)? {
            return Ok(Found::Native(index, Some(bytes)));
        }
    } else if is_there(files, &index)? {
        return Ok(Found::Native(index, None));
    }
    if is_there(files, &path.join(name(rank_metadata_name, METADATA_NAME)))? {
        return Ok(Found::Foreign(Foreign::Dcp));
    }
    match rank {
        Some(rank) => no(path, format!("rank {rank} wrote no index of its own")),
        None => models(files, path).map(Found::Foreign),
    }
}

/// Detects a foreign checkpoint at `path`, and ignores an index of this crate.
pub(super) fn find_data(files: Files<'_>, path: &Path) -> Result<Foreign> {
    if let Some(model) = file(files, path)? {
        return Ok(model);
    }
    if is_there(files, &path.join(METADATA_NAME))? {
        return Ok(Foreign::Dcp);
    }
    models(files, path)
}

fn no<T>(path: &Path, reason: impl Into<String>) -> Result<T> {
    Err(Error::NotFound { path: path.to_owned(), reason: reason.into() })
}

/// Detects the kind of a single file; returns `None` for a folder. On a store, only the name shows
/// the kind.
fn file(files: Files<'_>, path: &Path) -> Result<Option<Foreign>> {
    let is_local = !files.is_remote();
    let dir = path.parent().unwrap_or(Path::new("")).to_owned();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if rank_files::is_pattern(&name) && !is_there(files, path)? {
        let listed = if dir.as_os_str().is_empty() { Path::new(".") } else { &dir };
        let names = names(files, listed)?.unwrap_or_default();
        if let Some(names) = rank_files::choose(&dir, &names, Some(&name))? {
            return Ok(Some(Foreign::TorchRanks { dir, names }));
        }
        if is_local {
            return no(path, NO_RANKS);
        }
        // On a store, a folder may have such a name.
    }
    if is_local {
        match std::fs::metadata(path) {
            Ok(what) if what.is_file() => {}
            Ok(_) => return Ok(None),
            Err(e) if e.kind() == ErrorKind::NotFound => return no(path, "there is no such path"),
            Err(e) => return Err(Error::io("look at", path, e)),
        }
        if path.to_str().is_none() {
            let reason = format!("{}: the file name is not UTF-8", path.display());
            return Err(Error::Unsupported(reason));
        }
    }
    let start = if is_local { start(path)? } else { Vec::new() };
    // On a store, a folder may have such a name too.
    if torch_file::is_torch_file(&name, &start) && files.has(path)? {
        let model = Model::of_file(&name);
        return Ok(Some(Foreign::Torch { dir, model }));
    }
    if let Some(model) = Model::at(files, &dir, &name, &models::SAFETENSORS)? {
        return Ok(Some(Foreign::Safetensors { dir, model }));
    }
    if let Some(model) = Model::at(files, &dir, &name, &models::TORCH)? {
        return Ok(Some(Foreign::Torch { dir, model }));
    }
    if is_local {
        return no(
            path,
            "a single file must be a .safetensors file, a file of torch.save, or an .index.json \
            of such files",
        );
    }
    Ok(None)
}

/// Returns the first bytes of a file.
fn start(path: &Path) -> Result<Vec<u8>> {
    let file = store::open_file(path).map_err(|e| Error::io("open", path, e))?;
    let mut start = Vec::new();
    match file.take(torch_file::START as u64).read_to_end(&mut start) {
        Ok(_) => Ok(start),
        Err(e) => Err(Error::io("read", path, e)),
    }
}

/// Returns the model in a folder.
fn models(files: Files<'_>, path: &Path) -> Result<Foreign> {
    let listed = names(files, path)?;
    let can_list = listed.is_some();
    let names = match listed {
        Some(names) => names,
        // A server that cannot list files may still serve those with well-known names.
        None => models::known_names(files, path)?,
    };
    let dir = path.to_owned();
    // Like transformers, prefer safetensors. Those of other names may be an adapter.
    if !models::is_loaded_by_torch(files, path, &names)
        && let Some(model) = models::choose(files, path, &names, &models::SAFETENSORS)?
    {
        return Ok(Foreign::Safetensors { dir, model });
    }
    if let Some(model) = models::choose(files, path, &names, &models::TORCH)? {
        return Ok(Foreign::Torch { dir, model });
    }
    match rank_files::choose(path, &names, None)? {
        Some(names) => Ok(Foreign::TorchRanks { dir, names }),
        None if !can_list => no(
            path,
            "no index.dcprs, no .metadata and no model.safetensors is there, and this server \
            lists no files",
        ),
        None if names.is_empty() && files.is_remote() => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            no(path, if rank_files::is_pattern(&name) { NO_RANKS } else { "nothing is there" })
        }
        None => no(path, why_not(&names)),
    }
}

/// Returns whether the name exists, even as a dangling link.
fn is_there(files: Files<'_>, path: &Path) -> Result<bool> {
    if files.is_remote() {
        return files.has(path);
    }
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io("look at", path, e)),
    }
}

/// Returns whether the folder has native data files.
pub fn has_native_data(dir: &Path) -> Result<bool> {
    Ok(local_names(dir)?.iter().any(|name| DataFileName::parse(name).is_some()))
}

/// Refuses a folder with indexes of single ranks: an index of all ranks would take precedence, and
/// hide what those ranks saved.
///
/// # Errors
/// [`Error::Unsupported`], which names one of them.
pub fn check_no_rank_indexes(dir: &Path) -> Result<()> {
    check_no_rank_names(dir, &local_names(dir)?)
}

/// Does the same for a folder whose files have these names.
pub(super) fn check_no_rank_names(dir: &Path, names: &[String]) -> Result<()> {
    match names.iter().filter(|name| parse_rank_index_name(name).is_some()).min() {
        None => Ok(()),
        Some(name) => Err(Error::Unsupported(format!(
            "{}: an {INDEX_NAME} there would hide the indexes of a rank-local save, such as \
            {name}; remove them if they are not needed",
            dir.display()
        ))),
    }
}

/// Returns the names in a folder, except that of its lock; `None` if a store cannot list them.
pub(super) fn names(files: Files<'_>, dir: &Path) -> Result<Option<Vec<String>>> {
    match files {
        Files::Local => local_names(dir).map(Some),
        Files::Remote(connection, control) => connection.names(dir, control),
    }
}

/// Returns the names in a folder of the file system, except that of its lock.
pub(super) fn local_names(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io("list", dir, e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        // We look for no name that is not UTF-8.
        names.extend(entry.map_err(failed)?.file_name().into_string().ok());
    }
    names.retain(|name| name != LOCK_NAME);
    Ok(names)
}

/// Returns the most helpful guess at what is wrong with a folder without an index.
fn why_not(names: &[String]) -> &'static str {
    let any = |part: &str| names.iter().any(|name| name.contains(part));
    if names.iter().any(|name| name == INDEX_NAME) {
        "there is an index, but no data files beside it"
    } else if any(".metadata.tmp") || (any(".distcp") && !any(METADATA_NAME)) {
        "it has .distcp data but no .metadata: the save did not finish"
    } else if names.iter().any(|name| name.starts_with("__") && name.ends_with(METADATA_NAME)) {
        "its metadata is rank-local (__<rank>.metadata): it opens for one rank at a time"
    } else if names.iter().any(|name| name.starts_with("__") && name.ends_with(INDEX_NAME)) {
        "its index is rank-local (__<rank>.index.dcprs): it opens for one rank at a time"
    } else if names.iter().any(|name| DataFileName::parse(name).is_some()) {
        "it has data files but no index.dcprs: the save did not finish, or the index was lost \
        (dcp_rs.index(path) rebuilds it)"
    } else if names.is_empty() {
        "the folder is empty"
    } else if names.iter().any(|name| torch_file::is_torch_file(name, &[])) {
        "by their names, its files are of torch.save: open one of them"
    } else {
        "it holds no index.dcprs, no .metadata and no .safetensors file"
    }
}
