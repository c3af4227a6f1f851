//! Saves, for Python.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_rs_core::Error;
use dcp_rs_core::format::Value;
use dcp_rs_core::store::{FileLock, Remote};
use dcp_rs_core::write::{self, FilePlan, Part, SaveInfo, Sums, WriteIo, WriteOptions};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::sync::MutexExt as _;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::convert::to_value;
use crate::error::PlanError;
use crate::interrupt;
use crate::panics::guarded;
use crate::plain::Plain;
use crate::remote::Store;
use crate::rows::{self, PlacedValue};
use crate::save_item::{SaveItem, items_of};
use crate::save_plan::Planned;
use crate::template::Template;

/// One rank's data files of one save. If it is dropped before `finish`, it removes the files that
/// it created.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Save {
    inner: Mutex<State>,
    planned: Planned,
    /// Bytes of all items to write.
    #[pyo3(get)]
    bytes: u64,
    /// Bytes of the reused items: those that a parent has, and that are linked or copied by a
    /// store.
    #[pyo3(get)]
    bytes_reused: u64,
    /// Requests to a store that upload or copy data.
    #[pyo3(get)]
    requests: u64,
    /// Reasons why files of the parent could not be linked or copied.
    #[pyo3(get)]
    problems: Vec<String>,
    /// True if all parts are collected before the first write: incomplete parts of a store's
    /// objects take memory.
    at_once: bool,
    process: u32,
}

struct State {
    /// Set until the save is finished.
    save: Option<write::Save>,
    /// Set from then until the save is committed.
    claim: Option<FileLock>,
    /// Callback for the number of bytes written, which is `written`.
    progress: Option<Py<PyAny>>,
    written: u64,
}

#[guarded]
#[pymethods]
impl Save {
    /// Lays out the files for `items` in `folder` and creates them.
    #[staticmethod]
    #[pyo3(signature = (folder, items, *, store = None, **options))]
    fn create(
        py: Python<'_>,
        folder: PathBuf,
        items: Vec<Bound<'_, SaveItem>>,
        store: Option<&Bound<'_, Store>>,
        options: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let (info, options) = save_options(options.as_ref())?;
        let to = to(&folder, store);
        Self::begin(py, &to, items_of(&items), info, &options, Planned::default(), None)
    }

    /// Creates files (name, header, size) in the caller's own layout, for `values` in them. `crc32`
    /// enables [`crc32s`](Self::crc32s).
    #[staticmethod]
    #[pyo3(signature = (folder, files, values, *, crc32 = false, **options))]
    fn create_files(
        py: Python<'_>,
        folder: PathBuf,
        files: Vec<(String, Vec<u8>, u64)>,
        values: Vec<Bound<'_, PlacedValue>>,
        crc32: bool,
        options: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let files = files
            .into_iter()
            .map(|(name, header, size)| FilePlan { name, header, size, items: vec![] })
            .collect();
        let values: Vec<_> = values.iter().map(|value| value.get().to_core()).collect();
        let bytes = values.iter().map(|(.., length)| length).sum();
        let options = write_options(options.as_ref())?;
        let save = interrupt::run(py, |control| {
            let sums = if crc32 { Sums::Crc32 } else { Sums::None };
            write::Save::create_files(&folder, files, values, sums, &options, control)
        })?;
        Ok(Self::new(save, Planned::default(), bytes))
    }

    /// Writes parts of items.
    ///
    /// The caller keeps the tensors until this returns. The memory behind every address must not
    /// change.
    #[expect(unsafe_code, reason = "tensors are handed over by address")]
    fn write(&self, py: Python<'_>, parts: Vec<Bound<'_, rows::Part>>) -> PyResult<()> {
        // SAFETY: the contract of this method, which `dcp_rs.transfer.save` keeps.
        let parts = unsafe { parts_at(&parts)? };
        self.put(py, &parts)
    }

