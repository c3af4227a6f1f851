//! Names of files that each rank saved with `torch.save`: `model_world_size_8_rank_0.pt` and the
//! like.

use std::collections::BTreeMap;
use std::path::Path;

use crate::{Error, Result};

/// File names with these endings belong to files of `torch.save`.
const ENDINGS: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];
/// The series that is a model, if a folder has several.
const MODELS: [&str; 2] = ["model", "pytorch_model"];

/// Stem, number of ranks if the name has it, and ending of the names of a series.
type Series<'a> = (&'a str, Option<u64>, &'a str);

/// Returns the names of the files of all ranks, in the order of the ranks. `pattern` chooses a
/// series; without it, a folder has one, or one of a model. Returns `None` if there is none.
///
/// # Errors
/// - [`Error::Unsupported`] if there are several series.
/// - [`Error::CorruptData`] if the file of a rank is missing.
pub(crate) fn choose(
    dir: &Path,
    names: &[String],
    pattern: Option<&str>,
) -> Result<Option<Vec<String>>> {
    let mut all: BTreeMap<Series<'_>, BTreeMap<u64, &str>> = BTreeMap::new();
    for name in names {
        if !name.starts_with('.')
            && pattern.is_none_or(|pattern| matches(pattern, name))
            && let Some((series, rank)) = parse(name)
            && let Some(other) = all.entry(series).or_default().insert(rank, name)
        {
            let reason = format!("rank {rank} has two files there, {other} and {name}");
            return Err(Error::Unsupported(format!("{}: {reason}", dir.display())));
        }
    }
    if pattern.is_none() && all.len() > 1 && all.keys().any(|(stem, ..)| MODELS.contains(stem)) {
        all.retain(|(stem, ..), _| MODELS.contains(stem));
    }
    if all.len() > 1 {
        let patterns: Vec<String> = all.iter().map(|(series, files)| glob(series, files)).collect();
        return Err(Error::Unsupported(format!(
            "{}: files of several saves by each rank: {}; open the one you want by its pattern",
            dir.display(),
            patterns.join(", ")
        )));
    }
    let Some(((_, world, _), files)) = all.into_iter().next() else { return Ok(None) };
    let last = files.last_key_value().map_or(0, |(rank, _)| *rank);
    let world = world.unwrap_or(last + 1);
    let lacking = (0..world).find(|rank| !files.contains_key(rank));
    if let (Some(lacking), Some((rank, name))) = (lacking, files.first_key_value()) {
        let missing = with_rank(name, *rank, &lacking.to_string());
        let reason = format!("it is missing: {} of {world} ranks have a file", files.len());
        return Err(Error::corrupt_file(&dir.join(missing), reason));
    }
    if last >= world {
        let name = files[&last];
        let reason = format!("it is of rank {last}, and its name says that there are {world}");
        return Err(Error::corrupt_file(&dir.join(name), reason));
    }
    Ok(Some(files.into_values().map(str::to_owned).collect()))
}

/// Returns whether a name is a pattern.
pub(crate) fn is_pattern(name: &str) -> bool {
    name.contains('*')
}

/// Returns whether a name is as in a pattern, where `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((begin, rest)) => name.strip_prefix(begin).is_some_and(|name| {
            (0..=name.len())
                .filter(|&at| name.is_char_boundary(at))
                .any(|at| matches(rest, &name[at..]))
        }),
    }
}

fn parse(name: &str) -> Option<(Series<'_>, u64)> {
    let ending = *ENDINGS.iter().find(|ending| name.ends_with(**ending))?;
    let stem = name.strip_suffix(ending)?;
    let digits = stem.len() - stem.bytes().rev().take_while(u8::is_ascii_digit).count();
    let rank = stem[digits..].parse().ok()?;
    let is_separator = |c| matches!(c, '_' | '-' | '.');
    let stem = stem[..digits].trim_end_matches(is_separator).strip_suffix("rank")?;
    if !stem.is_empty() && !stem.ends_with(is_separator) {
        return None;
    }
    let stem = stem.trim_end_matches(is_separator);
    let (stem, world) = match stem.rsplit_once("world_size_") {
        Some((stem, world)) => (stem.trim_end_matches(is_separator), Some(world.parse().ok()?)),
        None => (stem, None),
    };
    Some(((stem, world, ending), rank))
}

/// Returns the name of the same series with another text for the rank.
fn with_rank(name: &str, rank: u64, text: &str) -> String {
    match name.rsplit_once(&rank.to_string()) {
        Some((begin, end)) => format!("{begin}{text}{end}"),
        None => name.to_owned(),
    }
}

fn glob((stem, ..): &Series<'_>, files: &BTreeMap<u64, &str>) -> String {
    files
        .first_key_value()
        .map_or_else(|| (*stem).to_owned(), |(rank, name)| with_rank(name, *rank, "*"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], pattern: Option<&str>) -> std::result::Result<Vec<String>, String> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let found = choose(Path::new("dir"), &names, pattern);
        found.map(Option::unwrap_or_default).map_err(|error| error.to_string())
    }

    #[test]
    fn series_by_their_names() {
        let verl = [
            "model_world_size_2_rank_1.pt",
            "model_world_size_2_rank_0.pt",
            "optim_world_size_2_rank_0.pt",
            "optim_world_size_2_rank_1.pt",
            "config.json",
        ];
        assert_eq!(chosen(&verl, None).unwrap(), [verl[1], verl[0]]);
        assert_eq!(chosen(&verl, Some("optim*.pt")).unwrap(), [verl[2], verl[3]]);
        let error = chosen(&verl, Some("*_rank_*.pt")).unwrap_err();
        for series in ["model_world_size_2_rank_*.pt", "optim_world_size_2_rank_*.pt"] {
            assert!(error.contains(series), "{error}");
        }
        assert_eq!(chosen(&["rank1.pt", "rank0.pt"], None).unwrap(), ["rank0.pt", "rank1.pt"]);
        assert_eq!(chosen(&["w_rank_0.bin"], Some("*_rank_*.bin")).unwrap(), ["w_rank_0.bin"]);
        for none in [&["model.pt", "frank1.pt", "rank.pt", ".rank0.pt", "rank0.txt"][..], &[]] {
            assert!(chosen(none, None).unwrap().is_empty());
        }
        assert!(chosen(&verl, Some("x*")).unwrap().is_empty());
        let ten: Vec<String> = (0..11).map(|rank| format!("rank{rank}.pt")).collect();
        let names: Vec<&str> = ten.iter().map(String::as_str).collect();
        assert_eq!(chosen(&names, None).unwrap()[10], "rank10.pt");
    }

    #[test]
    fn errors_name_the_file() {
        for (names, named) in [
            (
                &["m_world_size_3_rank_0.pt", "m_world_size_3_rank_2.pt"][..],
                "m_world_size_3_rank_1.pt",
            ),
            (&["m_rank_1.pt"], "m_rank_0.pt"),
            (&["m_world_size_1_rank_0.pt", "m_world_size_1_rank_1.pt"], "m_world_size_1_rank_1.pt"),
            (&["m_world_size_1_rank_0.pt", "m_world_size_2_rank_0.pt"], "m_world_size_2_rank_*.pt"),
            (&["rank0.pt", "rank00.pt"], "rank00.pt"),
        ] {
            let error = chosen(names, None).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
