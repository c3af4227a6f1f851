//! Views: logical tensors over those of an index. They are an index in memory, over the same files,
//! of which no file knows.
//!
//! A joined tensor is a table of chunks at offsets, one that was cut or transposed is chunks with
//! strides. Both are what records of an index say. What records have no field for stands beside
//! them, by chunk: how many bytes of its stretch come before it, and how it is decoded.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use smallvec::SmallVec;

use super::{ChunkEntry, ChunkView, FileEntry, Index, IndexBuilder, Kind, TensorEntry, Value};
use crate::geometry::overlap::{self, Overlap, Region};
use crate::geometry::{Dims, row_major, strided_length};
use crate::quant::Coded;
use crate::{Dtype, Error, Result};

/// Properties of a view that its records lack.
#[derive(Default)]
pub(super) struct View {
    pub is_logical: bool,
    /// By the numbers of chunks.
    pub pieces: HashMap<u64, ChunkOrigin>,
    /// Second names of tensors.
    pub aliases: HashMap<String, u32>,
}

/// Properties of a chunk that its record lacks.
#[derive(Clone, Default)]
pub(super) struct ChunkOrigin {
    pub lead: u64,
    pub coded: Option<Arc<CodedChunk>>,
}

/// A chunk that is a rectangle of a tensor stored as codes.
#[derive(Clone, Debug)]
pub struct CodedChunk {
    /// The tensor.
    pub of: Arc<Coded>,
    /// Offsets of the chunk in the coded tensor.
    pub offsets: Dims,
    /// For each dimension of the tensor, that of the chunk; the chunk has one element of the
    /// others.
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
    /// The rectangle of the tensor that is one of the chunk.
    #[must_use]
    pub fn region(&self, offsets: &[u64], sizes: &[u64]) -> Region {
        let own = self.offsets.iter().zip(&self.dims);
        Region {
            offsets: own.map(|(&at, dim)| at + dim.map_or(0, |dim| offsets[dim])).collect(),
            sizes: self.dims.iter().map(|dim| dim.map_or(1, |dim| sizes[dim])).collect(),
        }
    }
}

/// For each dimension of one tensor, that of another.
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
    /// Codes, of the index that the view is of.
    Coded(Arc<Coded>),
    /// Rectangles of tensors of one dtype.
    Sources {
        /// Sizes of the logical tensor.
        shape: Dims,
        /// The rectangles. They do not overlap.
        sources: Vec<ViewSource>,
    },
}

/// A rectangle of a tensor, and its place in a logical one.
pub struct ViewSource {
    /// The tensor.
    pub tensor: u32,
    /// Region of it.
    pub region: Region,
    /// For each dimension of the logical tensor that of the other one; none for a dimension that is
    /// new. The region has one element of those that are missing here.
    pub dims: Axes,
    /// Offsets of its first element in the logical tensor.
    pub at: Dims,
}

/// The index of a view: the tensors of `base` but for the `hidden` ones, and the logical ones.
/// `aliases` are second names of tensors.
///
/// # Errors
/// [`Error::TensorPlan`] where two tensors have one name, or a source does not fit.
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
        // Aliases of the base stay where there is still a tensor of that name.
        aliases: (base.view.aliases.iter())
            .map(|(alias, tensor)| (alias.clone(), base.name(*tensor).to_owned()))
            .chain(aliases)
            .filter_map(|(alias, name)| Some((alias, index.find(&name)?)))
            .collect(),
    })
}

/// An entry as that of a tensor, under a name of its own.
fn entry(base: &Index, tensor: u32, name: &str, dtype: Option<Dtype>, shape: Dims) -> TensorEntry {
    let view = base.tensor(tensor);
    let is_same = view.name == name;
    TensorEntry {
        name: name.to_owned(),
        kind: view.kind,
        dtype,
        shape,
        flags: view.flags,
        // Entries with a path of their own keep it. Hugging Face folders have none.
        path: base
            .planner_path(tensor)
            .map(|path| if is_same { path } else { Value::Tuple(vec![Value::Str(name.into())]) }),
        position: view.position,
    }
}

/// Place of a chunk in its tensor; no two chunks of one tensor share it.
type ChunkPlace = (String, Dims, Dims);

struct Making<'a> {
    base: &'a Arc<Index>,
    builder: IndexBuilder,
    pieces: HashMap<ChunkPlace, ChunkOrigin>,
}

impl Making<'_> {
    /// Adds a chunk with all that is known of it. `number` is that of the chunk in the base whose
    /// bytes it has.
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
            for part in overlap::touching(self.base, source.tensor, &source.region) {
                let (view, piece) = placed(self.base, source, &part, dtype.map_or(1, Dtype::size));
                self.add(id, name, view, part.chunk, piece)?;
            }
        }
        Ok(())
    }

    /// Adds a chunk without elements, so that those who write chunk by chunk do not lose the
    /// tensor.
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

/// A part of a chunk of the base, as a chunk of a logical tensor.
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
    // The stride of a single element is any: that of contiguous ones, so that these are known as
    // such.
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
        // The same bytes in another order, or some of them.
        content: None,
        frozen: false,
        ..view
    };
    if coded.is_some() {
        made.strides = None;
        return (made, ChunkOrigin { lead: 0, coded });
    }
    if made.digests.is_some() {
        // Digests are over the whole stretch, so that this stays what is checked.
        return (made, ChunkOrigin { lead, coded });
    }
    made.offset += lead;
    made.length = strided_length(&made.sizes, &strides, itemsize).unwrap_or(0);
    (made, ChunkOrigin::default())
}

/// Orders the properties beside the records by the chunks' present numbers.
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
