//! Construction of an index.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use smallvec::SmallVec;

use super::entry::{ChunkEntry, FileEntry, TensorEntry};
use super::sections::Sections;
use super::{FileView, Index, SourceKind, Value, block_count};
use crate::names::ByName;
use crate::{Error, Result};

/// Collects files, tensors and chunks in any order, and lays out an index of them.
#[derive(Debug)]
pub struct IndexBuilder {
    source: SourceKind,
    /// 16 random bytes that identify the save.
    pub save_id: [u8; 16],
    /// Number of the save into the folder.
    pub generation: u64,
    /// Planner data that belongs to no tensor.
    pub root: Value,
    /// The containers of the state dict that no path shows: a value that [is
    /// nesting](Value::is_nesting).
    pub nesting: Value,
    files: Vec<FileEntry>,
    file_ids: HashMap<String, u32>,
    tensors: Vec<TensorEntry>,
    tensor_ids: ByName,
    chunks: Vec<ChunkEntry>,
}

impl IndexBuilder {
    /// Makes an empty index.
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
            tensor_ids: ByName::default(),
            chunks: Vec::new(),
        }
    }

    /// Reserves memory for this many tensors with one chunk each.
    pub fn reserve(&mut self, tensors: usize) {
        self.tensors.reserve(tensors);
        self.tensor_ids.reserve(tensors, |id| &self.tensors[id as usize].name);
        self.chunks.reserve(tensors);
    }

    /// Adds a data file. Its name must be new.
    pub fn add_file(&mut self, file: FileEntry) -> Result<u32> {
        let id = next_id(self.files.len(), "files")?;
        if self.file_ids.insert(file.name.clone(), id).is_some() {
            return Err(Error::Plan(format!("data file {:?} is added twice", file.name)));
        }
        self.files.push(file);
        Ok(id)
    }

    /// Adds a tensor and returns its number, or the number of one with this name that was added
    /// before. Both must agree in kind, dtype and shape. The flags, path and position of the first
    /// one stay, but it gets the path of the second if it has none.
    pub fn add_tensor(&mut self, tensor: TensorEntry) -> Result<u32> {
        let next = next_id(self.tensors.len(), "tensors")?;
        let name_of = |id: u32| {
            self.tensors.get(id as usize).map_or(tensor.name.as_str(), |known| known.name.as_str())
        };
        let id = self.tensor_ids.get_or_add(&tensor.name, next, name_of);
        if id < next {
            let known = &mut self.tensors[id as usize];
            if (known.kind, known.dtype, &known.shape) != (tensor.kind, tensor.dtype, &tensor.shape)
            {
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
        self.tensors.push(tensor);
        Ok(id)
    }

    /// Adds a chunk. Of several chunks of exactly the same rectangle, the first one stays.
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

    /// Sets the path of a tensor, unless it has one. Returns whether the tensor was added before.
    pub fn set_path(&mut self, fqn: &str, path: Value) -> bool {
        let Some(id) = self.tensor_id(fqn) else {
            return false;
        };
        self.tensors[id as usize].path.get_or_insert(path);
        true
    }

    /// Returns whether a tensor or value with this FQN was added and has a path.
    pub fn has_path(&self, fqn: &str) -> bool {
        self.tensor_id(fqn).is_some_and(|id| self.tensors[id as usize].path.is_some())
    }

    /// Returns whether a tensor or value with this FQN was added.
    pub fn has_tensor(&self, fqn: &str) -> bool {
        self.tensor_id(fqn).is_some()
    }

    fn tensor_id(&self, fqn: &str) -> Option<u32> {
        self.tensor_ids.get(fqn, |id| &self.tensors[id as usize].name)
    }

    /// Adds all files, tensors, chunks and containers of another index, such as that of another
    /// rank.
    pub fn merge(&mut self, other: &Index) -> Result<()> {
        self.merge_nesting(other.nesting());
        self.merge_with(other, |file| Ok(FileEntry::from(file)), |_| None)
    }

    /// Adds containers. Of several containers at one path, the first one stays.
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

    /// Does the same as [`merge`](Self::merge). `file` converts the files, and `digests` adds
    /// digests for chunks that have none.
    pub fn merge_with(
        &mut self,
        other: &Index,
        file: impl Fn(FileView<'_>) -> Result<FileEntry>,
        digests: impl Fn(u64) -> Option<Vec<u64>>,
    ) -> Result<()> {
        let mut files = Vec::with_capacity(other.file_count() as usize);
        self.reserve(other.tensor_count() as usize);
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
                    content: chunk.content,
                    frozen: chunk.frozen,
                })?;
            }
        }
        Ok(())
    }

    /// Lays out the index, and checks it like a reader.
    pub fn build(self) -> Result<Vec<u8>> {
        let bytes = Shared(Arc::new(self.lay_out()?));
        Index::from_bytes(bytes.clone(), Path::new("(new index)"))?;
        Ok(Arc::try_unwrap(bytes.0).expect("the index that shared it is gone"))
    }

    /// Lays out the index.
    pub(super) fn lay_out(self) -> Result<Vec<u8>> {
        let mut order: Vec<u32> = (0..next_id(self.tensors.len(), "tensors")?).collect();
        order.sort_unstable_by(|&a, &b| {
            let name = |id: u32| self.tensors[id as usize].name.as_bytes();
            name(a).cmp(name(b))
        });
        // First groups chunks by tensor. They were added rank by rank, each with all tensors, so
        // those of one tensor are then nearly sorted.
        let mut chunks: Vec<Chunks<'_>> = vec![Chunks::new(); self.tensors.len()];
        for chunk in &self.chunks {
            chunks[chunk.tensor as usize].push(chunk);
        }

        let mut out = Sections::new(&[&self.root, &self.nesting])?;
        for file in &self.files {
            out.file(file)?;
        }
        for (place, &id) in (0_u32..).zip(&order) {
            let own = &mut chunks[id as usize];
            // A stable sort, so that the first of two equal rectangles stays.
            own.sort_by(|a, b| a.offsets.cmp(&b.offsets).then_with(|| a.sizes.cmp(&b.sizes)));
            own.dedup_by(|b, a| (&a.offsets, &a.sizes) == (&b.offsets, &b.sizes));
            out.tensor(&self.tensors[id as usize], place, own)?;
        }
        Ok(out.assemble(self.source, self.save_id, self.generation))
    }
}

/// The chunks of one tensor. Most tensors have one.
type Chunks<'a> = SmallVec<[&'a ChunkEntry; 2]>;

fn next_id(len: usize, what: &str) -> Result<u32> {
    u32::try_from(len).ok().filter(|&id| id < u32::MAX).ok_or_else(|| {
        Error::Unsupported(format!("an index cannot hold more than 4 billion {what}"))
    })
}

fn describe(tensor: &TensorEntry) -> String {
    match tensor.dtype {
        Some(dtype) => format!("{} {:?}", dtype.name(), tensor.shape.as_slice()),
        None => "a non-tensor value".into(),
    }
}

/// The finished bytes, shared with an [`Index`] during its checks.
#[derive(Clone)]
struct Shared(Arc<Vec<u8>>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
#[path = "build_tests.rs"]
mod tests;
