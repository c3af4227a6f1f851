//! Rebuilding a lost index from the data files: section 8 of `docs/format.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::data_header::DataHeader;
use super::locate::check_no_rank_indexes;
use super::payload::PayloadReader;
use crate::copy::Signs;
use crate::format::{
    BLOCK_SIZE, BlockCell, BlockDigests, ChunkEntry, DataFileName, IndexBuilder, SourceKind, Value, block_count,
    content_digest,
};
use crate::store::Files;
use crate::{Control, Error, Result, parallel};

/// Which save to recover, and how.
#[derive(Clone, Debug, Default)]
pub struct RecoverOptions {
    /// Only this generation. `None`: the highest that is complete.
    pub generation: Option<u64>,
    /// Only this save. Needed where two saves of one generation are complete.
    pub save_id: Option<[u8; 16]>,
    /// Threads, each with a read in flight. 0: 8, or as many as the cores that this process may use.
    pub threads: usize,
}

/// The bytes of an index over the data files in `dir`, as the save that wrote them had it, but for planner data other than paths. No file is changed. Those of a rank-local save are no part of any index of all ranks.
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
    for (generation, names) in data_files(dir, options.generation)?.into_iter().rev() {
        let (headers, refused): (Vec<_>, Vec<_>) = names
            .into_iter()
            .map(|name| DataHeader::read(Files::Local, dir, name))
            .partition(Result::is_ok);
        let (alone, headers): (Vec<_>, Vec<_>) = headers
            .into_iter()
            .flatten()
            .flat_map(with_linked)
            .filter(|header: &DataHeader| options.save_id.is_none_or(|id| id == header.save_id))
            .partition(|header| header.world_size == 0);
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
pub(super) fn recoverable<'a>(
    files: Files<'_>,
    dir: &Path,
    names: impl Iterator<Item = &'a str>,
) -> Result<BTreeSet<DataFileName>> {
    let mut found = BTreeSet::new();
    for (generation, names) in by_generation(names) {
        let mut headers = Vec::new();
        for &name in &names {
            match DataHeader::read(files, dir, name) {
                Ok(header) => headers.push(header),
                // A store that does not answer says nothing of the file.
                Err(error @ (Error::Storage { .. } | Error::Interrupted)) => return Err(error),
                Err(_) => {}
            }
        }
        let headers = headers
            .into_iter()
            .filter(|header| header.world_size != 0)
            .flat_map(with_linked)
            .collect();
        match complete_set(generation, headers) {
            Ok(headers) => found.extend(headers.iter().map(|header| header.name)),
            // There are several.
            Err(_) => found.extend(names),
        }
    }
    Ok(found)
}

/// A file, and those of other saves that it says are linked.
fn with_linked(mut header: DataHeader) -> impl Iterator<Item = DataHeader> {
    let linked = std::mem::take(&mut header.linked);
    std::iter::once(header).chain(linked)
}

/// The names of data files in a folder, by generation.
fn data_files(dir: &Path, generation: Option<u64>) -> Result<BTreeMap<u64, BTreeSet<DataFileName>>> {
    let io = |error| Error::io("list", dir, error);
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        names.extend(entry.map_err(io)?.file_name().into_string().ok());
    }
    let mut found = by_generation(names.iter().map(String::as_str));
    found.retain(|found, _| generation.is_none_or(|wanted| wanted == *found));
    Ok(found)
}

fn by_generation<'a>(names: impl Iterator<Item = &'a str>) -> BTreeMap<u64, BTreeSet<DataFileName>> {
    let mut found: BTreeMap<u64, BTreeSet<DataFileName>> = BTreeMap::new();
    for name in names.filter_map(DataFileName::parse) {
        found.entry(name.generation).or_default().insert(name);
    }
    found
}

