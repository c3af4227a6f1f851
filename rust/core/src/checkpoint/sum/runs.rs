//! Sums of long runs in mapped files: one pass over all summands, with the sums in the first-level
//! cache.

#![allow(unsafe_code)] // destinations are addresses that the caller guarantees

use std::hash::Hasher as _;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use twox_hash::xxhash3_64::Hasher;

use super::{Input, Sum, Summand, add, hand_over, nothing, sink, size_of_sum};
use crate::checkpoint::explain;
use crate::checkpoint::gather::Gather;
use crate::copy::Accumulate;
use crate::format::{BLOCK_SIZE, block_digest};
use crate::read::{Destination, Operation, ReadOptions, Sequential, Verify, compare};
use crate::{Control, Error, Result, parallel};

/// Sums of fewer elements are combined with others, which takes fewer calls.
const FEW: u64 = 32 << 10;
/// Elements of a thread's part: one block of bfloat16.
const PART: u64 = BLOCK_SIZE / 2;
/// Elements that are summed in one step: 32 KiB of float32. A block of any dtype is a whole number
/// of steps.
const STEP: usize = 8 << 10;

/// Elements of one summand that are consecutive in a file and in the sums, from element `begin` of
/// the sums on.
struct Run {
    request: usize,
    begin: u64,
    elements: u64,
}

/// Elements that one thread sums. Each summand has them in one run, given by a request and the
/// first byte in its chunk.
struct CommonRun {
    to: Destination,
    is_bfloat16: bool,
    elements: u64,
    runs: SmallVec<[(usize, u64); 4]>,
}

/// The elements of a part in one summand.
struct Row<'a> {
    sink: Accumulate,
    itemsize: usize,
    bytes: &'a [u8],
    /// State of the hash of the current block, and the block's number, if blocks are hashed.
    hashed: Option<(Hasher, u64)>,
}

/// Computes the sums whose elements are in long runs in all summands.
///
/// Returns the numbers of all other sums, which are untouched.
///
/// # Errors
/// Those of [`sum`](super::sum).
///
/// # Safety
/// That of [`sum`](super::sum).
pub(super) unsafe fn sum_runs(
    summands: &[Summand],
    sums: &[Sum],
    is_double: bool,
    options: &ReadOptions,
    control: &Control,
) -> Result<Vec<usize>> {
    let size = size_of_sum(is_double);
    let (long, short): (Vec<_>, Vec<_>) =
        groups(sums, size).into_iter().partition(|group| elements(&sums[group.clone()]) >= FEW);
    let mut left: Vec<usize> = short.into_iter().flatten().collect();
    if long.is_empty() {
        return Ok(left);
    }
    let inputs = (0..summands.len())
        .map(|number| input(number, summands, sums, &long, is_double, options, control))
        .collect::<Result<Vec<_>>>()?;
    let mut parts = Vec::new();
    for (number, group) in long.into_iter().enumerate() {
        let total = elements(&sums[group.clone()]);
        let runs: Option<Vec<_>> =
            inputs.iter().map(|input| runs(input, number, total, size)).collect();
        match runs {
            Some(runs) => cut(&inputs, &runs, &sums[group.start], total, size, &mut parts),
            None => left.extend(group),
        }
    }
    let threads = match options.threads {
        0 => parallel::available(),
        n => n,
    };
    let state = || {
        let readers: Vec<Sequential> = inputs.iter().map(|_| Sequential::new(None)).collect();
        (readers, vec![0_u64; if is_double { STEP } else { STEP / 2 }])
    };
    parallel::for_each(parts.len(), threads, state, |(readers, memory), number| {
        control.check()?;
        // SAFETY: the caller guarantees that the destination is valid for the elements of the part,
        // and no other part has them.
        unsafe { add_up(&parts[number], &inputs, readers, memory, is_double, control) }
    })?;
    Ok(left)
}

/// Groups sums that are adjacent in the same tensors and in memory: a tensor was split between
/// them.
fn groups(sums: &[Sum], size: u64) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    for (number, sum) in sums.iter().enumerate() {
        let follows = number > 0 && {
            let before = &sums[number - 1];
            let bytes =
                elements(std::slice::from_ref(before)) * if before.is_bfloat16 { 2 } else { size };
            before.tensors == sum.tensors
                && before.is_bfloat16 == sum.is_bfloat16
                && before.to.0.addr() as u64 + bytes == sum.to.0.addr() as u64
        };
        match groups.last_mut() {
            Some(group) if follows => group.end = number + 1,
            _ => groups.push(number..number + 1),
        }
    }
    groups
}

