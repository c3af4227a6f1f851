//! Reads for Python: one batch per call, with destinations by address.

#![allow(unsafe_code)] // tensors are handed over by address

use std::sync::Arc;

use dcp_rs_core::checkpoint;
use dcp_rs_core::checkpoint::gather::{Gather, Memory, Passes};
use dcp_rs_core::checkpoint::verify::verify_chunks;
use dcp_rs_core::format::{self, Kind, SourceKind};
use dcp_rs_core::geometry::{Dims, Region};
use dcp_rs_core::read::{Destination, IoMode, ReadOptions, ReadStats, Sharing, Verify};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::convert::{Extent, extent_to_py};
use crate::error::{IntoPy, PlanError, plan_error};
use crate::index::Index;
use crate::interrupt;
use crate::panics::guarded;
use crate::rows::{self, Fill, Overlap};

/// Region, offsets and sizes of a part that no chunk holds.
type Hole<'py> = (usize, Bound<'py, PyTuple>, Bound<'py, PyTuple>);

/// The options of a read, as keyword arguments.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Options {
    io: String,
    threads: usize,
    /// `None`: [`Verify::Auto`](dcp_rs_core::read::Verify::Auto).
    #[pyo3(default)]
    verify: Option<bool>,
    #[pyo3(default)]
    shared: bool,
    #[pyo3(default)]
    max_inflight_bytes: u64,
    #[pyo3(default = 1)]
    local_ranks: usize,
}

/// Converts options, with defaults for those that were not given.
pub fn read_options(options: Option<Options>) -> PyResult<ReadOptions> {
    let Some(options) = options else {
        return Ok(ReadOptions::default());
    };
    let io = match options.io.as_str() {
        "auto" => IoMode::Auto,
        "mmap" => IoMode::Mmap,
        "direct" => IoMode::Direct,
        "buffered" => IoMode::Buffered,
        other => {
            return Err(PlanError::new_err(format!(
                "io is {other:?}: must be one of auto, mmap, direct, buffered"
            )));
        }
    };
    Ok(ReadOptions {
        io,
        threads: options.threads,
        verify: match options.verify {
            None => Verify::Auto,
            Some(true) => Verify::All,
            Some(false) => Verify::Nothing,
        },
        shared: if options.shared { Sharing::Guess } else { Sharing::Nothing },
        max_inflight_bytes: options.max_inflight_bytes,
        local_ranks: options.local_ranks,
    })
}

/// Returns the memory of a tensor. A freed tensor has the address 0.
pub fn memory(
    index: &Index,
    tensor: u32,
    address: usize,
    sizes: &Dims,
    strides: &Dims,
) -> PyResult<Memory> {
    let refuse = |why: &str| {
        let name = index.inner.name(tensor);
        let message = format!("tensor {name:?}: the destination has {why}");
        plan_error(index.inner.path(), Some(name), message)
    };
    if address == 0 && !sizes.contains(&0) {
        return Err(refuse("no memory: its storage has been freed"));
    }
    let itemsize = index.itemsize(tensor);
    let strides: Option<Dims> = strides.iter().map(|stride| stride.checked_mul(itemsize)).collect();
    Ok(Memory {
        address: Destination(std::ptr::with_exposed_provenance_mut(address)),
        strides: strides.ok_or_else(|| refuse("strides that overflow"))?,
    })
}

/// Reads a whole batch without the GIL.
///
/// # Safety
/// That of [`Gather::read`].
unsafe fn run(py: Python<'_>, gather: &Gather, options: &ReadOptions) -> PyResult<ReadStats> {
    // SAFETY: the caller guarantees it.
    interrupt::run_here(py, |control| unsafe { gather.read(options, control) })
}

/// Reads one pass of a batch without the GIL.
///
/// # Safety
/// That of [`Gather::read_pass`].
pub unsafe fn run_pass(
    py: Python<'_>,
    gather: &Gather,
    passes: &Passes,
    pass: usize,
    options: &ReadOptions,
    progress: Option<&Py<PyAny>>,
) -> PyResult<ReadStats> {
    // SAFETY: the caller guarantees it.
    interrupt::run_with(py, progress, 0, |control| unsafe {
        gather.read_pass(passes, pass, options, control)
    })
}

#[guarded]
#[pymethods]
impl Index {
    /// Fills memory with rectangles of chunks.
    ///
    /// The caller keeps the tensors, and so the memory behind every address, until this returns.
    #[pyo3(signature = (fills, **options))]
    fn read_chunks(
        &self,
        py: Python<'_>,
        fills: Vec<Bound<'_, Fill>>,
        options: Option<Options>,
    ) -> PyResult<rows::ReadStats> {
        self.fill(py, fills, options, true)
    }

    /// Fills memory with regions of tensors, from all chunks that hold parts of them.
    ///
    /// As with `read_chunks`, the caller keeps the tensors.
    #[pyo3(signature = (fills, **options))]
    fn read_regions(
        &self,
        py: Python<'_>,
        fills: Vec<Bound<'_, Fill>>,
        options: Option<Options>,
    ) -> PyResult<rows::ReadStats> {
        self.fill(py, fills, options, false)
    }

