//! A pickled `DTensor`: its local shard, and its place in the global tensor.

use super::fault::{Fault, FaultResult};
use super::pickle::{Item, Pickle};
use super::tensor_pickle::{self, StoredTensor, dims};
use crate::Dtype;
use crate::geometry::{Dims, Region};

/// The part of a global tensor that a rank saved.
#[derive(Debug)]
pub(super) struct Part {
    /// Equal in all files of a checkpoint.
    pub spec: Spec,
    pub dtype: Dtype,
    /// The rank that saved it, if the pickle has it.
    pub rank: Option<u64>,
    pub requires_grad: bool,
    /// The stored elements, and their regions of the global tensor.
    pub shards: Vec<(StoredTensor, Region)>,
}

/// Shape and distribution of a global tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Spec {
    pub shape: Dims,
    /// Ranks along each dimension of the mesh. A `ShardedTensor` has none.
    pub mesh: Dims,
    /// For each dimension of the mesh.
    pub placements: Vec<Placement>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    Replicate,
    Shard(usize),
    /// A shard that is cut after those of the following dimensions of the mesh, which are this many
    /// ranks.
    StridedShard(usize, u64),
}

impl Spec {
    /// Returns the region of the shard at these coordinates in the mesh, as torch computes it
    /// (`compute_local_shape_and_global_offset`).
    fn region(&self, coordinates: &[u64]) -> FaultResult<Region> {
        let Self { shape, mesh, placements } = self;
        let mut region = Region::new(&Dims::from_elem(0, shape.len()), shape);
        for dim in 0..shape.len() {
            let mut cuts: Vec<usize> = (0..mesh.len())
                .filter(|&at| match placements[at] {
                    Placement::Replicate => false,
                    Placement::Shard(of) | Placement::StridedShard(of, _) => of == dim,
                })
                .collect();
            let is_strided = |at: &usize| matches!(placements[*at], Placement::StridedShard(..));
            if let [first, rest @ ..] = &cuts[..]
                && let Placement::StridedShard(_, factor) = placements[*first]
            {
                let later: u64 = rest.iter().map(|&at| mesh[at]).product();
                if factor != later || rest.iter().any(is_strided) {
                    return Err(strided());
                }
                cuts.rotate_left(1);
            } else if cuts.iter().any(is_strided) {
                return Err(strided());
            }
            let (mut begin, mut size) = (0, shape[dim]);
            for at in cuts {
                let chunk = size.div_ceil(mesh[at].max(1));
                let skip = chunk.saturating_mul(coordinates[at]).min(size);
                (begin, size) = (begin + skip, chunk.min(size - skip));
            }
            (region.offsets[dim], region.sizes[dim]) = (begin, size);
        }
        Ok(region)
    }
}

fn odd(what: &str) -> Fault {
    Fault::corrupt(0, format!("pickle of a DTensor: {what}"))
}

fn strided() -> Fault {
    Fault::Unsupported("a DTensor with strided shards of an unknown order".into())
}

/// Parses an item; returns `None` if it is no `DTensor`.
pub(super) fn read(pickle: &Pickle<'_>, item: Item) -> FaultResult<Option<Part>> {
    let Some((("torch._tensor", "_rebuild_from_type_v2"), [function, kind, args, state], None)) =
        pickle.as_object(item)
    else {
        return Ok(None);
    };
    let is_dtensor = pickle
        .as_global(*kind)
        .is_some_and(|(module, name)| module.starts_with("torch.distributed") && name == "DTensor");
    if !is_dtensor
        || pickle.as_global(*function) != Some(("torch._utils", "_rebuild_wrapper_subclass"))
    {
        return Ok(None);
    }
    // The attributes are a dict, or a pair of one and of a dict of slots.
    let slots = match pickle.as_tuple(*state) {
        Some([_, slots]) => *slots,
        _ => *state,
    };
    let part = |of: Item, name: &str| {
        pickle.get(of, name).ok_or_else(|| odd(&format!("it has no {name}")))
    };
    let spec = attributes(pickle, part(slots, "_spec")?)?;
    let mesh = attributes(pickle, part(spec, "mesh")?)?;
    let meta = pickle.as_object(part(spec, "tensor_meta")?);
    let shape = match meta {
        Some((_, [shape, ..], _)) => dims(pickle, *shape),
        _ => None,
    };
    let shape = shape.ok_or_else(|| odd("its shape"))?;
    let placements = pickle.as_tuple(part(spec, "placements")?).ok_or_else(|| odd("placements"))?;
    let placements: Vec<Placement> = placements
        .iter()
        .map(|item| placement(pickle, *item, shape.len()))
        .collect::<FaultResult<_>>()?;
    let sizes = mesh_sizes(pickle, mesh)?;
    let coordinates = pickle
        .get(mesh, "_coordinate_on_dim")
        .and_then(|item| numbers(pickle, item))
        .ok_or_else(|| odd("the coordinates of its rank"))?;
    if sizes.len() != placements.len()
        || coordinates.len() != sizes.len()
        || coordinates.iter().zip(&sizes).any(|(at, size)| at >= size)
    {
        return Err(odd("its mesh and its placements"));
    }
    let local = tensor_pickle::read(pickle, part(slots, "_local_tensor")?)?;
    let spec = Spec { shape, mesh: sizes, placements };
    let region = spec.region(&coordinates)?;
    if region.sizes != local.sizes {
        return Err(odd(&format!(
            "its shard is {:?}, and by its placements {:?}",
            local.sizes.as_slice(),
            region.sizes.as_slice()
        )));
    }
    let requires_grad = pickle.as_tuple(*args).and_then(|args| args.get(7));
    Ok(Some(Part {
        spec,
        dtype: local.dtype,
        rank: pickle.get(mesh, "_rank").and_then(Item::as_u64),
        requires_grad: requires_grad == Some(&Item::Bool(true)),
        shards: vec![(local, region)],
    }))
}

