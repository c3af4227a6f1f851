//! Execution of a plan: workers, which live for one call, take jobs until none is left or one
//! fails.
#![allow(unsafe_code)] // `read` is unsafe to call: it writes to given addresses

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::batch::{Batch, Visitor, change_signs, stores};
use super::coded;
use super::plan::{Job, plan};
use super::policy::{Access, MIN_JOB, Policy, SMALL_READ, SMALL_READ_DEPTH};
use super::probe::{self, CachedHandle, connect, probe, spans};
use super::scatter;
use super::worker::Worker;
use super::{Catalog, Destination, FileRef, ReadOptions, ReadReq, ReadStats, Verify, verify};
use crate::store::Buffer;
use crate::{Control, Error, Result, parallel};

/// Fills every destination, in parallel, and stops at the first error.
///
/// # Errors
/// - [`Error::CorruptData`] for a file that is missing or that has another length or modification
///   time, and for a block that does not match its digest.
/// - [`Error::Plan`] for a request that exceeds its chunk.
/// - [`Error::Interrupted`] after [`Control::cancel`].
/// - [`Error::Io`].
///
/// After an error, destinations may be partly written.
///
/// # Safety
/// For every request, all bytes that `shape` and `dst_strides` reach from `dst` are valid for
/// writes from any thread until this returns. No two requests reach the same byte. No file is
/// truncated while this runs.
pub unsafe fn read(
    files: &[FileRef],
    reqs: &[ReadReq],
    catalog: &dyn Catalog,
    options: &ReadOptions,
    control: &Control,
) -> Result<ReadStats> {
    let (reqs, coded) = coded::split_off_coded(reqs);
    // SAFETY: the caller guarantees it.
    let mut stats = unsafe { carry_out(files, &reqs, catalog, options, None, control)? };
    // SAFETY: the caller guarantees it, and all elements were just written.
    unsafe { change_signs(&reqs) };
    // SAFETY: the caller guarantees it.
    stats += unsafe { coded::read(files, &coded, options, control)? };
    Ok(stats)
}

/// A range of a file of at most one block, [`BLOCK_SIZE`](crate::format::BLOCK_SIZE) bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileRange {
    /// The file, as an index in the slice given to [`visit`].
    pub file: u32,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Reads ranges of files in parallel, and calls `visitor` with the number and the bytes of each.
/// Stops at its first error.
///
/// # Errors
/// Those of [`read`] for files, and those of the visitor.
pub(crate) fn visit(
    files: &[FileRef],
    ranges: &[FileRange],
    threads: usize,
    visitor: Visitor<'_>,
    control: &Control,
) -> Result<()> {
    let options = ReadOptions {
        threads,
        // Makes the planner split jobs only between blocks, and so between ranges.
        verify: Verify::All,
        ..ReadOptions::default()
    };
    let nowhere = Destination(std::ptr::null_mut());
    let request = |range: &FileRange| ReadReq {
        digests: Some(0),
        ..ReadReq::bytes(range.file, 0, range.offset, range.length, nowhere)
    };
    let requests: Vec<ReadReq> = ranges.iter().map(request).collect();
    // SAFETY: with a visitor, no destination is used.
    unsafe { carry_out(files, &requests, &Nameless, &options, Some(visitor), control)? };
    Ok(())
}

/// For reads that compare no digest, and so need no names.
struct Nameless;

impl Catalog for Nameless {
    fn tensor_name(&self, _: u32) -> String {
        String::new()
    }

    fn digest(&self, _: u64) -> u64 {
        0
    }
}

