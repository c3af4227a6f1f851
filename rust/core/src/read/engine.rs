//! Carries out a plan: workers that live for one call take jobs, fetch them, check them and copy them out.
#![allow(unsafe_code)] // Writes to destinations and reads from mappings: this is one of the few places that need it.

mod sequential;

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::bounce::Bounce;
use super::plan::{Extent, Job, Plan, Policy, Segment, plan};
use super::verify;
use super::{Catalog, FileRef, IoMode, ReadOptions, ReadReq, ReadStats};
use crate::copy::{Stores, copy_strided_unfenced, copy_with_digest_unfenced, fence};
use crate::format::{BLOCK_SIZE, block_digest};
use crate::store::{Mapping, direct_align, is_remote, resident_bytes};
use crate::{Control, Error, Result};

pub use sequential::{Sequential, Survey};

/// Bytes of a job that is copied from a mapping: large against the cost of a job, small against the work of a thread.
const MAPPED_JOB: u64 = 2 << 20;
/// Bytes of a job that waits for a disk.
const DISK_JOB: u64 = 2 << 20;
/// Bytes of a job read from the page cache: buffer and all must stay in the second-level cache.
const CACHED_JOB: u64 = 512 << 10;
/// Jobs are made smaller than the above to give every thread some, but never below this.
const MIN_JOB: u64 = 256 << 10;
/// Reads in flight that keep a disk busy, whatever the number of cores.
const DISK_DEPTH: usize = 16;
/// The same for reads so small that their number is what limits the disk.
const SMALL_READ_DEPTH: usize = 64;
/// What counts as such.
const SMALL_READ: u64 = 32 << 10;
/// Files opened to be checked are kept open for the workers, if there are no more than this many.
const KEEP_OPEN: usize = 64;
/// From here on a batch is streamed: what it writes would not stay in a cache anyway.
const STREAM_BATCH: u64 = 1 << 20;
/// Of a file that is taken as resident, at most one part in this many is not.
const MISSING_PART: u64 = 32;
/// Below this, setting up a mapping costs more than it saves.
const SMALL: u64 = 128 << 10;

/// How one file is read in this call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Mapped,
    /// From the page cache, by as many threads as copy.
    Cached,
    /// From storage through the page cache.
    Buffered,
    /// From storage past the page cache.
    Direct {
        align: u64,
    },
}

impl Access {
    /// Whether more threads than cores are useful.
    fn waits(self) -> bool {
        matches!(self, Self::Buffered | Self::Direct { .. })
    }

    fn policy(self, share: u64) -> Policy {
        let (target, align) = match self {
            Self::Mapped => (MAPPED_JOB, 1),
            Self::Cached => (CACHED_JOB, 1),
            Self::Buffered => (DISK_JOB, 1),
            Self::Direct { align } => (DISK_JOB, align),
        };
        Policy {
            target: share.next_power_of_two().clamp(MIN_JOB, target),
            align,
            skip_gaps: self != Self::Mapped,
        }
    }
}

