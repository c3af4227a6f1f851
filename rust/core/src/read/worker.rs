//! The work of one thread: it takes a job, fetches it, verifies it and copies it.
#![allow(unsafe_code)] // Writes to destinations and reads from mappings

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::batch::Batch;
use super::bounce;
use super::plan::Job;
use super::policy::Access;
use super::probe::CachedHandle;
use super::segments::{Extent, Segment};
use super::{FileRef, Operation, ReadReq, ReadStats, scatter, verify};
use crate::copy::{Loop, copy_strided_unfenced, copy_with_digest_unfenced, fence};
use crate::format::{BLOCK_SIZE, block_digest};
use crate::store::{self, Buffer, Mapping, Mismatch, resident_bytes};
use crate::{Error, Result};
use smallvec::SmallVec;

/// The only file that a worker has open, with the handles that its jobs needed so far. Jobs are
/// sorted by file.
#[derive(Default)]
struct Open {
    file: Option<u32>,
    plain: Option<File>,
    direct: Option<File>,
    mapping: Option<Arc<Mapping>>,
}

impl Open {
    fn turn_to(&mut self, file: u32) {
        if self.file != Some(file) {
            *self = Self { file: Some(file), ..Self::default() };
        }
    }

    /// Returns the file for reads through the page cache. Workers share a handle that was kept
    /// open, except for reads from storage. The kernel does read-ahead for each open file, and
    /// would take many readers of one for random access.
    fn plain<'o>(&'o mut self, batch: &'o Batch, file: u32) -> Result<&'o File> {
        match &batch.kept[file as usize] {
            CachedHandle::Open(kept) if batch.access[file as usize] != Access::Buffered => Ok(kept),
            _ => once(&mut self.plain, || batch.files[file as usize].open(false)),
        }
    }

    fn direct(&mut self, file: &FileRef) -> Result<&File> {
        once(&mut self.direct, || file.open(true))
    }

    /// Returns the file's mapping, if there is one.
    fn mapped<'o>(&'o self, batch: &'o Batch, file: u32) -> Option<&'o Mapping> {
        match &batch.kept[file as usize] {
            CachedHandle::Mapped(kept) => Some(kept.as_ref()),
            _ => self.mapping.as_deref(),
        }
    }

    /// Returns the file's mapping. Refuses a file whose length changed after it was opened, since
    /// its last page has zeros after the end.
    fn mapping<'o>(&'o mut self, batch: &'o Batch, number: u32) -> Result<&'o Mapping> {
        let file = &batch.files[number as usize];
        let mapping = if let CachedHandle::Mapped(kept) = &batch.kept[number as usize] {
            kept.as_ref()
        } else {
            let mapping = match self.mapping.take() {
                Some(mapping) => mapping,
                None => batch.mappings[number as usize].get(|| {
                    let plain = self.plain(batch, number)?;
                    Mapping::new(plain).map_err(|e| Error::io("map", &file.path, e))
                })?,
            };
            &**self.mapping.insert(mapping)
        };
        let length = mapping.len() as u64;
        if length == file.size { Ok(mapping) } else { Err(file.has_length(length)) }
    }
}

fn once<T>(slot: &mut Option<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    match slot {
        Some(made) => Ok(made),
        None => Ok(slot.insert(make()?)),
    }
}

/// State that a thread keeps from job to job.
#[derive(Default)]
pub struct Worker {
    open: Open,
    buffer: Buffer,
    extents: Vec<Extent>,
    segments: Vec<Segment>,
    /// Counts so far.
    pub stats: ReadStats,
}

impl Worker {
    /// Delivers one job.
    pub fn job(&mut self, batch: &Batch, job: &Job) -> Result<()> {
        let index = job.file as usize;
        let file = &batch.files[index];
        batch.plan.extents(
            job,
            batch.reqs,
            batch.policies[index],
            batch.verify,
            &mut self.extents,
            &mut self.segments,
        );
        if batch.access[index] == Access::Remote {
            return self.fetch(batch, job);
        }
        self.open.turn_to(job.file);
        let mapped = batch.access[index].maps();
        if mapped {
            // Once the pages are set up, access to them cannot fail.
            let mapping = self.open.mapping(batch, job.file)?;
            let populated = self.segments.iter().try_for_each(|segment| {
                if batch.access[index] == Access::Shared {
                    mapping.read_ahead(segment.start, segment.end);
                }
                let populated = mapping.populate(segment.start, segment.end);
                populated.map_err(|e| (segment.start, e))
            });
            if let Err((at, e)) = populated {
                return Err(failed(file, self.open.plain(batch, job.file).ok(), at, e));
            }
        } else {
            self.fill(batch, job)?;
        }
        let delivered = self.deliver(batch, job.file, mapped);
        fence();
        delivered?;
        self.stats.bytes_wanted += job.wanted;
        self.stats.jobs += 1;
        if mapped {
            self.stats.bytes_read += job.wanted;
            self.stats.bytes_mapped += job.wanted;
        }
        Ok(())
    }

