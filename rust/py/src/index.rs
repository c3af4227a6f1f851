//! The index of a checkpoint, as Python sees it.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_rs_core::checkpoint;
use dcp_rs_core::checkpoint::gather::Source;
use dcp_rs_core::foreign::torch_file::ValueReader;
use dcp_rs_core::format;
use dcp_rs_core::geometry::{Dims, Region};
use dcp_rs_core::quant::{self, Target};
use dcp_rs_core::store::{PrivateMapping, Remote};
use dcp_rs_core::{Control, Result};
use dcp_rs_remote::Store;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::convert::{Extent, FsPath, extent_to_py, from_value};
use crate::error::{IntoPy, PlanError, plan_error};
use crate::interrupt;
use crate::panics::guarded;
use crate::read::{Options, read_options};
use crate::rows::{ChunkEntry, FileEntry, TensorEntry};

/// An open, validated index. Immutable, and safe to share between threads.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Index {
    pub inner: Arc<format::Index>,
    /// True if files outside of the checkpoint's folder may be opened.
    pub allow_external: bool,
    /// Reader of the values in files that `torch.save` wrote.
    pub values: ValueReader,
}

/// Tensor, offsets and sizes in it, its dimension for each dimension of the new tensor, and offsets
/// in the new tensor.
type Rectangle = (u32, Extent, Extent, Vec<Option<usize>>, Extent);

/// Tensor, dtype, shape.
type Description<'py> = (u32, Option<&'static str>, Bound<'py, PyTuple>);

