//! Weighted sums of regions of several checkpoints, in parts that stay in a core's cache until they
//! are rounded.

#![allow(unsafe_code)] // destinations are addresses that the caller guarantees

use std::sync::Arc;

use super::gather::{Gather, Memory, ReadGroups, Source};
use crate::copy::{Accumulate, round_to_bfloat16};
use crate::format::Index;
use crate::geometry::{Region, row_major};
use crate::read::{Destination, Operation, ReadOptions, Sequential};
use crate::slabs::split;
use crate::{Control, Error, Result, parallel};

/// Elements that are summed together: 2 MiB of float32, and one block of bfloat16, so that each
/// block is hashed once.
const PART: u64 = 512 << 10;
/// Limit in bytes on the memory of threads, if reads wait and there are more threads than cores.
/// Each thread has the memory of a part, and a buffer for each summand.
const WAITING: usize = 64 << 20;
/// Approximate bytes of such a buffer.
const BUFFER: usize = 2 << 20;

/// A checkpoint, and the factor of its elements.
pub struct Summand {
    /// Index of the tensors.
    pub index: Arc<Index>,
    /// True if data files outside of its folder may be read.
    pub allow_external: bool,
    /// The factor.
    pub weight: f64,
}

/// A sum of regions that have the same offsets and sizes in a tensor of each summand.
pub struct Sum {
    /// The tensors, in the order of the summands.
    pub tensors: Vec<u32>,
    /// Region of each tensor to sum.
    pub region: Region,
    /// Destination of the rounded sum, in row-major order.
    pub to: Destination,
    /// True if the sum is rounded to bfloat16; otherwise it keeps the type of the sum.
    pub is_bfloat16: bool,
}

/// Sums that one thread computes together.
#[derive(Default)]
struct Unit {
    parts: Vec<SumRegion>,
    elements: u64,
}

/// Consecutive elements of a sum.
struct SumRegion {
    sum: usize,
    /// The rectangle, in the tensors.
    region: Region,
    /// The first element, relative to the sum, and relative to the unit.
    begin: u64,
    at: u64,
    elements: u64,
}

/// Sums in float32, or in float64 (`is_double`), and rounds once.
///
/// The first summand starts the sum, `weight * element`. The others are added in order:
/// `sum = weight * element + sum`, fused.
///
/// # Errors
/// Those of [`Gather::add`] and of [`read`](crate::read::read); [`Error::Plan`] for dtypes that
/// cannot be summed.
///
/// # Safety
/// Every destination is valid for writes to all its elements, from any thread, until this returns.
/// No two overlap.
pub unsafe fn sum(
    summands: &[Summand],
    sums: &[Sum],
    is_double: bool,
    options: &ReadOptions,
    control: &Control,
) -> Result<()> {
    if sums.iter().any(|sum| sum.tensors.len() != summands.len()) {
        return Err(Error::Plan("a sum has a tensor of each summand".into()));
    }
    let units = units(sums);
    if units.is_empty() {
        return Ok(());
    }
    let inputs = (0..summands.len())
        .map(|number| input(number, summands, sums, &units, is_double, options, control))
        .collect::<Result<Vec<_>>>()?;
    let wanted = inputs.iter().map(ReadGroups::workers).max();
    let of_one = (if is_double { 4 << 20 } else { 2 << 20 }) + summands.len() * BUFFER;
    let threads = parallel::threads(options.threads);
    let workers = wanted.unwrap_or(1).min(threads.max(WAITING / of_one));
    let connections = inputs.iter().map(ReadGroups::connect).collect::<Result<Vec<_>>>()?;
    let worker = || Worker {
        readers: connections.iter().cloned().map(Sequential::new).collect(),
        memory: Vec::new(),
    };
    parallel::for_each_with(units.len(), workers, worker, |worker, number| {
        let unit = &units[number];
        worker.add_up(unit, number, &inputs, is_double, control)?;
        // SAFETY: the caller guarantees the destinations, and no other unit has these elements.
        unsafe { worker.hand_over(unit, sums, is_double) };
        Ok(())
    })
}

/// A thread's readers, one for each summand, and the memory of its sums.
struct Worker {
    readers: Vec<Sequential>,
    memory: Vec<u64>,
}

