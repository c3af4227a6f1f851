//! Leftovers of killed saves, for Python.

use std::path::PathBuf;
use std::time::Duration;

use dcp_rs_core::checkpoint::{self, Cleaned};
use dcp_rs_core::store::{self, Mode};
use dcp_rs_core::{Control, NOTICE};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::IntoPy as _;
use crate::interrupt;
use crate::panics::guarded;
use crate::rows::Leftover;

/// Returns what killed saves and conversions left at `path`. Changes nothing.
#[guarded]
#[pyfunction]
pub fn leftovers(
    py: Python<'_>,
    path: PathBuf,
    older_than: Option<f64>,
) -> PyResult<Vec<Leftover>> {
    let older_than = older_than.map(Duration::from_secs_f64);
    let found = py.detach(|| checkpoint::leftovers(&path, older_than)).into_py(py)?;
    Ok(found.into_iter().map(Leftover::from).collect())
}

/// Removes leftovers. Returns what was removed, what was kept, and the errors of failed removals.
#[guarded]
#[pyfunction]
pub fn clean(py: Python<'_>, path: PathBuf, older_than: Option<f64>) -> PyResult<CleanedRows> {
    let older_than = older_than.map(Duration::from_secs_f64);
    let cleaned = interrupt::run(py, |control| checkpoint::clean(&path, older_than, control))?;
    Ok(to_rows(cleaned))
}

/// Removed leftovers, kept ones, and errors of removals.
pub type CleanedRows = (Vec<Leftover>, Vec<Leftover>, Vec<String>);

pub fn to_rows(cleaned: Cleaned) -> CleanedRows {
    (
        cleaned.removed.into_iter().map(Leftover::from).collect(),
        cleaned.kept.into_iter().map(Leftover::from).collect(),
        cleaned.failed.iter().map(ToString::to_string).collect(),
    )
}

/// Exclusive lock of a folder, held while this object exists.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct FolderLock {
    lock: store::FolderLock,
}

#[guarded]
#[pymethods]
impl FolderLock {
    /// Waits for the lock. Logs a wait of more than `notice` seconds.
    #[new]
    #[pyo3(signature = (folder, *, notice=NOTICE.as_secs_f64()))]
    fn new(py: Python<'_>, folder: PathBuf, notice: f64) -> PyResult<Self> {
        let control = Control::with_notice(Duration::try_from_secs_f64(notice).unwrap_or(NOTICE));
        let take = |control: &Control| store::FolderLock::take(&folder, Mode::Exclusive, control);
        Ok(Self { lock: interrupt::run_under(py, &control, take)? })
    }

    /// Returns the bytes in the file of the lock.
    fn read<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = interrupt::run(py, |_| self.lock.read())?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Stores bytes in the file of the lock.
    fn write(&self, py: Python<'_>, data: Vec<u8>, fsync: bool) -> PyResult<()> {
        interrupt::run(py, |control| self.lock.write(&data, fsync, control))
    }
}
