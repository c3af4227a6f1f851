//! What kind of checkpoint a path is: found out by looking.

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use crate::foreign::distcp::{METADATA_NAME, rank_metadata_name};
use crate::foreign::models::{self, Model};
use crate::foreign::{Foreign, torch_file};
use crate::format::{DataFileName, INDEX_NAME, parse_rank_index_name, rank_index_name};
use crate::store::{self, Connection, Files, LOCK_NAME};
use crate::{Control, Error, Result};

/// What a path holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// A folder with an index of this crate, over data of whichever kind.
    Native,
    /// A checkpoint without one.
    Foreign(Foreign),
}

/// What is at `path`; with `rank`, what that rank wrote for itself. An index comes first: it may be over any of the others.
///
/// A folder is listed only where neither of the two names is there that make one a checkpoint: it may hold a hundred thousand files.
pub fn find(path: &Path, rank: Option<u32>) -> Result<Found> {
    if let Some(model) = file(path)? {
        return Ok(Found::Foreign(model));
    }
    let name = |of_rank: fn(u32) -> String, of_all: &str| rank.map_or_else(|| of_all.to_owned(), of_rank);
    if is_there(&path.join(name(rank_index_name, INDEX_NAME)))? {
        return Ok(Found::Native);
    }
    if is_there(&path.join(name(rank_metadata_name, METADATA_NAME)))? {
        return Ok(Found::Foreign(Foreign::Dcp));
    }
    match rank {
        Some(rank) => no(path, format!("rank {rank} wrote no index of its own")),
        None => models(path).map(Found::Foreign),
    }
}

/// What others wrote at `path`, whatever index of this crate lies there.
pub fn find_data(path: &Path) -> Result<Foreign> {
    if let Some(model) = file(path)? {
        return Ok(model);
    }
    if is_there(&path.join(METADATA_NAME))? {
        return Ok(Foreign::Dcp);
    }
    models(path)
}

fn no<T>(path: &Path, reason: impl Into<String>) -> Result<T> {
    Err(Error::NotFound {
        path: path.to_owned(),
        reason: reason.into(),
    })
}

/// What a single file is; nothing where the path is a folder.
fn file(path: &Path) -> Result<Option<Foreign>> {
    match std::fs::metadata(path) {
        Ok(what) if what.is_file() => {}
        Ok(_) => return Ok(None),
        Err(e) if e.kind() == ErrorKind::NotFound => return no(path, "there is no such path"),
        Err(e) => return Err(Error::io("look at", path, e)),
    }
    let dir = path.parent().unwrap_or(Path::new(""));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if path.to_str().is_none() {
        return Err(Error::Unsupported(format!(
            "{}: the file name is not UTF-8",
            path.display()
        )));
    }
    let dir = dir.to_owned();
    if torch_file::is_torch_file(&name, &start(path)?) {
        let model = Model::of_file(&name);
        return Ok(Some(Foreign::Torch { dir, model }));
    }
    if let Some(model) = Model::at(Files::Local, &dir, &name, &models::SAFETENSORS)? {
        return Ok(Some(Foreign::Safetensors { dir, model }));
    }
    if let Some(model) = Model::at(Files::Local, &dir, &name, &models::TORCH)? {
        return Ok(Some(Foreign::Torch { dir, model }));
    }
    no(
        path,
        "a single file must be a .safetensors file, a file of torch.save, or an .index.json of such files",
    )
}

/// The first bytes of a file.
fn start(path: &Path) -> Result<Vec<u8>> {
    let file = store::open_file(path).map_err(|e| Error::io("open", path, e))?;
    let mut start = Vec::new();
    match file.take(torch_file::START as u64).read_to_end(&mut start) {
        Ok(_) => Ok(start),
        Err(e) => Err(Error::io("read", path, e)),
    }
}

/// The model of a folder, of files with these names.
fn model_of(files: Files<'_>, path: &Path, names: &[String]) -> Result<Option<Foreign>> {
    let dir = path.to_owned();
    // transformers prefers safetensors too.
    if let Some(model) = models::choose(files, path, names, &models::SAFETENSORS)? {
        return Ok(Some(Foreign::Safetensors { dir, model }));
    }
    let model = models::choose(files, path, names, &models::TORCH)?;
    Ok(model.map(|model| Foreign::Torch { dir, model }))
}

fn models(path: &Path) -> Result<Foreign> {
    let names = names(path)?;
    match model_of(Files::Local, path, &names)? {
        Some(model) => Ok(model),
        None => no(path, why_not(&names)),
    }
}

/// What is at a path that is a URL: the kinds that are read in place there. Each look is a request, so an index is asked for at once, and
/// taken where it is.
pub(super) fn find_remote(
    connection: &dyn Connection,
    path: &Path,
    rank: Option<u32>,
    control: &Control,
) -> Result<FoundRemote> {
    let files = Files::Remote(connection, control);
    if rank.is_none()
        && let Some(model) = remote_file(files, path)?
    {
        return Ok(FoundRemote::Foreign(model));
    }
    let index = path.join(rank.map_or_else(|| INDEX_NAME.to_owned(), rank_index_name));
    if let Some(bytes) = files.read(&index)? {
        return Ok(FoundRemote::Native { index, bytes });
    }
    let metadata = path.join(rank.map_or_else(|| METADATA_NAME.to_owned(), rank_metadata_name));
    if connection.look(&metadata, control)?.is_some() {
        return Ok(FoundRemote::Foreign(Foreign::Dcp));
    }
    if let Some(rank) = rank {
        return no(path, format!("rank {rank} wrote no index of its own"));
    }
    remote_model(connection, path, control).map(FoundRemote::Foreign)
}

