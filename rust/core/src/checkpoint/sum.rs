//! Weighted sums of regions of several checkpoints, in parts that stay in a core's cache until they are rounded.

#![allow(unsafe_code)] // destinations are addresses that a caller vouches for

use std::ops::Range;
use std::sync::Arc;

use super::explain;
use super::gather::{Gather, Memory, Source};
use crate::copy::{Accumulate, round_to_bfloat16};
use crate::format::Index;
use crate::geometry::{Region, row_major};
use crate::read::{Destination, FileRef, Operation, ReadOptions, ReadReq, Sequential, Survey, connect};
use crate::slabs::split;
use crate::{Control, Error, Result, parallel};

/// Elements that are summed at a time: 2 MiB of float32, and one block of bfloat16, so that each is hashed once.
const PART: u64 = 512 << 10;
/// Bytes that threads may take together where reads wait and there are more threads than cores. Each has the memory of
/// a part, and a buffer for each summand,
const WAITING: usize = 64 << 20;
/// of this size, about.
const BUFFER: usize = 2 << 20;

/// A checkpoint, and what its elements are multiplied by.
pub struct Summand {
    /// Where the tensors are.
    pub index: Arc<Index>,
    /// Whether data files outside of its folder are read.
    pub allow_external: bool,
    /// The factor.
    pub weight: f64,
}

/// A sum of regions that have the same offsets and sizes in a tensor of each summand.
pub struct Sum {
    /// The tensors, in the order of the summands.
    pub tensors: Vec<u32>,
    /// What is summed of each.
    pub region: Region,
    /// Where the rounded sum goes, in row-major order.
    pub to: Destination,
    /// Whether it is rounded to bfloat16. Otherwise it stays as it was summed up.
    pub is_bfloat16: bool,
}

/// Sums of which one thread takes care at a time.
#[derive(Default)]
struct Unit {
    parts: Vec<Part>,
    elements: u64,
}

/// Consecutive elements of a sum.
struct Part {
    sum: usize,
    /// The rectangle, in the tensors.
    region: Region,
    /// The first element, counted from that of the sum, and from that of the unit.
    begin: u64,
    at: u64,
    elements: u64,
}

/// What is read of one summand.
struct Input<'a> {
    index: &'a Index,
    files: Vec<FileRef>,
    /// Destinations are places in a unit.
    requests: Vec<ReadReq>,
    /// The requests of each unit.
    ranges: Vec<Range<usize>>,
    survey: Survey,
    verify: bool,
}

/// Sums up in float32, or in float64 (`is_double`), and rounds once.
///
/// A sum begins with zero and takes the summands in their order: `sum = weight * element + sum`, fused.
///
/// # Errors
/// Those of [`Gather::add`] and of [`read`](crate::read::read); [`Error::Plan`] for types that are not summed.
///
/// # Safety
/// Every destination is valid for writes to all its elements, from any thread, until this returns. No two overlap.
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
    let inputs = (0..summands.len())
        .map(|number| input(number, summands, sums, &units, is_double, options, control))
        .collect::<Result<Vec<_>>>()?;
    let threads = match options.threads {
        0 => parallel::available(),
        n => n,
    };
    let wanted = inputs.iter().map(|input| input.survey.workers(threads)).max();
    let of_one = (if is_double { 4 << 20 } else { 2 << 20 }) + summands.len() * BUFFER;
    let workers = wanted.unwrap_or(1).min(threads.max(WAITING / of_one));
    let connections = inputs
        .iter()
        .map(|input| connect(&input.files, threads))
        .collect::<Result<Vec<_>>>()?;
    let state = || {
        let readers: Vec<Sequential> = connections.iter().cloned().map(Sequential::new).collect();
        (readers, Vec::<u64>::new(), Vec::<ReadReq>::new())
    };
    parallel::for_each(units.len(), workers, state, |(readers, memory, requests), number| {
        let unit = &units[number];
        let bytes = unit.elements * if is_double { 8 } else { 4 };
        // Of whole words, so that the sums are aligned.
        let words = usize::try_from(bytes.div_ceil(8)).map_err(|_| Error::Plan("too much to sum up".into()))?;
        if memory.len() < words {
            memory.resize(words, 0);
        }
        let base = memory.as_mut_ptr().cast::<u8>();
        for (input, reader) in inputs.iter().zip(readers) {
            requests.clear();
            requests.extend(
                input.requests[input.ranges[number].clone()]
                    .iter()
                    .map(|request| ReadReq {
                        dst: Destination(base.wrapping_add(request.dst.0.addr())),
                        ..request.clone()
                    }),
            );
            // SAFETY: the parts of a unit lie in its memory, apart from each other; that is this thread's alone.
            let read = unsafe {
                reader.read(
                    &input.files,
                    requests,
                    &input.survey,
                    input.verify,
                    input.index,
                    control,
                )
            };
            read.map_err(|error| explain(input.index, error, control))?;
        }
        for part in &unit.parts {
            // SAFETY: the sums of the part were made just now; there is room for them at the destination, as the
            // caller vouches, and no other part has these elements.
            unsafe { hand_over(part, &sums[part.sum], base, is_double) };
        }
        Ok(())
    })
}

