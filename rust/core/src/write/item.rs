//! Items of one rank, and the save that they belong to.

use crate::format::{Kind, Value};
use crate::geometry::Dims;
use crate::{Dtype, Error, Result};

const MAX_NDIM: usize = 64;

/// Some bytes of an item.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Index of the item.
    pub item: u32,
    /// Offset in the item.
    pub at: u64,
    /// The bytes.
    pub data: &'a [u8],
}

/// A chunk of a tensor, or another value, to save.
#[derive(Clone, Debug, PartialEq)]
pub struct SaveItem {
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
    /// Its path in the state dict.
    pub path: Option<Value>,
    /// Its position among the entries of the state dict.
    pub position: Option<u32>,
    /// Offsets of the chunk in the tensor.
    pub offsets: Dims,
    /// Sizes of the chunk.
    pub sizes: Dims,
    /// Length in bytes; for a tensor, the number of elements times their size.
    pub length: u64,
}

/// Identity of a save, and of the rank in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveInfo {
    /// Random. Identifies the save on all ranks.
    pub save_id: [u8; 16],
    /// One more than the highest generation of any file in the folder.
    pub generation: u64,
    /// Random. No two saves into a folder may have the same.
    pub token: u64,
    /// The rank that writes.
    pub rank: u32,
    /// Number of ranks that write; 0 for a rank-local save.
    pub world_size: u32,
}

impl SaveItem {
    /// Returns a non-tensor value, without its place in the state dict.
    pub(crate) fn bytes(name: String, length: u64) -> Self {
        Self {
            name,
            kind: Kind::Bytes,
            dtype: None,
            shape: Dims::new(),
            flags: 0,
            path: None,
            position: None,
            offsets: Dims::new(),
            sizes: Dims::new(),
            length,
        }
    }

    /// Returns an error that names the item.
    pub(super) fn refuse(&self, reason: impl std::fmt::Display) -> Error {
        let name: String = self.name.chars().take(200).collect();
        Error::tensor_plan(None, &name, format!("it cannot be saved: {reason}"))
    }

    /// Refuses an item that is inconsistent, or that the format cannot store.
    pub(super) fn check(&self) -> Result<()> {
        let dims = [&self.shape, &self.offsets, &self.sizes].map(Dims::len);
        let Some(dtype) = self.dtype.filter(|_| self.kind == Kind::Tensor) else {
            return match (self.kind, self.dtype, dims, self.flags) {
                (Kind::Bytes, None, [0, 0, 0], 0) => Ok(()),
                (Kind::Bytes, ..) => {
                    Err(self.refuse("a non-tensor value has no dtype, shape or flags"))
                }
                (Kind::Tensor, ..) => Err(self.refuse("a tensor needs a dtype")),
            };
        };
        if dims != [self.shape.len(); 3] || self.shape.len() > MAX_NDIM {
            return Err(self.refuse(format!(
                "it has {dims:?} sizes, offsets and chunk sizes; at most {MAX_NDIM}"
            )));
        }
        if self.flags >> 4 != 0 || self.flags >> 2 == 3 {
            return Err(self.refuse(format!("unknown flags {:#x}", self.flags)));
        }
        for ((&size, &offset), &extent) in self.sizes.iter().zip(&self.offsets).zip(&self.shape) {
            if offset.checked_add(size).is_none_or(|end| end > extent) {
                return Err(self.refuse(format!(
                    "chunk {:?} at {:?} does not lie in the shape {:?}",
                    self.sizes.as_slice(),
                    self.offsets.as_slice(),
                    self.shape.as_slice()
                )));
            }
        }
        // In bits and in this order, even if a size is 0: safetensors multiplies like this, and
        // refuses an overflow.
        let bits = self
            .sizes
            .iter()
            .try_fold(1_u64, |n, &size| n.checked_mul(size))
            .and_then(|n| n.checked_mul(8 * dtype.size()));
        match bits {
            None => Err(self.refuse(format!("sizes {:?} overflow", self.sizes.as_slice()))),
            Some(bits) if bits / 8 != self.length => {
                Err(self.refuse(format!("{} bytes given, {} expected", self.length, bits / 8)))
            }
            Some(_) => Ok(()),
        }
    }

    /// Checks that two chunks of one name belong to one tensor.
    pub(super) fn agree_with(&self, first: &Self) -> Result<()> {
        if self.kind == Kind::Bytes {
            return Err(self.refuse("a second value has this name"));
        }
        if (first.kind, first.dtype, &first.shape) != (self.kind, self.dtype, &self.shape) {
            return Err(self.refuse("two chunks of it disagree in kind, dtype or shape"));
        }
        Ok(())
    }
}