    /// Writes the plain tensors of the plan that created this save. `tensors` is the list that the
    /// plan was made with.
    fn write_plain<'py>(
        &self,
        py: Python<'py>,
        tensors: &Bound<'py, PyList>,
        types: &Bound<'py, PyTuple>,
        dtypes: &Bound<'py, PyDict>,
    ) -> PyResult<()> {
        let plain = Plain::new(py, types, dtypes)?;
        self.put_all(py, self.planned.parts(&plain, tensors))
    }

    /// Writes values: (item, bytes).
    fn write_values(&self, py: Python<'_>, values: Vec<(u32, PyBackedBytes)>) -> PyResult<()> {
        self.put(py, &parts_of(&values))
    }

    /// Writes the pieces of a template, which are the items from `first` on.
    fn write_template(&self, py: Python<'_>, template: &Template, first: u32) -> PyResult<()> {
        let template = template.lock(py);
        let pieces = (first..).zip(template.file.pieces());
        let parts: Vec<Part<'_>> =
            pieces.map(|(item, (_, data))| Part { item, at: 0, data }).collect();
        self.put(py, &parts)
    }

    /// Returns the CRC-32 of each item.
    fn crc32s(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let state = self.lock(py)?;
        let save = state.save.as_ref().ok_or_else(closed)?;
        Ok(py.detach(|| save.crc32s()))
    }

    /// Calls `progress` with the bytes written so far, from the next write on.
    fn watch(&self, py: Python<'_>, progress: Py<PyAny>) -> PyResult<()> {
        self.lock(py)?.progress = Some(progress);
        Ok(())
    }

    /// Returns for each item whether it is reused from a parent, and so not written.
    fn reused(&self, py: Python<'_>) -> PyResult<Vec<bool>> {
        Ok(self.lock(py)?.save.as_ref().ok_or_else(closed)?.is_reused())
    }

    /// Returns the number of plain tensors, which come first among the items of a plan.
    #[getter]
    fn plain_count(&self) -> usize {
        self.planned.count
    }

    /// Completes the files, and returns the bytes of an index over them. `nesting` has the
    /// containers (position, path, kind) that no path shows; `None` if they are unknown.
    #[pyo3(signature = (nesting=None))]
    fn finish<'py>(
        &self,
        py: Python<'py>,
        nesting: Option<Bound<'py, PyList>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
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

    /// Releases the claim on the files, once the save is committed or abandoned.
    fn unlock(&self, py: Python<'_>) -> PyResult<()> {
        let claim = self.lock(py)?.claim.take();
        py.detach(|| drop(claim));
        Ok(())
    }

    /// Removes the files, unless they are complete. Returns the reasons why something is still on a
    /// store.
    fn abort(&self, py: Python<'_>) -> Vec<String> {
        // In a fork of the process that began the save, the lock fails, and the files stay: they
        // belong to the parent process.
        let save = self.lock(py).ok().and_then(|mut inner| inner.save.take());
        let left = py.detach(|| save.map(write::Save::abort).unwrap_or_default());
        left.iter().map(ToString::to_string).collect()
    }
}

impl Drop for Save {
    /// Removes the files of an unfinished save. This may send requests to a store, so it releases
    /// the GIL.
    fn drop(&mut self) {
        let state = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (save, claim) = (state.save.take(), state.claim.take());
        if save.is_some() || claim.is_some() {
            Python::attach(|py| py.detach(|| drop((save, claim))));
        }
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
        let (save, problems) = interrupt::run(py, |control| match to {
            To::Folder(folder) => write::Save::create(folder, items, info, options, reuse, control),
            To::Store(folder, store) => write::Save::create_remote(
                Arc::clone(store),
                folder,
                items,
                turns,
                info,
                options,
                reuse,
                control,
            ),
        })?;
        let reused = save.is_reused();
        let of = |which: bool| {
            (lengths.iter().zip(&reused))
                .filter_map(move |(length, reused)| (*reused == which).then_some(*length))
        };
        let mut begun =
            Self::new(save, planned.only(|item| !reused[item as usize]), of(false).sum());
        begun.bytes_reused = of(true).sum();
        begun.problems = problems.iter().map(ToString::to_string).collect();
        begun.at_once = matches!(to, To::Store(..));
        Ok(begun)
    }

    fn put(&self, py: Python<'_>, parts: &[Part<'_>]) -> PyResult<()> {
        let mut parts = Some(parts.to_vec());
        self.put_all(py, || Ok(parts.take()))
    }

    /// Writes the parts of all blocks. The first are written while later ones are still located.
    /// Locating may run Python code, which may call this object, so the lock is held only during a
    /// write.
    fn put_all<'a>(
        &self,
        py: Python<'_>,
        blocks: impl FnMut() -> PyResult<Option<Vec<Part<'a>>>>,
    ) -> PyResult<()> {
        let (progress, before) = {
            let state = self.lock(py)?;
            if state.save.is_none() {
                return Err(closed());
            }
            let progress = state.progress.as_ref().map(|progress| progress.clone_ref(py));
            (progress, state.written)
        };
        let bytes = interrupt::run_on(py, progress.as_ref(), before, blocks, |blocks, control| {
            // One write of many parts is much faster than many writes.
            let all = self.at_once.then(|| blocks.iter().flatten().collect());
            let mut next = all.or_else(|| interrupt::made_by_now(&blocks));
            while let Some(parts) = next {
                let state = self.inner.lock().map_err(|_| ended())?;
                state.save.as_ref().ok_or_else(ended)?.write(&parts, control)?;
                drop(state);
                next = interrupt::made_by_now(&blocks);
            }
            Ok(control.done())
        })?;
        self.lock(py)?.written += bytes;
        Ok(())
    }

    fn new(save: write::Save, planned: Planned, bytes: u64) -> Self {
        Self {
            requests: save.requests(),
            inner: Mutex::new(State { save: Some(save), claim: None, progress: None, written: 0 }),
            planned,
            bytes,
            bytes_reused: 0,
            problems: Vec::new(),
            at_once: false,
            process: std::process::id(),
        }
    }

    /// Locks the state. Fails in a fork, where a thread of the parent may have held the lock.
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, State>> {
        if self.process != std::process::id() {
            return Err(PlanError::new_err(
                "this save was begun before a fork, in the parent process",
            ));
        }
        self.inner.lock_py_attached(py).map_err(|_| closed())
    }
}