#[guarded]
#[pymethods]
impl Index {
    /// Opens the checkpoint at `path`, of any format; with `rank`, the one that the rank wrote for
    /// itself. With `storage_options`, `path` is a URL. Data files are read from `tiers`, folders,
    /// where these have them.
    #[staticmethod]
    #[pyo3(signature = (path, rank, allow_external, storage_options = None, tiers = Vec::new()))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        rank: Option<u32>,
        allow_external: bool,
        storage_options: Option<HashMap<String, String>>,
        tiers: Vec<PathBuf>,
    ) -> PyResult<Self> {
        let remote = remote(py, &path, storage_options)?;
        let look = |control: &Control| {
            if tiers.is_empty() || rank.is_some() {
                checkpoint::open(&path, rank, remote.clone(), 0, control)
            } else {
                checkpoint::open_in_tiers(&path, tiers, remote.clone(), control)
            }
        };
        let opened = Self::new(Arc::new(looking(py, remote.is_some(), look)?), allow_external);
        opened.warn(py)?;
        Ok(opened)
    }

    /// Reads the data file at a path from elsewhere from now on, if that is in a tier. Returns
    /// whether it is.
    fn pass_over(&self, py: Python<'_>, path: PathBuf, reason: &str) -> PyResult<bool> {
        let is_passed_over = self.inner.pass_over(&path, reason);
        self.warn(py)?;
        Ok(is_passed_over)
    }

    /// Returns the names of the data files that reads asked for so far, and that no tier had.
    fn lacking(&self) -> Vec<&str> {
        let lacking = self.inner.tiers().map(|tiers| tiers.lacking()).unwrap_or_default();
        lacking.into_iter().map(|file| self.inner.file(file).name).collect()
    }

    /// Returns the bytes that reads delivered from each tier since the last call.
    fn take_delivered(&self) -> Vec<(FsPath, u64)> {
        let delivered = self.inner.tiers().map(|tiers| tiers.take_delivered());
        delivered.into_iter().flatten().map(|(path, bytes)| (FsPath(path), bytes)).collect()
    }

    /// Makes an index of the foreign checkpoint at `path`, and ignores an index that is there. With
    /// `storage_options`, `path` is a URL.
    #[staticmethod]
    #[pyo3(signature = (path, storage_options = None))]
    fn from_data(
        py: Python<'_>,
        path: PathBuf,
        storage_options: Option<HashMap<String, String>>,
    ) -> PyResult<Self> {
        let remote = remote(py, &path, storage_options)?;
        let look = |control: &Control| checkpoint::open_data(&path, remote.clone(), control);
        Ok(Self::new(Arc::new(looking(py, remote.is_some(), look)?), true))
    }

    /// Checks the bytes of an index. `path` is where its file would be.
    #[staticmethod]
    fn from_bytes(
        py: Python<'_>,
        data: Vec<u8>,
        path: PathBuf,
        allow_external: bool,
    ) -> PyResult<Self> {
        let inner = py.detach(|| format::Index::from_bytes(data, &path)).into_py(py)?;
        Ok(Self::new(Arc::new(inner), allow_external))
    }

    #[getter]
    fn path(&self) -> FsPath {
        FsPath(self.inner.path().to_owned())
    }

    /// Returns whether the index has no file: it was made from a foreign checkpoint at `path`.
    #[getter]
    fn is_in_memory(&self) -> bool {
        self.inner.is_in_memory()
    }

    /// Returns whether the data files are on a store.
    #[getter]
    fn is_remote(&self) -> bool {
        self.inner.remote().is_some()
    }

    #[getter]
    fn save_id(&self) -> Option<String> {
        let id = self.inner.save_id();
        (id != [0; 16]).then(|| format::uuid(id))
    }

    #[getter]
    fn generation(&self) -> u64 {
        self.inner.generation()
    }

    #[getter]
    fn version(&self) -> u32 {
        self.inner.version()
    }

    #[getter]
    fn writer(&self) -> Option<&str> {
        self.inner.writer()
    }

    #[getter]
    fn source(&self) -> &'static str {
        match self.inner.source() {
            format::SourceKind::Native => "dcp-rs",
            format::SourceKind::Safetensors => "safetensors",
            format::SourceKind::Dcp => "dcp",
            format::SourceKind::Torch => "torch",
        }
    }

    #[getter]
    fn tensor_count(&self) -> u32 {
        self.inner.tensor_count()
    }

    #[getter]
    fn chunk_count(&self) -> u64 {
        self.inner.chunk_count()
    }

    /// Returns whether any chunk has digests.
    fn has_digests(&self) -> bool {
        (0..self.inner.chunk_count()).any(|chunk| self.inner.chunk(chunk).digests.is_some())
    }

    /// Returns the index as it is on disk.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.inner.bytes())
    }

    /// Returns all FQNs, sorted.
    fn names<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, (0..self.inner.tensor_count()).map(|t| self.inner.name(t)))
    }

    fn name(&self, tensor: u32) -> PyResult<&str> {
        self.check_tensor(tensor)?;
        Ok(self.inner.name(tensor))
    }

    fn find(&self, fqn: &str) -> Option<u32> {
        self.inner.find(fqn)
    }

    /// Returns (tensor, dtype, shape) for each name, with dtype `None` for bytes. Returns `None`
    /// for a name that the index does not have.
    fn describe<'py>(
        &self,
        py: Python<'py>,
        names: Vec<PyBackedStr>,
    ) -> PyResult<Vec<Option<Description<'py>>>> {
        names
            .iter()
            .map(|name| {
                let Some(tensor) = self.inner.find(name) else {
                    return Ok(None);
                };
                let view = self.inner.tensor(tensor);
                let dtype = view.dtype.map(dcp_rs_core::Dtype::name);
                Ok(Some((tensor, dtype, extent_to_py(py, &view.shape)?)))
            })
            .collect()
    }

    fn tensor(&self, py: Python<'_>, tensor: u32) -> PyResult<TensorEntry> {
        self.check_tensor(tensor)?;
        TensorEntry::new(py, &self.inner.tensor(tensor))
    }

    /// Returns the chunks of a tensor, sorted by offsets.
    fn chunks(&self, py: Python<'_>, tensor: u32) -> PyResult<Vec<ChunkEntry>> {
        self.check_tensor(tensor)?;
        let chunks = self.inner.tensor(tensor).chunks;
        chunks.map(|chunk| ChunkEntry::new(py, &self.inner, chunk)).collect()
    }

    /// Returns `make(extent(offsets), extent(sizes))` for each chunk of a tensor, sorted by
    /// offsets. Consecutive chunks of equal sizes share one sizes object.
    fn make_chunks<'py>(
        &self,
        tensor: u32,
        make: &Bound<'py, PyAny>,
        extent: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        self.check_tensor(tensor)?;
        let py = make.py();
        let made = PyList::empty(py);
        let mut last: Option<(Dims, Bound<'py, PyAny>)> = None;
        for chunk in self.inner.tensor(tensor).chunks {
            let chunk = self.inner.chunk(chunk);
            let sizes = match last.take() {
                Some(last) if last.0 == chunk.sizes => last,
                _ => {
                    let sizes = extent.call1((extent_to_py(py, &chunk.sizes)?,))?;
                    (chunk.sizes, sizes)
                }
            };
            let offsets = extent.call1((extent_to_py(py, &chunk.offsets)?,))?;
            made.append(make.call1((offsets, &sizes.1))?)?;
            last = Some(sizes);
        }
        Ok(made)
    }

    /// Returns the number of a tensor's first chunk, for the methods that read chunks.
    fn first_chunk(&self, tensor: u32) -> PyResult<u64> {
        self.check_tensor(tensor)?;
        Ok(self.inner.tensor(tensor).chunks.start)
    }

    /// Returns the strides of a chunk in elements; `None` if it is contiguous.
    fn chunk_strides<'py>(
        &self,
        py: Python<'py>,
        chunk: u64,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.check_chunk(chunk)?;
        self.inner.chunk(chunk).strides.map(|strides| extent_to_py(py, &strides)).transpose()
    }

    /// Returns whether the bytes of a chunk are its elements, so that they can be used in place.
    fn is_in_place(&self, chunk: u64) -> PyResult<bool> {
        self.check_chunk(chunk)?;
        let view = self.inner.chunk(chunk);
        Ok(view.coded.is_none() && !view.signs.conjugate && !view.signs.negative)
    }

    /// Returns whether the index has logical tensors, which no index file stores.
    #[getter]
    fn is_view(&self) -> bool {
        self.inner.is_view()
    }

    /// Returns the format that a tensor is decoded from, and the names of its stored tensors.
    /// Returns `None` if it is stored as it is.
    fn coded_from(&self, tensor: u32) -> PyResult<Option<(&'static str, Vec<String>)>> {
        self.check_tensor(tensor)?;
        let chunks = self.inner.tensor(tensor).chunks;
        let coded = chunks.clone().next().and_then(|chunk| self.inner.chunk(chunk).coded);
        Ok(coded.map(|chunk| {
            let of = &chunk.of;
            let parts = of.parts(&Dims::from_elem(0, of.shape.len()), &of.shape);
            let names = parts.iter().map(|part| of.index.name(part.tensor).to_owned());
            (of.format.name(), names.collect())
        }))
    }

    /// Returns the names of tensors with codes, each with that of a scale, by dtypes and names.
    fn codes_beside_scales(&self) -> Vec<(&str, &str)> {
        let named = |(codes, scale)| (self.inner.name(codes), self.inner.name(scale));
        quant::codes_beside_scales(&self.inner).into_iter().map(named).collect()
    }

    /// Returns this checkpoint with its quantized weights as tensors of `dtype`; `None` if it has
    /// no quantized weights.
    #[pyo3(signature = (dtype, **options))]
    fn dequantize(
        &self,
        py: Python<'_>,
        dtype: &str,
        options: Option<Options>,
    ) -> PyResult<Option<Self>> {
        let target = Target::from_name(dtype).ok_or_else(|| {
            PlanError::new_err(format!("weights become bfloat16, float16 or float32, not {dtype}"))
        })?;
        let options = read_options(options)?;
        let found = self.looking(py, |control| {
            checkpoint::dequantize(&self.inner, target, self.allow_external, &options, control)
        })?;
        Ok(found.map(|index| self.view(index)))
    }

    /// Returns this checkpoint with other tensors in place of the `hidden` ones. Each new tensor
    /// has a name, a shape and rectangles of stored tensors.
    fn derive(
        &self,
        py: Python<'_>,
        hidden: Vec<u32>,
        tensors: Vec<(String, Extent, Vec<Rectangle>)>,
    ) -> PyResult<Self> {
        let source = |(tensor, offsets, sizes, dims, at): Rectangle| {
            self.check_tensor(tensor)?;
            let region = Region { offsets: offsets.0, sizes: sizes.0 };
            Ok(format::ViewSource { tensor, region, dims: dims.into(), at: at.0 })
        };
        let logical = |(name, shape, rectangles): (String, Extent, Vec<Rectangle>)| {
            let sources = rectangles.into_iter().map(source).collect::<PyResult<_>>()?;
            let origin = format::Origin::Sources { shape: shape.0, sources };
            Ok(format::Logical { name, origin })
        };
        let logical: Vec<_> = tensors.into_iter().map(logical).collect::<PyResult<_>>()?;
        let derived = py.detach(|| format::derive(&self.inner, &hidden, &logical, Vec::new()));
        Ok(self.view(derived.into_py(py)?))
    }

    /// Returns whether the elements of a chunk are the conjugates of its stored values, and whether
    /// they are the negatives.
    fn chunk_signs(&self, chunk: u64) -> PyResult<(bool, bool)> {
        self.check_chunk(chunk)?;
        let signs = self.inner.chunk(chunk).signs;
        Ok((signs.conjugate, signs.negative))
    }

    /// Returns the dtype of the tensor that a chunk belongs to; `None` for bytes.
    fn dtype_of(&self, chunk: u64) -> PyResult<Option<&'static str>> {
        self.check_chunk(chunk)?;
        let tensor = self.inner.tensor(self.inner.chunk(chunk).tensor);
        Ok(tensor.dtype.map(dcp_rs_core::Dtype::name))
    }

    /// Returns the data file of each chunk.
    fn files_of(&self, chunks: Vec<u64>) -> PyResult<Vec<u32>> {
        let file = |chunk| self.check_chunk(chunk).map(|()| self.inner.chunk_file(chunk));
        chunks.into_iter().map(file).collect()
    }

    /// Returns all tensors, in the order of their first bytes on disk.
    fn file_order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.inner.tensor_count()).collect();
        order.sort_by_cached_key(|&t| {
            let chunks = self.inner.tensor(t).chunks;
            (!chunks.is_empty()).then(|| {
                let first = self.inner.chunk(chunks.start);
                (first.file, first.offset)
            })
        });
        order
    }

    /// Returns all data files.
    fn files(&self) -> Vec<FileEntry> {
        let count = self.inner.file_count();
        (0..count).map(|file| FileEntry::new(&self.inner.file(file))).collect()
    }

    /// Returns for each data file the bytes that chunks use, and whether it is a link to a file of
    /// another save.
    fn use_of_files(&self) -> Vec<(u64, bool)> {
        let mut used = vec![0; self.inner.file_count() as usize];
        for number in 0..self.inner.chunk_count() {
            let (chunk, (_, length)) = (self.inner.chunk(number), self.inner.span(number));
            used[chunk.file as usize] += length;
        }
        let linked = (0..).map(|file| self.inner.file(file).linked);
        used.into_iter().zip(linked).collect()
    }

    /// Returns the paths of the data files, in the order of `files`.
    fn file_paths(&self) -> Vec<FsPath> {
        let count = self.inner.file_count();
        (0..count).map(|file| FsPath(self.inner.file_path(file))).collect()
    }

    /// Returns the path of a tensor in the saved state dict, as a tuple; `None` if it has none.
    fn planner_path<'py>(
        &self,
        py: Python<'py>,
        tensor: u32,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.check_tensor(tensor)?;
        self.inner.planner_path(tensor).map(|path| from_value(py, &path)).transpose()
    }

    /// Returns the planner data that belongs to no tensor.
    fn planner_root<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        from_value(py, &self.inner.planner_root())
    }

    /// Returns the containers (position, path, kind) that no path shows; `None` if they are
    /// unknown.
    fn nesting<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        from_value(py, &self.inner.nesting())
    }

    /// Returns the position of each entry in the state dict, in the order of `names`; `None` if it
    /// is unknown.
    fn positions(&self) -> Vec<Option<u32>> {
        let count = self.inner.tensor_count();
        (0..count).map(|tensor| self.inner.tensor(tensor).position).collect()
    }

    /// Returns the chunk for each (fqn, offset or None, hint or None), the fields of DCP's
    /// `MetadataIndex`.
    fn locate(&self, wanted: Vec<(String, Option<Extent>, Option<u64>)>) -> PyResult<Vec<u64>> {
        wanted
            .into_iter()
            .map(|(fqn, offset, hint)| self.locate_one(&fqn, offset.as_ref().map(|o| &o.0), hint))
            .collect()
    }

    /// Maps a data file privately (copy-on-write), after a check of its length.
    fn map_file(&self, py: Python<'_>, file: u32) -> PyResult<FileMapping> {
        let inner = Arc::clone(&self.inner);
        let allow_external = self.allow_external;
        let mapping =
            py.detach(|| checkpoint::map_data_file(&inner, file, allow_external)).into_py(py)?;
        self.warn(py)?;
        Ok(FileMapping { mapping })
    }
}

