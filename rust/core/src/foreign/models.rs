//! Selection of the files in a folder that form one model.
//!
//! A folder may contain several: weights and an adapter, one for each precision, a copy in another
//! layout. This picks by name the model that transformers and diffusers would load. If they would
//! load neither, a folder with several models is refused.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use serde::Deserialize;

use super::stand_in;
use crate::format::DataFileName;
use crate::paths::{Reach, reach};
use crate::store::{Files, MOST_JSON};
use crate::{Error, Result, json};

/// A family of model files.
#[derive(Debug)]
pub(crate) struct Family {
    /// Suffix of the file names.
    suffix: &'static str,
    /// Possible prefixes of a model's file names; empty for any.
    stems: &'static [&'static str],
    /// Text between a model's name and `.json` in the name of the file that maps tensors to files.
    index: &'static str,
    /// Names that loaders look for, first match first: transformers (`SAFE_WEIGHTS_NAME`,
    /// `SAFE_WEIGHTS_INDEX_NAME` and the like in `utils/__init__.py`,
    /// `_get_resolved_checkpoint_files` in `modeling_utils.py`, seen in 5.23), and diffusers, which
    /// looks for the index first (`from_pretrained` in `models/modeling_utils.py`, seen in 0.42).
    loaded: &'static [&'static str],
}

pub(crate) const SAFETENSORS: Family = Family {
    suffix: ".safetensors",
    stems: &[],
    index: ".safetensors.index",
    loaded: &[
        "model.safetensors",
        "model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors",
    ],
};
/// Files of `torch.save`. Only the names that those libraries use count, because trainers leave
/// other `.bin` files in the folder.
pub(crate) const TORCH: Family = Family {
    suffix: ".bin",
    stems: &["pytorch_model", "diffusion_pytorch_model", "adapter_model"],
    index: ".bin.index",
    loaded: &[
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "diffusion_pytorch_model.bin.index.json",
        "diffusion_pytorch_model.bin",
    ],
};
/// Most names in a message.
const SHOWN: usize = 8;

/// A model, as its files in one folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    /// Their names, sorted.
    pub files: Vec<String>,
    /// The file of each tensor, if an index has it.
    pub weight_map: HashMap<String, String>,
}

impl Model {
    /// Returns a model of one file.
    pub(crate) fn of_file(name: &str) -> Self {
        Self { files: vec![name.to_owned()], ..Self::default() }
    }

    /// Returns the model with the index `name` in the folder.
    fn of_index(from: Files<'_>, dir: &Path, name: &str) -> Result<Self> {
        let weight_map = read_weight_map(from, dir, name)?;
        let files: BTreeSet<&String> = weight_map.values().collect();
        if files.is_empty() {
            return Err(Error::NotFound {
                path: dir.join(name),
                reason: "it names no files".into(),
            });
        }
        Ok(Self { files: files.into_iter().cloned().collect(), weight_map })
    }

    /// Returns the model that a file is or that it indexes; `None` if it is neither.
    pub(crate) fn at(
        from: Files<'_>,
        dir: &Path,
        name: &str,
        family: &Family,
    ) -> Result<Option<Self>> {
        if family.is_index(name) {
            Self::of_index(from, dir, name).map(Some)
        } else {
            Ok(name.ends_with(family.suffix).then(|| Self::of_file(name)))
        }
    }
}

impl Family {
    /// Returns whether a file of this name belongs to a model. Hidden files are leftovers of
    /// downloads or belong to macOS. Native data files count only if an index names them. Without
    /// an index, their save did not finish, or the index was lost.
    fn is_model_file(&self, name: &str) -> bool {
        let is_named =
            self.stems.is_empty() || self.stems.iter().any(|stem| name.starts_with(stem));
        name.ends_with(self.suffix)
            && is_named
            && !name.starts_with('.')
            && DataFileName::parse(name).is_none()
    }

    /// Returns whether a file of this name maps tensors to files: `model.safetensors.index.json`,
    /// perhaps with the name of a variant before `.json`.
    fn is_index(&self, name: &str) -> bool {
        let rest = name.strip_suffix(".json").and_then(|stem| stem.rsplit_once(self.index));
        rest.is_some_and(|(_, variant)| variant.is_empty() || variant.starts_with('.'))
    }
}