    /// Returns a range of a mapped file. The range must be inside the file.
    pub fn mapped(&mut self, batch: &Batch, number: u32, range: Range<u64>) -> Result<&[u8]> {
        self.open.turn_to(number);
        let file = &batch.files[number as usize];
        let mapping = self.open.mapping(batch, number)?;
        if (mapping.len() as u64) < range.end {
            return Err(failed(
                file,
                self.open.plain(batch, number).ok(),
                range.start,
                io::ErrorKind::UnexpectedEof.into(),
            ));
        }
        if let Err(e) = mapping.populate(range.start, range.end) {
            return Err(failed(file, self.open.plain(batch, number).ok(), range.start, e));
        }
        let mapping = self.open.mapping(batch, number)?;
        let (start, length) = (index(range.start), index(range.end - range.start));
        // SAFETY: the mapping contains the range, and stays until this worker turns to another
        // file. Published files do not change.
        Ok(unsafe { std::slice::from_raw_parts(mapping.as_ptr().wrapping_add(start), length) })
    }

    /// Delivers a job from a store: directly to its destinations if all of it can go there,
    /// otherwise through the buffer.
    fn fetch(&mut self, batch: &Batch, job: &Job) -> Result<()> {
        let file = &batch.files[job.file as usize];
        let connection = batch
            .connection
            .ok_or_else(|| Error::Internal("a remote file without a connection".into()))?;
        let bytes: u64 = self.segments.iter().map(|s| s.end - s.start).sum();
        if scatter::goes_straight(batch, job) {
            let parts = scatter::parts(batch, &self.extents, &self.segments);
            let runs = parts.iter().flat_map(|part| &part.runs);
            let verified: u64 = runs.filter(|run| run.expected.is_some()).map(|run| run.len).sum();
            // SAFETY: the planner only divides the rectangles of the requests. The caller of `read`
            // guarantees all of them, and no other piece has these bytes. The planner has checked
            // that every extent ends within the file.
            let found =
                unsafe { store::fetch(connection, &file.path, file.size, parts, batch.control)? };
            found.into_iter().try_for_each(|mismatch| self.check(batch, file, mismatch))?;
            self.stats.bytes_verified += verified;
        } else {
            let size = self.segments.last().map_or(0, |s| s.buffer_end(1));
            let memory = self.buffer.at_least(index(size));
            let memory = memory.map_err(|e| Error::io("read", &file.path, e))?.as_mut_ptr();
            let parts = scatter::whole(&self.segments, memory);
            // SAFETY: the buffer has room for every segment at its offset, and only this thread
            // uses it. Segments are inside the file, as above.
            unsafe { store::fetch(connection, &file.path, file.size, parts, batch.control)? };
            let delivered = self.deliver(batch, job.file, false);
            fence();
            delivered?;
        }
        self.stats.bytes_read += bytes;
        self.stats.bytes_wanted += job.wanted;
        self.stats.jobs += 1;
        Ok(())
    }

    /// Returns the error for a block that went directly to its destination, and that does not match
    /// its digest.
    fn check(&self, batch: &Batch, file: &FileRef, found: Mismatch) -> Result<()> {
        // Tensors in a file of `torch.save` may begin at the same byte and end at different ones.
        let is_found = |extent: &&Extent| (extent.src, extent.len) == (found.at, found.len);
        self.extents.iter().filter(is_found).try_for_each(|extent| {
            let req = &batch.reqs[batch.plan.pieces[extent.piece].req as usize];
            let block = (found.at - req.chunk_offset) / BLOCK_SIZE;
            verify::compare(file, req, block, found.digest, batch.catalog)
        })
    }

    /// Reads the segments into the buffer.
    fn fill(&mut self, batch: &Batch, job: &Job) -> Result<()> {
        let (index, room) = (job.file, job.buffer);
        let file = &batch.files[index as usize];
        let bytes: u64 = self.segments.iter().map(|s| s.end - s.start).sum();
        self.stats.bytes_read += bytes;
        if let Access::Direct { align } = batch.access[index as usize] {
            let plain = self.open.plain(batch, index)?;
            let cached =
                |s: &Segment| resident_bytes(plain, s.start, s.end) == Some(s.end - s.start);
            if !self.segments.iter().all(cached) {
                match bounce::fill(
                    &mut self.buffer,
                    self.open.direct(file)?,
                    &self.segments,
                    Some(align),
                    room,
                ) {
                    Ok(()) => {
                        self.stats.bytes_direct += bytes;
                        return Ok(());
                    }
                    // Some file systems refuse some direct reads (compressed extents, inline data).
                    // Read those through the page cache.
                    Err((_, e)) if e.raw_os_error() == Some(libc::EINVAL) => {}
                    Err((at, e)) => {
                        return Err(failed(file, self.open.plain(batch, index).ok(), at, e));
                    }
                }
            }
            // The segments keep their aligned offsets.
        }
        let plain = self.open.plain(batch, index)?;
        bounce::fill(&mut self.buffer, plain, &self.segments, None, room)
            .map_err(|(at, e)| failed(file, Some(plain), at, e))
    }

