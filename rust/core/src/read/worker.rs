//! One thread's part: takes a job, fetches it, checks it and copies it out.
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

/// The one file a worker has open, in the ways that its jobs needed so far. Jobs come sorted by
/// file.
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

    /// The file for reads through the page cache. One that is kept open serves all, but for
    /// storage: read-ahead is by open file, and would take many readers of one for random access.
    fn plain<'o>(&'o mut self, batch: &'o Batch, file: u32) -> Result<&'o File> {
        match &batch.kept[file as usize] {
            CachedHandle::Open(kept) if batch.access[file as usize] != Access::Buffered => Ok(kept),
            _ => once(&mut self.plain, || batch.files[file as usize].open(false)),
        }
    }

    fn direct(&mut self, file: &FileRef) -> Result<&File> {
        once(&mut self.direct, || file.open(true))
    }

    /// The file's mapping, where there is one.
    fn mapped<'o>(&'o self, batch: &'o Batch, file: u32) -> Option<&'o Mapping> {
        match &batch.kept[file as usize] {
            CachedHandle::Mapped(kept) => Some(kept.as_ref()),
            _ => self.mapping.as_deref(),
        }
    }

    /// Returns the file's mapping. A file that got another length after it was opened is refused:
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
            // Touching the pages cannot fail once they are set up.
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

    /// Returns bytes of a mapped file. It has so many.
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
        // SAFETY: the mapping has these bytes, and stays while this worker does not turn to another
        // file. Published files do not change.
        Ok(unsafe { std::slice::from_raw_parts(mapping.as_ptr().wrapping_add(start), length) })
    }

    /// Delivers a job from a store: straight to its destinations where all of it can go there, else
    /// by way of the buffer.
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
            // SAFETY: the planner only divides the requests' rectangles, all of which the caller of
            // `read` vouches for, and no other piece holds these bytes; it has checked that every
            // extent ends within the file.
            let found =
                unsafe { store::fetch(connection, &file.path, file.size, parts, batch.control)? };
            found.into_iter().try_for_each(|mismatch| self.check(batch, file, mismatch))?;
            self.stats.bytes_verified += verified;
        } else {
            let size = self.segments.last().map_or(0, |s| s.buffer_end(1));
            let memory = self.buffer.at_least(index(size));
            let memory = memory.map_err(|e| Error::io("read", &file.path, e))?.as_mut_ptr();
            let parts = scatter::whole(&self.segments, memory);
            // SAFETY: the buffer has room for every segment at its own place, and is this thread's
            // alone; segments lie in the file, as above.
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

    /// Returns the error for a block that went straight to its destination and differs from its
    /// digest.
    fn check(&self, batch: &Batch, file: &FileRef, found: Mismatch) -> Result<()> {
        // Tensors of a file of `torch.save` may begin at one byte and end apart.
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
                    // Some file systems refuse single reads (compressed extents, inline data): read
                    // those plainly.
                    Err((_, e)) if e.raw_os_error() == Some(libc::EINVAL) => {}
                    Err((at, e)) => {
                        return Err(failed(file, self.open.plain(batch, index).ok(), at, e));
                    }
                }
            }
            // The segments keep the places that the alignment gave them.
        }
        let plain = self.open.plain(batch, index)?;
        bounce::fill(&mut self.buffer, plain, &self.segments, None, room)
            .map_err(|(at, e)| failed(file, Some(plain), at, e))
    }

    /// Checks the fetched extents and copies them to their destinations.
    fn deliver(&mut self, batch: &Batch, number: u32, mapped: bool) -> Result<()> {
        let Worker { open, buffer, extents, segments, stats } = self;
        let file = &batch.files[number as usize];
        let mapping = mapped.then(|| open.mapped(batch, number)).flatten();
        // Finds byte `offset` of the file in memory, for an offset within the segment.
        let locate = |segment: usize, offset: u64| -> *const u8 {
            let Segment { start, at, .. } = segments[segment];
            match mapping {
                Some(mapping) => mapping.as_ptr().wrapping_add(index(offset)),
                None => buffer.as_ptr().wrapping_add(index(at + (offset - start))),
            }
        };
        // The bytes that were hashed last, and what to: neighbours often share a block. Blocks of
        // two chunks may begin at one byte and end apart.
        let mut hashed: Option<((u64, u64), u64)> = None;
        let check = |number: u32, block, got| {
            verify::compare(file, &batch.reqs[number as usize], block, got, batch.catalog)
        };
        for extent in extents.iter() {
            let piece = &batch.plan.pieces[extent.piece];
            let req = &batch.reqs[piece.req as usize];
            if let Some(visitor) = batch.visitor {
                // SAFETY: as of the blocks below.
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
                    // SAFETY: `fetch` covers its blocks whole and lies within its segment, which was populated or read;
                    // the planner has checked that it ends within the file. Published files do not
                    // change. The destination is as below.
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
            // SAFETY: the source: all of the extent lies in its segment, as above. The destination:
            // the planner only divides the request's rectangle, all of which the caller of `read`
            // vouches for, and no other piece holds these bytes. A fence follows in `job`.
            unsafe {
                let src = locate(extent.segment, extent.src);
                match req.operation {
                    Operation::Copy => {
                        copy_strided_unfenced(dst, src, loops, piece.run, batch.stores);
                    }
                    Operation::Accumulate(sink) => {
                        sink.run(dst, src, &there(req, loops), piece.run);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Loops whose steps of the destination are in bytes of what is there.
pub(super) fn there(req: &ReadReq, loops: &[Loop]) -> SmallVec<[Loop; 4]> {
    let there = |l: &Loop| Loop { dst: at_destination(req, l.dst), ..*l };
    loops.iter().map(there).collect()
}

/// Bytes of the destination for so many bytes of stored elements.
fn at_destination(req: &ReadReq, stored: u64) -> u64 {
    let size = req.operation.element_size(req.itemsize);
    // A plain copy may be cut within an element.
    if size == req.itemsize {
        return stored;
    }
    stored / req.itemsize * size
}

/// Offsets in files and destinations that are in memory fit in it.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// The error for a read at `offset` that failed; `open`: the file that was read.
fn failed(file: &FileRef, open: Option<&File>, offset: u64, error: io::Error) -> Error {
    let length = open.and_then(|open| Some(open.metadata().ok()?.len()));
    match length {
        Some(length) if length < file.size => Error::corrupt_data(
            &file.path,
            "",
            offset,
            format!("the file ends at byte {length}, and its length was {} before", file.size),
        ),
        // Populating a mapping answers so where a touch would be a bus error: here the disk failed.
        _ if error.raw_os_error() == Some(libc::EFAULT) => {
            Error::io("read", &file.path, io::Error::from_raw_os_error(libc::EIO))
        }
        _ => Error::io("read", &file.path, error),
    }
}
