//! Files that each rank saved with `torch.save`, as one checkpoint. A `DTensor` or `ShardedTensor`
//! is made of the shards in all files. Other entries have to be the same in all of them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::archive::TorchFile;
use super::tree::{Content, Leaf};
use super::{add, add_entry, place_of};
use crate::foreign::dtensor::{self, Part, Spec};
use crate::foreign::fault::FaultResult;
use crate::foreign::pickle::{Item, Pickle};
use crate::foreign::sharded_tensor;
use crate::format::{
    FileEntry, Index, IndexBuilder, Logical, Origin, SourceKind, Value, ViewSource,
};
use crate::geometry::{Dims, Region, tiling};
use crate::store::Files;
use crate::{Dtype, Error, Result};

/// An index of the files, in which each shard is a tensor, and the tensors that they make.
pub(crate) struct Ranks {
    pub index: Vec<u8>,
    sharded: BTreeMap<String, Sharded>,
}

/// A global tensor.
struct Sharded {
    spec: Spec,
    dtype: Dtype,
    requires_grad: bool,
    /// Names of the shards in the index, and their places. Replicas are left out.
    shards: Vec<(String, Region)>,
}

impl Sharded {
    /// Returns whether the shards make up the tensor.
    fn is_whole(&self) -> bool {
        let rectangles: Vec<(&[u64], &[u64])> =
            (self.shards.iter()).map(|(_, place)| (&place.offsets[..], &place.sizes[..])).collect();
        !rectangles.is_empty() && tiling::check_tiling(&self.spec.shape, &rectangles).is_ok()
    }
}

impl Ranks {
    /// Returns the shards by their numbers in the index, and the tensors that they make.
    pub(crate) fn views(self, index: &Index) -> (Vec<u32>, Vec<Logical>) {
        let mut hidden = Vec::new();
        let mut logical = Vec::new();
        for (name, sharded) in self.sharded {
            let ndim = sharded.spec.shape.len();
            let sources = sharded.shards.into_iter().filter_map(|(shard, place)| {
                let tensor = index.find(&shard)?;
                hidden.push(tensor);
                Some(ViewSource {
                    tensor,
                    region: Region::new(&Dims::from_elem(0, ndim), &place.sizes),
                    dims: (0..ndim).map(Some).collect(),
                    at: place.offsets,
                })
            });
            let sources = sources.collect();
            logical.push(Logical {
                name,
                origin: Origin::Sources { shape: sharded.spec.shape, sources },
            });
        }
        (hidden, logical)
    }
}

