//! Saves, as Python sees them.

use std::path::PathBuf;
use std::sync::Mutex;

use dcp_rs_core::format::{Index, IndexBuilder, Kind, SourceKind, Value};
use dcp_rs_core::store;
use dcp_rs_core::write::{self, Part, SaveInfo, SaveItem, WriteIo, WriteOptions};
use pyo3::prelude::*;
use pyo3::sync::MutexExt as _;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::convert::{Extent, dtype, to_value};
use crate::error::{IntoPy, PlanError, UnsupportedError};
use crate::interrupt;

/// One rank's data files of one save. Dropped before `finish`, it removes what it created.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Save {
    inner: Mutex<Option<write::Save>>,
}

/// FQN, dtype (None: bytes), shape of the whole, flags, path, offsets, sizes, length in bytes.
type ItemTuple<'py> = (
    Bound<'py, PyAny>,
    Option<String>,
    Extent,
    u8,
    Option<Bound<'py, PyTuple>>,
    Extent,
    Extent,
    u64,
);

#[pymethods]
impl Save {
    /// Lays out the files for `items` in `folder` and creates them.
    #[staticmethod]
    #[pyo3(signature = (folder, items, *, generation, token, rank, world_size, threads, fsync, io, max_inflight_bytes))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, in Python")]
    fn create(
        py: Python<'_>,
        folder: PathBuf,
        items: Vec<ItemTuple<'_>>,
        generation: u64,
        token: u64,
        rank: u32,
        world_size: u32,
        threads: usize,
        fsync: bool,
        io: &str,
        max_inflight_bytes: u64,
    ) -> PyResult<Self> {
        let items = items.into_iter().map(save_item).collect::<PyResult<Vec<_>>>()?;
        let info = SaveInfo {
            generation,
            token,
            rank,
            world_size,
        };
        let options = WriteOptions {
            threads,
            fsync,
            io: io_mode(io)?,
            max_inflight_bytes,
        };
        let save = py
            .detach(|| write::Save::create(&folder, items, info, &options))
            .into_py(py)?;
        Ok(Self {
            inner: Mutex::new(Some(save)),
        })
    }

    /// Writes parts (item, first byte of the item, address, bytes).
    ///
    /// The memory behind every address must be there, and unchanged, until this returns: the caller holds the tensors.
    #[expect(unsafe_code, reason = "tensors are handed over by address")]
    fn write(&self, py: Python<'_>, parts: Vec<(u32, u64, usize, usize)>) -> PyResult<()> {
        let parts: Vec<Part<'_>> = parts
            .into_iter()
            .filter(|&(.., len)| len > 0)
            .map(|(item, at, address, len)| Part {
                item,
                at,
                // SAFETY: this method's contract: `dcp_rs.payload` holds every tensor, contiguous and in host memory, until the
                // call returns. Training code that changes a tensor while it is saved gets a torn save, as with any writer.
                data: unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len) },
            })
            .collect();
        // Waiting for another thread's write must not keep the GIL from it.
        let inner = self.inner.lock_py_attached(py).map_err(|_| closed())?;
        let save = inner.as_ref().ok_or_else(closed)?;
        interrupt::run(py, |control| save.write(&parts, control))
    }

    /// Completes the files, and returns the bytes of an index over them.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let save = self
            .inner
            .lock_py_attached(py)
            .map_err(|_| closed())?
            .take()
            .ok_or_else(closed)?;
        let bytes = py.detach(|| save.finish()).into_py(py)?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Removes the files.
    fn abort(&self, py: Python<'_>) {
        let save = self.inner.lock_py_attached(py).ok().and_then(|mut inner| inner.take());
        py.detach(|| drop(save));
    }
}

fn closed() -> PyErr {
    PlanError::new_err("the save has ended")
}

fn io_mode(name: &str) -> PyResult<WriteIo> {
    match name {
        "auto" => Ok(WriteIo::Auto),
        "direct" => Ok(WriteIo::Direct),
        "buffered" => Ok(WriteIo::Buffered),
        _ => Err(PlanError::new_err(format!(
            "io is {name:?}: one of auto, direct, buffered"
        ))),
    }
}