/// Fills every destination, in parallel; returns when all is written. The first error stops the rest.
///
/// # Errors
/// [`Error::CorruptData`] for a file that is missing, of another length or time than expected, or a block that differs from
/// its digest; [`Error::Io`]; [`Error::Plan`] for a request that reaches out of its chunk;
/// [`Error::Interrupted`] after [`Control::cancel`]. Destinations may then be partly written.
///
/// # Safety
/// For every request, all the bytes that `shape` and `dst_strides` reach from `dst` are valid for writes from any thread until
/// this returns, and no two requests reach the same byte. No file is made shorter while this runs.
pub unsafe fn read(
    files: &[FileRef],
    reqs: &[ReadReq],
    catalog: &dyn Catalog,
    options: &ReadOptions,
    control: &Control,
) -> Result<ReadStats> {
    control.check()?;
    let wanted = spans(files, reqs)?;
    let total: u64 = wanted.iter().fold(0, |sum, w| sum.saturating_add(w.bytes));
    let threads = match options.threads {
        // Asking for the number of cores takes longer than a small batch.
        0 if total < MIN_JOB => 1,
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let (access, open) = survey(files, &wanted, options)?;
    let policies: Vec<Policy> = access
        .iter()
        .map(|access| {
            let workers = if access.waits() {
                threads.max(DISK_DEPTH)
            } else {
                threads
            };
            access.policy(total / (workers as u64 * 4))
        })
        .collect();
    let plan = plan(files, reqs, &policies, options.verify, catalog)?;
    let mut queues = [Queue::default(), Queue::default()];
    for (i, job) in plan.jobs.iter().enumerate() {
        queues[usize::from(access[job.file as usize].waits())].jobs.push(i);
    }
    let batch = Batch {
        files,
        reqs,
        catalog,
        verify: options.verify,
        control,
        open: &open,
        access: &access,
        policies: &policies,
        plan,
        queues,
        stores: stores(total),
        stop: AtomicBool::new(false),
        failure: Mutex::new(None),
        stats: Mutex::new(ReadStats::default()),
    };
    batch.run(threads, options.max_inflight_bytes)
}

/// How to copy what a batch of so many bytes wants.
fn stores(total: u64) -> Stores {
    if total < STREAM_BATCH {
        Stores::Cached
    } else {
        Stores::Streaming
    }
}

/// What is wanted of a file.
#[derive(Clone, Copy, Debug, Default)]
struct Wanted {
    bytes: u64,
    start: u64,
    end: u64,
}

fn spans(files: &[FileRef], reqs: &[ReadReq]) -> Result<Vec<Wanted>> {
    let mut all = vec![Wanted::default(); files.len()];
    for req in reqs {
        let Some(wanted) = all.get_mut(req.file as usize) else {
            return Err(Error::Plan(format!(
                "a request names file {} of {}",
                req.file,
                files.len()
            )));
        };
        // Saturating: what is out of bounds is refused by the planner, this only weighs.
        let bytes = req.shape.iter().fold(req.itemsize, |n, &s| n.saturating_mul(s));
        let start = req.chunk_offset.saturating_add(req.src_offset);
        let steps = req.shape.iter().zip(&req.src_strides);
        let reach = steps.fold(req.itemsize, |n, (&s, &stride)| {
            n.saturating_add(s.saturating_sub(1).saturating_mul(stride))
        });
        let end = start.saturating_add(reach);
        if bytes > 0 {
            wanted.start = if wanted.bytes == 0 {
                start
            } else {
                wanted.start.min(start)
            };
            wanted.end = wanted.end.max(end);
            wanted.bytes = wanted.bytes.saturating_add(bytes);
        }
    }
    Ok(all)
}

/// Opens and checks every file that is needed before a byte of any is read, and decides how to read each.
fn survey(files: &[FileRef], wanted: &[Wanted], options: &ReadOptions) -> Result<(Vec<Access>, Vec<Option<File>>)> {
    let mut all = Vec::with_capacity(files.len());
    let mut kept: Vec<Option<File>> = Vec::with_capacity(files.len());
    let keep = wanted.iter().filter(|w| w.bytes > 0).count() <= KEEP_OPEN;
    for (file, wanted) in files.iter().zip(wanted) {
        if wanted.bytes == 0 {
            all.push(Access::Buffered);
            kept.push(None);
            continue;
        }
        let open = file.open(false)?;
        let missing = || {
            let span = wanted.end.saturating_sub(wanted.start);
            resident_bytes(&open, wanted.start, wanted.end)
                .map(|bytes| span.saturating_sub(bytes) > span / MISSING_PART)
        };
        let direct = || {
            let align = direct_align(&open)?;
            file.open(true).ok().map(|_| Access::Direct { align })
        };
        all.push(match options.io {
            IoMode::Mmap => Access::Mapped,
            IoMode::Buffered if missing() == Some(false) => Access::Cached,
            IoMode::Buffered => Access::Buffered,
            IoMode::Direct => direct().unwrap_or(Access::Buffered),
            IoMode::Auto => match (missing(), is_remote(&open)) {
                (Some(false), false) if wanted.bytes >= SMALL => Access::Mapped,
                (Some(false), _) => Access::Cached,
                (_, true) => Access::Buffered,
                (_, false) => direct().unwrap_or(Access::Buffered),
            },
        });
        kept.push(Some(open).filter(|_| keep));
    }
    Ok((all, kept))
}

/// Jobs in the order of files and offsets, and how many were taken.
#[derive(Default)]
struct Queue {
    jobs: Vec<usize>,
    taken: AtomicUsize,
}

struct Batch<'a> {
    files: &'a [FileRef],
    reqs: &'a [ReadReq],
    catalog: &'a dyn Catalog,
    verify: bool,
    control: &'a Control,
    /// Files that are kept open.
    open: &'a [Option<File>],
    access: &'a [Access],
    policies: &'a [Policy],
    plan: Plan,
    /// Jobs that only need a core, and jobs that wait for storage.
    queues: [Queue; 2],
    stores: Stores,
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    stats: Mutex<ReadStats>,
}

