//! Rebuilding a lost index from the data files: section 8 of `docs/format.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::data_header::DataHeader;
use super::locate::check_no_rank_indexes;
use super::payload::PayloadReader;
use crate::copy::Signs;
use crate::format::{BLOCK_SIZE, ChunkEntry, DataFileName, IndexBuilder, SourceKind, Value, block_count, block_digest};
use crate::store::random_bytes;
use crate::{Control, Error, Result, parallel};

/// Which save to recover, and how.
#[derive(Clone, Debug, Default)]
pub struct RecoverOptions {
    /// Only this generation. `None`: the highest that is complete.
    pub generation: Option<u64>,
    /// Of each rank that wrote files with one of these tokens, only those. Needed for the ranks of which there are several parts, where two saves
    /// of one generation are complete.
    pub tokens: Vec<u64>,
    /// Threads, each with a read in flight. 0: 8, or as many as the cores that this process may use.
    pub threads: usize,
}

/// The bytes of an index over the data files in `dir`, as the save that wrote them had it: but for a `save_id` of its
/// own and planner data other than paths. No file is changed. Those of a rank-local save are no part of any index of all ranks.
///
/// All payload is read, to hash it; `control` counts its bytes.
///
/// # Errors
/// [`Error::Unsupported`] where ranks have indexes of their own there; [`Error::NotFound`] where no generation is complete, with what
/// each one lacks; [`Error::Plan`] where there are two complete saves to choose from; [`Error::CorruptIndex`] where headers contradict
/// each other.
pub fn recover(dir: &Path, options: &RecoverOptions, control: &Control) -> Result<Vec<u8>> {
    check_no_rank_indexes(dir)?;
    let mut reasons = String::new();
    for (generation, names) in data_files(dir, options)?.into_iter().rev() {
        let (headers, refused): (Vec<_>, Vec<_>) = names
            .into_iter()
            .map(|name| DataHeader::read(dir, name))
            .partition(Result::is_ok);
        let (alone, headers): (Vec<_>, Vec<_>) = headers
            .into_iter()
            .flatten()
            .partition(|header: &DataHeader| header.world_size == 0);
        let headers = complete_set(generation, headers)?;
        if !headers.is_empty() {
            return build(generation, &headers, options, control);
        }
        write!(reasons, "; generation {generation} is not complete").expect("a String takes all");
        if let Some(DataHeader { name, .. }) = alone.first() {
            write!(reasons, " ({name} is of a rank-local save)").expect("a String takes all");
        }
        if let Some(error) = refused.into_iter().find_map(Result::err) {
            write!(reasons, " ({error})").expect("a String takes all");
        }
    }
    Err(Error::NotFound {
        path: dir.to_owned(),
        reason: format!("no complete set of data files{reasons}"),
    })
}

/// The data files of those saves that [`recover`] could make an index for.
pub(super) fn recoverable(dir: &Path) -> Result<BTreeSet<DataFileName>> {
    let mut found = BTreeSet::new();
    for (generation, names) in data_files(dir, &RecoverOptions::default())? {
        let headers = names.iter().filter_map(|&name| DataHeader::read(dir, name).ok());
        let headers = headers.filter(|header| header.world_size != 0).collect();
        match complete_set(generation, headers) {
            Ok(headers) => found.extend(headers.iter().map(|header| header.name)),
            // There are several.
            Err(_) => found.extend(names),
        }
    }
    Ok(found)
}

/// The names of data files, by generation.
fn data_files(dir: &Path, options: &RecoverOptions) -> Result<BTreeMap<u64, BTreeSet<DataFileName>>> {
    let io = |error| Error::io("list", dir, error);
    let mut found: BTreeMap<u64, BTreeSet<DataFileName>> = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let file_name = entry.map_err(io)?.file_name();
        let Some(name) = file_name.to_str().and_then(DataFileName::parse) else {
            continue;
        };
        if options.generation.is_none_or(|wanted| wanted == name.generation) {
            found.entry(name.generation).or_default().insert(name);
        }
    }
    if !options.tokens.is_empty() {
        let is_chosen = |name: &DataFileName| options.tokens.contains(&name.token);
        found.retain(|_, names| names.iter().any(is_chosen));
        for names in found.values_mut() {
            let decided: BTreeSet<u32> = names
                .iter()
                .filter(|name| is_chosen(name))
                .map(|name| name.rank)
                .collect();
            names.retain(|name| is_chosen(name) || !decided.contains(&name.rank));
        }
    }
    Ok(found)
}

