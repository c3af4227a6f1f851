//! Views: logical tensors over the tensors of an index. A view is an index in memory, over the same
//! files, and has no file of its own.
//!
//! A joined tensor is a set of chunks at offsets. A sliced or transposed one has chunks with
//! strides. Both fit in the records of an index. What does not is kept beside them for each chunk:
//! the bytes of the stored range before it, and how it is decoded.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use smallvec::SmallVec;

use super::{
    ChunkEntry, ChunkView, FileEntry, Index, IndexBuilder, Kind, Overlap, TensorEntry, Value,
    touching,
};
use crate::geometry::{Dims, Region, row_major, strided_length};
use crate::quant::Coded;
use crate::{Dtype, Error, Result};

/// Properties of a view that its records cannot store.
#[derive(Default)]
pub(super) struct View {
    pub is_logical: bool,
    /// Properties of chunks, by number.
    pub pieces: HashMap<u64, ChunkOrigin>,
    /// Additional names of tensors.
    pub aliases: HashMap<String, u32>,
}

/// Properties of a chunk that its record cannot store.
#[derive(Clone, Default)]
pub(super) struct ChunkOrigin {
    pub lead: u64,
    pub coded: Option<Arc<CodedChunk>>,
}

/// A chunk that is a rectangle of a coded tensor.
#[derive(Clone, Debug)]
pub struct CodedChunk {
    /// The coded tensor.
    pub of: Arc<Coded>,
    /// Offsets of the chunk in the coded tensor.
    pub offsets: Dims,
    /// The chunk's dimension for each dimension of the tensor. Along a dimension without one, the
    /// chunk has one element.
    pub dims: Axes,
}

impl PartialEq for CodedChunk {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.of, &other.of)
            && (&self.offsets, &self.dims) == (&other.offsets, &other.dims)
    }
}

impl Eq for CodedChunk {}

impl CodedChunk {
    /// Converts a rectangle of the chunk to one of the tensor.
    #[must_use]
    pub fn region(&self, offsets: &[u64], sizes: &[u64]) -> Region {
        let own = self.offsets.iter().zip(&self.dims);
        Region {
            offsets: own.map(|(&at, dim)| at + dim.map_or(0, |dim| offsets[dim])).collect(),
            sizes: self.dims.iter().map(|dim| dim.map_or(1, |dim| sizes[dim])).collect(),
        }
    }
}

impl ChunkView {
    /// Returns the first byte of a rectangle within the chunk, and the strides in bytes. For a
    /// coded chunk, both are estimates.
    pub(crate) fn bytes_of(&self, itemsize: u64, offsets: &[u64]) -> (u64, Dims) {
        if let Some(chunk) = &self.coded {
            return self.coded_bytes(chunk, offsets);
        }
        let strides = self.strides.clone().unwrap_or_else(|| row_major(&self.sizes));
        let strides: Dims = strides.iter().map(|stride| stride * itemsize).collect();
        let first = offsets.iter().zip(&strides).map(|(offset, stride)| offset * stride);
        (self.lead + first.sum::<u64>(), strides)
    }

    /// Estimates the bytes of a rectangle of codes, to compare the reads of ranks. Each row of the
    /// last dimension counts as one byte.
    fn coded_bytes(&self, chunk: &CodedChunk, offsets: &[u64]) -> (u64, Dims) {
        let numbers: u64 = chunk.of.shape.iter().product();
        let own = row_major(&chunk.of.shape);
        let stride = |dim: usize| -> u64 {
            let at = chunk.dims.iter().position(|&of| of == Some(dim));
            let bytes = at.map_or(0, |at| {
                u128::from(own[at]) * u128::from(self.length) / u128::from(numbers.max(1))
            });
            u64::try_from(bytes).unwrap_or(0)
        };
        let strides: Dims = (0..offsets.len()).map(stride).collect();
        (offsets.iter().zip(&strides).map(|(at, stride)| at * stride).sum(), strides)
    }
}

