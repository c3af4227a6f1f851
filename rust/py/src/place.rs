//! Replacement of an earlier result in place, for Python.

use std::path::PathBuf;

use dcp_rs_core::{checkpoint, store};
use pyo3::prelude::*;

use crate::error::IntoPy as _;
use crate::interrupt;
use crate::panics::guarded;

/// Fingerprint of a path, to tell later whether it has changed.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Fingerprint {
    inner: store::Fingerprint,
}

/// Returns the fingerprint of a path, or `None` if nothing is there.
#[guarded]
#[pyfunction]
pub fn fingerprint(py: Python<'_>, path: PathBuf) -> PyResult<Option<Fingerprint>> {
    let found = py.detach(|| store::Fingerprint::at(&path)).into_py(py)?;
    Ok(found.map(|inner| Fingerprint { inner }))
}

/// Renames a finished file or folder to its final name, if the target is still what it was
/// `before`. Signals end only the wait for the lock. An exception says where everything is.
#[guarded]
#[pyfunction]
pub fn put_in_place(
    py: Python<'_>,
    from: PathBuf,
    to: PathBuf,
    before: Option<&Bound<'_, Fingerprint>>,
) -> PyResult<()> {
    let before = before.map(|before| &before.get().inner);
    let lock = match before {
        Some(_) => interrupt::run(py, |control| store::lock_replaced(&to, control))?,
        None => None,
    };
    let put = py.detach(|| store::put_in_place(&from, &to, before));
    drop(lock);
    put.into_py(py)
}

/// Makes `index` the index of `folder`, atomically, if the index there is still what it was
/// `before`. Removes nothing.
#[guarded]
#[pyfunction]
pub fn replace_index(
    py: Python<'_>,
    folder: PathBuf,
    index: Vec<u8>,
    before: Option<&Bound<'_, Fingerprint>>,
    fsync: bool,
) -> PyResult<()> {
    let before = before.map(|before| &before.get().inner);
    interrupt::run(py, |control| checkpoint::replace_index(&folder, index, before, fsync, control))
}
