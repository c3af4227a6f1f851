//! Bytes that several ranks of a machine read, for Python.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_rs_core::checkpoint::gather;
use dcp_rs_core::geometry::Region;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::batch::Batch;
use crate::convert::Extent;
use crate::error::{IntoPy, PlanError};
use crate::index::Index;
use crate::panics::guarded;

/// A sample of a rank's reads, as a message of fixed size.
#[pyclass(module = "dcp_rs._core")]
pub struct Sample {
    index: Py<Index>,
    inner: gather::Sample,
}

/// Sections of a checkpoint that other ranks read too.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct SharedSections {
    pub inner: Arc<gather::SharedSections>,
}

#[guarded]
#[pymethods]
impl Sample {
    #[new]
    fn new(index: Py<Index>) -> Self {
        let inner = gather::Sample::new(Arc::clone(&index.get().inner));
        Self { index, inner }
    }

    /// Adds the targets of a batch of the same index that are filled in place.
    fn add_batch(&mut self, py: Python<'_>, batch: &Batch) -> PyResult<()> {
        if !Arc::ptr_eq(&batch.index().inner, &self.index.get().inner) {
            return Err(PlanError::new_err("the batch is of another index"));
        }
        py.detach(|| self.inner.add_batch(batch.gather()));
        Ok(())
    }

    /// Adds regions (source, whether it is a chunk, offsets, sizes).
    fn add(&mut self, regions: Vec<(u64, bool, Extent, Extent)>) -> PyResult<()> {
        let index = self.index.get();
        for (source, of_chunk, offsets, sizes) in regions {
            let region = Region { offsets: offsets.0, sizes: sizes.0 };
            self.inner.add(index.source_of(source, of_chunk)?.0, &region);
        }
        Ok(())
    }

    /// Returns the message for the coordinator: 1 KiB.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.to_bytes())
    }

    /// Combines the sample with the coordinator's reply; returns `None` if the reply is invalid.
    fn with_reply(&self, reply: &[u8]) -> Option<SharedSections> {
        let common = self.inner.with_reply(reply);
        common.map(|common| SharedSections { inner: Arc::new(common) })
    }
}

/// Compares the samples of all ranks, on the coordinator. Each has the rank's machine and
/// `Sample.to_bytes`. Returns for each the number of ranks on its machine, and the reply.
#[guarded]
#[pyfunction]
pub fn compare_samples<'py>(
    py: Python<'py>,
    samples: Vec<(PyBackedBytes, PyBackedBytes)>,
) -> PyResult<Vec<(usize, Bound<'py, PyBytes>)>> {
    let mut machines: HashMap<&[u8], Vec<usize>> = HashMap::new();
    for (rank, (machine, _)) in samples.iter().enumerate() {
        machines.entry(machine).or_default().push(rank);
    }
    let mut answers = vec![(0, Vec::new()); samples.len()];
    for ranks in machines.values() {
        let messages: Vec<&[u8]> = ranks.iter().map(|&rank| &*samples[rank].1).collect();
        for (&rank, answer) in ranks.iter().zip(gather::compare(&messages).into_py(py)?) {
            answers[rank] = (ranks.len(), answer);
        }
    }
    Ok(answers.into_iter().map(|(count, answer)| (count, PyBytes::new(py, &answer))).collect())
}
