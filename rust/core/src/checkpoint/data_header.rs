//! Parsing of the headers of native data files: section 2 of `docs/format.md`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value as Json;

use crate::format::safetensors::{Header, HeaderTensor, PREFIX_LEN, header_len, parse};
use crate::format::{
    DataFileName, FileEntry, Kind, TensorEntry, Value, block_digest, from_header_name, parse_uuid,
};
use crate::geometry::Dims;
use crate::store::{Files, Stat};
use crate::{Dtype, Error, Result};

/// A data file, as its header describes it.
#[derive(Debug)]
pub(super) struct DataHeader {
    pub path: PathBuf,
    pub name: DataFileName,
    /// Id of the save that wrote the file.
    pub save_id: [u8; 16],
    /// Number of ranks that saved together; 0 for a rank-local save.
    pub world_size: u32,
    /// Number of files that the rank wrote.
    pub files: u32,
    pub entry: FileEntry,
    pub chunks: Vec<HeaderChunk>,
    /// Linked files of other saves, under names of this one.
    pub linked: Vec<DataHeader>,
}

/// A chunk, as the header of its file describes it.
#[derive(Debug)]
pub(super) struct HeaderChunk {
    pub tensor: TensorEntry,
    pub offsets: Dims,
    pub sizes: Dims,
    /// First byte in the file.
    pub offset: u64,
    pub length: u64,
}

/// Content of `DCPRS`.
#[derive(Deserialize)]
struct About {
    version: u64,
    save_id: String,
    generation: u64,
    rank: u32,
    world_size: u32,
    file: u32,
    files: u32,
    tensors: HashMap<String, AboutTensor>,
    #[serde(default)]
    linked: Vec<Linked>,
}

/// A file of another save.
#[derive(Deserialize)]
struct Linked {
    file: u32,
    size: u64,
    head: String,
    bytes: Vec<(u64, u64)>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
enum AboutTensor {
    Tensor { dtype: String, shape: Vec<u64>, flags: u8, path: Option<Vec<Json>> },
    Bytes { path: Option<Vec<Json>> },
}

#[derive(Deserialize)]
struct Saved {
    saved_offsets: Vec<u64>,
}

impl DataHeader {
    /// Reads the header of the file `name` in `dir`, and the headers of the files that it lists as
    /// linked.
    ///
    /// # Errors
    /// [`Error::CorruptIndex`] if the file is not a complete data file, or its name does not match
    /// its header.
    pub(super) fn read(files: Files<'_>, dir: &Path, name: DataFileName) -> Result<Self> {
        let path = dir.join(name.to_string());
        let Read { about, entry, chunks } = Read::header(files, &path, name)?;
        let refuse = |reason: String| Error::corrupt_index(&path, PREFIX_LEN, reason);
        if (about.generation, about.rank, about.file) != (name.generation, name.rank, name.file) {
            let About { generation, rank, file, .. } = about;
            return Err(refuse(format!(
                "it is file {file} of rank {rank} of generation {generation} by its header"
            )));
        }
        if about.file >= about.files || (about.world_size != 0 && about.rank >= about.world_size) {
            let About { rank, world_size, file, files, .. } = about;
            return Err(refuse(format!(
                "it is file {file} of {files}, of rank {rank} of {world_size}"
            )));
        }
        let save_id = parse_uuid(&about.save_id)
            .ok_or_else(|| refuse(format!("save_id {:?}", about.save_id)))?;
        if !about.linked.is_sorted_by(|a, b| a.file < b.file)
            || about.linked.iter().any(|link| link.file == name.file)
        {
            return Err(refuse("linked files that are out of order, or this one".into()));
        }
        let mut header = Self {
            name,
            save_id,
            world_size: about.world_size,
            files: about.files,
            entry,
            chunks,
            path,
            linked: Vec::new(),
        };
        for link in &about.linked {
            header.linked.push(header.linked_file(files, dir, link)?);
        }
        Ok(header)
    }