/// Returns the model of a folder with these file names; `None` if there is none.
///
/// # Errors
/// - [`Error::Unsupported`] if there are several models and no loader prefers one.
/// - [`Error::CorruptData`] if a file of a numbered series is missing.
/// - [`Error::CorruptIndex`] if the index of the model is invalid.
pub(crate) fn choose(
    from: Files<'_>,
    dir: &Path,
    names: &[String],
    family: &Family,
) -> Result<Option<Model>> {
    let is_model_index = |name: &str| family.is_index(name) && !name.starts_with('.');
    let sorted = |wanted: &dyn Fn(&str) -> bool| {
        let mut found: Vec<&str> =
            names.iter().map(String::as_str).filter(|name| wanted(name)).collect();
        found.sort_unstable();
        found
    };
    let (files, indexes) = (sorted(&|name| family.is_model_file(name)), sorted(&is_model_index));
    let series = by_series(&files, family);
    if indexes.is_empty() && series.len() <= 1 {
        return match series.into_iter().next() {
            None => Ok(None),
            Some((key, files)) => whole(dir, &key, &files, family).map(Some),
        };
    }
    if let Some(name) = named_by_config(from, dir, names)
        && let Some(model) = Model::at(from, dir, &name, family)?
    {
        return Ok(Some(model));
    }
    let preferred = family.loaded.iter().find(|&name| names.iter().any(|there| there == name));
    match (preferred, indexes.as_slice()) {
        (Some(name), _) | (None, [name]) => Model::at(from, dir, name, family),
        (None, _) => Err(several(dir, &indexes, &series, family)),
    }
}

/// Returns whether loaders look for a file of `torch.save` in the folder, and for no safetensors
/// file.
pub(crate) fn is_loaded_by_torch(from: Files<'_>, dir: &Path, names: &[String]) -> bool {
    let has_loaded =
        |family: &Family| family.loaded.iter().any(|&name| names.iter().any(|there| there == name));
    has_loaded(&TORCH)
        && !has_loaded(&SAFETENSORS)
        && named_by_config(from, dir, names).is_none_or(|name| !name.ends_with(SAFETENSORS.suffix))
}

/// Returns those of the names that loaders look for that exist, for a folder that cannot be listed.
pub(crate) fn known_names(from: Files<'_>, dir: &Path) -> Result<Vec<String>> {
    let Files::Remote(connection, control) = from else {
        return Ok(Vec::new());
    };
    let mut names = Vec::new();
    for name in SAFETENSORS.loaded {
        if connection.look(&dir.join(name), control)?.is_some() {
            names.push((*name).to_owned());
            break;
        }
    }
    Ok(names)
}

/// Group of a file, by its name alone: all ranks of one distributed save, a series with its length,
/// or a single file.
type Key<'a> = (Grouping, &'a str, &'a str, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Grouping {
    File,
    Series,
    Shards,
}

fn by_series<'a>(files: &[&'a str], family: &Family) -> BTreeMap<Key<'a>, Vec<&'a str>> {
    let mut all: BTreeMap<Key<'a>, Vec<&'a str>> = BTreeMap::new();
    for name in files {
        all.entry(key(name, family)).or_default().push(name);
    }
    all
}

fn key<'a>(name: &'a str, family: &Family) -> Key<'a> {
    // torch's `HuggingFaceStorageWriter(save_distributed=True)` writes a series for each rank. It
    // leaves out files for which the rank has no data.
    let shard = name
        .strip_prefix("shard-")
        .and_then(|rest| rest.split_once('-'))
        .filter(|(rank, _)| is_number(rank));
    if let Some((_, rest)) = shard {
        let (stem, variant) =
            numbered(rest, family).map_or((rest, ""), |part| (part.stem, part.variant));
        return (Grouping::Shards, stem, variant, 0);
    }
    match numbered(name, family) {
        Some(part) => (Grouping::Series, part.stem, part.variant, part.of),
        None => (Grouping::File, name, "", 0),
    }
}

/// A file of a series: `model-00002-of-00005.safetensors`, perhaps with the name of a variant in
/// it.
struct Numbered<'a> {
    stem: &'a str,
    number: u64,
    of: u64,
    variant: &'a str,
}

