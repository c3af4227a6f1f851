//! Laying out an index from what was written or found.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use zerocopy::{FromBytes as _, IntoBytes as _};

use super::digest::index_digest;
use super::layout::{
    CHUNK_CONJUGATE, CHUNK_DIGESTS, CHUNK_NEGATIVE, CHUNK_STRIDED, ChunkRecord, DIGEST_AT, FILE_EXTERNAL,
    FILE_HEAD_DIGEST, FileRecord, HEADER_LEN, HEADER_LEN_U32, Header, INCOMPAT_SIGNS, Kind, MAGIC, NO_POSITION,
    NO_SPLIT, SECTIONS, SectionRecord, SourceKind, TensorRecord, VERSION,
};
use super::{BLOCK_SIZE, FileView, Index, Value, block_count};
use crate::copy::Signs;
use crate::geometry::Dims;
use crate::{Dtype, Error, Result};

/// A data file, to be named by an index.
#[derive(Clone, Debug)]
pub struct FileEntry {
    /// Path relative to the folder of the index.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
    /// Where the payload begins.
    pub data_start: u64,
    /// Whether someone else wrote the file.
    pub external: bool,
    /// XXH3-64 of what precedes the payload.
    pub head_digest: Option<u64>,
    /// Modification time in nanoseconds since 1970; 0: not recorded.
    pub mtime_ns: i64,
}

impl From<FileView<'_>> for FileEntry {
    fn from(file: FileView<'_>) -> Self {
        Self {
            name: file.name.to_owned(),
            size: file.size,
            data_start: file.data_start,
            external: file.external,
            head_digest: file.head_digest,
            mtime_ns: file.mtime_ns,
        }
    }
}

/// A tensor or another value.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// FQN.
    pub name: String,
    /// Tensor or bytes.
    pub kind: Kind,
    /// Element type, for tensors.
    pub dtype: Option<Dtype>,
    /// Sizes of the whole tensor.
    pub shape: Dims,
    /// As in section 3.3 of the format.
    pub flags: u8,
    /// Its path in the state dict: a value that [is one](Value::is_path).
    pub path: Option<Value>,
    /// Its place among the entries of the state dict.
    pub position: Option<u32>,
}

/// A chunk of a tensor that was added before.
#[derive(Clone, Debug)]
pub struct ChunkEntry {
    /// What [`IndexBuilder::add_tensor`] returned.
    pub tensor: u32,
    /// What [`IndexBuilder::add_file`] returned.
    pub file: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes in the file.
    pub length: u64,
    /// Where the chunk begins in the tensor.
    pub offsets: Dims,
    /// How far it extends.
    pub sizes: Dims,
    /// Strides in elements, where it is not contiguous.
    pub strides: Option<Dims>,
    /// What its bytes stand for; other than themselves only in adopted data.
    pub signs: Signs,
    /// A digest for each block.
    pub digests: Option<Vec<u64>>,
}

/// Collects files, tensors and chunks, in any order, and lays out an index.
#[derive(Debug)]
pub struct IndexBuilder {
    source: SourceKind,
    /// 16 random bytes that identify the save.
    pub save_id: [u8; 16],
    /// Counts the saves into the folder.
    pub generation: u64,
    /// Planner data that belongs to no tensor.
    pub root: Value,
    /// The containers of the state dict that the paths do not tell: a value that [is nesting](Value::is_nesting).
    pub nesting: Value,
    files: Vec<FileEntry>,
    file_ids: HashMap<String, u32>,
    tensors: Vec<TensorEntry>,
    tensor_ids: HashMap<String, u32>,
    chunks: Vec<ChunkEntry>,
}

impl IndexBuilder {
    /// An empty index.
    pub fn new(source: SourceKind) -> Self {
        Self {
            source,
            save_id: [0; 16],
            generation: 0,
            root: Value::None,
            nesting: Value::None,
            files: Vec::new(),
            file_ids: HashMap::new(),
            tensors: Vec::new(),
            tensor_ids: HashMap::new(),
            chunks: Vec::new(),
        }
    }

