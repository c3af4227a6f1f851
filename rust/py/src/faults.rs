//! A disk that fails on demand. See `dcp_rs.testing`.

use std::path::PathBuf;

use dcp_rs_core::store;
use pyo3::prelude::*;

use crate::panics::guarded;

/// Arms a fault in this process: the change number `at` (from 0) below `folder` fails with `errno`.
#[guarded]
#[pyfunction]
pub fn arm_fault(folder: PathBuf, at: u64, errno: i32) -> PyResult<()> {
    Ok(store::arm(&folder, at, errno)?)
}

/// Disarms the fault. Returns the number of calls, and the one that failed; `None` if no fault was
/// armed.
#[guarded]
#[pyfunction]
pub fn disarm_fault() -> PyResult<Option<(u64, Option<&'static str>)>> {
    Ok(store::disarm().map(|fault| (fault.seen, fault.failed)))
}