/// Indexes the files of all ranks in the folder `dir`, in the order of the ranks. If `threads` is
/// 0, it uses all cores.
pub(crate) fn index_ranks(
    files: Files<'_>,
    dir: &Path,
    names: &[String],
    threads: usize,
) -> Result<Ranks> {
    let mut builder = IndexBuilder::new(SourceKind::Torch);
    builder.root = Value::Dict(Vec::new());
    let mut sharded: BTreeMap<String, Sharded> = BTreeMap::new();
    let mut same: HashMap<String, Contents> = HashMap::new();
    for (rank, name) in (0_u64..).zip(names) {
        let path = dir.join(name);
        let file = TorchFile::open(files, &path, threads)?;
        let number =
            builder.add_file(FileEntry::foreign(name, file.stat.size, file.stat.mtime_ns))?;
        let mut tree = file.tree()?;
        let (own, count) = (tree.leaves.len(), sharded.len() + same.len());
        if rank == 0 {
            tree.describe_in(&mut builder);
        } else if own != count {
            let reason = format!("it has {own} entries, and {:?} has {count}", names[0]);
            return Err(Error::corrupt_file(&path, reason));
        }
        for (position, leaf) in (0..).zip(tree.leaves) {
            let bad = |reason: String| Err(Error::corrupt_data(&path, &leaf.name, 0, reason));
            let part = match &leaf.content {
                Content::Tensor(_) => None,
                Content::Value => part(&file.parts.pickle, leaf.item)
                    .map_err(|fault| file.name_fault(fault, &leaf.name))?,
            };
            let Some(part) = part else {
                let contents = Contents::of(&file, &leaf)?;
                match same.get(&leaf.name) {
                    None if rank == 0 => {
                        same.insert(leaf.name.clone(), contents);
                        add(&mut builder, &file, number, leaf, position)?;
                    }
                    Some(first) if *first == contents => {}
                    Some(_) => return bad(format!("it differs from that in {:?}", names[0])),
                    None => return bad(format!("{:?} has no such entry", names[0])),
                }
                continue;
            };
            if part.rank.is_some_and(|own| own != rank) {
                let own = part.rank.unwrap_or_default();
                return bad(format!("rank {own} saved it, and the file is of rank {rank}"));
            }
            let Part { spec, dtype, requires_grad, shards, .. } = part;
            let ranks: u64 = spec.mesh.iter().product();
            if ranks > names.len() as u64 {
                return bad(format!("its mesh has {ranks} ranks, and {} have files", names.len()));
            }
            let known = match sharded.get_mut(&leaf.name) {
                None if rank == 0 => sharded.entry(leaf.name.clone()).or_insert(Sharded {
                    spec,
                    dtype,
                    requires_grad,
                    shards: Vec::new(),
                }),
                Some(known) if known.spec == spec && known.dtype == dtype => known,
                Some(_) => {
                    let reason = "its dtype, shape, mesh or placements differ from those";
                    return bad(format!("{reason} in {:?}", names[0]));
                }
                None => return bad(format!("{:?} has no such tensor of several ranks", names[0])),
            };
            for (local, region) in shards {
                if known.shards.iter().any(|(_, place)| *place == region) {
                    continue;
                }
                let place = place_of(&file.parts, &local)
                    .map_err(|fault| file.name_fault(fault, &leaf.name))?;
                // The first shard has the tensor's own name, with its place in the state dict.
                let stored = match known.shards.len() {
                    0 => leaf.name.clone(),
                    count => format!("{}, shard {count}", leaf.name),
                };
                known.shards.push((stored.clone(), region));
                let requires_grad = known.requires_grad;
                let tensor = super::StoredTensor { requires_grad, ..local };
                let leaf = Leaf {
                    name: stored,
                    path: leaf.path.clone(),
                    content: Content::Tensor(Box::new(tensor)),
                    ..leaf
                };
                add_entry(&mut builder, number, leaf, place, position)?;
            }
        }
    }
    let first = dir.join(&names[0]);
    if sharded.is_empty() {
        return Err(Error::Unsupported(format!(
            "{}: no entry is a DTensor or a ShardedTensor, whose place in a tensor the file would \
             have: open the file of one rank",
            first.display()
        )));
    }
    for (name, sharded) in &sharded {
        if !sharded.is_whole() {
            let shape = sharded.spec.shape.as_slice();
            let reason = format!("its shards in {} files do not make up {shape:?}", names.len());
            return Err(Error::corrupt_data(&first, name, 0, reason));
        }
    }
    Ok(Ranks { index: builder.build()?, sharded })
}

/// Parses an item that is a part of a tensor of several ranks; returns `None` for others.
fn part(pickle: &Pickle<'_>, item: Item) -> FaultResult<Option<Part>> {
    match dtensor::read(pickle, item)? {
        None => sharded_tensor::read(pickle, item),
        part => Ok(part),
    }
}

/// The contents of an entry that all ranks have, as far as they can be compared without a read of
/// tensors: the layout of a tensor and the checksum of its storage, or the pickle of a value.
#[derive(PartialEq)]
enum Contents {
    Tensor { dtype: Dtype, sizes: Dims, offset: u64, strides: Dims, crc: Option<u32> },
    Value { pickle: Vec<u8>, crcs: Vec<Option<u32>> },
}

impl Contents {
    fn of(file: &TorchFile, leaf: &Leaf) -> Result<Self> {
        let crc = |key: &str| file.parts.storages.get(key).and_then(|storage| storage.crc);
        match &leaf.content {
            Content::Tensor(tensor) => Ok(Self::Tensor {
                dtype: tensor.dtype,
                sizes: tensor.sizes.clone(),
                offset: tensor.offset,
                strides: tensor.steps(),
                crc: crc(&tensor.key),
            }),
            Content::Value => {
                let pickle = &file.parts.pickle;
                let (pickled, storages) =
                    pickle.write(leaf.item).map_err(|fault| file.name_fault(fault, &leaf.name))?;
                let keys = storages
                    .iter()
                    .filter_map(|id| crate::foreign::tensor_pickle::storage_key(pickle, *id));
                Ok(Self::Value { pickle: pickled, crcs: keys.map(crc).collect() })
            }
        }
    }
}
