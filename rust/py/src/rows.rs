//! Immutable objects that cross to Python and back, with a name for each field.

use std::path::PathBuf;

use dcp_rs_core::Dtype;
use dcp_rs_core::checkpoint::{self, LeftoverKind, Verdict, verify};
use dcp_rs_core::format::{self, FileView, Index, Kind, TensorView};
use dcp_rs_core::read;
use dcp_rs_core::write::Place;
use pyo3::IntoPyObjectExt as _;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::convert::{Extent, FsPath, extent_to_py};
use crate::panics::guarded;

/// A tensor or a value of an index.
#[pyclass(frozen, get_all, module = "dcp_rs._core")]
pub struct TensorEntry {
    name: String,
    is_bytes: bool,
    dtype: Option<&'static str>,
    shape: Py<PyTuple>,
    flags: u8,
    chunk_count: u64,
}

impl TensorEntry {
    pub fn new(py: Python<'_>, view: &TensorView<'_>) -> PyResult<Self> {
        Ok(Self {
            name: view.name.to_owned(),
            is_bytes: view.kind == Kind::Bytes,
            dtype: view.dtype.map(Dtype::name),
            shape: extent_to_py(py, &view.shape)?.unbind(),
            flags: view.flags,
            chunk_count: view.chunks.end - view.chunks.start,
        })
    }
}

/// Place of a chunk in its file and in its tensor.
#[pyclass(frozen, get_all, module = "dcp_rs._core")]
pub struct ChunkEntry {
    file: u32,
    offset: u64,
    length: u64,
    offsets: Py<PyTuple>,
    sizes: Py<PyTuple>,
}

impl ChunkEntry {
    pub fn new(py: Python<'_>, index: &Index, chunk: u64) -> PyResult<Self> {
        let view = index.chunk(chunk);
        let (offset, length) = index.span(chunk);
        Ok(Self {
            file: view.file,
            offset,
            length,
            offsets: extent_to_py(py, &view.offsets)?.unbind(),
            sizes: extent_to_py(py, &view.sizes)?.unbind(),
        })
    }
}

/// A data file of an index.
#[pyclass(frozen, get_all, module = "dcp_rs._core")]
pub struct FileEntry {
    name: String,
    size: u64,
    /// First byte of the payload.
    data_start: u64,
    external: bool,
}

impl FileEntry {
    pub fn new(view: &FileView<'_>) -> Self {
        Self {
            name: view.name.to_owned(),
            size: view.size,
            data_start: view.data_start,
            external: view.external,
        }
    }
}

/// Part of a region in one chunk.
#[pyclass(frozen, get_all, module = "dcp_rs._core")]
pub struct Overlap {
    chunk: u64,
    chunk_offsets: Py<PyTuple>,
    region_offsets: Py<PyTuple>,
    sizes: Py<PyTuple>,
}

impl Overlap {
    pub fn new(py: Python<'_>, overlap: &format::Overlap) -> PyResult<Self> {
        Ok(Self {
            chunk: overlap.chunk,
            chunk_offsets: extent_to_py(py, &overlap.chunk_offsets)?.unbind(),
            region_offsets: extent_to_py(py, &overlap.region_offsets)?.unbind(),
            sizes: extent_to_py(py, &overlap.sizes)?.unbind(),
        })
    }
}

/// A block whose bytes have changed since they were written, or a file that does not match the
/// index.
#[pyclass(frozen, get_all, module = "dcp_rs._core")]
pub struct Damage {
    path: Py<PyAny>,
    tensor: String,
    whole_file: bool,
    block: u64,
    offset: u64,
    expected: String,
    got: String,
}

impl Damage {
    pub fn new(py: Python<'_>, problem: verify::Problem) -> PyResult<Self> {
        Ok(Self {
            path: FsPath(problem.path).into_py_any(py)?,
            tensor: problem.tensor,
            whole_file: problem.whole_file,
            block: problem.block,
            offset: problem.offset,
            expected: problem.expected,
            got: problem.got,
        })
    }
}

/// Leftover of a killed save or conversion.
#[pyclass(frozen, get_all, module = "dcp_rs._core")]
pub struct Leftover {
    path: PathBuf,
    nbytes: u64,
    kind: &'static str,
    verdict: &'static str,
}

impl From<checkpoint::Leftover> for Leftover {
    fn from(leftover: checkpoint::Leftover) -> Self {
        Self {
            path: leftover.path,
            nbytes: leftover.bytes,
            kind: match leftover.kind {
                LeftoverKind::Data => "data",
                LeftoverKind::TemporaryIndex => "temporary index",
                LeftoverKind::RankIndex => "rank index",
                LeftoverKind::Conversion => "conversion",
            },
            verdict: match leftover.verdict {
                Verdict::Left => "left",
                Verdict::InUse => "in use",
                Verdict::Young => "young",
                Verdict::Whole => "whole",
            },
        }
    }
}

/// Counts of a read: bytes, and the number of requests.
#[pyclass(frozen, get_all, module = "dcp_rs._core")]
pub struct ReadStats {
    wanted: u64,
    read: u64,
    direct: u64,
    mapped: u64,
    verified: u64,
    requests: u64,
}

impl From<read::ReadStats> for ReadStats {
    fn from(stats: read::ReadStats) -> Self {
        Self {
            wanted: stats.bytes_wanted,
            read: stats.bytes_read,
            direct: stats.bytes_direct,
            mapped: stats.bytes_mapped,
            verified: stats.bytes_verified,
            requests: stats.jobs,
        }
    }
}

/// Memory to fill with a rectangle of a chunk or of a tensor. Strides are in elements.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Fill {
    /// Number of the chunk or the tensor.
    pub source: u64,
    pub offsets: Extent,
    pub sizes: Extent,
    pub address: usize,
    pub strides: Extent,
}

#[guarded]
#[pymethods]
impl Fill {
    #[new]
    fn new(source: u64, offsets: Extent, sizes: Extent, address: usize, strides: Extent) -> Self {
        Self { source, offsets, sizes, address, strides }
    }
}

/// Memory with some bytes of an item to save.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Part {
    pub item: u32,
    /// Offset in the item.
    pub at: u64,
    pub address: usize,
    pub nbytes: usize,
}

#[guarded]
#[pymethods]
impl Part {
    #[new]
    fn new(item: u32, at: u64, address: usize, nbytes: usize) -> Self {
        Self { item, at, address, nbytes }
    }
}

/// A range of a file that the caller has laid out, for an item to save.
#[pyclass(frozen, get_all, module = "dcp_rs._core")]
pub struct PlacedValue {
    name: String,
    file: u32,
    offset: u64,
    length: u64,
}

impl PlacedValue {
    pub fn to_core(&self) -> (String, Place, u64) {
        let place = Place { file: self.file, offset: self.offset };
        (self.name.clone(), place, self.length)
    }
}

#[guarded]
#[pymethods]
impl PlacedValue {
    #[new]
    fn new(name: String, file: u32, offset: u64, length: u64) -> Self {
        Self { name, file, offset, length }
    }
}