/// Returns the store of a URL; `None` for a path of the file system, which has no `options`.
fn remote(
    py: Python<'_>,
    path: &Path,
    options: Option<HashMap<String, String>>,
) -> PyResult<Option<Arc<dyn Remote>>> {
    let store = |options| Store::new(&path.to_string_lossy(), options).into_py(py);
    options.map(|options| Ok(Arc::new(store(options)?) as _)).transpose()
}

/// Runs `look` without the GIL. On a store each look is a request, so Ctrl-C stops it.
fn looking<T: Send>(
    py: Python<'_>,
    is_remote: bool,
    look: impl FnOnce(&Control) -> Result<T> + Send,
) -> PyResult<T> {
    if is_remote {
        interrupt::run(py, look)
    } else {
        py.detach(|| look(&Control::new())).into_py(py)
    }
}

impl Index {
    pub fn new(inner: Arc<format::Index>, allow_external: bool) -> Self {
        Self { inner, allow_external, values: ValueReader::default() }
    }

    /// Runs `look`, which checks data files, without the GIL. On a store each look is a request, so
    /// Ctrl-C stops it.
    pub fn looking<T: Send>(
        &self,
        py: Python<'_>,
        look: impl FnOnce(&Control) -> Result<T> + Send,
    ) -> PyResult<T> {
        let found = looking(py, self.inner.remote().is_some(), look)?;
        self.warn(py)?;
        Ok(found)
    }