/// For each dimension of one tensor, the corresponding dimension of another.
pub type Axes = SmallVec<[Option<usize>; 4]>;

/// A logical tensor.
pub struct Logical {
    /// FQN.
    pub name: String,
    /// Its stored parts.
    pub origin: Origin,
}

/// Stored parts of a logical tensor.
pub enum Origin {
    /// Codes, in the index that the view is based on.
    Coded(Arc<Coded>),
    /// Rectangles of tensors of one dtype.
    Sources {
        /// Sizes of the logical tensor.
        shape: Dims,
        /// The rectangles. They do not overlap.
        sources: Vec<ViewSource>,
    },
}

/// A rectangle of a tensor, and its place in a logical tensor.
pub struct ViewSource {
    /// The tensor.
    pub tensor: u32,
    /// Region of it.
    pub region: Region,
    /// The tensor's dimension for each dimension of the logical tensor; `None` for a new dimension.
    /// Along dimensions that are missing here, the region has one element.
    pub dims: Axes,
    /// Offsets of its first element in the logical tensor.
    pub at: Dims,
}

/// Makes the index of a view: the tensors of `base` without the `hidden` ones, and the logical
/// tensors. `aliases` are additional names of tensors.
///
/// # Errors
/// [`Error::TensorPlan`] if two tensors have the same name, or a source does not fit.
pub fn derive(
    base: &Arc<Index>,
    hidden: &[u32],
    logical: &[Logical],
    aliases: Vec<(String, String)>,
) -> Result<Index> {
    let hidden: HashSet<u32> = hidden.iter().copied().collect();
    let mut builder = IndexBuilder::new(base.source());
    builder.save_id = base.save_id();
    builder.generation = base.generation();
    builder.root = base.planner_root();
    builder.nesting = base.nesting();
    for file in 0..base.file_count() {
        builder.add_file(FileEntry::from(base.file(file)))?;
    }
    let mut making = Making { base, builder, pieces: HashMap::new() };
    for tensor in (0..base.tensor_count()).filter(|tensor| !hidden.contains(tensor)) {
        let view = base.tensor(tensor);
        let id = making.builder.add_tensor(entry(
            base,
            tensor,
            view.name,
            view.dtype,
            view.shape.clone(),
        ))?;
        for chunk in view.chunks {
            let view = base.chunk(chunk);
            let piece = ChunkOrigin { lead: view.lead, coded: view.coded.clone() };
            making.add(id, base.name(tensor), view, chunk, piece)?;
        }
    }
    for Logical { name, origin } in logical {
        if making.builder.has_tensor(name) {
            return Err(Error::tensor_plan(Some(base.path()), name, "there are two of this name"));
        }
        match origin {
            Origin::Coded(coded) => making.coded(name, coded)?,
            Origin::Sources { shape, sources } => making.joined(name, shape, sources)?,
        }
    }
    let Making { builder, pieces, .. } = making;
    Index::of_view(builder.lay_out()?, base, |index| View {
        is_logical: true,
        pieces: by_number(index, pieces),
        // An alias of the base stays if there is still a tensor of that name.
        aliases: (base.view.aliases.iter())
            .map(|(alias, tensor)| (alias.clone(), base.name(*tensor).to_owned()))
            .chain(aliases)
            .filter_map(|(alias, name)| Some((alias, index.find(&name)?)))
            .collect(),
    })
}

/// Returns an entry with the properties of a tensor, under another name.
fn entry(base: &Index, tensor: u32, name: &str, dtype: Option<Dtype>, shape: Dims) -> TensorEntry {
    let view = base.tensor(tensor);
    let is_same = view.name == name;
    TensorEntry {
        name: name.to_owned(),
        kind: view.kind,
        dtype,
        shape,
        flags: view.flags,
        // An entry with a path gets one of its own. Hugging Face folders have no paths.
        path: base
            .planner_path(tensor)
            .map(|path| if is_same { path } else { Value::Tuple(vec![Value::Str(name.into())]) }),
        position: view.position,
    }
}