/// Carries out [`read`], or with a visitor [`visit`].
///
/// # Safety
/// That of [`read`], without a visitor.
unsafe fn carry_out(
    files: &[FileRef],
    reqs: &[ReadReq],
    catalog: &dyn Catalog,
    options: &ReadOptions,
    visitor: Option<Visitor<'_>>,
    control: &Control,
) -> Result<ReadStats> {
    control.check()?;
    let wanted = spans(files, reqs, options, catalog)?;
    let total: u64 = wanted.iter().fold(0, |sum, w| sum.saturating_add(w.bytes));
    let threads = match options.threads {
        // Looking up the number of cores takes longer than a small batch.
        0 if total < MIN_JOB => 1,
        0 => parallel::available(),
        n => n,
    };
    let probe::Found { access, kept, mappings, opening_waits } = probe(files, &wanted, options)?;
    let policies: Vec<Policy> = access
        .iter()
        .map(|access| {
            // The slowest request determines the time of a small load from a store, so each worker
            // gets one. Gaps between rows are fetched as well. The ranks of a machine share its
            // connections.
            let workers = match access {
                Access::Remote => threads.max(access.depth() / options.local_ranks.max(1)),
                _ if access.waits() => threads.max(access.depth()),
                _ => threads,
            };
            let share = match access {
                Access::Remote => wanted.iter().fold(0_u64, |sum, w| sum.saturating_add(w.reach)),
                _ => total / 4,
            };
            access.policy(share / workers as u64)
        })
        .collect();
    let connection = connect(files, threads)?;
    let (verify, reqs) = verify::chosen(reqs, options.verify, &access);
    let (plan, reqs) = (plan(files, &reqs, &policies, verify, catalog)?, &*reqs);
    let mut call = Call {
        batch: Batch {
            files,
            reqs,
            catalog,
            verify,
            visitor,
            kept: &kept,
            mappings: &mappings,
            access: &access,
            policies: &policies,
            plan,
            stores: stores(total),
            connection: connection.as_deref(),
            control,
        },
        control,
        opening_waits,
        queues: Default::default(),
        stop: AtomicBool::new(false),
        failure: Mutex::new(None),
        stats: Mutex::new(ReadStats::default()),
    };
    call.sort();
    let workers = call.workers(threads, options.max_inflight_bytes);
    let stats = call.run(workers)?;
    for (file, wanted) in files.iter().zip(&wanted) {
        file.count(wanted.bytes);
    }
    Ok(stats)
}

/// Jobs in the order of files and offsets, and the number of jobs taken.
#[derive(Default)]
struct Queue {
    jobs: Vec<usize>,
    taken: AtomicUsize,
}

/// The queues of a call: jobs that only need a core, jobs that wait for storage without a buffer,
/// and jobs that wait and need a buffer.
const COPIED: usize = 0;
const STRAIGHT: usize = 1;
const BUFFERED: usize = 2;

/// Returns the queue of a job.
fn queue(access: Access, waits_to_open: bool, goes_straight: impl FnOnce() -> bool) -> usize {
    if !waits_to_open && !access.waits() {
        COPIED
    } else if access.maps() || access == Access::Remote && goes_straight() {
        STRAIGHT
    } else {
        BUFFERED
    }
}

/// One call: its batch, and the progress of its workers.
struct Call<'a> {
    batch: Batch<'a>,
    control: &'a Control,
    opening_waits: bool,
    queues: [Queue; 3],
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    stats: Mutex<ReadStats>,
}

