//! Statistics of elements that Python has read.

use dcp_rs_core::{Dtype, tally as core};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::interrupt;
use crate::panics::guarded;
use crate::rows::Tally;

/// What the elements of pieces of memory (address, bytes, dtype) are. The caller holds the memory.
#[guarded]
#[pyfunction]
#[expect(unsafe_code, reason = "memory is handed over by address")]
pub fn tally(py: Python<'_>, pieces: Vec<(usize, usize, String)>, threads: usize) -> PyResult<Vec<Tally>> {
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
    found.iter().map(|tally| Tally::new(py, tally)).collect()
}
