//! Saves, as Python sees them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use dcp_rs_core::foreign::torch_file::ValueReader;
use dcp_rs_core::format::{INDEX_NAME, Index, IndexBuilder, SourceKind, Value, rank_index_name};
use dcp_rs_core::store::{self, FileLock, Remote};
use dcp_rs_core::write::{self, FilePlan, Part, SaveInfo, WriteIo, WriteOptions};
use dcp_rs_core::{Error, checkpoint};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::sync::MutexExt as _;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::convert::to_value;
use crate::error::{IntoPy, PlanError, StorageUnclearError, plan_error, to_py};
use crate::panics::guarded;
use crate::plain::Plain;
use crate::remote::Store;
use crate::rows::{self, PlacedValue};
use crate::save_item::{SaveItem, items_of, name_of};
use crate::save_plan::Planned;
use crate::{index, interrupt};

/// One rank's data files of one save. Dropped before `finish`, it removes what it created.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Save {
    inner: Mutex<State>,
    planned: Planned,
    /// Of all items that are written, in bytes.
    #[pyo3(get)]
    bytes: u64,
    /// Of those that a parent holds, and that are linked, or copied by a store.
    #[pyo3(get)]
    bytes_reused: u64,
    /// Requests to a store that have the bytes in them, or have it copy some.
    #[pyo3(get)]
    requests: u64,
    /// Why files of the parent could not be linked, or copied.
    #[pyo3(get)]
    problems: Vec<String>,
    process: u32,
}

struct State {
    /// Until it is finished.
    save: Option<write::Save>,
    /// From then on, until it is committed.
    claim: Option<FileLock>,
    /// Hears of the bytes that are written, of which there are so many.
    progress: Option<Py<PyAny>>,
    written: u64,
}

#[guarded]
#[pymethods]
impl Save {
    /// Lays out the files for `items` in `folder` and creates them.
    #[staticmethod]
    #[pyo3(signature = (folder, items, *, save_id, generation, token, rank, world_size, threads, fsync, io, max_inflight_bytes, store=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, in Python")]
    fn create(
        py: Python<'_>,
        folder: PathBuf,
        items: Vec<Bound<'_, SaveItem>>,
        save_id: [u8; 16],
        generation: u64,
        token: u64,
        rank: u32,
        world_size: u32,
        threads: usize,
        fsync: bool,
        io: &str,
        max_inflight_bytes: u64,
        store: Option<&Bound<'_, Store>>,
    ) -> PyResult<Self> {
        let info = SaveInfo {
            save_id,
            generation,
            token,
            rank,
            world_size,
        };
        let options = options(threads, fsync, io, max_inflight_bytes)?;
        let to = to(&folder, store);
        Self::begin(py, &to, items_of(&items), info, &options, Planned::default(), None)
    }

    /// Creates files (name, header, size) of the caller's own layout, with values in them.
    #[staticmethod]
    #[pyo3(signature = (folder, files, values, *, threads, fsync, io, max_inflight_bytes))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, in Python")]
    fn create_files(
        py: Python<'_>,
        folder: PathBuf,
        files: Vec<(String, Vec<u8>, u64)>,
        values: Vec<Bound<'_, PlacedValue>>,
        threads: usize,
        fsync: bool,
        io: &str,
        max_inflight_bytes: u64,
    ) -> PyResult<Self> {
        let files = files
            .into_iter()
            .map(|(name, header, size)| FilePlan {
                name,
                header,
                size,
                items: vec![],
            })
            .collect();
        let values: Vec<_> = values.iter().map(|value| value.get().to_core()).collect();
        let bytes = values.iter().map(|(.., length)| length).sum();
        let options = options(threads, fsync, io, max_inflight_bytes)?;
        let save = interrupt::run(py, |control| {
            write::Save::create_files(&folder, files, values, &options, control)
        })?;
        Ok(Self::new(save, Planned::default(), bytes))
    }

    /// Writes parts of items.
    ///
    /// The memory behind every address must be there, and unchanged, until this returns: the caller holds the tensors.
    fn write(&self, py: Python<'_>, parts: Vec<Bound<'_, rows::Part>>) -> PyResult<()> {
        self.put(py, &parts_at(&parts))
    }

