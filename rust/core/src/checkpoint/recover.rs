//! Rebuilding a lost index from the data files: section 8 of `docs/format.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use super::blocks::{Block, each_block};
use super::data_header::DataHeader;
use super::locate::{check_no_rank_names, names};
use crate::format::{
    BLOCK_SIZE, BlockCell, BlockDigests, ChunkEntry, DataFileName, IndexBuilder, SourceKind, Value,
    block_count, content_digest,
};
use crate::store::{FileRef, Files, Remote, Storage};
use crate::{Control, Error, Result, parallel};

/// Options of [`recover`].
#[derive(Clone, Debug, Default)]
pub struct RecoverOptions {
    /// Generation to recover. `None`: the highest that is complete.
    pub generation: Option<u64>,
    /// Save to recover. Required if two saves of one generation are complete.
    pub save_id: Option<[u8; 16]>,
    /// Threads that hash. 0: as many as the cores that this process may use.
    pub threads: usize,
}

/// Rebuilds the index of the data files in `dir`, and returns its bytes. It equals the lost one
/// except for planner data other than paths. No file is changed. Files of a rank-local save are
/// ignored. With `remote`, `dir` is a URL on that store.
///
/// This reads and hashes all payload. `control` counts its bytes.
///
/// # Errors
/// - [`Error::NotFound`] if no generation is complete. It names what each one lacks.
/// - [`Error::Plan`] if there are two complete saves to choose from.
/// - [`Error::CorruptIndex`] if headers contradict each other.
/// - [`Error::Unsupported`] if single ranks have indexes there, or if a store cannot list files.
/// - Those of a [`Connection`](crate::store::Connection).
pub fn recover(
    dir: &Path,
    remote: Option<&Arc<dyn Remote>>,
    options: &RecoverOptions,
    control: &Control,
) -> Result<Vec<u8>> {
    let storage = Storage::new(remote, options.threads, control)?;
    let files = storage.files();
    let names = names(files, dir)?;
    let names =
        &names.ok_or_else(|| Error::Unsupported(format!("{} cannot be listed", dir.display())))?;
    check_no_rank_names(dir, names)?;
    let mut generations = by_generation(names.iter().map(String::as_str));
    generations.retain(|found, _| options.generation.is_none_or(|wanted| wanted == *found));
    let mut reasons = String::new();
    for (generation, names) in generations.into_iter().rev() {
        let (headers, refused) = read_headers(files, dir, names)?;
        let (alone, headers): (Vec<_>, Vec<_>) = headers
            .into_iter()
            .flat_map(with_linked)
            .filter(|header: &DataHeader| options.save_id.is_none_or(|id| id == header.save_id))
            .partition(|header| header.world_size == 0);
        let headers = complete_set(generation, headers)?;
        if !headers.is_empty() {
            return build(generation, &headers, remote, options, control);
        }
        write!(reasons, "; generation {generation} is not complete").expect("a String takes all");
        if let Some(DataHeader { name, .. }) = alone.first() {
            write!(reasons, " ({name} is of a rank-local save)").expect("a String takes all");
        }
        if let Some(error) = refused.first() {
            write!(reasons, " ({error})").expect("a String takes all");
        }
    }
    Err(Error::NotFound {
        path: dir.to_owned(),
        reason: format!("no complete set of data files{reasons}"),
    })
}

/// Returns the data files of the saves that [`recover`] could index.
pub(super) fn recoverable<'a>(
    files: Files<'_>,
    dir: &Path,
    names: impl Iterator<Item = &'a str>,
) -> Result<BTreeSet<DataFileName>> {
    let mut found = BTreeSet::new();
    for (generation, names) in by_generation(names) {
        let headers = read_headers(files, dir, names.iter().copied())?
            .0
            .into_iter()
            .filter(|header| header.world_size != 0)
            .flat_map(with_linked)
            .collect();
        match complete_set(generation, headers) {
            Ok(headers) => found.extend(headers.iter().map(|header| header.name)),
            // Several saves are complete.
            Err(_) => found.extend(names),
        }
    }
    Ok(found)
}

/// Returns a file, and the files of other saves that it lists as linked.
fn with_linked(mut header: DataHeader) -> impl Iterator<Item = DataHeader> {
    let linked = std::mem::take(&mut header.linked);
    std::iter::once(header).chain(linked)
}