fn save_item(item: ItemTuple<'_>) -> PyResult<SaveItem> {
    let (name, dtype_name, shape, flags, path, offsets, sizes, length) = item;
    let Ok(name) = name.extract::<String>() else {
        return Err(UnsupportedError::new_err(format!(
            "the name {} is not valid Unicode text",
            name.repr()?
        )));
    };
    Ok(SaveItem {
        kind: if dtype_name.is_some() {
            Kind::Tensor
        } else {
            Kind::Bytes
        },
        dtype: dtype_name.as_deref().map(dtype).transpose()?,
        shape: shape.0,
        flags,
        path: path.map(|path| to_value(path.as_any(), 0)).transpose()?,
        offsets: offsets.0,
        sizes: sizes.0,
        length,
        name,
    })
}

/// One index of the indexes of all ranks.
///
/// `planner_data` as DCP's `Metadata` has it: a mapping of FQN to path is spread over the tensors; what names no tensor, and any
/// other value, goes to the root.
#[pyfunction]
pub fn merge_indexes<'py>(
    py: Python<'py>,
    indexes: Vec<Vec<u8>>,
    save_id: [u8; 16],
    generation: u64,
    planner_data: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut builder = IndexBuilder::new(SourceKind::Native);
    builder.save_id = save_id;
    builder.generation = generation;
    for (rank, bytes) in indexes.into_iter().enumerate() {
        let part = Index::from_bytes(bytes, std::path::Path::new(&format!("(index of rank {rank})"))).into_py(py)?;
        builder.merge(&part).into_py(py)?;
    }
    builder.root = spread(&mut builder, planner_data)?;
    let bytes = py.detach(|| builder.build()).into_py(py)?;
    Ok(PyBytes::new(py, &bytes))
}

fn spread(builder: &mut IndexBuilder, planner_data: &Bound<'_, PyAny>) -> PyResult<Value> {
    let Ok(mapping) = planner_data.cast::<PyDict>() else {
        return to_value(planner_data, 0);
    };
    let mut rest = Vec::new();
    for (key, value) in mapping {
        let fqn = key.extract::<String>();
        match (fqn, value.cast::<PyTuple>()) {
            (Ok(fqn), Ok(path)) if builder.has_tensor(&fqn) => {
                builder.set_path(&fqn, to_value(path.as_any(), 0)?);
            }
            _ => rest.push((to_value(&key, 1)?, to_value(&value, 1)?)),
        }
    }
    Ok(Value::Dict(rest))
}

/// The generation of the next save into `folder`.
#[pyfunction]
pub fn next_generation(py: Python<'_>, folder: PathBuf) -> PyResult<u64> {
    py.detach(|| write::next_generation(&folder)).into_py(py)
}

/// Makes `index` the index of `folder` (or of one rank in it), atomically, then removes the data files that only the replaced one named. Returns
/// why any of those are still there.
#[pyfunction]
pub fn commit(
    py: Python<'_>,
    folder: PathBuf,
    rank: Option<u32>,
    index: Vec<u8>,
    fsync: bool,
) -> PyResult<Vec<String>> {
    let committed = py.detach(|| write::commit(&folder, rank, index, fsync)).into_py(py)?;
    Ok(committed.left.iter().map(ToString::to_string).collect())
}

/// Makes `index` the index `name` of `folder`, atomically.
#[pyfunction]
pub fn publish(py: Python<'_>, folder: PathBuf, name: &str, index: Vec<u8>, fsync: bool) -> PyResult<()> {
    py.detach(|| store::publish(&folder, name, &index, fsync)).into_py(py)
}

/// Removes the data files that an index names: those of a save that will not be committed.
#[pyfunction]
pub fn discard(py: Python<'_>, folder: PathBuf, index: Vec<u8>) -> PyResult<()> {
    py.detach(|| write::discard(&folder, index)).into_py(py)
}