    /// Reads the part of a linked file that this save uses.
    fn linked_file(&self, files: Files<'_>, dir: &Path, link: &Linked) -> Result<Self> {
        let name = DataFileName { file: link.file, ..self.name };
        let path = dir.join(name.to_string());
        let Read { entry, mut chunks, .. } = Read::header(files, &path, name)?;
        let found = (entry.size, entry.head_digest.map(|head| format!("{head:016x}")));
        if found != (link.size, Some(link.head.clone())) {
            let reason =
                format!("it is not the file that {} was saved beside", self.path.display());
            return Err(Error::corrupt_index(&path, PREFIX_LEN, reason));
        }
        let within = |chunk: &HeaderChunk| {
            let end = chunk.offset + chunk.length;
            let after = link.bytes.partition_point(|&(begin, _)| begin <= chunk.offset);
            chunk.length > 0 && after > 0 && end <= link.bytes[after - 1].1
        };
        chunks.retain(within);
        Ok(Self {
            name,
            entry: FileEntry { linked: true, ..entry },
            chunks,
            path,
            linked: Vec::new(),
            ..*self
        })
    }
}

/// Content of a header. It need not match the name of the file.
struct Read {
    about: About,
    entry: FileEntry,
    chunks: Vec<HeaderChunk>,
}

impl Read {
    fn header(files: Files<'_>, path: &Path, name: DataFileName) -> Result<Self> {
        let (head, size) = read_head(files, path)?;
        let refuse = |reason: String| Error::corrupt_index(path, PREFIX_LEN, reason);
        let header = parse(&head, size)
            .map_err(|error| Error::corrupt_index(path, error.offset, error.reason))?;
        let text = |key: &str| {
            header.metadata.get(key).ok_or_else(|| {
                refuse(format!("no {key:?} in the header: not a file of this format"))
            })
        };
        let about: About = serde_json::from_str(text("DCPRS")?)
            .map_err(|error| refuse(format!("DCPRS in the header: {error}")))?;
        let saved: HashMap<String, Saved> = serde_json::from_str(text("DCP_SHARDING_INFO")?)
            .map_err(|error| refuse(format!("DCP_SHARDING_INFO in the header: {error}")))?;
        if about.version != 1 {
            return Err(refuse(format!("version {} of the format, and 1 is known", about.version)));
        }
        let mut chunks = Vec::with_capacity(header.tensors.len());
        for tensor in &header.tensors {
            let saved = saved.get(&tensor.name).map(|saved| saved.saved_offsets.as_slice());
            let chunk = chunk(tensor, about.tensors.get(&tensor.name), saved, header.data_start);
            chunks.push(
                chunk.map_err(|reason| refuse(format!("tensor {:?}: {reason}", tensor.name)))?,
            );
        }
        Ok(Self {
            about,
            entry: FileEntry {
                name: name.to_string(),
                size,
                data_start: header.data_start,
                external: false,
                linked: false,
                head_digest: Some(block_digest(&head)),
                mtime_ns: 0,
            },
            chunks,
        })
    }
}

/// Describes the part of a checkpoint that a native safetensors file holds; `None` if it holds all
/// of it.
pub(crate) fn part_of(header: &Header) -> Option<String> {
    let About { rank, world_size, file, files, .. } =
        serde_json::from_str(header.metadata.get("DCPRS")?).ok()?;
    match (world_size, files) {
        (1, 1) => None,
        (0, _) => Some(format!("file {file} of {files} of what rank {rank} saved for itself")),
        _ => Some(format!("file {file} of {files} of rank {rank}, of {world_size} ranks")),
    }
}

/// Bytes of the first read, before the length of the header is known.
const FIRST: u64 = 64 << 10;

/// Returns the bytes before the payload, and the length of the file.
fn read_head(files: Files<'_>, path: &Path) -> Result<(Vec<u8>, u64)> {
    let (Stat { size, .. }, mut head) = files.stat_with_start(path, FIRST)?;
    let Some(&prefix) = head.first_chunk() else {
        let reason = format!("{size} bytes, too few for a header");
        return Err(Error::corrupt_index(path, 0, reason));
    };
    let len = header_len(prefix, size)
        .map_err(|error| Error::corrupt_index(path, error.offset, error.reason))?;
    let len = usize::try_from(PREFIX_LEN + len).expect("headers are of at most 100 MB");
    if head.len() < len {
        head = files.open(path)?.fetch(path, size, 0, len as u64)?;
    }
    head.truncate(len);
    Ok((head, size))
}

/// Reverses section 2.1. Everything beyond the header is checked when the index is built.
fn chunk(
    tensor: &HeaderTensor,
    about: Option<&AboutTensor>,
    saved: Option<&[u64]>,
    data_start: u64,
) -> std::result::Result<HeaderChunk, String> {
    let saved = saved.ok_or("no saved_offsets")?;
    let mut sizes = Dims::from_slice(&tensor.shape);
    let mut offsets = Dims::from_slice(saved);
    let name = from_header_name(&tensor.name).ok_or("a name that no tensor has in a header")?;
    let mut entry = TensorEntry { kind: Kind::Tensor, ..TensorEntry::bytes(name) };
    match about {
        None => {
            let (dtype, _) =
                tensor.dtype.to_torch(&tensor.shape).ok_or("a type that torch does not have")?;
            if offsets.iter().any(|&offset| offset != 0) {
                return Err("a part of a tensor, and nothing says of which shape".into());
            }
            entry.dtype = Some(dtype);
            entry.shape.clone_from(&sizes);
        }
        Some(AboutTensor::Bytes { path }) => {
            entry.kind = Kind::Bytes;
            entry.path = path.as_deref().map(to_path).transpose()?;
            (sizes, offsets) = (Dims::new(), Dims::new());
        }
        Some(AboutTensor::Tensor { dtype, shape, flags, path }) => {
            let dtype =
                Dtype::from_name(dtype).ok_or_else(|| format!("unknown dtype {dtype:?}"))?;
            if tensor.dtype.name() != dtype.header_name() {
                return Err(format!(
                    "{} cannot be stored as {}",
                    dtype.name(),
                    tensor.dtype.name()
                ));
            }
            if !dtype.is_native_to_safetensors()
                && dtype.size() > 1
                && (sizes.pop(), offsets.pop()) != (Some(dtype.size()), Some(0))
            {
                return Err(format!("the last dimension is not the bytes of a {}", dtype.name()));
            }
            entry.dtype = Some(dtype);
            entry.shape = Dims::from_slice(shape);
            entry.flags = *flags;
            entry.path = path.as_deref().map(to_path).transpose()?;
        }
    }
    if offsets.len() != sizes.len() {
        return Err(format!("{} saved_offsets for {} sizes", offsets.len(), sizes.len()));
    }
    Ok(HeaderChunk {
        tensor: entry,
        offsets,
        sizes,
        offset: data_start + tensor.begin,
        length: tensor.end - tensor.begin,
    })
}

/// Parses a path of `DCPRS`: strings, positions in lists, and a list for a key of another type.
fn to_path(parts: &[Json]) -> std::result::Result<Value, String> {
    let part = |part: &Json| match part {
        Json::Array(key) => Some(Value::Tuple(key.iter().map(to_key).collect::<Option<_>>()?)),
        other => to_key(other),
    };
    let path = parts.iter().map(part).collect::<Option<_>>().map(Value::Tuple);
    path.filter(Value::is_path).ok_or_else(|| format!("path {parts:?} is none"))
}

fn to_key(key: &Json) -> Option<Value> {
    Some(match key {
        Json::Null => Value::None,
        Json::Bool(truth) => Value::Bool(*truth),
        Json::Number(number) if number.is_f64() => Value::Float(number.as_f64()?),
        Json::Number(number) => Value::Int(number.as_i64()?),
        Json::String(text) => Value::Str(text.clone()),
        Json::Array(items) => Value::Tuple(items.iter().map(to_key).collect::<Option<_>>()?),
        Json::Object(_) => return None,
    })
}