    /// Adds a data file. A name may be added once.
    pub fn add_file(&mut self, file: FileEntry) -> Result<u32> {
        let id = next_id(self.files.len(), "files")?;
        if self.file_ids.insert(file.name.clone(), id).is_some() {
            return Err(Error::Plan(format!("data file {:?} is added twice", file.name)));
        }
        self.files.push(file);
        Ok(id)
    }

    /// Adds a tensor, or finds it when one that agrees in kind, dtype and shape was added before. The first one's flags, path and position stay.
    pub fn add_tensor(&mut self, tensor: TensorEntry) -> Result<u32> {
        if let Some(&id) = self.tensor_ids.get(&tensor.name) {
            let known = &mut self.tensors[id as usize];
            if (known.kind, known.dtype, &known.shape) != (tensor.kind, tensor.dtype, &tensor.shape) {
                let reason = format!(
                    "it is described in two ways: {} and {}",
                    describe(known),
                    describe(&tensor)
                );
                return Err(Error::tensor_plan(None, &tensor.name, reason));
            }
            if known.path.is_none() {
                known.path = tensor.path;
            }
            return Ok(id);
        }
        let id = next_id(self.tensors.len(), "tensors")?;
        self.tensor_ids.insert(tensor.name.clone(), id);
        self.tensors.push(tensor);
        Ok(id)
    }

    /// Adds a chunk. Of several that cover exactly the same rectangle, the one added first stays.
    pub fn add_chunk(&mut self, chunk: ChunkEntry) -> Result<()> {
        if chunk.tensor as usize >= self.tensors.len() || chunk.file as usize >= self.files.len() {
            return Err(Error::Plan("a chunk of an unknown tensor or file".into()));
        }
        if let Some(digests) = &chunk.digests
            && digests.len() as u64 != block_count(chunk.length)
        {
            let reason = format!("{} digests for {} bytes", digests.len(), chunk.length);
            let name = &self.tensors[chunk.tensor as usize].name;
            return Err(Error::tensor_plan(None, name, reason));
        }
        self.chunks.push(chunk);
        Ok(())
    }

    /// Sets the path of a tensor that was added, unless it has one. Returns whether there is such a tensor.
    pub fn set_path(&mut self, fqn: &str, path: Value) -> bool {
        let Some(&id) = self.tensor_ids.get(fqn) else {
            return false;
        };
        self.tensors[id as usize].path.get_or_insert(path);
        true
    }

    /// Whether a tensor or value with this FQN was added, and has a path.
    pub fn has_path(&self, fqn: &str) -> bool {
        (self.tensor_ids.get(fqn)).is_some_and(|&id| self.tensors[id as usize].path.is_some())
    }

    /// Whether a tensor or value with this FQN was added.
    pub fn has_tensor(&self, fqn: &str) -> bool {
        self.tensor_ids.contains_key(fqn)
    }

    /// Adds all of another index: the files, tensors, chunks and containers that another rank wrote.
    pub fn merge(&mut self, other: &Index) -> Result<()> {
        self.merge_nesting(other.nesting());
        self.merge_with(other, |file| Ok(FileEntry::from(file)), |_| None)
    }

    /// Adds containers. Of several at one path, the one added first stays.
    pub fn merge_nesting(&mut self, other: Value) {
        let Value::List(others) = other else { return };
        let mut known = match std::mem::replace(&mut self.nesting, Value::None) {
            Value::List(known) => known,
            _ => vec![],
        };
        let path = |container: &Value| match container {
            Value::Tuple(fields) => fields.get(1).map(Value::to_bytes),
            _ => None,
        };
        let mut paths: HashSet<_> = known.iter().map(path).collect();
        known.extend(others.into_iter().filter(|container| paths.insert(path(container))));
        self.nesting = Value::List(known);
    }

