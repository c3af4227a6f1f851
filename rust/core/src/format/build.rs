//! Laying out an index from what was written or found.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use smallvec::SmallVec;

use super::entry::{ChunkEntry, FileEntry, TensorEntry};
use super::sections::Sections;
use super::{FileView, Index, SourceKind, Value, block_count};
use crate::names::ByName;
use crate::{Error, Result};

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
    /// The containers of the state dict that the paths do not tell: a value that [is
    /// nesting](Value::is_nesting).
    pub nesting: Value,
    files: Vec<FileEntry>,
    file_ids: HashMap<String, u32>,
    tensors: Vec<TensorEntry>,
    tensor_ids: ByName,
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
            tensor_ids: ByName::default(),
            chunks: Vec::new(),
        }
    }

    /// Makes room for as many tensors, of a chunk each.
    pub fn reserve(&mut self, tensors: usize) {
        self.tensors.reserve(tensors);
        self.tensor_ids.reserve(tensors, |id| &self.tensors[id as usize].name);
        self.chunks.reserve(tensors);
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

    /// Adds a tensor, or finds it when one that agrees in kind, dtype and shape was added before.
    /// The first one's flags, path and position stay.
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

    /// Sets the path of a tensor that was added, unless it has one. Returns whether there is such a
    /// tensor.
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

    /// Adds all of another index: the files, tensors, chunks and containers that another rank
    /// wrote.
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

    /// [`merge`](Self::merge), with a say in what the files become, and digests for chunks that
    /// have none.
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

    /// Lays the index out, and checks it as a reader would.
    pub fn build(self) -> Result<Vec<u8>> {
        let bytes = Shared(Arc::new(self.lay_out()?));
        Index::from_bytes(bytes.clone(), Path::new("(new index)"))?;
        Ok(Arc::try_unwrap(bytes.0).expect("the index that shared it is gone"))
    }

    /// Lays the index out.
    pub(super) fn lay_out(self) -> Result<Vec<u8>> {
        let mut order: Vec<u32> = (0..next_id(self.tensors.len(), "tensors")?).collect();
        order.sort_unstable_by(|&a, &b| {
            let name = |id: u32| self.tensors[id as usize].name.as_bytes();
            name(a).cmp(name(b))
        });
        // By tensor first: chunks come rank by rank, of all tensors each time, and those of a
        // tensor are nearly sorted then.
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
            // Stable, so that the first of two equal rectangles is the one that stays.
            own.sort_by(|a, b| a.offsets.cmp(&b.offsets).then_with(|| a.sizes.cmp(&b.sizes)));
            own.dedup_by(|b, a| (&a.offsets, &a.sizes) == (&b.offsets, &b.sizes));
            out.tensor(&self.tensors[id as usize], place, own)?;
        }
        Ok(out.assemble(self.source, self.save_id, self.generation))
    }
}

/// The chunks of one tensor: most have one.
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

/// The finished bytes, lent to an [`Index`] for the time of its checks.
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
