//! Loads through slabs, for Python.

#![allow(unsafe_code)] // slabs are handed over by address

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use dcp_rs_core::read::{Destination, ReadOptions};
use dcp_rs_core::slabs::{self, Next, Plan, Session, Slab, To};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::batch::Batch;
use crate::convert::extent_to_py;
use crate::error::{IntoPy, PlanError};
use crate::panics::guarded;
use crate::read::{Options, read_options};
use crate::rows::ReadStats;

/// Interval at which signals are checked.
const PERIOD: Duration = Duration::from_millis(20);

/// Bytes of a slab, and the part of a target that they fill.
#[pyclass(frozen, get_all, module = "dcp_rs._core")]
pub struct Copy {
    /// Number of the target.
    target: usize,
    /// First byte in the slab.
    at: u64,
    /// Bytes.
    nbytes: u64,
    /// First byte in the target, in the order of its stored elements; `None` if `r#box` is set.
    begin: Option<u64>,
    /// Offsets and sizes of a rectangle of the target; `None` if the bytes go to one run of memory.
    r#box: Option<Py<PyTuple>>,
}

impl Copy {
    fn new(py: Python<'_>, copy: slabs::SlabCopy) -> PyResult<Self> {
        let (begin, r#box) = match copy.to {
            To::Bytes(begin) => (Some(begin), None),
            To::Box(region) => {
                let ends = [extent_to_py(py, &region.offsets)?, extent_to_py(py, &region.sizes)?];
                (None, Some(PyTuple::new(py, ends)?.unbind()))
            }
        };
        Ok(Self { target: copy.target, at: copy.at, nbytes: copy.length, begin, r#box })
    }
}

/// A load in progress: threads that fill slabs ahead of the consumer.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct SlabReader {
    plan: Arc<Plan>,
    /// The owner of the slabs' memory comes after the session, so that it is dropped later.
    running: OnceLock<(Session, Py<PyAny>)>,
}

#[guarded]
#[pymethods]
impl SlabReader {
    /// Packs parts of a batch into slabs of up to `slab_bytes`, in the order of `regions` or, with
    /// `sort`, of the files. Checks the files.
    #[staticmethod]
    #[pyo3(signature = (batch, regions, slab_bytes, *, sort, **options))]
    fn create(
        py: Python<'_>,
        batch: &Batch,
        regions: Vec<usize>,
        slab_bytes: u64,
        sort: bool,
        options: Option<Options>,
    ) -> PyResult<Self> {
        let options = ReadOptions { max_inflight_bytes: slab_bytes, ..read_options(options)? };
        let found = batch.checked_regions(&regions)?;
        let index = &batch.index().inner;
        let allow_external = batch.index().allow_external;
        let plan = py
            .detach(|| {
                Plan::new(index, allow_external, found, slab_bytes, sort, &options, batch.common())
            })
            .into_py(py)?;
        Ok(Self { plan: Arc::new(plan), running: OnceLock::new() })
    }

    /// Returns the number of batches.
    #[getter]
    fn batch_count(&self) -> usize {
        self.plan.batches().len()
    }

    /// Returns the best number of slabs to fill at a time.
    #[getter]
    fn workers(&self) -> usize {
        self.plan.workers()
    }

    /// Returns the number of the batch's device, and the copies to it, in the order of their
    /// places.
    fn batch<'py>(&self, py: Python<'py>, batch: usize) -> PyResult<(u32, Bound<'py, PyList>)> {
        let batch = self.found(batch)?;
        let copies = self.plan.copies(batch).map(|copy| Copy::new(py, copy));
        let list = PyList::new(py, copies.collect::<PyResult<Vec<_>>>()?)?;
        Ok((self.plan.device(batch), list))
    }

    /// Begins to fill slabs, on up to `workers` threads. `slabs` are addresses and lengths in bytes
    /// of the memory that `memory` keeps alive. Addresses are multiples of 4096.
    fn start(&self, slabs: Vec<(usize, u64)>, memory: Py<PyAny>, workers: usize) -> PyResult<()> {
        if self.running.get().is_some() {
            return Err(PlanError::new_err("the load has begun"));
        }
        let needed = self.plan.slab_bytes();
        if let Some((_, length)) = slabs.iter().find(|(_, length)| *length < needed) {
            return Err(PlanError::new_err(format!(
                "a slab of {length} bytes, where {needed} are needed"
            )));
        }
        let slabs = slabs
            .into_iter()
            .map(|(address, _)| Slab(Destination(std::ptr::with_exposed_provenance_mut(address))))
            .collect();
        let plan = Arc::clone(&self.plan);
        // SAFETY: the contract of this method: `memory` keeps the slabs, of `plan.slab_bytes()`
        // each, alive and disjoint, and is kept until the session is dropped.
        // `dcp_rs.transfer.upload` accesses a slab only between `next` and `release`.
        let session = unsafe { Session::start(plan, slabs, workers) };
        let session = Python::attach(|py| session.into_py(py))?;
        // If two calls race, the later session is dropped, which stops it.
        let _ = self.running.set((session, memory));
        Ok(())
    }

    /// Returns (batch, slab) of the next batch in order, once it is filled; `None` after the last.
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

    /// Returns a slab to the reader, to be filled again.
    fn release(&self, slab: usize) -> PyResult<()> {
        self.running.get().ok_or_else(not_begun)?.0.release(slab);
        Ok(())
    }

    /// Stops the load. After this returns, nothing accesses the slabs.
    fn close(&self, py: Python<'_>) {
        if let Some((session, _)) = self.running.get() {
            py.detach(|| session.close());
        }
    }

    /// Returns the counts, which are complete once the load is closed.
    fn stats(&self) -> ReadStats {
        let running = self.running.get();
        running.map(|(session, _)| session.stats()).unwrap_or_default().into()
    }
}

impl SlabReader {
    fn found(&self, batch: usize) -> PyResult<&slabs::SlabBatch> {
        let found = self.plan.batches().get(batch);
        found.ok_or_else(|| PlanError::new_err(format!("no batch {batch}")))
    }
}

fn not_begun() -> PyErr {
    PlanError::new_err("the load has not begun")
}
