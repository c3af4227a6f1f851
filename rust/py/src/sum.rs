//! Weighted sums of several checkpoints, for Python.

#![allow(unsafe_code)] // tensors are handed over by address

use std::sync::Arc;

use dcp_rs_core::checkpoint::sum::{Sum, Summand, sum};
use dcp_rs_core::geometry::Region;
use dcp_rs_core::read::Destination;
use pyo3::prelude::*;

use crate::convert::Extent;
use crate::error::PlanError;
use crate::index::Index;
use crate::interrupt;
use crate::panics::guarded;
use crate::read::{Options, read_options};

/// The tensor of each input, offsets and sizes of the region, the address of the result, and
/// whether the result is bfloat16.
type SumArguments = (Vec<u32>, Extent, Extent, usize, bool);

/// Sums regions of several checkpoints, each an index and a weight, in float32 or (`double`)
/// float64.
///
/// The caller keeps the tensors, and so the memory behind every address, until this returns. They
/// are contiguous, and no two of them share memory.
#[guarded]
#[pyfunction]
#[pyo3(signature = (inputs, sums, *, double, **options))]
pub fn sum_regions(
    py: Python<'_>,
    inputs: Vec<(Bound<'_, Index>, f64)>,
    sums: Vec<SumArguments>,
    double: bool,
    options: Option<Options>,
) -> PyResult<()> {
    let options = read_options(options)?;
    let mut made = Vec::with_capacity(sums.len());
    for (tensors, offsets, sizes, address, is_bfloat16) in sums {
        if tensors.len() != inputs.len() || is_bfloat16 && double {
            return Err(PlanError::new_err(
                "a sum has a tensor of each input, and a type to be rounded to",
            ));
        }
        for (&tensor, (index, _)) in tensors.iter().zip(&inputs) {
            index.get().check_tensor(tensor)?;
        }
        made.push(Sum {
            tensors,
            region: Region::new(&offsets.0, &sizes.0),
            to: Destination(std::ptr::with_exposed_provenance_mut(address)),
            is_bfloat16,
        });
    }
    let summands: Vec<Summand> = inputs
        .iter()
        .map(|(index, weight)| Summand {
            index: Arc::clone(&index.get().inner),
            allow_external: index.get().allow_external,
            weight: *weight,
        })
        .collect();
    // SAFETY: the contract of this function: the caller keeps the tensors at the addresses, and
    // they are as large as the regions.
    interrupt::run(py, |control| unsafe { sum(&summands, &made, double, &options, control) })
}
