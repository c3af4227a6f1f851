//! Reads of codes and scales: window by window, the stored parts are read to memory of the thread,
//! and decoded from there to the destination. Codes in a mapped file are decoded from the mapping.
#![allow(unsafe_code)] // writes to given addresses

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;

use super::batch::stores;
use super::plan::stored_strides;
use super::sequential::{FileProbe, Sequential};
use super::worker::in_destination_bytes;
use super::{Catalog, FileRef, Operation, ReadOptions, ReadReq, ReadStats, Verify, connect};
use crate::copy::{Stores, Strided, copy_strided, fence};
use crate::geometry::{Dims, row_major};
use crate::quant::Coded;
use crate::slabs::split;
use crate::store::Destination;
use crate::{Control, Error, Result, parallel};

/// Bytes of a window that is decoded to its destination: large compared with the cost of a window.
const WINDOW: u64 = 1 << 20;
/// Bytes of a window that is decoded and then copied. Together with its codes it stays in the
/// second-level cache.
const COPIED_WINDOW: u64 = 512 << 10;
/// Bytes of a decoded window, if reads wait for storage.
const WAITING_WINDOW: u64 = 2 << 20;

/// Source of a coded request: a rectangle of this tensor, with the shape of the request.
#[derive(Clone, Debug)]
pub struct CodedReq {
    /// The tensor.
    pub of: Arc<Coded>,
    /// Offsets of the rectangle in it.
    pub offsets: Dims,
    /// The files of the tensor's parts: their numbers in the index, and their numbers in the
    /// requests.
    pub files: SmallVec<[(u32, u32); 2]>,
}

/// Separates plain requests from coded ones.
pub fn split_off_coded(reqs: &[ReadReq]) -> (Cow<'_, [ReadReq]>, Vec<&ReadReq>) {
    if reqs.iter().all(|req| req.coded.is_none()) {
        return (Cow::Borrowed(reqs), Vec::new());
    }
    let (coded, plain): (Vec<&ReadReq>, Vec<&ReadReq>) =
        reqs.iter().partition(|req| req.coded.is_some());
    (plain.into_iter().cloned().collect(), coded)
}

/// The stored parts of a window, as requests. Their destinations are offsets in one memory, where
/// the parts are consecutive.
struct Stored {
    requests: Vec<ReadReq>,
    lengths: SmallVec<[usize; 4]>,
}

impl CodedReq {
    fn stored(&self, offsets: &[u64], sizes: &[u64]) -> Result<Stored> {
        let index = &self.of.index;
        let mut stored = Stored { requests: Vec::new(), lengths: SmallVec::new() };
        let mut at = 0;
        for part in self.of.parts(offsets, sizes) {
            let strides: Dims =
                row_major(&part.region.sizes).iter().map(|stride| stride * part.itemsize).collect();
            let dtype = index.tensor(part.tensor).dtype;
            for held in index.parts_of(part.tensor, &part.region)? {
                let view = index.chunk(held.chunk);
                let (src_offset, src_strides) = view.bytes_of(part.itemsize, &held.chunk_offsets);
                let to: u64 =
                    held.region_offsets.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
                let file = self.files.iter().find(|(file, _)| *file == view.file);
                stored.requests.push(ReadReq {
                    file: file.map_or(u32::MAX, |(_, place)| *place),
                    tensor: part.tensor,
                    chunk_offset: view.offset,
                    chunk_length: view.length,
                    digests: view.digests.map(|range| range.start),
                    itemsize: part.itemsize,
                    shape: held.sizes,
                    src_offset,
                    src_strides,
                    dst: Destination(std::ptr::without_provenance_mut(at + in_memory(to)?)),
                    dst_strides: strides.clone(),
                    signs: dtype.and_then(|dtype| view.signs.bits(dtype)).unwrap_or_default(),
                    operation: Operation::Copy,
                    coded: None,
                });
            }
            let length = in_memory(part.length())?;
            stored.lengths.push(length);
            at += length;
        }
        Ok(stored)
    }
}

/// Returns requests for all stored bytes that a coded request needs.
pub fn wanted(req: &ReadReq) -> Result<Vec<ReadReq>> {
    match &req.coded {
        Some(coded) => Ok(coded.stored(&coded.offsets, &req.shape)?.requests),
        None => Ok(Vec::new()),
    }
}