/// The files of the one save of this generation of which every rank's part is there; none if there is no such save.
/// In the order of ranks and files.
fn complete_set(generation: u64, headers: Vec<DataHeader>) -> Result<Vec<DataHeader>> {
    // What one rank wrote in one save; files that disagree about the save are of different ones.
    let mut parts: BTreeMap<(u32, u32, u64, u32), Vec<DataHeader>> = BTreeMap::new();
    for header in headers {
        let key = (header.world_size, header.name.rank, header.name.token, header.files);
        parts.entry(key).or_default().push(header);
    }
    parts.retain(|&(.., files), part| part.len() == files as usize);

    let mut ranks: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for &(world_size, rank, ..) in parts.keys() {
        ranks.entry(world_size).or_default().insert(rank);
    }
    parts.retain(|(world_size, ..), _| ranks[world_size].len() == *world_size as usize);
    let is_single = parts.len() == parts.keys().next().map_or(0, |(world_size, ..)| *world_size as usize);
    if !is_single {
        let mut tokens = String::new();
        for (_, rank, token, _) in parts.keys() {
            write!(tokens, " {token:016x} (rank {rank})").expect("a String takes all");
        }
        return Err(Error::Plan(format!(
            "generation {generation} has more than one complete save: choose by token, of{tokens}"
        )));
    }
    Ok(parts.into_values().flatten().collect())
}

fn build(generation: u64, headers: &[DataHeader], options: &RecoverOptions, control: &Control) -> Result<Vec<u8>> {
    let mut digests = hash(headers, options.threads, control)?.into_iter();
    let mut builder = IndexBuilder::new(SourceKind::Native);
    builder.save_id = random_bytes()?;
    builder.generation = generation;
    builder.root = Value::Dict(vec![]);
    for header in headers {
        let file = builder.add_file(header.entry.clone())?;
        for chunk in &header.chunks {
            let tensor = builder.add_tensor(chunk.tensor.clone())?;
            builder.add_chunk(ChunkEntry {
                tensor,
                file,
                offset: chunk.offset,
                length: chunk.length,
                offsets: chunk.offsets.clone(),
                sizes: chunk.sizes.clone(),
                strides: None,
                signs: Signs::default(),
                digests: digests.next(),
            })?;
        }
    }
    builder.build()
}

/// The digests of all chunks, in the order of the headers.
fn hash(headers: &[DataHeader], threads: usize, control: &Control) -> Result<Vec<Vec<u64>>> {
    struct Block<'a> {
        header: &'a DataHeader,
        offset: u64,
        length: u64,
    }
    let chunks = || {
        headers
            .iter()
            .flat_map(|header| header.chunks.iter().map(move |chunk| (header, chunk)))
    };
    let mut blocks = Vec::new();
    for (header, chunk) in chunks() {
        for begin in (0..block_count(chunk.length)).map(|block| block * BLOCK_SIZE) {
            let length = BLOCK_SIZE.min(chunk.length - begin);
            blocks.push(Block {
                header,
                offset: chunk.offset + begin,
                length,
            });
        }
    }
    let digests: Vec<AtomicU64> = blocks.iter().map(|_| AtomicU64::new(0)).collect();
    let threads = if threads == 0 {
        parallel::available().max(8)
    } else {
        threads
    };
    parallel::for_each(blocks.len(), threads, PayloadReader::new, |reader, number| {
        control.check()?;
        let Block { header, offset, length } = blocks[number];
        let digest = block_digest(reader.block(header, offset, length)?);
        digests[number].store(digest, Ordering::Relaxed);
        control.add(length);
        Ok(())
    })?;
    let mut digests = digests.into_iter().map(AtomicU64::into_inner);
    Ok(chunks()
        .map(|(_, chunk)| {
            let count = usize::try_from(block_count(chunk.length)).expect("their blocks are in memory");
            digests.by_ref().take(count).collect()
        })
        .collect())
}

#[cfg(test)]
#[path = "recover_tests.rs"]
mod tests;