/// Destination of a save.
pub enum To<'a> {
    Folder(&'a Path),
    Store(&'a Path, Arc<dyn Remote>),
}

/// Returns the destination: a folder of the file system, or of `store` if one is given.
pub fn to<'a>(folder: &'a Path, store: Option<&Bound<'_, Store>>) -> To<'a> {
    match store {
        Some(store) => To::Store(folder, Arc::clone(&store.get().inner)),
        None => To::Folder(folder),
    }
}

/// Converts parts of tensors that the caller keeps.
///
/// # Safety
/// That of [`bytes_at`], for each part.
#[expect(unsafe_code, reason = "tensors are handed over by address")]
pub unsafe fn parts_at<'a>(parts: &[Bound<'_, rows::Part>]) -> PyResult<Vec<Part<'a>>> {
    parts
        .iter()
        .map(Bound::get)
        .filter(|part| part.nbytes > 0)
        .map(|part| {
            Ok(Part {
                item: part.item,
                at: part.at,
                // SAFETY: the caller guarantees it.
                data: unsafe { bytes_at(part.address, part.nbytes)? },
            })
        })
        .collect()
}

/// Returns memory that Python keeps, as bytes. Refuses an address and a length that no memory can
/// have.
///
/// # Safety
/// The `length` bytes from `address` on can be read for `'a`. Training code that changes a tensor
/// while it is saved gets a torn save, as with any writer.
#[expect(unsafe_code, reason = "tensors are handed over by address")]
pub unsafe fn bytes_at<'a>(address: usize, length: usize) -> PyResult<&'a [u8]> {
    let is_memory =
        address != 0 && isize::try_from(length).is_ok() && address.checked_add(length).is_some();
    if !is_memory {
        return Err(PlanError::new_err(format!(
            "{length} bytes at address {address:#x} are not memory"
        )));
    }
    // SAFETY: the caller guarantees it, and a slice may have this length.
    Ok(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), length) })
}

/// Converts values (item, bytes), each to one part.
pub fn parts_of(values: &[(u32, PyBackedBytes)]) -> Vec<Part<'_>> {
    values
        .iter()
        .filter(|(_, data)| !data.is_empty())
        .map(|(item, data)| Part { item: *item, at: 0, data })
        .collect()
}

/// Keyword arguments of [`WriteOptions`].
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Options {
    threads: usize,
    fsync: bool,
    io: String,
    max_inflight_bytes: u64,
    #[pyo3(default = 1)]
    local_ranks: usize,
}

/// Keyword arguments of [`SaveInfo`].
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Info {
    save_id: [u8; 16],
    generation: u64,
    token: u64,
    rank: u32,
    world_size: u32,
}

fn write_options(options: Option<&Bound<'_, PyDict>>) -> PyResult<WriteOptions> {
    let options: Options = options.ok_or_else(no_options)?.extract()?;
    let io = match options.io.as_str() {
        "auto" => WriteIo::Auto,
        "direct" => WriteIo::Direct,
        "buffered" => WriteIo::Buffered,
        other => {
            return Err(PlanError::new_err(format!(
                "io is {other:?}: must be one of auto, direct, buffered"
            )));
        }
    };
    Ok(WriteOptions {
        threads: options.threads,
        fsync: options.fsync,
        io,
        max_inflight_bytes: options.max_inflight_bytes,
        local_ranks: options.local_ranks,
    })
}

/// Extracts the keyword arguments of `Save.create` and `SavePlan.create`.
pub fn save_options(options: Option<&Bound<'_, PyDict>>) -> PyResult<(SaveInfo, WriteOptions)> {
    let info: Info = options.ok_or_else(no_options)?.extract()?;
    let info = SaveInfo {
        save_id: info.save_id,
        generation: info.generation,
        token: info.token,
        rank: info.rank,
        world_size: info.world_size,
    };
    Ok((info, write_options(options)?))
}

fn no_options() -> PyErr {
    PyTypeError::new_err("keyword arguments are missing")
}

const ENDED: &str = "the save has ended";

fn closed() -> PyErr {
    PlanError::new_err(ENDED)
}

fn ended() -> Error {
    Error::Plan(ENDED.into())
}