    /// Verifies the fetched extents, and copies them to their destinations.
    fn deliver(&mut self, batch: &Batch, number: u32, mapped: bool) -> Result<()> {
        let Worker { open, buffer, extents, segments, stats } = self;
        let file = &batch.files[number as usize];
        let mapping = mapped.then(|| open.mapped(batch, number)).flatten();
        // Returns the address of byte `offset` of the file, which must be inside the segment.
        let locate = |segment: usize, offset: u64| -> *const u8 {
            let Segment { start, at, .. } = segments[segment];
            match mapping {
                Some(mapping) => mapping.as_ptr().wrapping_add(index(offset)),
                None => buffer.as_ptr().wrapping_add(index(at + (offset - start))),
            }
        };
        // The range that was hashed last, and its hash: neighbours often share a block. Blocks of
        // two chunks may begin at the same byte and end at different ones.
        let mut hashed: Option<((u64, u64), u64)> = None;
        let check = |number: u32, block, got| {
            verify::compare(file, &batch.reqs[number as usize], block, got, batch.catalog)
        };
        for extent in extents.iter() {
            let piece = &batch.plan.pieces[extent.piece];
            let req = &batch.reqs[piece.req as usize];
            if let Some(visitor) = batch.visitor {
                // SAFETY: as for the blocks below.
                let bytes = unsafe {
                    std::slice::from_raw_parts(
                        locate(extent.segment, extent.src),
                        index(extent.len),
                    )
                };
                visitor(piece.req, bytes)?;
                continue;
            }
            let (_, loops) = batch.plan.loops_of(piece);
            let dst = req.dst.0.wrapping_add(index(at_destination(req, extent.dst)));
            let mut copied = false;
            if batch.verify && req.digests.is_some() {
                let first = (extent.fetch.0 - req.chunk_offset) / BLOCK_SIZE;
                let end = (extent.fetch.1 - req.chunk_offset).div_ceil(BLOCK_SIZE);
                let is_known = |range| hashed.is_some_and(|(known, _)| known == range);
                copied = req.operation == Operation::Copy
                    && loops.is_empty()
                    && end - first == 1
                    && !is_known(verify::block_range(req, first));
                for block in first..end {
                    let (from, to) = verify::block_range(req, block);
                    if let Some((_, got)) = hashed.filter(|(range, _)| *range == (from, to)) {
                        check(piece.req, block, got)?;
                        continue;
                    }
                    let (bytes, length) = (locate(extent.segment, from), index(to - from));
                    // SAFETY: `fetch` covers its blocks whole and is inside its segment, which was
                    // populated or read. The planner has checked that it ends within the file.
                    // Published files do not change. The destination is as below.
                    let got = unsafe {
                        if copied {
                            let (at, len) = (index(extent.src - from), index(extent.len));
                            copy_with_digest_unfenced(dst, bytes, length, at, len, batch.stores)
                        } else {
                            block_digest(std::slice::from_raw_parts(bytes, length))
                        }
                    };
                    check(piece.req, block, got)?;
                    stats.bytes_verified += to - from;
                    hashed = Some(((from, to), got));
                }
            }
            if copied {
                continue;
            }
            // SAFETY: source: all of the extent is inside its segment, as above. Destination: the
            // planner only divides the request's rectangle, which the caller of `read` guarantees,
            // and no other piece has these bytes. A fence follows in `job`.
            unsafe {
                let src = locate(extent.segment, extent.src);
                match req.operation {
                    Operation::Copy => {
                        copy_strided_unfenced(dst, src, loops, piece.run, batch.stores);
                    }
                    Operation::Accumulate(sink) => {
                        sink.run(dst, src, &in_destination_bytes(req, loops), piece.run);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Converts the destination steps of loops to bytes of the destination's elements.
pub(super) fn in_destination_bytes(req: &ReadReq, loops: &[Loop]) -> SmallVec<[Loop; 4]> {
    let converted = |l: &Loop| Loop { dst: at_destination(req, l.dst), ..*l };
    loops.iter().map(converted).collect()
}

/// Converts bytes of stored elements to bytes of the destination.
fn at_destination(req: &ReadReq, stored: u64) -> u64 {
    let size = req.operation.element_size(req.itemsize);
    // A plain copy may be split within an element.
    if size == req.itemsize {
        return stored;
    }
    stored / req.itemsize * size
}

/// Converts an offset in a file or destination in memory, which fits in a `usize`.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// Returns the error for a failed read at `offset`. `open` is the file that was read.
fn failed(file: &FileRef, open: Option<&File>, offset: u64, error: io::Error) -> Error {
    let length = open.and_then(|open| Some(open.metadata().ok()?.len()));
    match length {
        Some(length) if length < file.size => Error::corrupt_data(
            &file.path,
            "",
            offset,
            format!("the file ends at byte {length}, and its length was {} before", file.size),
        ),
        // Populating a mapping fails with `EFAULT` if access would raise a bus error: the disk
        // failed.
        _ if error.raw_os_error() == Some(libc::EFAULT) => {
            Error::io("read", &file.path, io::Error::from_raw_os_error(libc::EIO))
        }
        _ => Error::io("read", &file.path, error),
    }
}