/// The files of the one save of this generation of which every rank's part is there; none if there is no such save.
/// In the order of ranks and files.
fn complete_set(generation: u64, headers: Vec<DataHeader>) -> Result<Vec<DataHeader>> {
    let mut complete: Vec<Vec<DataHeader>> = saves(headers).into_values().filter(|save| is_complete(save)).collect();
    if complete.len() > 1 {
        let mut ids = String::new();
        for header in complete.iter().filter_map(|save| save.first()) {
            write!(ids, " {}", crate::format::uuid(header.save_id)).expect("a String takes all");
        }
        return Err(Error::Plan(format!(
            "generation {generation} has more than one complete save: choose by save id, of{ids}"
        )));
    }
    Ok(complete.pop().unwrap_or_default())
}

/// Files by the save that wrote them, in the order of ranks and files.
fn saves(headers: Vec<DataHeader>) -> BTreeMap<[u8; 16], Vec<DataHeader>> {
    let mut saves: BTreeMap<[u8; 16], Vec<DataHeader>> = BTreeMap::new();
    for header in headers {
        saves.entry(header.save_id).or_default().push(header);
    }
    for save in saves.values_mut() {
        save.sort_by_key(|header| (header.name.rank, header.name.file));
    }
    saves
}

/// Whether these files, sorted, are all that the ranks wrote: each rank under one token, and agreed on how many ranks and files there are.
fn is_complete(save: &[DataHeader]) -> bool {
    let mut ranks = 0..save.first().map_or(0, |header| header.world_size);
    let mut agrees = |part: &[DataHeader]| {
        let first = &part[0];
        Some(first.name.rank) == ranks.next()
            && part.len() == first.files as usize
            && (0..).zip(part).all(|(file, header)| {
                let same_save = header.world_size == save[0].world_size && header.files == first.files;
                same_save && header.name.token == first.name.token && header.name.file == file
            })
    };
    save.chunk_by(|a, b| a.name.rank == b.name.rank).all(&mut agrees) && ranks.is_empty()
}

fn build(generation: u64, headers: &[DataHeader], options: &RecoverOptions, control: &Control) -> Result<Vec<u8>> {
    let mut hashed = hash(headers, options.threads, control)?.into_iter();
    let mut builder = IndexBuilder::new(SourceKind::Native);
    builder.save_id = headers[0].save_id;
    builder.generation = generation;
    builder.root = Value::Dict(vec![]);
    for header in headers {
        let file = builder.add_file(header.entry.clone())?;
        for chunk in &header.chunks {
            let tensor = builder.add_tensor(chunk.tensor.clone())?;
            let (digests, content) = hashed.next().expect("as many as chunks");
            builder.add_chunk(ChunkEntry {
                tensor,
                file,
                offset: chunk.offset,
                length: chunk.length,
                offsets: chunk.offsets.clone(),
                sizes: chunk.sizes.clone(),
                strides: None,
                signs: Signs::default(),
                digests: Some(digests),
                content: Some(content),
                frozen: false,
            })?;
        }
    }
    builder.build()
}

/// The digests of all chunks, of their blocks and of their content, in the order of the headers.
fn hash(headers: &[DataHeader], threads: usize, control: &Control) -> Result<Vec<(Vec<u64>, u128)>> {
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
    let digests: Vec<BlockCell> = blocks.iter().map(|_| BlockCell::default()).collect();
    let threads = if threads == 0 {
        parallel::available().max(8)
    } else {
        threads
    };
    parallel::for_each(blocks.len(), threads, PayloadReader::new, |reader, number| {
        control.check()?;
        let Block { header, offset, length } = blocks[number];
        digests[number].set(BlockDigests::of(reader.block(header, offset, length)?));
        control.add(length);
        Ok(())
    })?;
    let mut rest = digests.as_slice();
    Ok(chunks()
        .map(|(_, chunk)| {
            let count = usize::try_from(block_count(chunk.length)).expect("their blocks are in memory");
            let (own, others) = rest.split_at(count);
            rest = others;
            let content = content_digest(own.iter().map(BlockCell::content));
            (own.iter().map(BlockCell::digest).collect(), content)
        })
        .collect())
}

#[cfg(test)]
#[path = "recover_tests.rs"]
mod tests;
