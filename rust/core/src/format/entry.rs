//! Entries of an index: data files, tensors, chunks.

use super::{FileView, Kind, Value};
use crate::Dtype;
use crate::copy::Signs;
use crate::geometry::Dims;

/// A data file of an index.
#[derive(Clone, Debug, Default)]
pub struct FileEntry {
    /// Path relative to the folder of the index.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
    /// Offset of the payload.
    pub data_start: u64,
    /// True if another program wrote the file.
    pub external: bool,
    /// True if it is a link to a file of another save.
    pub linked: bool,
    /// XXH3-64 of the bytes before the payload.
    pub head_digest: Option<u64>,
    /// Modification time in nanoseconds since 1970; 0 if it is not recorded.
    pub mtime_ns: i64,
}

impl FileEntry {
    /// Describes a file of another program, whose payload begins at its first byte.
    pub(crate) fn foreign(name: &str, size: u64, mtime_ns: i64) -> Self {
        Self { name: name.to_owned(), size, external: true, mtime_ns, ..Self::default() }
    }
}

impl From<FileView<'_>> for FileEntry {
    fn from(file: FileView<'_>) -> Self {
        Self {
            name: file.name.to_owned(),
            size: file.size,
            data_start: file.data_start,
            external: file.external,
            linked: file.linked,
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
    /// Its path in the state dict: a value that [is a path](Value::is_path).
    pub path: Option<Value>,
    /// Its position among the entries of the state dict.
    pub position: Option<u32>,
}

impl TensorEntry {
    /// Describes a tensor without flags, path and position.
    pub fn tensor(name: impl Into<String>, dtype: Dtype, shape: Dims) -> Self {
        Self { kind: Kind::Tensor, dtype: Some(dtype), shape, ..Self::bytes(name) }
    }

    /// Describes a value that is no tensor.
    pub fn bytes(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            kind: Kind::Bytes,
            dtype: None,
            shape: Dims::new(),
            flags: 0,
            path: None,
            position: None,
        }
    }
}

/// A chunk of a tensor that was added before. By default it is contiguous and has no digests.
#[derive(Clone, Debug, Default)]
pub struct ChunkEntry {
    /// Number that [`IndexBuilder::add_tensor`](super::IndexBuilder::add_tensor) returned.
    pub tensor: u32,
    /// Number that [`IndexBuilder::add_file`](super::IndexBuilder::add_file) returned.
    pub file: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Length in the file, in bytes.
    pub length: u64,
    /// Offsets of the chunk in the tensor.
    pub offsets: Dims,
    /// Sizes of the chunk.
    pub sizes: Dims,
    /// Strides in elements; `None` if it is contiguous.
    pub strides: Option<Dims>,
    /// Meaning of its bytes. Native data always has the default.
    pub signs: Signs,
    /// A digest for each block.
    pub digests: Option<Vec<u64>>,
    /// The digest of its content, for native data.
    pub content: Option<u128>,
    /// True if the caller said that the chunk never changes.
    pub frozen: bool,
}
