//! `cargo bench -p dcp-rs-benches` measures the parts of the core. These make entries of indexes.

use dcp_rs_core::Dtype;
use dcp_rs_core::copy::Signs;
use dcp_rs_core::format::{ChunkEntry, FileEntry, Kind, TensorEntry};
use dcp_rs_core::geometry::Dims;

/// First byte of the data of each file.
pub const DATA_START: u64 = 4096;

/// Returns a file with so many bytes of data.
#[must_use]
pub fn file(name: String, length: u64) -> FileEntry {
    FileEntry {
        name,
        size: DATA_START + length,
        data_start: DATA_START,
        external: false,
        linked: false,
        head_digest: None,
        mtime_ns: 0,
    }
}

/// Returns a tensor.
#[must_use]
pub fn tensor(name: String, dtype: &str, shape: &[u64]) -> TensorEntry {
    TensorEntry {
        name,
        kind: Kind::Tensor,
        dtype: Dtype::from_name(dtype),
        shape: Dims::from_slice(shape),
        flags: 0,
        path: None,
        position: None,
    }
}

/// Returns a chunk, `at` bytes after the start of the data of its file.
#[must_use]
pub fn chunk(
    (tensor, file): (u32, u32),
    at: u64,
    length: u64,
    offsets: &[u64],
    sizes: &[u64],
) -> ChunkEntry {
    ChunkEntry {
        tensor,
        file,
        offset: DATA_START + at,
        length,
        offsets: Dims::from_slice(offsets),
        sizes: Dims::from_slice(sizes),
        strides: None,
        signs: Signs::default(),
        digests: None,
        content: None,
        frozen: false,
    }
}