    /// Writes the plain tensors of the plan that this save was created from; they are in the list that the plan was made with.
    fn write_plain<'py>(
        &self,
        py: Python<'py>,
        tensors: &Bound<'py, PyList>,
        types: &Bound<'py, PyTuple>,
        dtypes: &Bound<'py, PyDict>,
    ) -> PyResult<()> {
        let parts = self.planned.parts(&Plain::new(py, types, dtypes)?, tensors)?;
        self.put(py, &parts)
    }

    /// Writes values: (item, bytes).
    fn write_values(&self, py: Python<'_>, values: Vec<(u32, PyBackedBytes)>) -> PyResult<()> {
        self.put(py, &parts_of(&values))
    }

    /// From here on `progress` is called, while something is written, with the bytes that are.
    fn watch(&self, py: Python<'_>, progress: Py<PyAny>) -> PyResult<()> {
        self.lock(py)?.progress = Some(progress);
        Ok(())
    }

    /// For each item, whether a parent holds it: then it is not written.
    fn reused(&self, py: Python<'_>) -> PyResult<Vec<bool>> {
        Ok(self.lock(py)?.save.as_ref().ok_or_else(closed)?.is_reused())
    }

    /// How many plain tensors come first among the items, where the save was created from a plan.
    #[getter]
    fn plain_count(&self) -> usize {
        self.planned.count
    }

    /// Completes the files, and returns the bytes of an index over them. `nesting`: containers (position, path, kind) that the paths do not tell; None
    /// where that is not known.
    #[pyo3(signature = (nesting=None))]
    fn finish<'py>(&self, py: Python<'py>, nesting: Option<Bound<'py, PyList>>) -> PyResult<Bound<'py, PyBytes>> {
        let nesting = nesting.map_or(Ok(Value::None), |nesting| to_value(&nesting, 0))?;
        if !nesting.is_nesting() {
            return Err(PlanError::new_err("containers are (position, path, kind)"));
        }
        let save = self.lock(py)?.save.take().ok_or_else(closed)?;
        let finished = interrupt::run(py, |control| save.finish_with(nesting, control))?;
        let (index, claim) = finished.keep();
        self.lock(py)?.claim = claim;
        Ok(PyBytes::new(py, &index))
    }

    /// The save is committed, or given up: the claim on its files ends.
    fn let_go(&self, py: Python<'_>) -> PyResult<()> {
        let claim = self.lock(py)?.claim.take();
        py.detach(|| drop(claim));
        Ok(())
    }

    /// Removes the files, if they are not complete.
    fn abort(&self, py: Python<'_>) {
        // In a fork of the process that began it, they are not its files.
        let save = self.lock(py).ok().and_then(|mut inner| inner.save.take());
        py.detach(|| drop(save));
    }
}

impl Save {
    pub fn begin(
        py: Python<'_>,
        to: &To<'_>,
        items: Vec<write::SaveItem>,
        info: SaveInfo,
        options: &WriteOptions,
        planned: Planned,
        reuse: Option<Arc<write::Reuse>>,
    ) -> PyResult<Self> {
        let turns = planned.turns.clone();
        let lengths: Vec<u64> = items.iter().map(|item| item.length).collect();
        let (save, problems) = interrupt::run(py, |control| match (to, reuse) {
            (To::Folder(folder), Some(reuse)) => {
                write::Save::create_reusing(folder, items, info, options, reuse, control)
            }
            (To::Folder(folder), None) => Ok((write::Save::create(folder, items, info, options, control)?, Vec::new())),
            (To::Store(folder, store), reuse) => {
                write::Save::create_remote(Arc::clone(store), folder, items, turns, info, options, reuse, control)
            }
        })?;
        let reused = save.is_reused();
        let of = |which: bool| {
            (lengths.iter().zip(&reused)).filter_map(move |(length, reused)| (*reused == which).then_some(*length))
        };
        Ok(Self {
            bytes_reused: of(true).sum(),
            problems: problems.iter().map(ToString::to_string).collect(),
            ..Self::new(save, planned.only(|item| !reused[item as usize]), of(false).sum())
        })
    }

    fn put(&self, py: Python<'_>, parts: &[Part<'_>]) -> PyResult<()> {
        let mut inner = self.lock(py)?;
        let save = inner.save.as_ref().ok_or_else(closed)?;
        interrupt::run_with(py, inner.progress.as_ref(), inner.written, |control| {
            save.write(parts, control)
        })?;
        inner.written += parts.iter().map(|part| part.data.len() as u64).sum::<u64>();
        Ok(())
    }

    fn new(save: write::Save, planned: Planned, bytes: u64) -> Self {
        Self {
            requests: save.requests(),
            inner: Mutex::new(State {
                save: Some(save),
                claim: None,
                progress: None,
                written: 0,
            }),
            planned,
            bytes,
            bytes_reused: 0,
            problems: Vec::new(),
            process: std::process::id(),
        }
    }

    /// What a fork holds of it is its parent's: one of the parent's threads may have had the lock.
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, State>> {
        if self.process != std::process::id() {
            return Err(PlanError::new_err(
                "this save was begun by the process that this one is a fork of",
            ));
        }
        self.inner.lock_py_attached(py).map_err(|_| closed())
    }
}