/// Cuts all sums into parts, and puts small ones together.
fn units(sums: &[Sum]) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    for (number, sum) in sums.iter().enumerate() {
        let mut begin = 0;
        split(&sum.region.sizes, 1, PART, &mut |offsets, sizes| {
            let elements: u64 = sizes.iter().product();
            let offsets: Vec<u64> = offsets.iter().zip(&sum.region.offsets).map(|(a, b)| a + b).collect();
            if units.last().is_none_or(|unit| unit.elements + elements > PART) {
                units.push(Unit::default());
            }
            let unit = units.last_mut().expect("there is one now");
            unit.parts.push(Part {
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

fn input<'a>(
    number: usize,
    summands: &'a [Summand],
    sums: &[Sum],
    units: &[Unit],
    is_double: bool,
    options: &ReadOptions,
    control: &Control,
) -> Result<Input<'a>> {
    let summand = &summands[number];
    let index = &summand.index;
    let mut gather = Gather::new(Arc::clone(index), summand.allow_external);
    let mut ranges = Vec::with_capacity(units.len());
    for unit in units {
        let first = gather.len();
        for part in &unit.parts {
            let tensor = sums[part.sum].tensors[number];
            let dtype = index.tensor(tensor).dtype;
            let sink = dtype.and_then(|dtype| Accumulate::new(dtype, summand.weight, is_double));
            let sink = sink.ok_or_else(|| {
                let reason = "its elements are not added to such sums";
                Error::tensor_plan(Some(index.path()), index.name(tensor), reason)
            })?;
            let sink = if number == 0 { sink.begin() } else { sink };
            let at = usize::try_from(part.at * sink.size()).map_err(|_| Error::Plan("too much to sum up".into()))?;
            let to = Memory {
                address: Destination(std::ptr::without_provenance_mut(at)),
                strides: row_major(&part.region.sizes)
                    .iter()
                    .map(|stride| stride * sink.size())
                    .collect(),
            };
            gather.add_with(Source::Tensor(tensor), &part.region, &to, Operation::Accumulate(sink))?;
        }
        ranges.push(first..gather.len());
    }
    let (files, mut requests) = gather.into_parts();
    let survey = Survey::new(&files, &requests, options, &**index);
    let survey = survey.map_err(|error| explain(index, error, control))?;
    let verify = survey.choose(&mut requests, options.verify);
    Ok(Input {
        index,
        files,
        requests,
        ranges,
        survey,
        verify,
    })
}

/// Brings the sums of a part to where they go.
///
/// # Safety
/// `base` is valid for reads of all elements of the unit, and the destination for writes of those of the part.
unsafe fn hand_over(part: &Part, sum: &Sum, base: *const u8, is_double: bool) {
    // What is in memory fits in it.
    let fit = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
    let (size, count) = (if is_double { 8 } else { 4 }, fit(part.elements));
    let from = base.wrapping_add(fit(part.at) * size);
    // SAFETY: as the caller vouches.
    unsafe {
        if sum.is_bfloat16 {
            round_to_bfloat16(sum.to.0.wrapping_add(fit(part.begin) * 2), from, count);
        } else {
            std::ptr::copy_nonoverlapping(from, sum.to.0.wrapping_add(fit(part.begin) * size), count * size);
        }
    }
}