impl Batch<'_> {
    fn run(&self, threads: usize, max_inflight: u64) -> Result<ReadStats> {
        let copying = threads.min(self.queues[0].jobs.len());
        let waiting = self.depth(threads, max_inflight).min(self.queues[1].jobs.len());
        std::thread::scope(|scope| {
            // The calling thread is one of them. Where the system refuses a thread, fewer do the work.
            for i in 1..copying + waiting {
                let queue = usize::from(i >= copying);
                let name = std::thread::Builder::new().name("dcp-rs-read".into());
                if name.spawn_scoped(scope, move || self.work(&[queue])).is_err() {
                    break;
                }
            }
            self.work(&[0, 1]);
        });
        if let Some(error) = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        Ok(*self.stats.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How many jobs may wait for storage at a time.
    fn depth(&self, threads: usize, max_inflight: u64) -> usize {
        let (mut largest, mut wanted, mut seeks) = (1, 0, 0);
        for &job in &self.queues[1].jobs {
            let job = &self.plan.jobs[job];
            largest = largest.max(job.buffer);
            wanted += job.wanted;
            seeks += job.seeks;
        }
        let buffers = usize::try_from(max_inflight / largest).unwrap_or(usize::MAX);
        let depth = if wanted / SMALL_READ < seeks {
            SMALL_READ_DEPTH
        } else {
            DISK_DEPTH
        };
        threads.max(depth).min(buffers).max(1)
    }

    fn work(&self, queues: &[usize]) {
        let mut worker = Worker::default();
        for &queue in queues {
            let queue = &self.queues[queue];
            while let Some(&job) = queue.jobs.get(queue.taken.fetch_add(1, Ordering::Relaxed)) {
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                let job = &self.plan.jobs[job];
                let result = self.control.check().and_then(|()| worker.job(self, job));
                if let Err(error) = result {
                    self.stop.store(true, Ordering::Relaxed);
                    let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                    failure.get_or_insert(error);
                    return;
                }
                self.control.add(job.wanted);
            }
        }
        let mut sum = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        sum.bytes_wanted += worker.stats.bytes_wanted;
        sum.bytes_read += worker.stats.bytes_read;
        sum.bytes_direct += worker.stats.bytes_direct;
        sum.bytes_mapped += worker.stats.bytes_mapped;
        sum.bytes_verified += worker.stats.bytes_verified;
        sum.jobs += worker.stats.jobs;
    }
}

/// The one file a worker has open, in the ways that its jobs needed so far. Jobs come sorted by file.
#[derive(Default)]
struct Open {
    file: Option<u32>,
    plain: Option<File>,
    direct: Option<File>,
    mapping: Option<Mapping>,
}

impl Open {
    fn turn_to(&mut self, file: u32) {
        if self.file != Some(file) {
            *self = Self {
                file: Some(file),
                ..Self::default()
            };
        }
    }

    /// The file for reads through the page cache. One that is kept open serves all, but for storage: read-ahead is by open
    /// file, and would take many readers of one for random access.
    fn plain<'o>(&'o mut self, batch: &'o Batch, file: u32) -> Result<&'o File> {
        let kept = batch.open[file as usize].as_ref();
        match kept.filter(|_| batch.access[file as usize] != Access::Buffered) {
            Some(kept) => Ok(kept),
            None => once(&mut self.plain, || batch.files[file as usize].open(false)),
        }
    }

    fn direct(&mut self, file: &FileRef) -> Result<&File> {
        once(&mut self.direct, || file.open(true))
    }

    fn mapping(&mut self, batch: &Batch, file: u32) -> Result<&Mapping> {
        let mapping = match self.mapping.take() {
            Some(mapping) => mapping,
            None => Mapping::new(self.plain(batch, file)?)
                .map_err(|e| Error::io("map", &batch.files[file as usize].path, e))?,
        };
        Ok(self.mapping.insert(mapping))
    }
}

fn once<T>(slot: &mut Option<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    match slot {
        Some(made) => Ok(made),
        None => Ok(slot.insert(make()?)),
    }
}

#[derive(Default)]
struct Worker {
    open: Open,
    bounce: Bounce,
    extents: Vec<Extent>,
    segments: Vec<Segment>,
    stats: ReadStats,
}

impl Worker {
    fn job(&mut self, batch: &Batch, job: &Job) -> Result<()> {
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
        self.open.turn_to(job.file);
        let mapped = batch.access[index] == Access::Mapped;
        if mapped {
            // Touching the pages cannot fail once they are set up.
            let mapping = self.open.mapping(batch, job.file)?;
            for segment in &self.segments {
                let populated = mapping.populate(segment.start, segment.end);
                populated.map_err(|e| failed(file, segment.start, e))?;
            }
        } else {
            self.fill(batch, job.file)?;
        }
        let delivered = self.deliver(batch, file, mapped);
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

    /// Reads the segments into the bounce buffer.
    fn fill(&mut self, batch: &Batch, index: u32) -> Result<()> {
        let file = &batch.files[index as usize];
        let bytes: u64 = self.segments.iter().map(|s| s.end - s.start).sum();
        self.stats.bytes_read += bytes;
        if let Access::Direct { align } = batch.access[index as usize] {
            let plain = self.open.plain(batch, index)?;
            let cached = |s: &Segment| resident_bytes(plain, s.start, s.end) == Some(s.end - s.start);
            if !self.segments.iter().all(cached) {
                match self.bounce.fill(self.open.direct(file)?, &self.segments, Some(align)) {
                    Ok(()) => {
                        self.stats.bytes_direct += bytes;
                        return Ok(());
                    }
                    // Some file systems refuse single reads (compressed extents, inline data): read those plainly.
                    Err((_, e)) if e.raw_os_error() == Some(libc::EINVAL) => {}
                    Err((at, e)) => return Err(failed(file, at, e)),
                }
            }
            // The segments keep the places that the alignment gave them.
        }
        let plain = self.open.plain(batch, index)?;
        self.bounce
            .fill(plain, &self.segments, None)
            .map_err(|(at, e)| failed(file, at, e))
    }

    /// Checks the fetched extents and copies them to their destinations.
    fn deliver(&mut self, batch: &Batch, file: &FileRef, mapped: bool) -> Result<()> {
        let Worker {
            open,
            bounce,
            extents,
            segments,
            stats,
        } = self;
        let mapping = open.mapping.as_ref().filter(|_| mapped);
        // Where byte `offset` of the file is in memory, for an offset within the segment.
        let locate = |segment: usize, offset: u64| -> *const u8 {
            let Segment { start, at, .. } = segments[segment];
            match mapping {
                Some(mapping) => mapping.as_ptr().wrapping_add(index(offset)),
                None => bounce.as_ptr().wrapping_add(index(at + (offset - start))),
            }
        };
        // The block that was hashed last: neighbours often share one.
        let mut checked = None;
        for extent in extents.iter() {
            let piece = &batch.plan.pieces[extent.piece];
            let req = &batch.reqs[piece.req as usize];
            let (loops, sparse) = batch.plan.loops_of(piece);
            let loops = &loops[sparse..];
            let dst = req.dst.0.wrapping_add(index(extent.dst));
            let mut copied = false;
            if batch.verify && req.digests.is_some() {
                let first = (extent.fetch.0 - req.chunk_offset) / BLOCK_SIZE;
                let end = (extent.fetch.1 - req.chunk_offset).div_ceil(BLOCK_SIZE);
                copied = loops.is_empty() && end - first == 1 && checked != Some((req.chunk_offset, first));
                for block in first..end {
                    if checked == Some((req.chunk_offset, block)) {
                        continue;
                    }
                    let (from, to) = verify::block_range(req, block);
                    let (bytes, length) = (locate(extent.segment, from), index(to - from));
                    // SAFETY: `fetch` covers its blocks whole and lies within its segment, which was populated or read;
                    // the planner has checked that it ends within the file. Published files do not change. The
                    // destination is as below.
                    let got = unsafe {
                        if copied {
                            let (at, len) = (index(extent.src - from), index(extent.len));
                            copy_with_digest_unfenced(dst, bytes, length, at, len, batch.stores)
                        } else {
                            block_digest(std::slice::from_raw_parts(bytes, length))
                        }
                    };
                    verify::compare(file, req, block, got, batch.catalog)?;
                    stats.bytes_verified += to - from;
                    checked = Some((req.chunk_offset, block));
                }
            }
            if copied {
                continue;
            }
            // SAFETY: the source: all of the extent lies in its segment, as above. The destination: the planner only
            // divides the request's rectangle, all of which the caller of `read` vouches for, and no other
            // piece holds these bytes. A fence follows in `job`.
            unsafe {
                let src = locate(extent.segment, extent.src);
                copy_strided_unfenced(dst, src, loops, piece.run, batch.stores);
            }
        }
        Ok(())
    }
}

/// Offsets in files and destinations that are in memory fit in it.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

fn failed(file: &FileRef, offset: u64, error: io::Error) -> Error {
    // EFAULT is what populating a mapping says of a page beyond the end of the file.
    if error.kind() == io::ErrorKind::UnexpectedEof || error.raw_os_error() == Some(libc::EFAULT) {
        Error::corrupt_data(
            &file.path,
            "",
            offset,
            format!(
                "the file ends before byte {}, its length is not {} any more",
                offset, file.size
            ),
        )
    } else {
        Error::io("read", &file.path, error)
    }
}
