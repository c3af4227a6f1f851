//! Loads through slabs, as Python sees them.

#![allow(unsafe_code)] // slabs are handed over by address

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use dcp_rs_core::read::{Destination, ReadOptions};
use dcp_rs_core::slabs::{Image, Next, Part, Plan, Session, Slab, Want};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::convert::{Extent, FsPath, extent_to_py};
use crate::error::{IntoPy, PlanError};
use crate::index::Index;
use crate::panics::guarded;
use crate::read::{Options, read_options};

/// How often signals are looked at.
const PERIOD: Duration = Duration::from_millis(20);

/// Chunk, offsets in it, sizes, whether it may be cut at any element, group.
type WantTuple = (u64, Extent, Extent, bool, u32);

/// A load in progress: threads that fill slabs ahead of whoever empties them.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct SlabReader {
    plan: Arc<Plan>,
    /// What holds the memory of the slabs comes after the session, so that it goes after it.
    running: OnceLock<(Session, Py<PyAny>)>,
}

#[guarded]
#[pymethods]
impl SlabReader {
    /// Packs what is wanted, in its order or that of the files, into batches of up to `slab_bytes`, and checks the files.
    #[staticmethod]
    #[pyo3(signature = (index, wants, slab_bytes, *, sort, **options))]
    fn create(
        py: Python<'_>,
        index: &Index,
        wants: Vec<WantTuple>,
        slab_bytes: u64,
        sort: bool,
        options: Option<Options>,
    ) -> PyResult<Self> {
        let options = ReadOptions {
            max_inflight_bytes: slab_bytes,
            ..read_options(options)?
        };
        let wants = wants
            .into_iter()
            .map(|(chunk, offsets, sizes, flat, group)| {
                index.check_chunk(chunk)?;
                Ok(Want {
                    chunk,
                    offsets: offsets.0,
                    sizes: sizes.0,
                    flat,
                    group,
                })
            })
            .collect::<PyResult<Vec<_>>>()?;
        let inner = Arc::clone(&index.inner);
        let allow_external = index.allow_external;
        let plan = py
            .detach(|| Plan::new(inner, allow_external, &wants, slab_bytes, sort, &options))
            .into_py(py)?;
        Ok(Self {
            plan: Arc::new(plan),
            running: OnceLock::new(),
        })
    }

    /// How many batches there are.
    #[getter]
    fn batch_count(&self) -> usize {
        self.plan.batches().len()
    }

    /// How many slabs are best filled at a time.
    #[getter]
    fn workers(&self) -> usize {
        self.plan.workers()
    }

    /// The group of a batch and its pieces, in the order of their places: (item, place, bytes, first byte in the item), or
    /// (item, place, bytes, offsets in the item, sizes).
    fn batch<'py>(&self, py: Python<'py>, batch: usize) -> PyResult<(u32, Bound<'py, PyList>)> {
        let batch = self
            .plan
            .batches()
            .get(batch)
            .ok_or_else(|| PlanError::new_err(format!("no batch {batch}")))?;
        let pieces = batch
            .pieces
            .iter()
            .map(|piece| match &piece.part {
                Part::Bytes(from) => (piece.item, piece.at, piece.length, *from).into_pyobject(py),
                Part::Rectangle(offsets, sizes) => {
                    let (offsets, sizes) = (extent_to_py(py, offsets)?, extent_to_py(py, sizes)?);
                    (piece.item, piece.at, piece.length, offsets, sizes).into_pyobject(py)
                }
            })
            .collect::<PyResult<Vec<Bound<'py, PyTuple>>>>()?;
        Ok((batch.group, PyList::new(py, pieces)?))
    }

    /// The stretches of files that a batch holds as they are: (path, first byte, byte after the last, place in the slab, first piece,
    /// piece after the last). Pages of 4096 bytes have the same boundaries in file and slab.
    fn images<'py>(&self, py: Python<'py>, batch: usize) -> PyResult<Bound<'py, PyList>> {
        let found = self.plan.batches().get(batch);
        let images = &found
            .ok_or_else(|| PlanError::new_err(format!("no batch {batch}")))?
            .images;
        let tuple = |image: &Image| -> PyResult<Bound<'py, PyTuple>> {
            let pieces = &image.pieces;
            let path = FsPath::text(py, self.plan.image_path(batch, image))?;
            (path, image.start, image.end, image.at, pieces.start, pieces.end).into_pyobject(py)
        };
        PyList::new(py, images.iter().map(tuple).collect::<PyResult<Vec<_>>>()?)
    }

    /// Begins to fill slabs, on up to `workers` threads. `addresses` are those of memory that `memory` keeps, a slab each; they
    /// are multiples of 4096.
    fn start(&self, addresses: Vec<usize>, memory: Py<PyAny>, workers: usize) -> PyResult<()> {
        if self.running.get().is_some() {
            return Err(PlanError::new_err("the load has begun"));
        }
        let slabs = addresses
            .into_iter()
            .map(|address| Slab(Destination(std::ptr::with_exposed_provenance_mut(address))))
            .collect();
        let plan = Arc::clone(&self.plan);
        // SAFETY: this method's contract: `memory` keeps the slabs, `plan.slab_bytes()` each, alive and apart, and is held until the session
        // is gone; `dcp_rs.transfer.load` touches a slab only between `next` and `release`.
        let session = unsafe { Session::start(plan, slabs, workers) };
        let session = Python::attach(|py| session.into_py(py))?;
        // Of two calls at once, one comes too late; its session stops again.
        let _ = self.running.set((session, memory));
        Ok(())
    }

    /// (batch, slab) for the next batch in order, once it is filled; None after the last.
    fn next(&self, py: Python<'_>) -> PyResult<Option<(usize, usize)>> {
        let (session, _) = self.running.get().ok_or_else(not_begun)?;
        loop {
            match py.detach(|| session.next(PERIOD)).into_py(py)? {
                Next::Filled { batch, slab } => return Ok(Some((batch, slab))),
                Next::Done => return Ok(None),
                Next::Waiting => py.check_signals()?,
            }
        }
    }

    /// Gives a slab back, to be filled again.
    fn release(&self, slab: usize) -> PyResult<()> {
        self.running.get().ok_or_else(not_begun)?.0.release(slab);
        Ok(())
    }

    /// Stops the load. When this returns, no slab is touched any more.
    fn close(&self, py: Python<'_>) {
        if let Some((session, _)) = self.running.get() {
            py.detach(|| session.close());
        }
    }

    /// (bytes wanted, bytes read, bytes read past the page cache), complete once the load is closed.
    fn stats(&self) -> (u64, u64, u64) {
        let stats = self
            .running
            .get()
            .map(|(session, _)| session.stats())
            .unwrap_or_default();
        (stats.bytes_wanted, stats.bytes_read, stats.bytes_direct)
    }
}

fn not_begun() -> PyErr {
    PlanError::new_err("the load has not begun")
}