fn elements(sums: &[Sum]) -> u64 {
    sums.iter().map(|sum| sum.region.sizes.iter().product::<u64>()).sum()
}

/// Plans the reads of one summand: for each group, requests whose destinations are offsets in its
/// sums.
fn input<'a>(
    number: usize,
    summands: &'a [Summand],
    sums: &[Sum],
    groups: &[Range<usize>],
    is_double: bool,
    options: &ReadOptions,
    control: &Control,
) -> Result<Input<'a>> {
    let summand = &summands[number];
    let mut gather = Gather::new(Arc::clone(&summand.index), summand.allow_external);
    let mut ranges = Vec::with_capacity(groups.len());
    for group in groups {
        let (first, mut at) = (gather.len(), 0);
        for sum in &sums[group.clone()] {
            let sink = sink(summand, sum.tensors[number], is_double)?;
            add(&mut gather, sum.tensors[number], &sum.region, at, sink)?;
            at += elements(std::slice::from_ref(sum));
        }
        ranges.push(first..gather.len());
    }
    Input::new(summand, gather, ranges, options, control)
}

/// Returns the runs of a group of sums in one summand, in order. Returns `None` if some elements
/// are not in runs, or if files are not mapped.
fn runs(input: &Input, group: usize, total: u64, size: u64) -> Option<Vec<Run>> {
    let mut runs = Vec::with_capacity(input.ranges[group].len());
    for number in input.ranges[group].clone() {
        let request = &input.requests[number];
        let elements = request.shape.iter().product::<u64>();
        let is_dense = |strides: &[u64], size: u64| {
            let mut step = size;
            request.shape.iter().zip(strides).rev().all(|(&n, &stride)| {
                let fits = n == 1 || stride == step;
                step *= n;
                fits
            })
        };
        let file = &input.files[request.file as usize];
        let lies_within = request.src_offset + elements * request.itemsize <= request.chunk_length
            && request.chunk_offset.checked_add(request.chunk_length)? <= file.size;
        let is_run = request.coded.is_none()
            && is_dense(&request.src_strides, request.itemsize)
            && is_dense(&request.dst_strides, size);
        if !is_run || !lies_within || !input.probe.maps(request.file) {
            return None;
        }
        runs.push(Run { request: number, begin: request.dst.0.addr() as u64 / size, elements });
    }
    runs.sort_by_key(|run| run.begin);
    // The runs must cover each element exactly once.
    let mut end = 0;
    for run in &runs {
        if run.begin != end {
            return None;
        }
        end += run.elements;
    }
    if end != total {
        return None;
    }
    runs.dedup_by(|next, run| {
        let (a, b) = (&input.requests[run.request], &input.requests[next.request]);
        let follows = (a.file, a.chunk_offset, a.digests) == (b.file, b.chunk_offset, b.digests)
            && a.src_offset + run.elements * a.itemsize == b.src_offset;
        if follows {
            run.elements += next.elements;
        }
        follows
    });
    Some(runs)
}

/// Splits a group of sums at the end of each summand's runs, and at the blocks of the first
/// summand.
fn cut(
    inputs: &[Input],
    runs: &[Vec<Run>],
    first: &Sum,
    total: u64,
    size: u64,
    parts: &mut Vec<CommonRun>,
) {
    let written = if first.is_bfloat16 { 2 } else { size };
    let mut at: Vec<usize> = vec![0; runs.len()];
    let mut begin = 0;
    while begin < total {
        let place = |number: usize, run: &Run| {
            let request = &inputs[number].requests[run.request];
            (
                run.request,
                request.src_offset + (begin - run.begin) * request.itemsize,
                request.itemsize,
            )
        };
        let (_, byte, itemsize) = place(0, &runs[0][at[0]]);
        let block = BLOCK_SIZE / itemsize;
        let to_block = block - byte / itemsize % block;
        // First the rest of a block, then whole blocks.
        let most = if to_block < block { to_block } else { PART.max(block) };
        let end = runs
            .iter()
            .zip(&at)
            .map(|(runs, &i)| runs[i].begin + runs[i].elements)
            .fold(begin + most, u64::min);
        // Sizes of memory fit in a `usize`.
        let offset = usize::try_from(begin * written).unwrap_or(usize::MAX);
        parts.push(CommonRun {
            to: Destination(first.to.0.wrapping_add(offset)),
            is_bfloat16: first.is_bfloat16,
            elements: end - begin,
            runs: runs
                .iter()
                .zip(&at)
                .enumerate()
                .map(|(number, (runs, &i))| {
                    let (request, byte, _) = place(number, &runs[i]);
                    (request, byte)
                })
                .collect(),
        });
        for (runs, i) in runs.iter().zip(&mut at) {
            *i += usize::from(runs[*i].begin + runs[*i].elements == end);
        }
        begin = end;
    }
}