/// Returns the dict of an object's attributes.
fn attributes(pickle: &Pickle<'_>, item: Item) -> FaultResult<Item> {
    let state = pickle.as_object(item).and_then(|(_, _, state)| state);
    state.ok_or_else(|| odd("an object without attributes"))
}

fn placement(pickle: &Pickle<'_>, item: Item, ndim: usize) -> FaultResult<Placement> {
    let Some(((_, name), _, state)) = pickle.as_object(item) else {
        return Err(odd("a placement"));
    };
    let attribute =
        |key: &str| state.and_then(|state| pickle.get(state, key)).and_then(Item::as_u64);
    let dim = || {
        let dim = attribute("dim").and_then(|dim| usize::try_from(dim).ok());
        dim.filter(|&dim| dim < ndim).ok_or_else(|| odd("the dimension of a shard"))
    };
    match name {
        "Replicate" => Ok(Placement::Replicate),
        "Shard" => Ok(Placement::Shard(dim()?)),
        "_StridedShard" => {
            let factor = attribute("split_factor").ok_or_else(|| odd("a strided shard"))?;
            Ok(Placement::StridedShard(dim()?, factor))
        }
        _ => Err(Fault::Unsupported(format!(
            "a DTensor with a {name} placement: save it after redistribute()"
        ))),
    }
}

/// Returns the ranks along each dimension: of the mesh's tensor, or since torch 2.10 of its layout.
fn mesh_sizes(pickle: &Pickle<'_>, mesh: Item) -> FaultResult<Dims> {
    if let Some(ranks) = pickle.get(mesh, "mesh").filter(|ranks| *ranks != Item::None) {
        return Ok(tensor_pickle::read(pickle, ranks)?.sizes);
    }
    let layout = pickle.get(mesh, "_layout").map(|layout| attributes(pickle, layout));
    let layout = layout.ok_or_else(|| odd("its mesh has no shape"))??;
    if let Some(axes) = pickle.get(layout, "axes") {
        let axes = pickle.as_tuple(axes).ok_or_else(|| odd("the layout of its mesh"))?;
        let size = |axis: &Item| {
            let shape = pickle.get(attributes(pickle, *axis).ok()?, "shape")?;
            product(pickle, shape)
        };
        return axes.iter().map(size).collect::<Option<_>>().ok_or_else(|| odd("its mesh"));
    }
    let shape = pickle.get(layout, "shape").ok_or_else(|| odd("its mesh has no shape"))?;
    match (shape.as_u64(), pickle.as_tuple(shape)) {
        (Some(size), _) => Ok(Dims::from_slice(&[size])),
        (None, Some(items)) => items
            .iter()
            .map(|item| product(pickle, *item))
            .collect::<Option<_>>()
            .ok_or_else(|| odd("its mesh")),
        _ => Err(odd("its mesh")),
    }
}

/// Returns a size, or the product of sizes.
fn product(pickle: &Pickle<'_>, item: Item) -> Option<u64> {
    match item.as_u64() {
        Some(size) => Some(size),
        None => numbers(pickle, item)?.iter().try_fold(1, |all: u64, size| all.checked_mul(*size)),
    }
}

/// Returns the numbers of a tuple or a list.
pub(super) fn numbers(pickle: &Pickle<'_>, item: Item) -> Option<Dims> {
    let items = pickle.as_tuple(item).or_else(|| pickle.as_list(item))?;
    (items.len() <= 64).then(|| items.iter().map(|item| item.as_u64()).collect())?
}