    /// Warns of the files of tiers that were passed over.
    pub fn warn(&self, py: Python<'_>) -> PyResult<()> {
        for problem in self.inner.tiers().map(|tiers| tiers.take_problems()).unwrap_or_default() {
            py.import("dcp_rs._warnings")?.call_method1("warn_caller", (problem,))?;
        }
        Ok(())
    }

    /// Wraps another index over the same files.
    fn view(&self, inner: format::Index) -> Self {
        Self::new(Arc::new(inner), self.allow_external)
    }

    pub fn check_tensor(&self, tensor: u32) -> PyResult<()> {
        self.check(tensor < self.inner.tensor_count(), || format!("tensor {tensor}"))
    }

    pub fn check_chunk(&self, chunk: u64) -> PyResult<()> {
        self.check(chunk < self.inner.chunk_count(), || format!("chunk {chunk}"))
    }

    /// Returns the source of a region, a tensor or one chunk of it by number, and the tensor.
    pub fn source_of(&self, number: u64, of_chunk: bool) -> PyResult<(Source, u32)> {
        if of_chunk {
            self.check_chunk(number)?;
            return Ok((Source::Chunk(number), self.inner.chunk(number).tensor));
        }
        // No tensor has a number beyond 32 bits.
        let tensor = u32::try_from(number).unwrap_or(u32::MAX);
        self.check_tensor(tensor)?;
        Ok((Source::Tensor(tensor), tensor))
    }

