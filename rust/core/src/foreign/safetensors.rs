//! Safetensors files, indexed in place.
//!
//! Two writers are supported. Hugging Face libraries write whole tensors to one or more files, with
//! or without `*.safetensors.index.json`. torch's `HuggingFaceStorageWriter(save_distributed=True)`
//! writes files for each rank, whose headers have the offsets of chunks.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use super::fault::{Fault, FaultResult};
use super::models::Model;
use super::sharding::Sharding;
use super::stand_in;
use crate::checkpoint::part_of;
use crate::format::safetensors as st;
use crate::format::{ChunkEntry, FileEntry, IndexBuilder, SourceKind, TensorEntry, Value};
use crate::geometry::{Dims, element_count, tiling};
use crate::store::{Files, Stat};
use crate::{Dtype, Error, Result, parallel};

/// Indexes the files of a model in the folder `dir`. Returns the bytes of an index for a file in
/// `dir`. If `threads` is 0, it uses all cores.
pub(crate) fn index_model(
    files: Files<'_>,
    dir: &Path,
    model: &Model,
    threads: usize,
) -> Result<Vec<u8>> {
    let threads = files.threads(threads);
    let parts =
        parallel::map(model.files.len(), threads, |i| read_part(files, dir, &model.files[i]))?;
    for part in &parts {
        if let Some(which) = part_of(&part.header) {
            return Err(Error::NotFound {
                path: dir.join(&part.name),
                reason: format!("it is a part of a checkpoint ({which}): open the folder"),
            });
        }
    }
    build(dir, &parts, &model.weight_map)
}

/// A file of the checkpoint, with its header.
struct ModelFile {
    name: String,
    stat: Stat,
    header: st::Header,
    sharding: Sharding,
}

/// Bytes of the first read: enough for most headers.
const FIRST_READ: u64 = 64 << 10;

/// Reads the header of a file.
pub(crate) fn read_header(files: Files<'_>, path: &Path) -> Result<(Stat, st::Header)> {
    let (stat, mut head) = files.stat_with_start(path, FIRST_READ)?;
    if let Some(what) = stand_in(&head) {
        return Err(Error::corrupt_index(path, 0, what));
    }
    let bad = |e: st::HeaderError| Error::corrupt_index(path, e.offset, e.reason);
    if let Some(prefix) = head.first_chunk::<8>() {
        let need = st::PREFIX_LEN + st::header_len(*prefix, stat.size).map_err(bad)?;
        if need > head.len() as u64 {
            let here = head.len() as u64;
            head.extend(files.open(path)?.fetch(path, stat.size, here, need - here)?);
        }
    }
    let header = st::parse(&head, stat.size).map_err(bad)?;
    Ok((stat, header))
}

fn read_part(files: Files<'_>, dir: &Path, name: &str) -> Result<ModelFile> {
    let path = dir.join(name);
    let (stat, header) = read_header(files, &path)?;
    let sharding = Sharding::of(&header).map_err(|fault| fault.in_index(&path))?;
    Ok(ModelFile { name: name.to_owned(), stat, header, sharding })
}

/// Properties of a tensor after all files were read.
struct Known {
    dtype: Dtype,
    shape: Dims,
    chunks: Vec<Chunk>,
}

struct Chunk {
    part: usize,
    /// True if the header has the chunk's offsets. Then an equal chunk of another rank is a
    /// replica.
    noted: bool,
    offsets: Dims,
    sizes: Dims,
    begin: u64,
    length: u64,
}

fn build(dir: &Path, parts: &[ModelFile], weight_map: &HashMap<String, String>) -> Result<Vec<u8>> {
    let mut tensors: BTreeMap<&str, Known> = BTreeMap::new();
    for (i, part) in parts.iter().enumerate() {
        let path = dir.join(&part.name);
        for tensor in &part.header.tensors {
            if weight_map.get(&tensor.name).is_some_and(|file| *file != part.name) {
                continue; // a copy: the index names another file for it
            }
            let (dtype, chunk) =
                chunk_of(i, part, tensor).map_err(|fault| fault.in_index(&path))?;
            let ends = chunk.offsets.iter().zip(&chunk.sizes).map(|(at, len)| at + len).collect();
            match tensors.get_mut(tensor.name.as_str()) {
                None => {
                    let chunks = vec![chunk];
                    tensors.insert(&tensor.name, Known { dtype, shape: ends, chunks });
                }
                Some(known) if known.dtype == dtype && known.shape.len() == ends.len() => {
                    known.shape.iter_mut().zip(ends).for_each(|(size, end)| *size = end.max(*size));
                    known.chunks.push(chunk);
                }
                Some(known) => {
                    let reason = format!(
                        "tensor {:?} is {} of {} dimensions here, and {} of {} in {:?}",
                        tensor.name,
                        dtype.name(),
                        ends.len(),
                        known.dtype.name(),
                        known.shape.len(),
                        parts[known.chunks[0].part].name
                    );
                    return Err(Error::corrupt_index(&path, 0, reason));
                }
            }
        }
    }
    check_weight_map(dir, &tensors, weight_map)?;
    let mut builder = IndexBuilder::new(SourceKind::Safetensors);
    builder.root = Value::None;
    for part in parts {
        builder.add_file(FileEntry {
            data_start: part.header.data_start,
            ..FileEntry::foreign(&part.name, part.stat.size, part.stat.mtime_ns)
        })?;
    }
    for (name, known) in tensors {
        add(&mut builder, dir, parts, name, known)?;
    }
    builder.build()
}