/// Computes the sums of a part.
///
/// # Safety
/// The destination is valid for writes of all its elements, and nothing else uses it meanwhile.
unsafe fn add_up(
    part: &CommonRun,
    inputs: &[Input],
    readers: &mut [Sequential],
    memory: &mut [u64],
    is_double: bool,
    control: &Control,
) -> Result<()> {
    // Sizes of memory fit in a `usize`.
    let fit = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
    let mut rows: SmallVec<[Row; 4]> = SmallVec::new();
    for ((input, reader), &(number, begin)) in inputs.iter().zip(readers).zip(&part.runs) {
        let row = row(input, reader, number, begin, part.elements, control);
        rows.push(row.map_err(|error| explain(input.index, error, control))?);
    }
    let elements = fit(part.elements);
    for at in (0..elements).step_by(STEP) {
        let count = STEP.min(elements - at);
        memory.fill(nothing(is_double));
        let sums = memory.as_mut_ptr().cast::<u8>();
        for ((row, input), &(number, _)) in rows.iter_mut().zip(inputs).zip(&part.runs) {
            let bytes = &row.bytes[at * row.itemsize..][..count * row.itemsize];
            if let Some((hasher, block)) = &mut row.hashed {
                hasher.write(bytes);
                let done = (at + count) * row.itemsize;
                if done % fit(BLOCK_SIZE) == 0 || at + count == elements {
                    let request = &input.requests[number];
                    let got = std::mem::take(hasher).finish();
                    let same = compare(
                        &input.files[request.file as usize],
                        request,
                        *block,
                        got,
                        input.index,
                    );
                    same.map_err(|error| explain(input.index, error, control))?;
                    *block += 1;
                }
            }
            // SAFETY: there is memory for the sums of a step, and only this thread uses it.
            unsafe { row.sink.run(sums, bytes.as_ptr(), &[], bytes.len() as u64) };
        }
        // SAFETY: the sums were just computed, and the caller guarantees the destination.
        unsafe { hand_over(part.to, at, sums, count, part.is_bfloat16, is_double) };
    }
    control.add(rows.iter().map(|row| row.bytes.len() as u64).sum());
    Ok(())
}

/// Loads the elements of a part in one summand into memory.
fn row<'a>(
    input: &Input,
    reader: &'a mut Sequential,
    number: usize,
    begin: u64,
    elements: u64,
    control: &Control,
) -> Result<Row<'a>> {
    let fit = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
    let request = &input.requests[number];
    let file = &input.files[request.file as usize];
    let Operation::Accumulate(sink) = request.operation else {
        return Err(Error::Internal("a summand that is not added".into()));
    };
    let checks = input.verify == Verify::All && request.digests.is_some();
    let end = begin + elements * request.itemsize;
    let (from, to) = if checks {
        (
            begin / BLOCK_SIZE * BLOCK_SIZE,
            end.next_multiple_of(BLOCK_SIZE).min(request.chunk_length),
        )
    } else {
        (begin, end)
    };
    let range = request.chunk_offset + from..request.chunk_offset + to;
    let bytes =
        reader.mapped(&input.files, request.file, range, &input.probe, input.index, control)?;
    let is_whole = (from, to) == (begin, end);
    if checks && !is_whole {
        for (block, bytes) in (from / BLOCK_SIZE..).zip(bytes.chunks(fit(BLOCK_SIZE))) {
            compare(file, request, block, block_digest(bytes), input.index)?;
        }
    }
    Ok(Row {
        sink,
        itemsize: fit(request.itemsize),
        bytes: &bytes[fit(begin - from)..fit(end - from)],
        hashed: (checks && is_whole).then(|| (Hasher::new(), begin / BLOCK_SIZE)),
    })
}
