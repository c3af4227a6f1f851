//! Files of `torch.save`, indexed in place.
//!
//! Such a file is a zip archive. It has a pickle (`data.pkl`) of the saved object, and a record for
//! each storage of its tensors. A tensor becomes a chunk of its storage's record, with strides if
//! the tensor is a view. Any other value becomes the part of the pickle that makes it.
//! [`ValueReader`] writes this part as a file of `torch.save` of its own when the value is read.

mod archive;
mod check;
mod checksums;
mod legacy;
mod parts;
mod ranks;
mod tree;
mod value;

use std::collections::HashMap;
use std::path::Path;

use self::archive::TorchFile;
pub(crate) use self::archive::{START, is_torch_file};
pub use self::check::{Refusal, check_value};
pub(crate) use self::checksums::check_records;
use self::parts::Parts;
pub(crate) use self::ranks::index_ranks;
use self::tree::{Content, Leaf};
pub use self::value::ValueReader;
use super::fault::{Fault, FaultResult};
use super::models::Model;
use super::tensor_pickle::StoredTensor;
#[cfg(any(test, fuzzing))]
use super::window::{Fetched, SourceFile};
use crate::copy::Signs;
use crate::format::{ChunkEntry, FileEntry, IndexBuilder, Kind, SourceKind, TensorEntry, Value};
use crate::geometry::Dims;
use crate::store::Files;
use crate::{Error, Result};

/// Parses bytes as such a file, down to every tensor and value, for [`crate::fuzzing`]. Returns
/// whether it is one.
#[cfg(any(test, fuzzing))]
pub(super) fn take_apart(source: &SourceFile<'_>, fetched: &[Fetched]) -> bool {
    let Ok(parts) = archive::look_at(source, fetched, 1) else {
        return false;
    };
    let Ok(tree) = tree::read(&parts.pickle) else {
        return false;
    };
    for leaf in &tree.leaves {
        assert!(u64::from(leaf.place.at) + u64::from(leaf.place.len) <= parts.pickle.len() as u64);
        match &leaf.content {
            Content::Tensor(tensor) => {
                let Ok(place) = place_of(&parts, tensor) else {
                    return false;
                };
                assert!(place.offset + place.length <= source.size);
            }
            Content::Value => {
                let _ = parts.pickle.write(leaf.item);
            }
        }
    }
    true
}

/// Indexes the files of a model in the folder `dir`. Returns the bytes of an index for a file in
/// `dir`. If `threads` is 0, it uses all cores.
pub(crate) fn index_model(
    files: Files<'_>,
    dir: &Path,
    model: &Model,
    threads: usize,
) -> Result<Vec<u8>> {
    let mut builder = IndexBuilder::new(SourceKind::Torch);
    builder.root = Value::Dict(Vec::new());
    let mut held_by: HashMap<String, &str> = HashMap::new();
    for name in &model.files {
        let path = dir.join(name);
        let file = TorchFile::open(files, &path, threads)?;
        let number =
            builder.add_file(FileEntry::foreign(name, file.stat.size, file.stat.mtime_ns))?;
        let mut tree = file.tree()?;
        tree.describe_in(&mut builder);
        for (position, leaf) in (0..).zip(tree.leaves) {
            if model.weight_map.get(&leaf.name).is_some_and(|of| of != name) {
                continue; // a copy: the index names another file for it
            }
            if let Some(other) = held_by.insert(leaf.name.clone(), name) {
                let reason = format!("two entries flatten to this name, in {other:?} and {name:?}");
                return Err(Error::tensor_plan(Some(&path), &leaf.name, reason));
            }
            add(&mut builder, &file, number, leaf, position)?;
        }
    }
    let missing = model.weight_map.iter().filter(|(name, _)| !held_by.contains_key(*name));
    if let Some((name, of)) = missing.min() {
        let reason =
            "the index of the folder names the tensor for this file, which does not hold it";
        return Err(Error::corrupt_data(&dir.join(of), name, 0, reason));
    }
    builder.build()
}

fn add(
    builder: &mut IndexBuilder,
    file: &TorchFile,
    number: u32,
    leaf: Leaf,
    position: u32,
) -> Result<()> {
    let place = match &leaf.content {
        Content::Tensor(tensor) => {
            place_of(&file.parts, tensor).map_err(|fault| file.name_fault(fault, &leaf.name))?
        }
        Content::Value => StoredPlace {
            offset: file.parts.pickle_at + u64::from(leaf.place.at),
            length: leaf.place.len.into(),
            strides: None,
            signs: Signs::default(),
        },
    };
    add_entry(builder, number, leaf, place, position)
}

/// Adds an entry whose place in the file is known.
fn add_entry(
    builder: &mut IndexBuilder,
    number: u32,
    leaf: Leaf,
    place: StoredPlace,
    position: u32,
) -> Result<()> {
    let (kind, dtype, shape, flags) = match &leaf.content {
        Content::Tensor(tensor) => {
            (Kind::Tensor, Some(tensor.dtype), tensor.sizes.clone(), u8::from(tensor.requires_grad))
        }
        Content::Value => (Kind::Bytes, None, Dims::new(), 0),
    };
    let tensor = builder.add_tensor(TensorEntry {
        name: leaf.name,
        kind,
        dtype,
        shape: shape.clone(),
        flags,
        path: Some(leaf.path),
        position: Some(position),
    })?;
    builder.add_chunk(ChunkEntry {
        tensor,
        file: number,
        offset: place.offset,
        length: place.length,
        offsets: Dims::from_elem(0, shape.len()),
        sizes: shape,
        strides: place.strides,
        signs: place.signs,
        ..ChunkEntry::default()
    })
}

/// Location of a chunk in the file.
struct StoredPlace {
    offset: u64,
    length: u64,
    strides: Option<Dims>,
    signs: Signs,
}

fn place_of(file: &Parts, tensor: &StoredTensor) -> FaultResult<StoredPlace> {
    let record = file.storage(&tensor.key)?;
    if record.size < tensor.storage_len {
        return Err(Fault::corrupt(
            record.at,
            format!("its storage has {} bytes, expected {}", record.size, tensor.storage_len),
        ));
    }
    Ok(StoredPlace {
        offset: record.at + tensor.offset,
        length: tensor.length(),
        strides: (!tensor.is_contiguous()).then(|| tensor.steps()),
        signs: tensor.signs,
    })
}
