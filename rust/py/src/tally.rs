//! Statistics of elements that Python has read.

use dcp_rs_core::{Dtype, tally as core};
use pyo3::IntoPyObjectExt as _;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::interrupt;
use crate::panics::guarded;

/// Of some elements: how many are finite, their mean, the sum of squared differences from it, the least, the greatest, and how many are NaN, infinite, zero.
type TallyTuple = (u64, f64, f64, Py<PyAny>, Py<PyAny>, u64, u64, u64);

/// What the elements of pieces of memory (address, bytes, dtype) are. The caller holds the memory.
#[guarded]
#[pyfunction]
#[expect(unsafe_code, reason = "memory is handed over by address")]
pub fn tally(py: Python<'_>, pieces: Vec<(usize, usize, String)>, threads: usize) -> PyResult<Vec<TallyTuple>> {
    let pieces: Vec<(&[u8], Dtype)> = pieces
        .into_iter()
        .filter(|&(_, length, _)| length > 0)
        .map(|(address, length, name)| {
            let dtype = Dtype::from_name(&name).ok_or_else(|| PyValueError::new_err(format!("no dtype {name}")))?;
            // SAFETY: this function's contract: `dcp_rs.checkpoint.stats` holds the slab, and nothing writes to it until this returns.
            let data = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), length) };
            Ok((data, dtype))
        })
        .collect::<PyResult<_>>()?;
    let found = interrupt::run(py, |_| core::tally(&pieces, threads))?;
    found
        .into_iter()
        .map(|t| {
            let (least, greatest) = match t.exact {
                Some((least, greatest)) => (least.into_py_any(py)?, greatest.into_py_any(py)?),
                None => (t.least.into_py_any(py)?, t.greatest.into_py_any(py)?),
            };
            Ok((t.finite, t.mean, t.squares, least, greatest, t.nan, t.infinite, t.zeros))
        })
        .collect()
}