/// Returns the headers of data files, and the reasons why some cannot be read.
fn read_headers(
    files: Files<'_>,
    dir: &Path,
    names: impl IntoIterator<Item = DataFileName>,
) -> Result<(Vec<DataHeader>, Vec<Error>)> {
    let names: Vec<DataFileName> = names.into_iter().collect();
    // On a file system there is little to wait for, so one after another.
    let looks = if files.is_remote() { files.threads(1) } else { 1 };
    let read = parallel::map(names.len(), looks, |number| {
        match DataHeader::read(files, dir, names[number]) {
            // A failed request shows nothing about the file.
            Err(error @ (Error::Storage { .. } | Error::Interrupted)) => Err(error),
            read => Ok(read),
        }
    })?;
    let (mut headers, mut refused) = (Vec::new(), Vec::new());
    for each in read {
        match each {
            Ok(header) => headers.push(header),
            Err(error) => refused.push(error),
        }
    }
    Ok((headers, refused))
}

/// Returns the names of data files by generation.
fn by_generation<'a>(
    names: impl Iterator<Item = &'a str>,
) -> BTreeMap<u64, BTreeSet<DataFileName>> {
    let mut found: BTreeMap<u64, BTreeSet<DataFileName>> = BTreeMap::new();
    for name in names.filter_map(DataFileName::parse) {
        found.entry(name.generation).or_default().insert(name);
    }
    found
}

/// Returns the files of the only complete save of this generation, in the order of ranks and files.
/// Returns none if no save is complete.
fn complete_set(generation: u64, headers: Vec<DataHeader>) -> Result<Vec<DataHeader>> {
    let mut complete: Vec<Vec<DataHeader>> =
        saves(headers).into_values().filter(|save| is_complete(save)).collect();
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

/// Groups files by the save that wrote them, in the order of ranks and files.
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

/// Returns whether these sorted files are all that the ranks wrote. Each rank must have one token,
/// and all must agree on the numbers of ranks and files.
fn is_complete(save: &[DataHeader]) -> bool {
    let mut ranks = 0..save.first().map_or(0, |header| header.world_size);
    let mut agrees = |part: &[DataHeader]| {
        let first = &part[0];
        Some(first.name.rank) == ranks.next()
            && part.len() == first.files as usize
            && (0..).zip(part).all(|(file, header)| {
                let same_save =
                    header.world_size == save[0].world_size && header.files == first.files;
                same_save && header.name.token == first.name.token && header.name.file == file
            })
    };
    save.chunk_by(|a, b| a.name.rank == b.name.rank).all(&mut agrees) && ranks.is_empty()
}

fn build(
    generation: u64,
    headers: &[DataHeader],
    remote: Option<&Arc<dyn Remote>>,
    options: &RecoverOptions,
    control: &Control,
) -> Result<Vec<u8>> {
    let mut hashed = hash(headers, remote, options.threads, control)?.into_iter();
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
                digests: Some(digests),
                content: Some(content),
                ..ChunkEntry::default()
            })?;
        }
    }
    builder.build()
}

/// Returns the digests of all chunks, of blocks and of content, in the order of the headers.
fn hash(
    headers: &[DataHeader],
    remote: Option<&Arc<dyn Remote>>,
    threads: usize,
    control: &Control,
) -> Result<Vec<(Vec<u64>, u128)>> {
    let chunks = || headers.iter().flat_map(|header| &header.chunks);
    let mut blocks = Vec::new();
    for (file, header) in (0..).zip(headers) {
        for (chunk, at) in (0..).zip(&header.chunks) {
            for begin in (0..block_count(at.length)).map(|block| block * BLOCK_SIZE) {
                blocks.push(Block {
                    file,
                    offset: at.offset + begin,
                    len: BLOCK_SIZE.min(at.length - begin),
                    chunk,
                    number: blocks.len() as u64,
                });
            }
        }
    }
    let digests: Vec<BlockCell> = blocks.iter().map(|_| BlockCell::default()).collect();
    blocks.sort_unstable_by_key(|block| (block.file, block.offset));
    let file = |header: &DataHeader| FileRef {
        remote: remote.cloned(),
        ..FileRef::new(&header.path, header.entry.size)
    };
    let files = (0..).zip(headers.iter().map(file)).collect();
    each_block(&files, &blocks, threads, control, |block, bytes| {
        let number = usize::try_from(block.number).expect("their blocks are in memory");
        digests[number].set(BlockDigests::of(bytes));
        Ok(())
    })?;
    let mut rest = digests.as_slice();
    Ok(chunks()
        .map(|chunk| {
            let count =
                usize::try_from(block_count(chunk.length)).expect("their blocks are in memory");
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