    /// Returns the bytes of whole chunks, as they are stored. A value in a file of `torch.save` is
    /// only a part of that file's pickle. For it, this returns what `torch.save` would write for
    /// the value alone.
    #[pyo3(signature = (chunks, **options))]
    fn read_bytes<'py>(
        &self,
        py: Python<'py>,
        chunks: Vec<u64>,
        options: Option<Options>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let options = read_options(options)?;
        let index = Arc::clone(&self.inner);
        // Checks the files first: a buffer gets the length of its chunk, which may be wrong if the
        // file is shorter.
        self.check_files(py, chunks.clone())?;
        let mut gather = Gather::new(Arc::clone(&index), self.allow_external);
        let mut buffers = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let view = index.chunk(chunk);
            if index.source() == SourceKind::Torch && index.tensor(view.tensor).kind == Kind::Bytes
            {
                let value = self.looking(py, |control| {
                    self.values.read(&index, chunk, self.allow_external, control)
                });
                buffers.push(value?);
                continue;
            }
            let length = view.length;
            let len = usize::try_from(length).map_err(|_| PlanError::new_err("value too large"))?;
            let mut buffer = vec![0_u8; len];
            gather.add_bytes(chunk, 0, length, Destination(buffer.as_mut_ptr())).into_py(py)?;
            buffers.push(buffer);
        }
        // SAFETY: each chunk goes to a buffer of its length, which nothing else accesses until this
        // ends.
        unsafe { run(py, &gather, &options)? };
        self.warn(py)?;
        Ok(buffers.iter().map(|buffer| PyBytes::new(py, buffer)).collect())
    }

    /// Raises unless the files of these chunks exist and have the expected length.
    fn check_files(&self, py: Python<'_>, chunks: Vec<u64>) -> PyResult<()> {
        for &chunk in &chunks {
            self.check_chunk(chunk)?;
        }
        let index = Arc::clone(&self.inner);
        let allow_external = self.allow_external;
        self.looking(py, |control| {
            checkpoint::check_files(&index, &chunks, allow_external, control)
        })
    }

    /// Raises unless the digests of these chunks match.
    #[pyo3(signature = (chunks, **options))]
    fn verify_chunks(
        &self,
        py: Python<'_>,
        chunks: Vec<u64>,
        options: Option<Options>,
    ) -> PyResult<()> {
        for &chunk in &chunks {
            self.check_chunk(chunk)?;
        }
        let threads = read_options(options)?.threads;
        let index = Arc::clone(&self.inner);
        let allow_external = self.allow_external;
        interrupt::run(py, |control| {
            verify_chunks(&index, &chunks, allow_external, threads, control)
        })?;
        self.warn(py)
    }

    /// Returns the overlaps of chunks and a region. They need not cover the region.
    fn touching(
        &self,
        py: Python<'_>,
        tensor: u32,
        offsets: Extent,
        sizes: Extent,
    ) -> PyResult<Vec<Overlap>> {
        let region = self.region(tensor, offsets, sizes)?;
        let found = format::touching(&self.inner, tensor, &region);
        found.iter().map(|overlap| Overlap::new(py, overlap)).collect()
    }

    /// Raises if tensors are much larger than the data files.
    fn check_expanded(&self, py: Python<'_>, tensors: Vec<u32>) -> PyResult<()> {
        for &tensor in &tensors {
            self.check_tensor(tensor)?;
        }
        let index = Arc::clone(&self.inner);
        self.looking(py, |_| checkpoint::check_expanded(&index, &tensors))
    }

    /// Checks a plan before anything is read. Raises unless the data files of these regions and
    /// values exist and have the expected length. Returns (region, offsets, sizes) for each part
    /// that no chunk holds.
    fn check_regions<'py>(
        &self,
        py: Python<'py>,
        regions: Vec<(u32, Extent, Extent)>,
        values: Vec<u32>,
    ) -> PyResult<Vec<Hole<'py>>> {
        let regions = regions
            .into_iter()
            .map(|(tensor, offsets, sizes)| Ok((tensor, self.region(tensor, offsets, sizes)?)))
            .collect::<PyResult<Vec<_>>>()?;
        for &value in &values {
            self.check_tensor(value)?;
        }
        let index = Arc::clone(&self.inner);
        let allow_external = self.allow_external;
        self.looking(py, |control| {
            checkpoint::check_regions(&index, &regions, &values, allow_external, control)
        })?
        .into_iter()
        .map(|(at, hole)| {
            Ok((at, extent_to_py(py, &hole.offsets)?, extent_to_py(py, &hole.sizes)?))
        })
        .collect()
    }
}

impl Index {
    /// Fills memory from tensors, or from single chunks.
    fn fill(
        &self,
        py: Python<'_>,
        fills: Vec<Bound<'_, Fill>>,
        options: Option<Options>,
        of_chunk: bool,
    ) -> PyResult<rows::ReadStats> {
        let options = read_options(options)?;
        let mut gather = Gather::new(Arc::clone(&self.inner), self.allow_external);
        for fill in fills.iter().map(Bound::get) {
            let (source, tensor) = self.source_of(fill.source, of_chunk)?;
            let to = memory(self, tensor, fill.address, &fill.sizes.0, &fill.strides.0)?;
            let region = Region::new(&fill.offsets.0, &fill.sizes.0);
            gather.add(source, &region, &to).into_py(py)?;
        }
        // SAFETY: the contract of this method: the caller keeps the tensors at the addresses.
        // Shapes and strides are those of the tensors.
        let stats = unsafe { run(py, &gather, &options)? };
        self.warn(py)?;
        Ok(stats.into())
    }

    fn region(&self, tensor: u32, offsets: Extent, sizes: Extent) -> PyResult<Region> {
        self.check_tensor(tensor)?;
        let region = Region { offsets: offsets.0, sizes: sizes.0 };
        if region.fits(&self.inner.tensor(tensor).shape) {
            Ok(region)
        } else {
            let name = self.inner.name(tensor);
            let message = format!(
                "tensor {name:?}: {:?} elements at {:?} lie outside of it",
                region.sizes.as_slice(),
                region.offsets.as_slice()
            );
            Err(plan_error(self.inner.path(), Some(name), message))
        }
    }
}
