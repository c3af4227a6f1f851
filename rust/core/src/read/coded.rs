//! Reads of codes and scales: window by window, the stored parts are read to memory of the thread,
//! and decoded from there.
#![allow(unsafe_code)] // writes to given addresses

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;

use super::batch::stores;
use super::plan::stored_strides;
use super::sequential::{FileProbe, Sequential};
use super::worker::in_destination_bytes;
use super::{Catalog, FileRef, Operation, ReadOptions, ReadReq, ReadStats, Verify, connect};
use crate::copy::{Strided, copy_strided};
use crate::geometry::{Dims, row_major};
use crate::quant::Coded;
use crate::slabs::split;
use crate::store::Destination;
use crate::{Control, Error, Result, parallel};

/// Bytes of a decoded window. Together with its codes it stays in the second-level cache.
const WINDOW: u64 = 512 << 10;
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
    let window = probe.window();
    let mut windows = Vec::new();
    for (number, req) in reqs.iter().enumerate() {
        split(&req.shape, req.itemsize, window, &mut |offsets, sizes| {
            windows.push((number, Dims::from_slice(offsets), Dims::from_slice(sizes)));
        });
    }
    let threads = match options.threads {
        0 => parallel::available(),
        n => n,
    };
    // Each window needs about its own size again, for its codes and for the buffer of a read.
    let most = usize::try_from(options.max_inflight_bytes / (2 * window)).unwrap_or(usize::MAX);
    let workers = probe.workers(threads).min(most.max(threads)).max(1);
    let connection = connect(files, threads)?;
    let stats = Mutex::new(ReadStats::default());
    let reader = || Sequential::new(connection.clone());
    parallel::for_each(windows.len(), workers, reader, |reader, i| {
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
        *stats.lock().unwrap_or_else(PoisonError::into_inner) += reader.stats() - before;
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
    split(&req.shape, req.itemsize, probe.window(), &mut |offsets, sizes| {
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
    fn window(&self) -> u64 {
        if self.waits() { WAITING_WINDOW } else { WINDOW }
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

/// Reads the stored parts of a rectangle of a request, decodes them, and copies the result to the
/// destination.
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
    let begin: Dims = coded.offsets.iter().zip(offsets).map(|(a, b)| a + b).collect();
    let Stored { mut requests, lengths } = coded.stored(&begin, sizes)?;
    let stored: usize = lengths.iter().sum();
    let decoded = in_memory(sizes.iter().product::<u64>() * req.itemsize)?;
    let mut memory = std::mem::take(&mut reader.memory);
    if memory.len() < stored + decoded {
        memory.resize(stored + decoded, 0);
    }
    let base = memory.as_mut_ptr();
    for request in &mut requests {
        request.dst = Destination(base.wrapping_add(request.dst.0.addr()));
    }
    let delivered = reader.stats().bytes_wanted;
    // SAFETY: the parts are consecutive in `memory`, and the chunks of a part do not overlap. Only
    // this thread uses the memory.
    unsafe { reader.read_plain(files, &requests, probe, verify, &*coded.of.index, control)? };
    reader.count_as(delivered, decoded as u64);
    control.add((decoded as u64).saturating_sub(stored as u64));
    let (codes, out) = memory[..stored + decoded].split_at_mut(stored);
    let mut rest = &*codes;
    let parts: Vec<&[u8]> = (lengths.iter())
        .map(|&length| {
            let (part, after) = rest.split_at(length);
            rest = after;
            part
        })
        .collect();
    coded.of.decode(&begin, sizes, &parts, out)?;
    let strides: Dims = row_major(sizes).iter().map(|stride| stride * req.itemsize).collect();
    let copy = stored_strides(req)
        .and_then(|dst| Strided::new(req.itemsize, sizes, &strides, &dst))
        .ok_or_else(|| Error::Plan("destination too large".into()))?;
    let to: u64 = offsets.iter().zip(&req.dst_strides).map(|(at, stride)| at * stride).sum();
    let total = req.shape.iter().fold(req.itemsize, |n, &size| n.saturating_mul(size));
    // SAFETY: `out` holds the rectangle in row-major order. It fits in the destination, which the
    // caller guarantees.
    unsafe {
        let to = req.dst.0.wrapping_add(in_memory(to)?);
        match req.operation {
            Operation::Copy => copy_strided(to, out.as_ptr(), &copy.loops, copy.run, stores(total)),
            Operation::Accumulate(sink) => {
                sink.run(to, out.as_ptr(), &in_destination_bytes(req, &copy.loops), copy.run);
            }
        }
    }
    reader.memory = memory;
    Ok(())
}

fn in_memory(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::Plan("more bytes than there is memory for".into()))
}