    fn check(&self, is_there: bool, what: impl FnOnce() -> String) -> PyResult<()> {
        let path = self.inner.path();
        let missing = || plan_error(path, None, format!("no {} in {}", what(), path.display()));
        if is_there { Ok(()) } else { Err(missing()) }
    }

    /// Returns the size of an element in bytes; 1 for a value.
    pub fn itemsize(&self, tensor: u32) -> u64 {
        self.inner.tensor(tensor).dtype.map_or(1, dcp_rs_core::Dtype::size)
    }

    fn locate_one(&self, fqn: &str, offset: Option<&Dims>, hint: Option<u64>) -> PyResult<u64> {
        let index = &self.inner;
        let missing = |what: String| {
            let message = format!("{what} in {}", index.path().display());
            plan_error(index.path(), Some(fqn), message)
        };
        let tensor = index.find(fqn).ok_or_else(|| missing(format!("no tensor {fqn:?}")))?;
        let chunks = index.tensor(tensor).chunks;
        let is_it = |c: u64| offset.is_none_or(|offset| index.chunk(c).offsets == *offset);
        if let Some(hinted) = hint.and_then(|hint| chunks.start.checked_add(hint))
            && hinted < chunks.end
            && is_it(hinted)
        {
            return Ok(hinted);
        }
        let Some(offset) = offset else {
            return match chunks.end - chunks.start {
                1 => Ok(chunks.start),
                n => Err(missing(format!(
                    "tensor {fqn:?} has {n} chunks, and no offset was given to tell them apart"
                ))),
            };
        };
        // Sorted by offset. Of two chunks at one offset the last is the larger; the other is empty.
        let (mut low, mut high) = (chunks.start, chunks.end);
        while low < high {
            let middle = low + (high - low) / 2;
            if index.chunk(middle).offsets <= *offset {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        match low.checked_sub(1) {
            Some(found) if found >= chunks.start && is_it(found) => Ok(found),
            _ => Err(missing(format!(
                "no chunk of tensor {fqn:?} at offset {:?}",
                offset.as_slice()
            ))),
        }
    }
}

/// A data file in memory, writable without changing the file. Every tensor over it keeps it alive.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct FileMapping {
    mapping: PrivateMapping,
}

#[guarded]
#[pymethods]
impl FileMapping {
    /// Exports the mapping as a writable buffer. The mapping is private, so writes stay in this
    /// process.
    ///
    /// # Safety
    /// Python calls this with a `view` to fill, and keeps `slf` alive until it releases the view.
    #[expect(unsafe_code, reason = "the buffer protocol is a C interface")]
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut pyo3::ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let mapping = &slf.get().mapping;
        let len = isize::try_from(mapping.len())
            .map_err(|_| PlanError::new_err("file too large to map"))?;
        // SAFETY: `view` is Python's to fill. The memory belongs to the mapping, which lives as
        // long as `slf`, and PyBuffer_FillInfo takes a reference to `slf`. Writes are private to
        // this process. As with any tensor, the caller synchronizes them.
        let status = unsafe {
            pyo3::ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                mapping.as_ptr().cast::<c_void>(),
                len,
                0,
                flags,
            )
        };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }

    fn __len__(&self) -> usize {
        self.mapping.len()
    }
}