/// Where a save goes.
pub enum To<'a> {
    Folder(&'a Path),
    Store(&'a Path, Arc<dyn Remote>),
}

/// A folder of the file system, or of a store.
pub fn to<'a>(folder: &'a Path, store: Option<&Bound<'_, Store>>) -> To<'a> {
    match store {
        Some(store) => To::Store(folder, Arc::clone(&store.get().inner)),
        None => To::Folder(folder),
    }
}

/// Parts of tensors that the caller holds.
#[expect(unsafe_code, reason = "tensors are handed over by address")]
pub fn parts_at<'a>(parts: &[Bound<'_, rows::Part>]) -> Vec<Part<'a>> {
    parts
        .iter()
        .map(Bound::get)
        .filter(|part| part.nbytes > 0)
        .map(|part| Part {
            item: part.item,
            at: part.at,
            // SAFETY: the contract of the methods that take such parts: `dcp_rs.transfer.save` holds every tensor, contiguous and in host
            // memory, until the call returns. Training code that changes a tensor while it is saved gets a torn save, as with any writer.
            data: unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(part.address), part.nbytes) },
        })
        .collect()
}

/// Values (item, bytes), each in one part.
pub fn parts_of(values: &[(u32, PyBackedBytes)]) -> Vec<Part<'_>> {
    values
        .iter()
        .filter(|(_, data)| !data.is_empty())
        .map(|(item, data)| Part {
            item: *item,
            at: 0,
            data,
        })
        .collect()
}