impl Call<'_> {
    /// Adds every job to its queue.
    fn sort(&mut self) {
        for (i, job) in self.batch.plan.jobs.iter().enumerate() {
            let access = self.batch.access[job.file as usize];
            let waits = self.waits_to_open(job);
            let queue = queue(access, waits, || scatter::goes_straight(&self.batch, job));
            self.queues[queue].jobs.push(i);
        }
    }

    /// Returns whether a worker has to open the file of a job, and waits for that.
    fn waits_to_open(&self, job: &Job) -> bool {
        self.opening_waits && matches!(self.batch.kept[job.file as usize], CachedHandle::Nothing)
    }

    /// Returns the number of workers of each queue.
    fn workers(&self, threads: usize, max_inflight: u64) -> [usize; 3] {
        let depth = self.depth(threads);
        let buffered = depth.min(self.buffers(max_inflight)).min(self.queues[BUFFERED].jobs.len());
        let straight = (depth - buffered).max(1).min(self.queues[STRAIGHT].jobs.len());
        let copying = threads.min(self.queues[COPIED].jobs.len());
        [copying, straight, buffered]
    }

    fn run(&self, [copying, straight, buffered]: [usize; 3]) -> Result<ReadStats> {
        std::thread::scope(|scope| {
            // The calling thread is a worker too. If the system refuses a thread, fewer do the
            // work.
            for i in 1..parallel::affordable(buffered + straight + copying) {
                let queues: &[usize] = if i < buffered {
                    // A worker with a buffer can also do jobs without one.
                    &[BUFFERED, STRAIGHT]
                } else if i < buffered + straight {
                    &[STRAIGHT]
                } else {
                    &[COPIED]
                };
                let name = std::thread::Builder::new().name("dcp-rs-read".into());
                if name.spawn_scoped(scope, move || self.work(queues)).is_err() {
                    break;
                }
            }
            self.work(&[BUFFERED, STRAIGHT, COPIED]);
        });
        if let Some(error) = parallel::lock(&self.failure).take() {
            return Err(error);
        }
        Ok(*parallel::lock(&self.stats))
    }

    fn jobs(&self, queue: usize) -> impl Iterator<Item = &Job> {
        self.queues[queue].jobs.iter().map(|&job| &self.batch.plan.jobs[job])
    }

    /// Returns the number of jobs that keep storage busy.
    fn depth(&self, threads: usize) -> usize {
        let (mut wanted, mut seeks, mut most, mut opening) = (0, 0, 0, false);
        for job in self.jobs(STRAIGHT).chain(self.jobs(BUFFERED)) {
            most = most.max(self.batch.access[job.file as usize].depth());
            wanted += job.wanted;
            seeks += job.seeks;
            opening |= self.waits_to_open(job);
        }
        let depth = if opening || wanted / SMALL_READ < seeks { SMALL_READ_DEPTH } else { most };
        threads.max(depth)
    }

    /// Returns the limit on the number of buffers, each large enough for any job.
    fn buffers(&self, max_inflight: u64) -> usize {
        let largest = self.jobs(BUFFERED).map(|job| job.buffer).max().unwrap_or_default();
        let footprint = usize::try_from(largest).map_or(usize::MAX, Buffer::footprint) as u64;
        usize::try_from(max_inflight / footprint).unwrap_or(usize::MAX).max(1)
    }

    fn work(&self, queues: &[usize]) {
        let mut worker = Worker::default();
        for &queue in queues {
            let queue = &self.queues[queue];
            while let Some(&job) = queue.jobs.get(queue.taken.fetch_add(1, Ordering::Relaxed)) {
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                let job = &self.batch.plan.jobs[job];
                let result = self.control.check().and_then(|()| worker.job(&self.batch, job));
                if let Err(error) = result {
                    self.stop.store(true, Ordering::Relaxed);
                    let mut failure = parallel::lock(&self.failure);
                    failure.get_or_insert(error);
                    return;
                }
                self.control.add(job.wanted);
            }
        }
        *parallel::lock(&self.stats) += worker.stats;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_from_a_disk_goes_by_way_of_a_buffer() {
        let disk = Access::Direct { align: 512 };
        for (access, straight, expected) in [
            (Access::Mapped, true, COPIED),
            (Access::Cached, true, COPIED),
            (Access::Shared, false, STRAIGHT),
            (Access::Buffered, true, BUFFERED),
            (disk, true, BUFFERED),
            (Access::Remote, true, STRAIGHT),
            (Access::Remote, false, BUFFERED),
        ] {
            assert_eq!(queue(access, false, || straight), expected, "{access:?}");
        }
        assert_eq!(queue(Access::Mapped, true, || true), STRAIGHT);
        assert_eq!(queue(Access::Cached, true, || true), BUFFERED);
    }
}