fn chunk_of(i: usize, part: &ModelFile, tensor: &st::HeaderTensor) -> FaultResult<(Dtype, Chunk)> {
    let unsupported = || {
        let (name, dtype) = (&tensor.name, tensor.dtype.name());
        Fault::Unsupported(format!(
            "tensor {name:?} is {dtype} {:?}, which torch has no type for",
            tensor.shape
        ))
    };
    let offsets = part.sharding.offsets(tensor)?;
    let (dtype, sizes) = tensor.dtype.to_torch(&tensor.shape).ok_or_else(unsupported)?;
    if offsets.iter().zip(&sizes).any(|(at, len)| at.checked_add(*len).is_none()) {
        return Err(Fault::corrupt(8, format!("tensor {:?}: its offsets overflow", tensor.name)));
    }
    let chunk = Chunk {
        part: i,
        noted: part.sharding.is_noted(),
        offsets,
        sizes: Dims::from_vec(sizes),
        begin: part.header.data_start + tensor.begin,
        length: tensor.end - tensor.begin,
    };
    Ok((dtype, chunk))
}

fn check_weight_map(
    dir: &Path,
    tensors: &BTreeMap<&str, Known>,
    weight_map: &HashMap<String, String>,
) -> Result<()> {
    let missing = weight_map.iter().filter(|(name, _)| !tensors.contains_key(name.as_str())).min();
    match missing {
        Some((name, file)) => Err(Error::corrupt_data(
            &dir.join(file),
            name,
            0,
            "the index of the folder names the tensor for this file, which does not hold it",
        )),
        None => Ok(()),
    }
}

fn add(
    builder: &mut IndexBuilder,
    dir: &Path,
    parts: &[ModelFile],
    name: &str,
    known: Known,
) -> Result<()> {
    let Known { dtype, shape, mut chunks } = known;
    let bad = |chunk: &Chunk, reason: String| {
        let path = dir.join(&parts[chunk.part].name);
        Err(Error::corrupt_index(&path, 0, format!("tensor {name:?} {reason}")))
    };
    let mut seen: HashMap<(Dims, Dims), usize> = HashMap::new();
    for chunk in &chunks {
        let first = *seen.entry((chunk.offsets.clone(), chunk.sizes.clone())).or_insert(chunk.part);
        if first != chunk.part && !chunk.noted {
            return bad(chunk, format!("is in {:?} too", parts[first].name));
        }
    }
    let mut kept = HashSet::new();
    chunks.retain(|chunk| kept.insert((chunk.offsets.clone(), chunk.sizes.clone())));
    if shape.len() > usize::from(u8::MAX) {
        return bad(&chunks[0], format!("has {} dimensions, more than {}", shape.len(), u8::MAX));
    }
    if let Err(reason) = check_tiling(&shape, &chunks) {
        return bad(&chunks[0], reason);
    }
    let tensor = builder.add_tensor(TensorEntry::tensor(name, dtype, shape))?;
    for chunk in chunks {
        builder.add_chunk(ChunkEntry {
            tensor,
            file: u32::try_from(chunk.part).map_err(|_| {
                Error::Unsupported("an index cannot hold more than 4 billion files".into())
            })?,
            offset: chunk.begin,
            length: chunk.length,
            offsets: chunk.offsets,
            sizes: chunk.sizes,
            ..ChunkEntry::default()
        })?;
    }
    Ok(())
}

/// Checks that the chunks tile the shape. It cannot detect that the last chunks are missing,
/// because the shape is derived from the chunks.
fn check_tiling(shape: &[u64], chunks: &[Chunk]) -> std::result::Result<(), String> {
    element_count(shape).ok_or("has a shape that overflows")?;
    let rectangles: Vec<(&[u64], &[u64])> =
        chunks.iter().map(|chunk| (&chunk.offsets[..], &chunk.sizes[..])).collect();
    tiling::check_tiling(shape, &rectangles).map_err(|fault| match fault {
        tiling::TilingFault::Hole(at) => {
            format!("of shape {shape:?} misses shards: none holds the element at {at:?}")
        }
        tiling::TilingFault::Overlap(at) => format!("has shards that overlap, at {at:?}"),
    })
}