/// Fills the destinations of coded requests, in parallel.
///
/// # Safety
/// That of [`read`](super::read).
pub unsafe fn read(
    files: &[FileRef],
    reqs: &[&ReadReq],
    options: &ReadOptions,
    control: &Control,
) -> Result<ReadStats> {
    let Some(coded) = reqs.first().and_then(|req| req.coded.as_ref()) else {
        return Ok(ReadStats::default());
    };
    let stored: Vec<ReadReq> =
        reqs.iter().map(|req| wanted(req)).collect::<Result<Vec<_>>>()?.concat();
    let probe = FileProbe::new(files, &stored, options, &*coded.of.index)?;
    let mut windows = Vec::new();
    for (number, req) in reqs.iter().enumerate() {
        split(&req.shape, req.itemsize, probe.window(req), &mut |offsets, sizes| {
            windows.push((number, Dims::from_slice(offsets), Dims::from_slice(sizes)));
        });
    }
    let threads = parallel::threads(options.threads);
    // Each window needs about its own size again, for its codes and for the buffer of a read.
    let window = reqs.iter().map(|req| probe.window(req)).max().unwrap_or(WINDOW);
    let most = usize::try_from(options.max_inflight_bytes / (2 * window)).unwrap_or(usize::MAX);
    let workers = probe.workers(threads).min(most.max(threads)).max(1);
    let connection = connect(files, threads)?;
    let stats = Mutex::new(ReadStats::default());
    let reader = || Sequential::new(connection.clone());
    parallel::for_each_with(windows.len(), workers, reader, |reader, i| {
        let (number, offsets, sizes) = &windows[i];
        let before = reader.stats();
        // SAFETY: the caller guarantees it.
        unsafe {
            fill_window(
                reader,
                files,
                reqs[*number],
                &probe,
                options.verify,
                control,
                (offsets, sizes),
            )?;
        };
        *parallel::lock(&stats) += reader.stats() - before;
        Ok(())
    })?;
    Ok(stats.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Fills the destination of a coded request, on this thread.
///
/// # Safety
/// That of [`read`](super::read).
unsafe fn fill(
    reader: &mut Sequential,
    files: &[FileRef],
    req: &ReadReq,
    probe: &FileProbe,
    verify: Verify,
    control: &Control,
) -> Result<()> {
    let mut windows = Vec::new();
    split(&req.shape, req.itemsize, probe.window(req), &mut |offsets, sizes| {
        windows.push((Dims::from_slice(offsets), Dims::from_slice(sizes)));
    });
    for (offsets, sizes) in &windows {
        // SAFETY: the caller guarantees it.
        unsafe {
            fill_window(reader, files, req, probe, verify, control, (offsets, sizes))?;
        };
    }
    Ok(())
}

impl FileProbe {
    /// Opens and checks every file that the requests of all batches need, and decides how to read
    /// it.
    ///
    /// # Errors
    /// Those of [`read`](super::read) for files.
    pub fn new(
        files: &[FileRef],
        reqs: &[ReadReq],
        options: &ReadOptions,
        catalog: &dyn Catalog,
    ) -> Result<Self> {
        let (plain, coded) = split_off_coded(reqs);
        let mut plain = plain.into_owned();
        for req in coded {
            let parts = wanted(req)?.into_iter();
            plain.extend(parts.map(|part| ReadReq { tensor: req.tensor, ..part }));
        }
        Self::of_plain(files, &plain, options, catalog)
    }

    /// Returns the bytes of a decoded window.
    fn window(&self, req: &ReadReq) -> u64 {
        match has_rows(req) {
            _ if self.waits() => WAITING_WINDOW,
            true => WINDOW,
            false => COPIED_WINDOW,
        }
    }

    /// Returns the file and the range with the codes of a window, which are the first `length` bytes
    /// of its parts. `None` unless they can be decoded from a mapping.
    fn mapped_range(&self, requests: &[ReadReq], length: usize) -> Option<(u32, Range<u64>)> {
        let req = requests.first()?;
        let copy = Strided::new(req.itemsize, &req.shape, &req.src_strides, &req.dst_strides)?;
        let is_run = copy.loops.is_empty() && copy.run == length as u64;
        let is_final = req.digests.is_none() && req.signs.is_empty();
        let start = req.chunk_offset + req.src_offset;
        (is_run && is_final && self.maps(req.file)).then(|| (req.file, start..start + copy.run))
    }
}

impl Sequential {
    /// Fills every destination, on this thread.
    ///
    /// # Errors
    /// Those of [`read`](super::read).
    ///
    /// # Safety
    /// That of [`read`](super::read).
    pub unsafe fn read(
        &mut self,
        files: &[FileRef],
        reqs: &[ReadReq],
        probe: &FileProbe,
        verify: Verify,
        catalog: &dyn Catalog,
        control: &Control,
    ) -> Result<()> {
        control.check()?;
        let (plain, coded) = split_off_coded(reqs);
        for req in coded {
            // SAFETY: the caller guarantees it.
            unsafe { fill(self, files, req, probe, verify, control)? };
        }
        // SAFETY: as above.
        unsafe { self.read_plain(files, &plain, probe, verify, catalog, control) }
    }
}

/// Returns whether the rows of a request are consecutive in its destination, so that they can be
/// decoded to there.
fn has_rows(req: &ReadReq) -> bool {
    req.operation == Operation::Copy && req.dst_strides.last() == Some(&req.itemsize)
}

/// Returns the offset of each row of a rectangle, given the sizes and strides of all dimensions but
/// the last.
fn offsets_of_rows(sizes: &[u64], strides: &[u64]) -> impl Iterator<Item = u64> {
    (0..sizes.iter().product()).map(move |mut row: u64| {
        let mut offset = 0;
        for (size, stride) in sizes.iter().zip(strides).rev() {
            offset += row % size * stride;
            row /= size;
        }
        offset
    })
}

/// Reads the stored parts of a rectangle of a request, and decodes them to the destination, if need
/// be by way of memory of the thread.
///
/// # Safety
/// That of [`read`](super::read).
unsafe fn fill_window(
    reader: &mut Sequential,
    files: &[FileRef],
    req: &ReadReq,
    probe: &FileProbe,
    verify: Verify,
    control: &Control,
    (offsets, sizes): (&Dims, &Dims),
) -> Result<()> {
    let Some(coded) = &req.coded else {
        return Ok(());
    };
    let index = &*coded.of.index;
    let begin: Dims = coded.offsets.iter().zip(offsets).map(|(a, b)| a + b).collect();
    let Stored { mut requests, lengths } = coded.stored(&begin, sizes)?;
    let mapped = probe.mapped_range(&requests, lengths[0]);
    let skipped = if mapped.is_some() { lengths[0] } else { 0 };
    requests.retain(|request| request.dst.0.addr() >= skipped);
    let stored = lengths.iter().sum::<usize>() - skipped;
    let decoded = in_memory(sizes.iter().product::<u64>() * req.itemsize)?;
    let mut memory = std::mem::take(&mut reader.memory);
    let room = stored + if has_rows(req) { 0 } else { decoded };
    if memory.len() < room {
        memory.resize(room, 0);
    }
    let base = memory.as_mut_ptr();
    for request in &mut requests {
        request.dst = Destination(base.wrapping_add(request.dst.0.addr() - skipped));
    }
    let delivered = reader.stats().bytes_wanted;
    // SAFETY: the parts are consecutive in `memory`, and the chunks of a part do not overlap. Only
    // this thread uses the memory.
    unsafe { reader.read_plain(files, &requests, probe, verify, index, control)? };
    reader.count_as(delivered, decoded as u64, skipped as u64);
    control.add((decoded as u64).saturating_sub(stored as u64));
    let (mut rest, out) = memory[..room].split_at_mut(stored);
    let mut parts: Vec<&[u8]> = Vec::with_capacity(lengths.len());
    if let Some((file, range)) = mapped {
        parts.push(reader.mapped(files, file, range, probe, index, control)?);
    }
    for &length in &lengths[parts.len()..] {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(length);
        parts.push(part);
        rest = after;
    }
    // SAFETY: the caller guarantees it.
    unsafe { decode(req, (&begin, offsets, sizes), &parts, out)? };
    reader.memory = memory;
    Ok(())
}

/// Decodes a rectangle of a request from its stored parts to the destination, by way of `buffer`
/// unless it has rows there.
///
/// # Safety
/// That of [`read`](super::read).
unsafe fn decode(
    req: &ReadReq,
    (begin, offsets, sizes): (&Dims, &Dims, &Dims),
    parts: &[&[u8]],
    buffer: &mut [u8],
) -> Result<()> {
    let Some(coded) = &req.coded else {
        return Ok(());
    };
    let strides: Dims = row_major(sizes).iter().map(|stride| stride * req.itemsize).collect();
    let copy = stored_strides(req)
        .and_then(|dst| Strided::new(req.itemsize, sizes, &strides, &dst))
        .ok_or_else(|| Error::Plan("destination too large".into()))?;
    let to: u64 = offsets.iter().zip(&req.dst_strides).map(|(at, stride)| at * stride).sum();
    let to = req.dst.0.wrapping_add(in_memory(to)?);
    let total = req.shape.iter().fold(req.itemsize, |n, &size| n.saturating_mul(size));
    let stores = stores(total);
    let last = sizes.len() - 1;
    let row = in_memory(sizes[last] * req.itemsize)?;
    if has_rows(req) {
        let rows = offsets_of_rows(&sizes[..last], &req.dst_strides[..last]).map(|offset| {
            let at = usize::try_from(offset).expect("a strided copy fits in memory");
            // SAFETY: the caller guarantees the rectangle, of which this is a row. No two rows
            // share a byte, and nobody else uses them meanwhile.
            unsafe { std::slice::from_raw_parts_mut(to.wrapping_add(at), row) }
        });
        let done = coded.of.decode(begin, sizes, parts, rows, stores);
        fence();
        return done;
    }
    coded.of.decode(begin, sizes, parts, buffer.chunks_exact_mut(row), Stores::Cached)?;
    // SAFETY: `buffer` holds the rectangle in row-major order. It fits in the destination, which
    // the caller guarantees.
    unsafe {
        match req.operation {
            Operation::Copy => {
                copy_strided(to, buffer.as_ptr(), &copy.loops, copy.run, stores);
            }
            Operation::Accumulate(sink) => {
                sink.run(to, buffer.as_ptr(), &in_destination_bytes(req, &copy.loops), copy.run);
            }
        }
    }
    Ok(())
}

fn in_memory(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::Plan("more bytes than there is memory for".into()))
}