fn numbered<'a>(name: &'a str, family: &Family) -> Option<Numbered<'a>> {
    let (rest, of) = name.strip_suffix(family.suffix)?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let (of, variant) = of.split_at(of.find('.').unwrap_or(of.len()));
    let parse = |digits: &str| is_number(digits).then(|| digits.parse().ok())?;
    Some(Numbered { stem, number: parse(number)?, of: parse(of)?, variant })
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the model of these files, if none is missing.
fn whole(dir: &Path, key: &Key<'_>, files: &[&str], family: &Family) -> Result<Model> {
    if let (Grouping::Series, stem, variant, of) = *key {
        let numbers: BTreeSet<u64> =
            files.iter().filter_map(|name| Some(numbered(name, family)?.number)).collect();
        // Some writers count from 0.
        let first = u64::from(!numbers.contains(&0) || numbers.contains(&of));
        let path = |number: u64| {
            dir.join(format!("{stem}-{number:05}-of-{of:05}{variant}{}", family.suffix))
        };
        let known = numbers.range(first..first + of).count() as u64;
        if known != of {
            let missing = (first..first + of).find(|number| !numbers.contains(number));
            return Err(Error::corrupt_file(
                &path(missing.unwrap_or(of)),
                format!("it is missing: {known} of {of} files are there"),
            ));
        }
        let odd = |name: &&&str| {
            numbered(name, family).is_some_and(|part| !(first..first + of).contains(&part.number))
        };
        if let Some(name) = files.iter().find(odd) {
            let reason = format!("it is not one of the {of} files of its series: remove it");
            return Err(Error::corrupt_file(&dir.join(name), reason));
        }
    }
    Ok(Model { files: files.iter().map(|&name| name.to_owned()).collect(), ..Model::default() })
}

/// Returns the file that the model's own configuration names. transformers prefers it to all
/// others.
fn named_by_config(from: Files<'_>, dir: &Path, names: &[String]) -> Option<String> {
    let config = names.iter().find(|&name| name == "config.json")?;
    let text = from.read(&dir.join(config), MOST_JSON).ok()??;
    let config = json::parse(&text).ok()?;
    config["transformers_weights"].as_str().map(str::to_owned).filter(|name| names.contains(name))
}

fn several(
    dir: &Path,
    indexes: &[&str],
    series: &BTreeMap<Key<'_>, Vec<&str>>,
    family: &Family,
) -> Error {
    let of_series = series.values().map(|files| match files.as_slice() {
        [only] => (*only).to_owned(),
        [first, rest @ ..] => format!("{first} and {} more of its series", rest.len()),
        [] => String::new(),
    });
    let models: Vec<String> =
        indexes.iter().map(|&name| name.to_owned()).chain(of_series).collect();
    let more = match models.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Error::Unsupported(format!(
        "{}: several models in one folder, and no name that transformers or diffusers would \
         choose: {}{more}; open the one you want by its file \
         ({}, or {}.json where it has several), or make it the folder's by dcp_rs.index(file)",
        dir.display(),
        models[..models.len().min(SHOWN)].join(", "),
        family.suffix,
        family.index
    ))
}

#[derive(Deserialize)]
struct HfIndex {
    weight_map: HashMap<String, String>,
}