pub fn options(threads: usize, fsync: bool, io: &str, max_inflight_bytes: u64) -> PyResult<WriteOptions> {
    Ok(WriteOptions {
        threads,
        fsync,
        io: io_mode(io)?,
        max_inflight_bytes,
    })
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

/// Merges the indexes of all ranks and commits them as the index of `folder` (or of one rank in it). Returns that index, and why files of the checkpoint it
/// replaces are still there, if some are.
///
/// `planner_data` as DCP's `Metadata` has it: a mapping of FQN to path is spread over the tensors; what names no tensor, and any
/// other value, goes to the root. `items`: how many chunks and values there must be, where that is known; or names that must be there.
#[guarded]
#[pyfunction]
#[pyo3(signature = (folder, rank, indexes, *, save_id, generation, planner_data, items, names, fsync, store=None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments, in Python")]
pub fn commit_indexes(
    py: Python<'_>,
    folder: PathBuf,
    rank: Option<u32>,
    indexes: Vec<PyBackedBytes>,
    save_id: [u8; 16],
    generation: u64,
    planner_data: &Bound<'_, PyAny>,
    items: Option<u64>,
    names: &Bound<'_, PyAny>,
    fsync: bool,
    store: Option<&Bound<'_, Store>>,
) -> PyResult<(index::Index, Vec<String>)> {
    let store = store.map(Bound::get);
    let path = folder.join(rank.map_or(INDEX_NAME.to_owned(), rank_index_name));
    if let [index] = indexes.as_slice()
        && planner_data
            .cast::<PyDict>()
            .is_ok_and(pyo3::types::PyDictMethods::is_empty)
        && names.len()? == 0
    {
        // Nothing to merge: the index of one rank says it all.
        let bytes = index.to_vec();
        let index = move || Index::from_bytes(bytes, &path);
        return commit_one(py, &folder, rank, index, items, fsync, store);
    }
    let mut builder = py
        .detach(|| {
            let mut builder = IndexBuilder::new(SourceKind::Native);
            builder.save_id = save_id;
            builder.generation = generation;
            for (rank, bytes) in indexes.into_iter().enumerate() {
                let part = Index::from_bytes(bytes, Path::new(&format!("(index of rank {rank})")))?;
                builder.merge(&part)?;
            }
            Ok(builder)
        })
        .into_py(py)?;
    for fqn in names.try_iter()? {
        let fqn = name_of(&fqn?)?;
        if !builder.has_tensor(&fqn) {
            return Err(plan_error(&path, Some(&fqn), format!("no rank wrote {fqn:?}")));
        }
    }
    builder.root = spread(&mut builder, planner_data)?;
    commit_one(
        py,
        &folder,
        rank,
        || Index::from_bytes(builder.build()?, &path),
        items,
        fsync,
        store,
    )
}

fn commit_one(
    py: Python<'_>,
    folder: &Path,
    rank: Option<u32>,
    index: impl FnOnce() -> dcp_rs_core::Result<Index> + Send,
    items: Option<u64>,
    fsync: bool,
    store: Option<&Store>,
) -> PyResult<(index::Index, Vec<String>)> {
    let mut stored = None;
    let committed = interrupt::run(py, |control| {
        let index = index()?;
        if items.is_some_and(|items| items != index.chunk_count()) {
            return Err(Error::Plan(format!(
                "ranks wrote {} chunks and values, of {} that were planned",
                index.chunk_count(),
                items.unwrap_or_default()
            )));
        }
        let committed = match store {
            Some(store) => {
                let committed = store.commit(folder, rank, &index, control);
                stored = checkpoint::may_be_stored(folder, rank, &committed);
                committed?
            }
            None => checkpoint::commit_index(folder, rank, &index, fsync, control)?,
        };
        Ok((index, committed.left))
    });
    let (index, left) = committed.map_err(|raised| match stored {
        // What a signal raised stands for what came of the commit, and says no more than that.
        Some(stored) if !raised.is_instance_of::<StorageUnclearError>(py) => {
            let unclear = to_py(py, &stored);
            unclear.set_cause(py, raised.cause(py));
            raised.set_cause(py, Some(unclear));
            raised
        }
        _ => raised,
    })?;
    let index = index::Index {
        inner: Arc::new(index),
        allow_external: false,
        values: ValueReader::default(),
    };
    Ok((index, left.iter().map(ToString::to_string).collect()))
}

fn spread(builder: &mut IndexBuilder, planner_data: &Bound<'_, PyAny>) -> PyResult<Value> {
    let Ok(mapping) = planner_data.cast::<PyDict>() else {
        return to_value(planner_data, 0);
    };
    let mut rest = Vec::new();
    for (key, value) in mapping {
        let tensor = key.extract::<String>().ok();
        let tensor = tensor.filter(|fqn| value.is_instance_of::<PyTuple>() && builder.has_tensor(fqn));
        if tensor.as_deref().is_some_and(|fqn| builder.has_path(fqn)) {
            continue;
        }
        let value = to_value(&value, 1)?;
        match tensor {
            Some(fqn) if value.is_path() => {
                builder.set_path(&fqn, value);
            }
            _ => rest.push((to_value(&key, 1)?, value)),
        }
    }
    Ok(Value::Dict(rest))
}

/// The generation of the next save into `folder`.
#[guarded]
#[pyfunction]
pub fn next_generation(py: Python<'_>, folder: PathBuf) -> PyResult<u64> {
    py.detach(|| checkpoint::next_generation(&folder)).into_py(py)
}

/// Creates a folder and those it is in, where they are missing; durably.
#[guarded]
#[pyfunction]
pub fn create_folder(py: Python<'_>, folder: PathBuf) -> PyResult<()> {
    py.detach(|| store::create_folder(&folder)).into_py(py)
}

/// Gives `data` the name `name` in `folder`, atomically.
#[guarded]
#[pyfunction]
pub fn publish(py: Python<'_>, folder: PathBuf, name: &str, data: Vec<u8>, fsync: bool) -> PyResult<()> {
    interrupt::run(py, |control| store::publish(&folder, name, &data, fsync, control))
}

/// Makes `index` the index of `folder`, atomically, and removes nothing.
#[guarded]
#[pyfunction]
pub fn replace_index(py: Python<'_>, folder: PathBuf, index: Vec<u8>, fsync: bool) -> PyResult<()> {
    interrupt::run(py, |control| checkpoint::replace_index(&folder, &index, fsync, control))
}

/// Removes the data files that an index names, but for those that the published index (with `rank`, of that rank) names too: those of a save that was not
/// committed.
#[guarded]
#[pyfunction]
pub fn discard(py: Python<'_>, folder: PathBuf, rank: Option<u32>, index: PyBackedBytes) -> PyResult<()> {
    interrupt::run(py, |control| checkpoint::discard(&folder, rank, index, control))
}

/// Gives a finished file or folder its name; with `replace`, a folder that had it before is at `from` then.
#[guarded]
#[pyfunction]
pub fn put_in_place(py: Python<'_>, from: PathBuf, to: PathBuf, replace: bool) -> PyResult<()> {
    interrupt::run(py, |control| store::put_in_place(&from, &to, replace, control))
}
