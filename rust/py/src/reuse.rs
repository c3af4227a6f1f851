//! Comparison of items with a parent checkpoint, for Python.

use std::sync::Arc;

use dcp_rs_core::checkpoint::verify;
use dcp_rs_core::format;
use dcp_rs_core::write::{self, Part, SaveItem};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::interrupt;
use crate::panics::guarded;
use crate::plain::Plain;
use crate::rows;
use crate::save_plan::Planned;
use crate::write::{parts_at, parts_of};

/// Comparison of one rank's items with a parent checkpoint. It takes bytes as `Save` does.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Reuse {
    pub inner: Arc<write::Reuse>,
    planned: Planned,
    wants: Vec<bool>,
}

impl Reuse {
    pub fn new(
        py: Python<'_>,
        parent: Option<Arc<format::Index>>,
        items: &[SaveItem],
        planned: Planned,
        frozen: &[bool],
        trusted: bool,
    ) -> PyResult<Self> {
        let inner = interrupt::run(py, |control| {
            write::Reuse::new(parent, items, frozen, trusted, control)
        })?;
        let wants: Vec<bool> = (0..items.len()).map(|item| inner.wants(item)).collect();
        Ok(Self {
            planned: planned.only(|item| wants[item as usize]),
            inner: Arc::new(inner),
            wants,
        })
    }

    fn compare(&self, py: Python<'_>, parts: &[Part<'_>]) -> PyResult<()> {
        interrupt::run(py, |control| self.inner.compare(parts, control))
    }

    /// Compares the parts of all blocks. The first are compared while later ones are still located.
    fn compare_all<'a>(
        &self,
        py: Python<'_>,
        blocks: impl FnMut() -> PyResult<Option<Vec<Part<'a>>>>,
    ) -> PyResult<()> {
        interrupt::run_on(py, None, 0, blocks, |blocks, control| {
            while let Some(parts) = interrupt::made_by_now(&blocks) {
                self.inner.compare(&parts, control)?;
            }
            Ok(())
        })
    }
}

#[guarded]
#[pymethods]
impl Reuse {
    /// Returns for each item whether its bytes are needed.
    fn wanted(&self) -> Vec<bool> {
        self.wants.clone()
    }

    /// Returns for each item whether its first block is enough.
    fn probed(&self) -> Vec<bool> {
        (0..self.wants.len()).map(|item| self.inner.probes(item)).collect()
    }

    /// Compares parts of items, as `Save.write` writes them. The caller keeps the memory until this
    /// returns.
    #[expect(unsafe_code, reason = "tensors are handed over by address")]
    fn write(&self, py: Python<'_>, parts: Vec<Bound<'_, rows::Part>>) -> PyResult<()> {
        // SAFETY: the contract of this method, which `dcp_rs.transfer.save` keeps.
        let parts = unsafe { parts_at(&parts)? };
        self.compare(py, &parts)
    }

    /// Compares the plain tensors of the plan.
    fn write_plain<'py>(
        &self,
        py: Python<'py>,
        tensors: &Bound<'py, PyList>,
        types: &Bound<'py, PyTuple>,
        dtypes: &Bound<'py, PyDict>,
    ) -> PyResult<()> {
        let plain = Plain::new(py, types, dtypes)?;
        self.compare_all(py, self.planned.parts(&plain, tensors))
    }

    /// Compares values: (item, bytes).
    fn write_values(&self, py: Python<'_>, values: Vec<(u32, PyBackedBytes)>) -> PyResult<()> {
        self.compare(py, &parts_of(&values))
    }

    /// Reads what would be reused, and returns descriptions of the damage. Damaged items will be
    /// written.
    fn verify(&self, py: Python<'_>, threads: usize) -> PyResult<Vec<String>> {
        let Some(parent) = self.inner.parent() else {
            return Ok(Vec::new());
        };
        let chunks = self.inner.chunks();
        let damaged = interrupt::run(py, |control| {
            verify::damaged_chunks(parent, &chunks, threads, control)
        })?;
        let numbers: Vec<u64> = damaged.iter().map(|(chunk, _)| *chunk).collect();
        self.inner.refuse(&numbers);
        Ok(damaged
            .into_iter()
            .map(|(_, problem)| {
                format!(
                    "{}: tensor {:?} at byte {}: digest {}, expected {}",
                    problem.path.display(),
                    problem.tensor,
                    problem.offset,
                    problem.got,
                    problem.expected
                )
            })
            .collect())
    }

    /// Returns the reasons why files of the parent are not reused.
    fn problems(&self) -> Vec<String> {
        self.inner.problems().iter().map(ToString::to_string).collect()
    }
}
