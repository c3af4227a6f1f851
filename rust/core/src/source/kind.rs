//! What kind of checkpoint a path is: found out by looking.

use std::path::Path;

use super::distcp::{METADATA_NAME, rank_metadata_name};
use super::safetensors::is_model_file;
use crate::format::{DataFileName, INDEX_NAME, parse_rank_index_name, rank_index_name};
use crate::{Error, Result};

/// What a path holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A folder with an index of this crate, over data of whichever kind.
    Native,
    /// A checkpoint without one.
    Foreign(Foreign),
}

/// A kind of checkpoint that others wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// A stock DCP folder.
    Dcp,
    /// A folder of safetensors files.
    SafetensorsFolder,
    /// One safetensors file.
    SafetensorsFile,
}

/// What is at `path`; with `rank`, what that rank wrote for itself. An index comes first: it may be over any of the others.
pub fn find(path: &Path, rank: Option<u32>) -> Result<Found> {
    let no = |reason: String| {
        Err(Error::NotFound {
            path: path.to_owned(),
            reason,
        })
    };
    let what = match std::fs::metadata(path) {
        Ok(what) => what,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return no("there is no such path".into()),
        Err(e) => return Err(Error::io("look at", path, e)),
    };
    if what.is_file() {
        return if path.extension().is_some_and(|extension| extension == "safetensors") {
            Ok(Found::Foreign(Foreign::SafetensorsFile))
        } else {
            no("of single files only .safetensors ones open; dcp_rs.convert makes a checkpoint of a file of torch.save".into())
        };
    }
    let names = names(path)?;
    let has = |name: &str| names.iter().any(|n| n == name);
    if let Some(rank) = rank {
        return match (has(&rank_index_name(rank)), has(&rank_metadata_name(rank))) {
            (true, _) => Ok(Found::Native),
            (false, true) => Ok(Found::Foreign(Foreign::Dcp)),
            (false, false) => no(format!("rank {rank} wrote no index of its own")),
        };
    }
    if has(INDEX_NAME) {
        Ok(Found::Native)
    } else if has(METADATA_NAME) {
        Ok(Found::Foreign(Foreign::Dcp))
    } else if names.iter().any(|name| is_model_file(name)) {
        Ok(Found::Foreign(Foreign::SafetensorsFolder))
    } else {
        no(why_not(&names).into())
    }
}

/// What others wrote at `path`, whatever index of this crate lies there.
pub fn find_data(path: &Path) -> Result<Foreign> {
    let names = if path.is_dir() { names(path)? } else { Vec::new() };
    if names.iter().any(|name| name == METADATA_NAME) {
        return Ok(Foreign::Dcp);
    }
    if names.iter().any(|name| is_model_file(name)) {
        return Ok(Foreign::SafetensorsFolder);
    }
    match find(path, None)? {
        Found::Foreign(kind) => Ok(kind),
        Found::Native => Err(Error::NotFound {
            path: path.to_owned(),
            reason: "there is an index, but no data of others beside it".into(),
        }),
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
    let names = names(dir)?;
    match names.iter().filter(|name| parse_rank_index_name(name).is_some()).min() {
        None => Ok(()),
        Some(name) => Err(Error::Unsupported(format!(
            "{}: an {INDEX_NAME} there would come before the indexes of a rank-local save, as {name}; remove those that are not needed",
            dir.display()
        ))),
    }
}

fn names(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io("list", dir, e);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        // A name that is not UTF-8 is none that is looked for.
        names.extend(entry.map_err(failed)?.file_name().into_string().ok());
    }
    Ok(names)
}

/// Whether a file is named as those of `torch.save` are.
fn is_torch_file(name: &str) -> bool {
    [".pt", ".pth", ".bin", ".ckpt"]
        .iter()
        .any(|ending| name.ends_with(ending))
}

/// The most helpful guess at what a folder without an index is.
fn why_not(names: &[String]) -> &'static str {
    let any = |part: &str| names.iter().any(|name| name.contains(part));
    if any(".metadata.tmp") || (any(".distcp") && !any(METADATA_NAME)) {
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
        "it has data files but no index.dcprs: the save did not finish, or dcp_rs.index(path) rebuilds it"
    } else if names.is_empty() {
        "the folder is empty"
    } else if names.iter().any(|name| is_torch_file(name)) {
        "it holds files of torch.save, to judge by their names: dcp_rs.convert makes a checkpoint of one"
    } else {
        "it holds no index.dcprs, no .metadata and no .safetensors file"
    }
}
