//! A disk that fails on demand: see `dcp_rs.testing`.

use std::path::PathBuf;

use dcp_rs_core::store;
use pyo3::prelude::*;

use crate::panics::guarded;

/// From now on, in this process, the call number `at` (from 0) that changes something below
/// `folder` fails with `errno`.
#[guarded]
#[pyfunction]
pub fn arm_fault(folder: PathBuf, at: u64, errno: i32) -> PyResult<()> {
    Ok(store::arm(&folder, at, errno)?)
}

/// Ends it: how many calls there were, and the one that failed. `None` where nothing was armed.
#[guarded]
#[pyfunction]
pub fn disarm_fault() -> PyResult<Option<(u64, Option<&'static str>)>> {
    Ok(store::disarm().map(|fault| (fault.seen, fault.failed)))
}
