//! Checks, copies and recovery of whole checkpoints, for Python.

use std::path::PathBuf;
use std::sync::Arc;

use dcp_rs_core::checkpoint::{self, RecoverOptions};
use dcp_rs_core::checkpoint::{CopyOptions, verify};
use dcp_rs_core::foreign::torch_file::{Refusal, check_value};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::FsPath;
use crate::error::IntoPy as _;
use crate::index::Index;
use crate::interrupt;
use crate::panics::guarded;
use crate::remote::Store;
use crate::rows::Damage;

#[guarded]
#[pymethods]
impl Index {
    /// Verifies all data. Returns the damage, the bytes hashed, and the bytes without a digest.
    #[pyo3(signature = (*, threads, progress = None))]
    fn verify(
        &self,
        py: Python<'_>,
        threads: usize,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<(Vec<Damage>, u64, u64)> {
        let index = Arc::clone(&self.inner);
        let allow_external = self.allow_external;
        let verified = interrupt::run_with(py, progress.as_ref(), 0, |control| {
            verify::verify(&index, allow_external, threads, control)
        })?;
        let found = verified.problems.into_iter();
        let damage = found.map(|problem| Damage::new(py, problem)).collect::<PyResult<_>>()?;
        Ok((damage, verified.bytes, verified.bytes_without_digest))
    }

    /// Returns a data file that is a link out of the folder; `None` if there is none. Opening the
    /// index file refuses such a link without `allow_external`.
    fn find_link_outside(&self, py: Python<'_>) -> Option<FsPath> {
        py.detach(|| checkpoint::find_link_outside(&self.inner)).map(FsPath)
    }

    /// Returns a copy of this index: for a file in another folder (`prefix` is then the folder of
    /// the data), or with digests for all chunks.
    #[pyo3(signature = (*, prefix, digests, save_id, threads, progress = None))]
    fn copy<'py>(
        &self,
        py: Python<'py>,
        prefix: Option<PathBuf>,
        digests: bool,
        save_id: [u8; 16],
        threads: usize,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let index = Arc::clone(&self.inner);
        let options = CopyOptions { prefix, digests, save_id, threads };
        let bytes = interrupt::run_with(py, progress.as_ref(), 0, |control| {
            checkpoint::copy_index(&index, &options, control)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }
}

/// Returns the number of cores that this process may use, by its affinity and its cgroup's quota.
#[guarded]
#[pyfunction]
pub fn available_cores() -> usize {
    dcp_rs_core::available_cores()
}

/// Returns why torch should not unpickle the bytes of a value: whether they are damaged, and the
/// reason. Returns `None` if torch may.
#[guarded]
#[pyfunction]
pub fn refusal(py: Python<'_>, data: &[u8]) -> Option<(bool, String)> {
    match py.detach(|| check_value(data)) {
        Ok(()) => None,
        Err(Refusal::Damaged(why)) => Some((true, why)),
        Err(Refusal::Unsafe(why)) => Some((false, why)),
    }
}

/// Returns the XXH3-64 of some bytes, as the format defines it.
#[guarded]
#[pyfunction]
pub fn block_digest(data: &[u8]) -> u64 {
    dcp_rs_core::format::block_digest(data)
}

/// Returns whether `folder` holds data files of this package.
#[guarded]
#[pyfunction]
pub fn has_native_data(py: Python<'_>, folder: PathBuf) -> PyResult<bool> {
    py.detach(|| checkpoint::has_native_data(&folder)).into_py(py)
}

/// Raises unless `folder` holds no index of a single rank.
#[guarded]
#[pyfunction]
pub fn check_no_rank_indexes(py: Python<'_>, folder: PathBuf) -> PyResult<()> {
    py.detach(|| checkpoint::check_no_rank_indexes(&folder)).into_py(py)
}

/// Rebuilds a lost index from the native data files of `folder`, and returns its bytes. With
/// `store`, the folder is on it.
#[guarded]
#[pyfunction]
#[pyo3(signature = (folder, *, generation, save_id, threads, progress = None, store = None))]
pub fn recover<'py>(
    py: Python<'py>,
    folder: PathBuf,
    generation: Option<u64>,
    save_id: Option<[u8; 16]>,
    threads: usize,
    progress: Option<Py<PyAny>>,
    store: Option<&Bound<'_, Store>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let remote = store.map(|store| &store.get().inner);
    let options = RecoverOptions { generation, save_id, threads };
    let bytes = interrupt::run_with(py, progress.as_ref(), 0, |control| {
        checkpoint::recover(&folder, remote, &options, control)
    })?;
    Ok(PyBytes::new(py, &bytes))
}
