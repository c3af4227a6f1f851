//! A pickled `ShardedTensor`, as FSDP1 saves it: its local shards, and their places in the global
//! tensor.

use super::dtensor::{Part, Spec, numbers};
use super::fault::{Fault, FaultResult};
use super::pickle::{Item, Pickle};
use super::tensor_pickle::{self, StoredTensor, dims};
use crate::Dtype;
use crate::geometry::{Dims, Region};

fn odd(what: &str) -> Fault {
    Fault::corrupt(0, format!("pickle of a ShardedTensor: {what}"))
}

/// Parses an item; returns `None` if it is no `ShardedTensor`.
pub(super) fn read(pickle: &Pickle<'_>, item: Item) -> FaultResult<Option<Part>> {
    let Some((("torch._tensor", "_rebuild_from_type_v2"), [_, kind, _, state], None)) =
        pickle.as_object(item)
    else {
        return Ok(None);
    };
    if !pickle.as_global(*kind).is_some_and(|(module, name)| {
        module.starts_with("torch.distributed") && name == "ShardedTensor"
    }) {
        return Ok(None);
    }
    // What `ShardedTensor.__getstate__` returns.
    let Some([shards, metadata, ..]) = pickle.as_tuple(*state) else {
        return Err(odd("its state"));
    };
    let shape = dims(pickle, attribute(pickle, *metadata, "size")?);
    let shape = shape.ok_or_else(|| odd("its size"))?;
    let (dtype, requires_grad) =
        properties(pickle, attribute(pickle, *metadata, "tensor_properties")?)?;
    let shards = pickle.as_list(*shards).ok_or_else(|| odd("its shards"))?;
    let shards = shards
        .iter()
        .map(|item| {
            let (local, region) = shard(pickle, *item)?;
            if local.dtype != dtype || !region.fits(&shape) {
                return Err(odd("a shard of another tensor"));
            }
            Ok((local, region))
        })
        .collect::<FaultResult<_>>()?;
    let spec = Spec { shape, mesh: Dims::new(), placements: Vec::new() };
    Ok(Some(Part { spec, dtype, rank: None, requires_grad, shards }))
}

/// Returns dtype and `requires_grad` of what `TensorProperties.__getstate__` returned.
fn properties(pickle: &Pickle<'_>, item: Item) -> FaultResult<(Dtype, bool)> {
    let state = pickle.as_object(item).and_then(|(_, _, state)| pickle.as_tuple(state?));
    let Some([dtype, _, requires_grad, ..]) = state else { return Err(odd("its properties")) };
    let dtype = match pickle.as_global(*dtype) {
        Some(("torch", name)) => Dtype::from_name(name),
        _ => None,
    };
    Ok((dtype.ok_or_else(|| odd("its dtype"))?, *requires_grad == Item::Bool(true)))
}

fn shard(pickle: &Pickle<'_>, item: Item) -> FaultResult<(StoredTensor, Region)> {
    let local = tensor_pickle::read(pickle, attribute(pickle, item, "tensor")?)?;
    let metadata = attribute(pickle, item, "metadata")?;
    let place = |name: &str| {
        numbers(pickle, attribute(pickle, metadata, name)?).ok_or_else(|| odd("a shard's place"))
    };
    let region = Region { offsets: place("shard_offsets")?, sizes: place("shard_sizes")? };
    if region.sizes != local.sizes {
        return Err(odd("a shard of another size than its place"));
    }
    Ok((local, region))
}

/// Returns an attribute of an object, or one of its slots.
fn attribute(pickle: &Pickle<'_>, object: Item, name: &str) -> FaultResult<Item> {
    let state = pickle.as_object(object).and_then(|(_, _, state)| state);
    // The attributes are a dict, or a pair of one and of a dict of slots.
    let found = state.and_then(|state| match pickle.as_tuple(state) {
        Some([_, slots]) => pickle.get(*slots, name),
        _ => pickle.get(state, name),
    });
    found.ok_or_else(|| odd(&format!("it has no {name}")))
}
