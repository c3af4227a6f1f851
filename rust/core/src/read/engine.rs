//! Carries out a plan: workers that live for one call take jobs until none is left, or one fails.
#![allow(unsafe_code)] // `read` is unsafe to call: it writes to addresses that it is given.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::batch::{Batch, change_signs, stores};
use super::plan::plan;
use super::policy::{Access, MIN_JOB, Policy, SMALL_READ, SMALL_READ_DEPTH};
use super::scatter;
use super::survey::{Found, connect, spans, survey};
use super::worker::Worker;
use super::{Catalog, FileRef, ReadOptions, ReadReq, ReadStats};
use crate::store::Buffer;
use crate::{Control, Error, Result};

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
    let wanted = spans(files, reqs, options, catalog)?;
    let total: u64 = wanted.iter().fold(0, |sum, w| sum.saturating_add(w.bytes));
    let threads = match options.threads {
        // Asking for the number of cores takes longer than a small batch.
        0 if total < MIN_JOB => 1,
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let Found {
        access,
        open,
        opening_waits,
    } = survey(files, &wanted, options)?;
    let policies: Vec<Policy> = access
        .iter()
        .map(|access| {
            let workers = if access.waits() {
                threads.max(access.depth())
            } else {
                threads
            };
            // A small load from a store is over when the slowest request is: one each.
            let shares = if *access == Access::Remote { 1 } else { 4 };
            access.policy(total / (workers as u64 * shares))
        })
        .collect();
    let connection = connect(files, threads)?;
    let plan = plan(files, reqs, &policies, options.verify, catalog)?;
    let mut queues = [Queue::default(), Queue::default()];
    for (i, job) in plan.jobs.iter().enumerate() {
        let waits = opening_waits || access[job.file as usize].waits();
        queues[usize::from(waits)].jobs.push(i);
    }
    let call = Call {
        batch: Batch {
            files,
            reqs,
            catalog,
            verify: options.verify,
            open: &open,
            access: &access,
            policies: &policies,
            plan,
            stores: stores(total),
            connection: connection.as_deref(),
            control,
        },
        control,
        opening_waits,
        queues,
        stop: AtomicBool::new(false),
        failure: Mutex::new(None),
        stats: Mutex::new(ReadStats::default()),
    };
    let stats = call.run(threads, options.max_inflight_bytes)?;
    // SAFETY: the caller's promise: all elements were written just now.
    unsafe { change_signs(reqs) };
    Ok(stats)
}

/// Jobs in the order of files and offsets, and how many were taken.
#[derive(Default)]
struct Queue {
    jobs: Vec<usize>,
    taken: AtomicUsize,
}

/// One call: its batch, and how far its workers are.
struct Call<'a> {
    batch: Batch<'a>,
    control: &'a Control,
    opening_waits: bool,
    /// Jobs that only need a core, and jobs that wait for storage.
    queues: [Queue; 2],
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    stats: Mutex<ReadStats>,
}

impl Call<'_> {
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
        let (mut largest, mut wanted, mut seeks, mut most) = (1, 0, 0, 0);
        for &job in &self.queues[1].jobs {
            let job = &self.batch.plan.jobs[job];
            most = most.max(self.batch.access[job.file as usize].depth());
            if !scatter::goes_straight(&self.batch, job) {
                largest = largest.max(job.buffer);
            }
            wanted += job.wanted;
            seeks += job.seeks;
        }
        let footprint = usize::try_from(largest).map_or(usize::MAX, Buffer::footprint) as u64;
        let buffers = usize::try_from(max_inflight / footprint).unwrap_or(usize::MAX);
        let depth = if self.opening_waits || wanted / SMALL_READ < seeks {
            SMALL_READ_DEPTH
        } else {
            most
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
                let job = &self.batch.plan.jobs[job];
                let result = self.control.check().and_then(|()| worker.job(&self.batch, job));
                if let Err(error) = result {
                    self.stop.store(true, Ordering::Relaxed);
                    let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                    failure.get_or_insert(error);
                    return;
                }
                self.control.add(job.wanted);
            }
        }
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) += worker.stats;
    }
}