/// What others wrote at a path that is a URL, whatever index lies there.
pub(super) fn find_remote_data(connection: &dyn Connection, path: &Path, control: &Control) -> Result<Foreign> {
    if let Some(model) = remote_file(Files::Remote(connection, control), path)? {
        return Ok(model);
    }
    if connection.look(&path.join(METADATA_NAME), control)?.is_some() {
        return Ok(Foreign::Dcp);
    }
    remote_model(connection, path, control)
}

/// What a single file is, by its name; nothing where that is no name of one.
fn remote_file(files: Files<'_>, path: &Path) -> Result<Option<Foreign>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let dir = path.parent().unwrap_or(Path::new("")).to_owned();
    if let Some(model) = Model::at(files, &dir, &name, &models::SAFETENSORS)? {
        return Ok(Some(Foreign::Safetensors { dir, model }));
    }
    // A folder may be called so too.
    if torch_file::is_torch_file(&name, &[]) && files.has(path)? {
        let model = Model::of_file(&name);
        return Ok(Some(Foreign::Torch { dir, model }));
    }
    let model = Model::at(files, &dir, &name, &models::TORCH)?;
    Ok(model.map(|model| Foreign::Torch { dir, model }))
}

fn remote_model(connection: &dyn Connection, path: &Path, control: &Control) -> Result<Foreign> {
    let files = Files::Remote(connection, control);
    let names = connection.names(path, control)?;
    let can_list = names.is_some();
    let names = match names {
        Some(names) => names,
        // A server of files tells what it has to who asks for it by name.
        None => models::known_names(files, path)?,
    };
    match model_of(files, path, &names)? {
        Some(model) => Ok(model),
        None if !can_list => no(
            path,
            "no index.dcprs, no .metadata and no model.safetensors is there, and this server lists no files",
        ),
        None if names.is_empty() => no(path, "nothing is there"),
        None => no(path, why_not(&names)),
    }
}

/// What [`find_remote`] finds.
pub(super) enum FoundRemote {
    /// An index of this crate: where, and its bytes.
    Native { index: PathBuf, bytes: Vec<u8> },
    /// A checkpoint without one.
    Foreign(Foreign),
}

/// Whether there is something of this name, and be it a link that leads nowhere.
fn is_there(path: &Path) -> Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io("look at", path, e)),
    }
}

/// Whether the folder holds native data files.
pub fn has_native_data(dir: &Path) -> Result<bool> {
    Ok(names(dir)?.iter().any(|name| DataFileName::parse(name).is_some()))
}

/// Refuses a folder in which ranks have indexes of their own: one of all ranks would come before them, and hide what they saved.
///
/// # Errors
/// [`Error::Unsupported`], which names one of them.
pub fn check_no_rank_indexes(dir: &Path) -> Result<()> {
    check_no_rank_names(dir, &names(dir)?)
}

/// The same of a folder whose files have these names.
pub(super) fn check_no_rank_names(dir: &Path, names: &[String]) -> Result<()> {
    match names.iter().filter(|name| parse_rank_index_name(name).is_some()).min() {
        None => Ok(()),
        Some(name) => Err(Error::Unsupported(format!(
            "{}: an {INDEX_NAME} there would hide the indexes of a rank-local save, such as {name}; remove them if they are not needed",
            dir.display()
        ))),
    }
}

/// The names in a folder, but for that of its lock.
pub(super) fn names(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io("list", dir, e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        // A name that is not UTF-8 is none that is looked for.
        names.extend(entry.map_err(failed)?.file_name().into_string().ok());
    }
    names.retain(|name| name != LOCK_NAME);
    Ok(names)
}

/// The most helpful guess at what a folder without an index is.
fn why_not(names: &[String]) -> &'static str {
    let any = |part: &str| names.iter().any(|name| name.contains(part));
    if names.iter().any(|name| name == INDEX_NAME) {
        "there is an index, but no data files beside it"
    } else if any(".metadata.tmp") || (any(".distcp") && !any(METADATA_NAME)) {
        "it has .distcp data but no .metadata: the save did not finish"
    } else if names
        .iter()
        .any(|name| name.starts_with("__") && name.ends_with(METADATA_NAME))
    {
        "its metadata is rank-local (__<rank>.metadata): it opens for one rank at a time"
    } else if names
        .iter()
        .any(|name| name.starts_with("__") && name.ends_with(INDEX_NAME))
    {
        "its index is rank-local (__<rank>.index.dcprs): it opens for one rank at a time"
    } else if names.iter().any(|name| DataFileName::parse(name).is_some()) {
        "it has data files but no index.dcprs: the save did not finish, or the index was lost (dcp_rs.index(path) rebuilds it)"
    } else if names.is_empty() {
        "the folder is empty"
    } else if names.iter().any(|name| torch_file::is_torch_file(name, &[])) {
        "by their names, its files are of torch.save: open one of them"
    } else {
        "it holds no index.dcprs, no .metadata and no .safetensors file"
    }
}