fn read_weight_map(from: Files<'_>, dir: &Path, name: &str) -> Result<HashMap<String, String>> {
    let path = dir.join(name);
    let Some(text) = from.read(&path, MOST_JSON)? else {
        return Err(Error::corrupt_file(&path, "it is missing"));
    };
    if let Some(what) = stand_in(&text) {
        return Err(Error::corrupt_index(&path, 0, what));
    }
    let mut index: HfIndex = serde_json::from_slice(&text).map_err(|e| {
        Error::corrupt_index(&path, 0, format!("line {} column {}: {e}", e.line(), e.column()))
    })?;
    for file in index.weight_map.values_mut().filter(|file| reach(file) != Reach::Plain) {
        let parts: Vec<&str> = file.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
        let plain = parts.join("/");
        if reach(file) != Reach::Inside || reach(&plain) != Reach::Plain {
            let reason = format!("file {file:?} leads out of the folder");
            return Err(Error::corrupt_index(&path, 0, reason));
        }
        *file = plain;
    }
    Ok(index.weight_map)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> std::result::Result<Vec<String>, String> {
        files_of(names, &SAFETENSORS)
    }

    fn files_of(names: &[&str], family: &Family) -> std::result::Result<Vec<String>, String> {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let stem = name.split_once(family.index).map_or("", |(stem, _)| stem);
            std::fs::write(
                dir.path().join(name),
                format!(
                    r#"{{"weight_map":{{"w":"of {stem}{}"}},"transformers_weights":"chosen.safetensors"}}"#,
                    family.suffix
                ),
            )
            .unwrap();
        }
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        match choose(Files::Local, dir.path(), &names, family) {
            Ok(model) => Ok(model.map(|model| model.files).unwrap_or_default()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn what_loaders_would_take_is_taken() {
        for (there, taken) in [
            (&["adapter_model.safetensors", "model.safetensors"][..], &["model.safetensors"][..]),
            (&["model.fp16.safetensors", "model.safetensors"], &["model.safetensors"]),
            (&["model.fp16.safetensors"], &["model.fp16.safetensors"]),
            (&["adapter_model.safetensors"], &["adapter_model.safetensors"]),
            (&["model.safetensors", "model.safetensors.index.json"], &["model.safetensors"]),
            (
                &["consolidated.safetensors", "model.safetensors.index.json"],
                &["of model.safetensors"],
            ),
            (
                &["model.safetensors.index.fp16.json", "model.safetensors.index.json"],
                &["of model.safetensors"],
            ),
            (&["a.safetensors", "model.safetensors.index.fp16.json"], &["of model.safetensors"]),
            (
                &[
                    "diffusion_pytorch_model.safetensors",
                    "diffusion_pytorch_model.safetensors.index.json",
                ],
                &["of diffusion_pytorch_model.safetensors"],
            ),
            (
                &[
                    "diffusion_pytorch_model.non_ema.safetensors",
                    "diffusion_pytorch_model.safetensors",
                ],
                &["diffusion_pytorch_model.safetensors"],
            ),
            (&["model.safetensors", "chosen.safetensors", "config.json"], &["chosen.safetensors"]),
            (&["model.safetensors", "config.json", "x.safetensors"], &["model.safetensors"]),
            (
                &["m-1-of-2.fp16.safetensors", "m-2-of-2.fp16.safetensors"],
                &["m-1-of-2.fp16.safetensors", "m-2-of-2.fp16.safetensors"],
            ),
            (
                &[
                    "shard-00001-model-00001-of-00002.safetensors",
                    "shard-00003-model-00002-of-00002.safetensors",
                ],
                &[
                    "shard-00001-model-00001-of-00002.safetensors",
                    "shard-00003-model-00002-of-00002.safetensors",
                ],
            ),
            (&[".model.safetensors", "README.md", "tokenizer.json"], &[]),
        ] {
            assert_eq!(files(there).unwrap(), taken, "{there:?}");
        }
    }

    #[test]
    fn of_files_of_torch_save_the_models_of_libraries_count() {
        for (there, taken) in [
            (
                &["pytorch_model.bin", "training_args.bin", "optimizer.bin"][..],
                &["pytorch_model.bin"][..],
            ),
            (&["pytorch_model.bin", "pytorch_model.fp16.bin"], &["pytorch_model.bin"]),
            (&["pytorch_model.bin.index.json", "adapter_model.bin"], &["of pytorch_model.bin"]),
            (
                &["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
                &["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
            ),
            (&["optimizer.bin", "checkpoint.pth", "model.pt"], &[]),
        ] {
            assert_eq!(files_of(there, &TORCH).unwrap(), taken, "{there:?}");
        }
        let error = files_of(&["pytorch_model-00001-of-00002.bin"], &TORCH).unwrap_err();
        assert!(
            error.contains("pytorch_model-00002-of-00002.bin") && error.contains("1 of 2"),
            "{error}"
        );
    }

    #[test]
    fn several_models_are_named() {
        for there in [
            &["a.safetensors", "b.safetensors"][..],
            &["model.bf16.safetensors", "model.fp16.safetensors"],
            &["model-00001-of-00001.safetensors", "consolidated.safetensors"],
            &["model-1-of-1.safetensors", "model-1-of-2.safetensors", "model-2-of-2.safetensors"],
            &["shard-00001-model-00001-of-00001.safetensors", "model-00001-of-00001.safetensors"],
            &["a.safetensors.index.json", "b.safetensors.index.json"],
        ] {
            let error = files(there).unwrap_err();
            assert!(error.contains("several models") && error.contains(there[0]), "{error}");
        }
        let many: Vec<String> = (10..30).map(|i| format!("m{i}.safetensors")).collect();
        let error = files(&many.iter().map(String::as_str).collect::<Vec<_>>()).unwrap_err();
        assert!(error.contains("m17.safetensors and 12 more"), "{error}");
    }
}