impl Worker {
    /// Computes the sums of a unit in the worker's memory.
    fn add_up(
        &mut self,
        unit: &Unit,
        number: usize,
        inputs: &[ReadGroups],
        is_double: bool,
        control: &Control,
    ) -> Result<()> {
        // Whole words, so that the sums are aligned.
        let words = usize::try_from((unit.elements * size_of_sum(is_double)).div_ceil(8))
            .map_err(|_| Error::Plan("too much to sum up".into()))?;
        if self.memory.len() < words {
            self.memory.resize(words, 0);
        }
        self.memory[..words].fill(nothing(is_double));
        let base = self.memory.as_mut_ptr().cast::<u8>();
        for (input, reader) in inputs.iter().zip(&mut self.readers) {
            // SAFETY: the parts of a unit are disjoint and inside its memory, which only this
            // thread uses.
            unsafe { input.read(number, base, reader, control)? };
        }
        Ok(())
    }

    /// Rounds the sums of a unit, and copies them to their destinations.
    ///
    /// # Safety
    /// The destinations are valid for writes of the elements, and nothing else uses them meanwhile.
    unsafe fn hand_over(&self, unit: &Unit, sums: &[Sum], is_double: bool) {
        // Sizes of memory fit in a `usize`.
        let fit = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
        let base = self.memory.as_ptr().cast::<u8>();
        for part in &unit.parts {
            let Sum { to, is_bfloat16, .. } = &sums[part.sum];
            let size = size_of_sum(is_double);
            let from = base.wrapping_add(fit(part.at * size));
            let to = |size| to.0.wrapping_add(fit(part.begin * size));
            // SAFETY: the sums of the part are in memory, and the caller guarantees the rest.
            unsafe {
                if *is_bfloat16 {
                    round_to_bfloat16(to(2), from, fit(part.elements));
                } else {
                    let length = fit(part.elements * size);
                    std::ptr::copy_nonoverlapping(from, to(size), length);
                }
            }
        }
    }
}

const fn size_of_sum(is_double: bool) -> u64 {
    if is_double { 8 } else { 4 }
}

/// Returns a word of sums without a summand: -0.0, which added to any product gives the product.
/// 0.0 would turn a product of -0.0 into 0.0.
fn nothing(is_double: bool) -> u64 {
    if is_double { 1 << 63 } else { 1 << 63 | 1 << 31 }
}

/// Splits sums into parts, and combines small ones.
fn units(sums: &[Sum]) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    for (number, sum) in sums.iter().enumerate() {
        let mut begin = 0;
        split(&sum.region.sizes, 1, PART, &mut |offsets, sizes| {
            let elements: u64 = sizes.iter().product();
            let offsets: Vec<u64> =
                offsets.iter().zip(&sum.region.offsets).map(|(a, b)| a + b).collect();
            if units.last().is_none_or(|unit| unit.elements + elements > PART) {
                units.push(Unit::default());
            }
            let unit = units.last_mut().expect("there is one now");
            unit.parts.push(SumRegion {
                sum: number,
                region: Region::new(&offsets, sizes),
                begin,
                at: unit.elements,
                elements,
            });
            unit.elements += elements;
            begin += elements;
        });
    }
    units
}

/// Returns the reads of one summand: for each unit, to the memory of its sums.
fn input(
    number: usize,
    summands: &[Summand],
    sums: &[Sum],
    units: &[Unit],
    is_double: bool,
    options: &ReadOptions,
    control: &Control,
) -> Result<ReadGroups> {
    let summand = &summands[number];
    let mut gather = Gather::new(Arc::clone(&summand.index), summand.allow_external);
    let mut ranges = Vec::with_capacity(units.len());
    for unit in units {
        let first = gather.len();
        for part in &unit.parts {
            add(&mut gather, summand, sums[part.sum].tensors[number], part, is_double)?;
        }
        ranges.push(first..gather.len());
    }
    gather.into_groups(ranges, options, control)
}

/// Adds the elements of a tensor to the reads, for a part of a sum.
fn add(
    gather: &mut Gather,
    summand: &Summand,
    tensor: u32,
    part: &SumRegion,
    is_double: bool,
) -> Result<()> {
    let index = &summand.index;
    let dtype = index.tensor(tensor).dtype;
    let sink = dtype.and_then(|dtype| Accumulate::new(dtype, summand.weight, is_double));
    let sink = sink.ok_or_else(|| {
        let reason = "its elements are not added to such sums";
        Error::tensor_plan(Some(index.path()), index.name(tensor), reason)
    })?;
    let at = usize::try_from(part.at * sink.size())
        .map_err(|_| Error::Plan("too much to sum up".into()))?;
    let strides = row_major(&part.region.sizes);
    let to = Memory {
        address: Destination(std::ptr::without_provenance_mut(at)),
        strides: strides.iter().map(|stride| stride * sink.size()).collect(),
    };
    gather.add_with(Source::Tensor(tensor), &part.region, &to, Operation::Accumulate(sink))
}