/// Name of a tensor, and offsets and sizes of a chunk in it. No two chunks share all three.
type ChunkPlace = (String, Dims, Dims);

struct Making<'a> {
    base: &'a Arc<Index>,
    builder: IndexBuilder,
    pieces: HashMap<ChunkPlace, ChunkOrigin>,
}

impl Making<'_> {
    /// Adds a chunk with all of its properties. `number` is the chunk of the base that has its
    /// bytes.
    fn add(
        &mut self,
        tensor: u32,
        name: &str,
        view: ChunkView,
        number: u64,
        piece: ChunkOrigin,
    ) -> Result<()> {
        if piece.lead > 0 || piece.coded.is_some() {
            let place = (name.to_owned(), view.offsets.clone(), view.sizes.clone());
            self.pieces.entry(place).or_insert(piece);
        }
        let digests = self.base.chunk(number).digests;
        self.builder.add_chunk(ChunkEntry {
            tensor,
            file: view.file,
            offset: view.offset,
            length: view.length,
            offsets: view.offsets,
            sizes: view.sizes,
            strides: view.strides,
            signs: view.signs,
            digests: view
                .digests
                .and(digests)
                .map(|range| range.map(|i| self.base.digest(i)).collect()),
            content: view.content,
            frozen: view.frozen,
        })
    }

    fn coded(&mut self, name: &str, coded: &Arc<Coded>) -> Result<()> {
        let dtype = Some(coded.target.dtype());
        let id = self.builder.add_tensor(entry(
            self.base,
            coded.codes,
            name,
            dtype,
            coded.shape.clone(),
        ))?;
        let chunks = self.base.tensor(coded.codes).chunks;
        if chunks.is_empty() {
            return Ok(());
        }
        let first = chunks.start;
        let offsets = Dims::from_elem(0, coded.shape.len());
        let view = ChunkView {
            offsets: offsets.clone(),
            sizes: coded.shape.clone(),
            strides: None,
            digests: None,
            content: None,
            ..self.base.chunk(first)
        };
        let dims = (0..coded.shape.len()).map(Some).collect();
        let coded = CodedChunk { of: Arc::clone(coded), offsets, dims };
        self.add(id, name, view, first, ChunkOrigin { lead: 0, coded: Some(Arc::new(coded)) })
    }

    fn joined(&mut self, name: &str, shape: &Dims, sources: &[ViewSource]) -> Result<()> {
        let refuse = |reason: String| Err(Error::tensor_plan(Some(self.base.path()), name, reason));
        let Some(first) = sources.first() else {
            return refuse("it is made of nothing".into());
        };
        let dtype = self.base.tensor(first.tensor).dtype;
        for source in sources {
            let view = self.base.tensor(source.tensor);
            if view.kind != Kind::Tensor {
                return refuse(format!("{:?} is a value, and no tensor", view.name));
            }
            if view.dtype != dtype {
                let names = [dtype, view.dtype].map(|dtype| dtype.map_or("", Dtype::name));
                let first = self.base.name(first.tensor);
                return refuse(format!(
                    "{first:?} is {} and {:?} is {}",
                    names[0], view.name, names[1]
                ));
            }
            let sizes = source.dims.iter().map(|dim| dim.map_or(1, |dim| source.region.sizes[dim]));
            let place = Region { offsets: source.at.clone(), sizes: sizes.collect() };
            if !source.region.fits(&view.shape) || !place.fits(shape) {
                return refuse(format!(
                    "{:?} of shape {:?} does not fit into {shape:?}",
                    view.name,
                    view.shape.as_slice()
                ));
            }
        }
        let id =
            self.builder.add_tensor(entry(self.base, first.tensor, name, dtype, shape.clone()))?;
        if shape.contains(&0) {
            return self.empty(id, name, shape, first.tensor);
        }
        for source in sources {
            for part in touching(self.base, source.tensor, &source.region) {
                let (view, piece) = placed(self.base, source, &part, dtype.map_or(1, Dtype::size));
                self.add(id, name, view, part.chunk, piece)?;
            }
        }
        Ok(())
    }

    /// Adds an empty chunk, so that writers that go chunk by chunk do not lose the tensor.
    fn empty(&mut self, tensor: u32, name: &str, shape: &Dims, of: u32) -> Result<()> {
        let chunks = self.base.tensor(of).chunks;
        if chunks.is_empty() {
            return Ok(());
        }
        let view = ChunkView {
            length: 0,
            offsets: Dims::from_elem(0, shape.len()),
            sizes: shape.clone(),
            strides: None,
            digests: None,
            content: None,
            frozen: false,
            ..self.base.chunk(chunks.start)
        };
        self.add(tensor, name, view, chunks.start, ChunkOrigin::default())
    }
}