    /// [`merge`](Self::merge), with a say in what the files become, and digests for chunks that have none.
    pub fn merge_with(
        &mut self,
        other: &Index,
        file: impl Fn(FileView<'_>) -> Result<FileEntry>,
        digests: impl Fn(u64) -> Option<Vec<u64>>,
    ) -> Result<()> {
        let mut files = Vec::with_capacity(other.file_count() as usize);
        for i in 0..other.file_count() {
            files.push(self.add_file(file(other.file(i))?)?);
        }
        for i in 0..other.tensor_count() {
            let tensor = other.tensor(i);
            let id = self.add_tensor(TensorEntry {
                name: tensor.name.to_owned(),
                kind: tensor.kind,
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                flags: tensor.flags,
                path: other.planner_path(i),
                position: tensor.position,
            })?;
            for c in tensor.chunks {
                let chunk = other.chunk(c);
                let known = chunk.digests.map(|range| range.map(|d| other.digest(d)).collect());
                self.add_chunk(ChunkEntry {
                    tensor: id,
                    file: files[chunk.file as usize],
                    offset: chunk.offset,
                    length: chunk.length,
                    offsets: chunk.offsets,
                    sizes: chunk.sizes,
                    strides: chunk.strides,
                    signs: chunk.signs,
                    digests: known.or_else(|| digests(c)),
                })?;
            }
        }
        Ok(())
    }

    /// Lays the index out, and checks it as a reader would.
    pub fn build(mut self) -> Result<Vec<u8>> {
        let mut order: Vec<u32> = (0..next_id(self.tensors.len(), "tensors")?).collect();
        order.sort_unstable_by(|&a, &b| {
            let name = |id: u32| self.tensors[id as usize].name.as_bytes();
            name(a).cmp(name(b))
        });
        let mut rank = vec![0_u32; self.tensors.len()];
        for (place, &id) in (0_u32..).zip(&order) {
            rank[id as usize] = place;
        }
        // Stable, so that the first of two equal rectangles is the one that stays.
        self.chunks.sort_by(|a, b| {
            let key = |c: &ChunkEntry| rank[c.tensor as usize];
            key(a)
                .cmp(&key(b))
                .then_with(|| a.offsets.cmp(&b.offsets))
                .then_with(|| a.sizes.cmp(&b.sizes))
        });
        self.chunks
            .dedup_by(|b, a| (a.tensor, &a.offsets, &a.sizes) == (b.tensor, &b.offsets, &b.sizes));

        let mut out = Sections::new(&[&self.root, &self.nesting])?;
        for file in &self.files {
            out.file(file)?;
        }
        let mut chunks = self.chunks.as_slice();
        for (place, &id) in (0_u32..).zip(&order) {
            let count = chunks.iter().take_while(|chunk| chunk.tensor == id).count();
            let (own, rest) = chunks.split_at(count);
            out.tensor(&self.tensors[id as usize], place, own)?;
            chunks = rest;
        }
        let bytes = Shared(Arc::new(out.assemble(&self)));
        Index::from_bytes(bytes.clone(), Path::new("(new index)"))?;
        Ok(Arc::try_unwrap(bytes.0).expect("the index that shared it is gone"))
    }
}

fn next_id(len: usize, what: &str) -> Result<u32> {
    u32::try_from(len)
        .ok()
        .filter(|&id| id < u32::MAX)
        .ok_or_else(|| Error::Unsupported(format!("more than 4 billion {what}")))
}

fn describe(tensor: &TensorEntry) -> String {
    match tensor.dtype {
        Some(dtype) => format!("{} {:?}", dtype.name(), tensor.shape.as_slice()),
        None => "a non-tensor value".into(),
    }
}

/// The dimension along which sorted chunks are a run, each spanning the others whole.
fn split_dim(shape: &[u64], chunks: &[ChunkEntry]) -> Option<usize> {
    let spans = |c: &ChunkEntry, split: usize| (0..shape.len()).all(|d| d == split || c.sizes[d] == shape[d]);
    (0..shape.len()).find(|&split| {
        chunks.iter().all(|c| spans(c, split))
            && chunks.windows(2).all(|pair| {
                pair[0].offsets[split]
                    .checked_add(pair[0].sizes[split])
                    .is_some_and(|end| end <= pair[1].offsets[split])
            })
    })
}

/// The finished bytes, lent to an [`Index`] for the time of its checks.
#[derive(Clone)]
struct Shared(Arc<Vec<u8>>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

struct Sections {
    files: Vec<u8>,
    tensors: Vec<u8>,
    chunks: Vec<u8>,
    chunk_count: u64,
    dims: Vec<u8>,
    digests: Vec<u8>,
    strings: Vec<u8>,
    planner: Vec<u8>,
}

impl Sections {
    fn new(values: &[&Value]) -> Result<Self> {
        let mut planner = Vec::new();
        for value in values {
            let encoded = value.encode(&mut planner);
            encoded.map_err(|reason| Error::Unsupported(reason.into()))?;
        }
        Ok(Self {
            files: Vec::new(),
            tensors: Vec::new(),
            chunks: Vec::new(),
            chunk_count: 0,
            dims: Vec::new(),
            digests: Vec::new(),
            strings: Vec::new(),
            planner,
        })
    }

    fn text(&mut self, text: &str) -> Result<(u64, u32)> {
        let at = self.strings.len() as u64;
        self.strings.extend(text.as_bytes());
        let len = u32::try_from(text.len()).map_err(|_| Error::Unsupported("a name of over 4 GiB".into()))?;
        Ok((at, len))
    }

    fn push_dims(&mut self, dims: &[u64]) -> u64 {
        let at = self.dims.len() as u64 / 8;
        for dim in dims {
            self.dims.extend(dim.to_le_bytes());
        }
        at
    }

    fn file(&mut self, file: &FileEntry) -> Result<()> {
        let (name_offset, name_len) = self.text(&file.name)?;
        let mut flags = 0;
        if file.external {
            flags |= FILE_EXTERNAL;
        }
        if file.head_digest.is_some() {
            flags |= FILE_HEAD_DIGEST;
        }
        let record = FileRecord {
            name_offset: name_offset.into(),
            name_len: name_len.into(),
            flags: flags.into(),
            file_size: file.size.into(),
            data_start: file.data_start.into(),
            head_digest: file.head_digest.unwrap_or(0).into(),
            mtime_ns: file.mtime_ns.into(),
            reserved: [0; 16],
        };
        self.files.extend(record.as_bytes());
        Ok(())
    }

    fn tensor(&mut self, tensor: &TensorEntry, place: u32, chunks: &[ChunkEntry]) -> Result<()> {
        let bad = |reason: String| Error::tensor_plan(None, &tensor.name, reason);
        let ndim = tensor.shape.len();
        let (name_offset, name_len) = self.text(&tensor.name)?;
        if let Some(chunk) = chunks.iter().find(|c| {
            c.offsets.len() != ndim || c.sizes.len() != ndim || c.strides.as_ref().is_some_and(|s| s.len() != ndim)
        }) {
            return Err(bad(format!(
                "a chunk at {:?} of sizes {:?} in a tensor of {ndim} dimensions",
                chunk.offsets, chunk.sizes
            )));
        }
        let path_offset = self.planner.len();
        if let Some(path) = &tensor.path {
            if !path.is_path() {
                return Err(bad("its path is not a tuple of keys and places".into()));
            }
            path.encode(&mut self.planner).map_err(|reason| bad(reason.into()))?;
        }
        let record = TensorRecord {
            name_offset: name_offset.into(),
            name_len: name_len.into(),
            kind: u8::from(tensor.kind == Kind::Bytes),
            dtype: tensor.dtype.map_or(0, Dtype::code),
            ndim: u8::try_from(ndim).map_err(|_| bad(format!("{ndim} dimensions")))?,
            flags: tensor.flags,
            shape: self.push_dims(&tensor.shape).into(),
            first_chunk: self.chunk_count.into(),
            chunk_count: (chunks.len() as u64).into(),
            path_offset: (path_offset as u64).into(),
            path_len: u32::try_from(self.planner.len() - path_offset)
                .map_err(|_| bad("a path of over 4 GiB".into()))?
                .into(),
            split_dim: split_dim(&tensor.shape, chunks)
                .map_or(NO_SPLIT, |d| u32::try_from(d).expect("at most 255 dimensions"))
                .into(),
            position: tensor.position.unwrap_or(NO_POSITION).into(),
            reserved: [0; 4],
        };
        self.tensors.extend(record.as_bytes());
        for chunk in chunks {
            self.chunk(chunk, place);
        }
        Ok(())
    }

    fn chunk(&mut self, chunk: &ChunkEntry, place: u32) {
        let dims = self.push_dims(&chunk.offsets);
        self.push_dims(&chunk.sizes);
        let mut flags = 0;
        if let Some(strides) = &chunk.strides {
            self.push_dims(strides);
            flags |= CHUNK_STRIDED;
        }
        if chunk.signs.conjugate {
            flags |= CHUNK_CONJUGATE;
        }
        if chunk.signs.negative {
            flags |= CHUNK_NEGATIVE;
        }
        let digest = self.digests.len() as u64 / 8;
        if let Some(digests) = &chunk.digests {
            flags |= CHUNK_DIGESTS;
            self.digests.extend(digests.iter().flat_map(|d| d.to_le_bytes()));
        }
        let record = ChunkRecord {
            tensor: place.into(),
            file: chunk.file.into(),
            offset: chunk.offset.into(),
            length: chunk.length.into(),
            dims: dims.into(),
            digest: digest.into(),
            flags: flags.into(),
            reserved: 0.into(),
        };
        self.chunks.extend(record.as_bytes());
        self.chunk_count += 1;
    }

    fn assemble(self, builder: &IndexBuilder) -> Vec<u8> {
        let parts = [
            self.files,
            self.tensors,
            self.chunks,
            self.dims,
            self.digests,
            self.strings,
            self.planner,
        ];
        let mut bytes = vec![0; HEADER_LEN];
        let mut records = [const { SectionRecord::new(0, 0) }; SECTIONS.len()];
        for (part, record) in parts.iter().zip(&mut records) {
            *record = SectionRecord::new(bytes.len() as u64, part.len() as u64);
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        let header = Header {
            magic: MAGIC,
            version: VERSION.into(),
            header_len: HEADER_LEN_U32.into(),
            compat: 0.into(),
            incompat: if builder.chunks.iter().any(|chunk| chunk.signs != Signs::default()) {
                INCOMPAT_SIGNS.into()
            } else {
                0.into()
            },
            file_len: (bytes.len() as u64).into(),
            digest: 0.into(),
            save_id: builder.save_id,
            generation: builder.generation.into(),
            block_size: BLOCK_SIZE.into(),
            source: builder.source.code().into(),
            reserved: 0.into(),
            sections: records,
            reserved_end: [0; 48],
        };
        bytes[..HEADER_LEN].copy_from_slice(header.as_bytes());
        let digest = index_digest(&bytes, DIGEST_AT);
        Header::mut_from_bytes(&mut bytes[..HEADER_LEN])
            .expect("the header was just written")
            .digest = digest.into();
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use smallvec::smallvec;

    use super::*;

    fn f32_tensor(name: &str, shape: &[u64]) -> TensorEntry {
        TensorEntry {
            name: name.into(),
            kind: Kind::Tensor,
            dtype: Dtype::from_name("float32"),
            shape: Dims::from_slice(shape),
            flags: 1,
            path: Some(Value::Tuple(vec![Value::Str(name.into()), Value::Int(3)])),
            position: None,
        }
    }

    fn with_file(size: u64) -> IndexBuilder {
        let mut builder = IndexBuilder::new(SourceKind::Native);
        builder
            .add_file(FileEntry {
                name: "data.safetensors".into(),
                size,
                data_start: 4096,
                external: false,
                head_digest: Some(7),
                mtime_ns: 0,
            })
            .unwrap();
        builder
    }

    fn chunk(tensor: u32, offset: u64, offsets: &[u64], sizes: &[u64]) -> ChunkEntry {
        let length = sizes.iter().product::<u64>() * 4;
        ChunkEntry {
            tensor,
            file: 0,
            offset,
            length,
            offsets: Dims::from_slice(offsets),
            sizes: Dims::from_slice(sizes),
            strides: None,
            signs: Signs::default(),
            digests: Some(vec![9; usize::try_from(block_count(length)).unwrap()]),
        }
    }

    fn sample() -> Vec<u8> {
        let mut builder = with_file(4096 + 96 + 5);
        builder.generation = 4;
        builder.save_id = [5; 16];
        builder.root = Value::Dict(vec![]);
        let w = builder.add_tensor(f32_tensor("w", &[4, 4])).unwrap();
        let b = builder.add_tensor(f32_tensor("b", &[])).unwrap();
        let step = builder
            .add_tensor(TensorEntry {
                name: "a.step".into(),
                kind: Kind::Bytes,
                dtype: None,
                shape: smallvec![],
                flags: 0,
                path: None,
                position: None,
            })
            .unwrap();
        builder.add_chunk(chunk(w, 4128, &[2, 0], &[2, 4])).unwrap();
        builder.add_chunk(chunk(w, 4096, &[0, 0], &[2, 4])).unwrap();
        builder.add_chunk(chunk(b, 4160, &[], &[])).unwrap();
        builder
            .add_chunk(ChunkEntry {
                digests: None,
                length: 5,
                ..chunk(step, 4180, &[], &[])
            })
            .unwrap();
        builder.build().unwrap()
    }

    #[test]
    fn what_is_built_is_found() {
        let index = Index::from_bytes(sample(), Path::new("ckpt/index.dcprs")).unwrap();
        assert_eq!((index.generation(), index.save_id(), index.version()), (4, [5; 16], 1));
        assert_eq!(index.source(), SourceKind::Native);
        let names: Vec<_> = (0..index.tensor_count()).map(|t| index.name(t)).collect();
        assert_eq!(names, ["a.step", "b", "w"]);
        assert_eq!(index.find("w"), Some(2));
        assert_eq!(index.find("c"), None);
        assert_eq!(index.find("x"), None);
        let w = index.tensor(2);
        assert_eq!(
            (w.shape.as_slice(), w.split_dim, w.chunks.clone()),
            (&[4, 4][..], Some(0), 2..4)
        );
        let second = index.chunk(3);
        assert_eq!(
            (second.offset, second.offsets.as_slice(), second.length),
            (4128, &[2, 0][..], 32)
        );
        assert_eq!(index.chunk_extent(3, 0), 2..4);
        assert_eq!(index.digest(second.digests.unwrap().start), 9);
        assert_eq!(index.chunk(0).digests, None);
        assert_eq!(index.planner_path(0), None);
        assert_eq!(
            index.planner_path(2),
            Some(Value::Tuple(vec![Value::Str("w".into()), Value::Int(3)]))
        );
        assert_eq!(index.planner_root(), Value::Dict(vec![]));
        assert_eq!(index.file(0).head_digest, Some(7));
        assert_eq!(index.file_path(0), Path::new("ckpt/data.safetensors"));
    }

    #[test]
    fn merging_two_halves_gives_the_whole() {
        let half = |row: u64, name: &str| {
            let mut builder = IndexBuilder::new(SourceKind::Native);
            builder
                .add_file(FileEntry {
                    name: name.into(),
                    size: 5000,
                    data_start: 4096,
                    external: false,
                    head_digest: None,
                    mtime_ns: 0,
                })
                .unwrap();
            let w = builder.add_tensor(f32_tensor("w", &[4, 4])).unwrap();
            builder.add_chunk(chunk(w, 4096, &[row, 0], &[2, 4])).unwrap();
            Index::from_bytes(builder.build().unwrap(), Path::new("x")).unwrap()
        };
        let mut builder = IndexBuilder::new(SourceKind::Native);
        builder.merge(&half(2, "b")).unwrap();
        builder.merge(&half(0, "a")).unwrap();
        let index = Index::from_bytes(builder.build().unwrap(), Path::new("x")).unwrap();
        let w = index.tensor(0);
        assert_eq!(w.chunks, 0..2);
        assert_eq!(index.file(index.chunk(0).file).name, "a");
        assert_eq!(index.file(index.chunk(1).file).name, "b");
    }

    #[test]
    fn contradictions_are_refused() {
        let mut builder = with_file(5000);
        let w = builder.add_tensor(f32_tensor("w", &[4, 4])).unwrap();
        assert_eq!(builder.add_tensor(f32_tensor("w", &[4, 4])).unwrap(), w);
        assert!(builder.add_tensor(f32_tensor("w", &[4, 5])).is_err());
        builder.add_chunk(chunk(w, 4096, &[3, 0], &[2, 4])).unwrap();
        assert!(builder.build().unwrap_err().to_string().contains("outside the tensor"));
    }

    #[test]
    fn a_path_is_of_strings_and_integers() {
        let text = || Value::Str("w".into());
        for path in [
            Value::Tuple(vec![]),
            Value::List(vec![text()]),
            text(),
            Value::Tuple(vec![text(), Value::Bool(true)]),
            Value::Tuple(vec![Value::Tuple(vec![text()])]),
        ] {
            let mut builder = with_file(5000);
            builder
                .add_tensor(TensorEntry {
                    path: Some(path),
                    position: None,
                    ..f32_tensor("w", &[4])
                })
                .unwrap();
            let error = builder.build().unwrap_err();
            assert!(
                matches!(&error, Error::TensorPlan { tensor, .. } if tensor == "w"),
                "{error}"
            );
        }
    }

    #[test]
    fn every_flipped_byte_and_every_truncation_is_noticed() {
        let good = sample();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(Index::from_bytes(bad, Path::new("x")).is_err(), "byte {at}");
            assert!(Index::from_bytes(good[..at].to_vec(), Path::new("x")).is_err());
        }
    }

    /// What an attacker can do, who can compute digests too.
    fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
        if bytes.len() >= HEADER_LEN {
            let digest = index_digest(&bytes, DIGEST_AT);
            bytes[DIGEST_AT..DIGEST_AT + 8].copy_from_slice(&digest.to_le_bytes());
        }
        bytes
    }

    /// Every look-up that there is, on an index that passed its checks.
    fn look_everywhere(index: &Index) {
        for t in 0..index.tensor_count() {
            let tensor = index.tensor(t);
            assert_eq!(index.find(tensor.name), Some(t));
            for near in 0..index.tensor_count() + 2 {
                assert_eq!(index.find_near(tensor.name, near), Some(t));
                let absent = format!("{}\0", tensor.name);
                assert_eq!(index.find_near(&absent, near), index.find(&absent));
            }
            index.planner_path(t);
            for c in tensor.chunks {
                let chunk = index.chunk(c);
                let file = index.file(chunk.file);
                assert!(chunk.offset + chunk.length <= file.size);
                for d in chunk.digests.into_iter().flatten() {
                    index.digest(d);
                }
            }
        }
        index.planner_root();
    }

    proptest! {
        #[test]
        fn a_resealed_mutation_is_refused_or_safe(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
            let mut bytes = sample();
            for (at, value) in edits {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if let Ok(index) = Index::from_bytes(resealed(bytes), Path::new("x")) {
                look_everywhere(&index);
            }
        }
    }
}