/// Converts a part of a chunk of the base to a chunk of a logical tensor.
fn placed(
    base: &Index,
    source: &ViewSource,
    part: &Overlap,
    itemsize: u64,
) -> (ChunkView, ChunkOrigin) {
    let view = base.chunk(part.chunk);
    let dims = || source.dims.iter();
    let sizes: Dims = dims().map(|dim| dim.map_or(1, |dim| part.sizes[dim])).collect();
    let offsets =
        dims().zip(&source.at).map(|(dim, at)| at + dim.map_or(0, |dim| part.region_offsets[dim]));
    let old = view.strides.clone().unwrap_or_else(|| row_major(&view.sizes));
    let contiguous = row_major(&sizes);
    // The stride of a single element is arbitrary. Use that of a contiguous chunk, so that a
    // contiguous chunk is recognized.
    let stride = |(i, dim): (usize, &Option<usize>)| {
        dim.filter(|_| sizes[i] != 1).map_or(contiguous[i], |dim| old[dim])
    };
    let strides: Dims = dims().enumerate().map(stride).collect();
    let first: u64 = part.chunk_offsets.iter().zip(&old).map(|(at, stride)| at * stride).sum();
    let lead = view.lead + first * itemsize;
    let coded = view.coded.as_ref().map(|coded| {
        let begin = coded.region(&part.chunk_offsets, &view.sizes).offsets;
        let axis = |dim: &Option<usize>| source.dims.iter().position(|d| d.is_some() && d == dim);
        let dims = coded.dims.iter().map(axis).collect();
        Arc::new(CodedChunk { of: Arc::clone(&coded.of), offsets: begin, dims })
    });
    let mut made = ChunkView {
        offsets: offsets.collect(),
        strides: (strides != contiguous).then_some(strides.clone()),
        sizes,
        // It has the same bytes in another order, or only some of them.
        content: None,
        frozen: false,
        ..view
    };
    if coded.is_some() {
        made.strides = None;
        return (made, ChunkOrigin { lead: 0, coded });
    }
    if made.digests.is_some() {
        // Digests cover the whole range, so the range must stay as it is.
        return (made, ChunkOrigin { lead, coded });
    }
    made.offset += lead;
    made.length = strided_length(&made.sizes, &strides, itemsize).unwrap_or(0);
    (made, ChunkOrigin::default())
}

/// Returns the additional properties by the numbers of the new chunks.
fn by_number(
    index: &Index,
    mut pieces: HashMap<ChunkPlace, ChunkOrigin>,
) -> HashMap<u64, ChunkOrigin> {
    let mut found = HashMap::with_capacity(pieces.len());
    for chunk in 0..index.chunk_count() {
        let view = index.chunk(chunk);
        let place = (index.name(view.tensor).to_owned(), view.offsets, view.sizes);
        found.extend(pieces.remove(&place).map(|piece| (chunk, piece)));
    }
    found
}
