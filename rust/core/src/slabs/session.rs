//! The threads that fill slabs, and the queue between them and the consumer.
#![allow(unsafe_code)] // slabs are handed over by address

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::pack::ALIGN;
use super::plan::Plan;
use crate::checkpoint::explain;
use crate::read::{Destination, ReadReq, ReadStats, Sequential, connect};
use crate::{Control, Error, Result, parallel};

/// Memory for one batch: [`Plan::slab_bytes`] from an address that is a multiple of [`ALIGN`].
#[derive(Clone, Copy, Debug)]
pub struct Slab(pub Destination);

/// Result of [`Session::next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// This batch is in this slab.
    Filled {
        /// Index in [`Plan::batches`].
        batch: usize,
        /// Index of the slab.
        slab: usize,
    },
    /// Not within the time given.
    Waiting,
    /// Every batch has been handed out.
    Done,
}

/// A load in progress. Dropped, it stops its threads and waits for them.
pub struct Session {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    process: u32,
}

struct Shared {
    plan: Arc<Plan>,
    slabs: Vec<Slab>,
    control: Control,
    state: Mutex<State>,
    /// A batch is filled, or something failed.
    filled: Condvar,
    /// A slab is free, or there is nothing more to do.
    freed: Condvar,
}

#[derive(Default)]
struct State {
    free: Vec<usize>,
    /// Batches taken by a thread.
    taken: usize,
    /// For the batches taken and not handed out, in order: the slab, once it is filled.
    ahead: VecDeque<Option<usize>>,
    /// Batches handed out.
    handed: usize,
    error: Option<Error>,
    closed: bool,
    stats: ReadStats,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Begins to fill slabs, on up to `workers` threads.
    ///
    /// # Errors
    /// The system has no thread to give; those of [`connect`].
    ///
    /// # Safety
    /// All bytes of every slab are valid for writes from any thread until [`close`](Self::close)
    /// has returned or the session is dropped, and no two slabs overlap. A slab is neither read nor
    /// written by others but between [`next`](Self::next) and [`release`](Self::release). No data
    /// file is made shorter meanwhile.
    pub unsafe fn start(plan: Arc<Plan>, slabs: Vec<Slab>, workers: usize) -> Result<Self> {
        let misplaced = |slab: &Slab| !(slab.0.0.addr() as u64).is_multiple_of(ALIGN);
        if slabs.is_empty() || slabs.iter().any(misplaced) {
            return Err(Error::Plan(format!(
                "slabs are at multiples of {ALIGN}, and at least one"
            )));
        }
        let workers = parallel::affordable(workers.clamp(1, slabs.len()).min(plan.batches.len()));
        // The threads have it, and with the last of them it ends.
        let connection = connect(&plan.files, plan.threads)?;
        let state = State { free: (0..slabs.len()).rev().collect(), ..State::default() };
        let session = Self {
            shared: Arc::new(Shared {
                plan,
                slabs,
                control: Control::new(),
                state: Mutex::new(state),
                filled: Condvar::new(),
                freed: Condvar::new(),
            }),
            threads: Mutex::default(),
            process: std::process::id(),
        };
        let mut threads = Vec::with_capacity(workers);
        for _ in 0..workers {
            let (shared, reader) =
                (Arc::clone(&session.shared), Sequential::new(connection.clone()));
            let thread = std::thread::Builder::new().name("dcp-rs-slab".into());
            match thread.spawn(move || work(&shared, reader)) {
                Ok(thread) => threads.push(thread),
                // Fewer do the work.
                Err(_) if !threads.is_empty() => break,
                Err(error) => {
                    return Err(Error::io(
                        "start a thread for",
                        session.shared.plan.index.path(),
                        error,
                    ));
                }
            }
        }
        *session.threads.lock().unwrap_or_else(PoisonError::into_inner) = threads;
        Ok(session)
    }

    /// The next batch in order, once its slab is filled; waits for up to `timeout`.
    ///
    /// # Errors
    /// Why a slab could not be filled, those of [`read`](crate::read::read); what comes after is
    /// [`Error::Interrupted`]. [`Error::Plan`] in a fork of the process that began the load.
    pub fn next(&self, timeout: Duration) -> Result<Next> {
        if !self.is_own() {
            return Err(Error::Plan(
                "this load was begun before a fork, and its threads are in the parent process"
                    .into(),
            ));
        }
        let shared = &*self.shared;
        let mut state = shared.lock();
        loop {
            if let Some(error) = state.error.take() {
                state.closed = true;
                return Err(error);
            }
            if state.handed == shared.plan.batches.len() {
                return Ok(Next::Done);
            }
            if state.closed {
                return Err(Error::Interrupted);
            }
            if let Some(&Some(slab)) = state.ahead.front() {
                state.ahead.pop_front();
                state.handed += 1;
                let batch = state.handed - 1;
                return Ok(Next::Filled { batch, slab });
            }
            let (guard, waited) =
                shared.filled.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if waited.timed_out()
                && state.error.is_none()
                && !matches!(state.ahead.front(), Some(Some(_)))
            {
                return Ok(Next::Waiting);
            }
        }
    }

    /// Gives back a slab that [`next`](Self::next) handed out.
    pub fn release(&self, slab: usize) {
        if !self.is_own() {
            return;
        }
        let mut state = self.shared.lock();
        if slab < self.shared.slabs.len() && !state.free.contains(&slab) {
            state.free.push(slab);
            self.shared.freed.notify_one();
        }
    }

    /// Stops the threads and waits for them; after that, no slab is touched any more.
    pub fn close(&self) {
        if !self.is_own() {
            if let Ok(mut threads) = self.threads.try_lock() {
                std::mem::take(&mut *threads).into_iter().for_each(std::mem::forget);
            }
            return;
        }
        self.shared.control.cancel();
        self.shared.lock().closed = true;
        self.shared.freed.notify_all();
        self.shared.filled.notify_all();
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // Panics were caught, and handed out as errors.
            let _ = thread.join();
        }
    }

    /// Returns the statistics of threads that have ended.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        if self.is_own() { self.shared.lock().stats } else { ReadStats::default() }
    }

    /// Returns whether this process began the load. A fork has none of the threads, and one of them
    /// may have had the lock of the state.
    fn is_own(&self) -> bool {
        std::process::id() == self.process
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

fn work(shared: &Shared, mut reader: Sequential) {
    let mut requests = Vec::new();
    while let Some((batch, slab)) = take(shared) {
        let filled = catch_unwind(AssertUnwindSafe(|| {
            fill(shared, batch, slab, &mut reader, &mut requests)
                .map_err(|error| explain(&shared.plan.index, error, &shared.control))
        }))
        .unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            Err(Error::Internal(format!("while batch {batch} was read: {said}")))
        });
        let mut state = shared.lock();
        match filled {
            Ok(()) => {
                let place = batch - state.handed;
                state.ahead[place] = Some(slab);
            }
            Err(error) => {
                // Only the first: the others stop because of it.
                if !state.closed {
                    state.error.get_or_insert(error);
                }
                shared.control.cancel();
                state.closed = true;
                shared.freed.notify_all();
            }
        }
        drop(state);
        shared.filled.notify_all();
    }
    shared.lock().stats += reader.stats();
}

/// A batch and a slab for it; none when there is nothing more to do.
fn take(shared: &Shared) -> Option<(usize, usize)> {
    let mut state = shared.lock();
    loop {
        if state.closed || state.taken == shared.plan.batches.len() {
            return None;
        }
        if let Some(slab) = state.free.pop() {
            state.taken += 1;
            state.ahead.push_back(None);
            let batch = state.taken - 1;
            if state.taken == shared.plan.batches.len() {
                shared.freed.notify_all();
            }
            return Some((batch, slab));
        }
        state = shared.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

fn fill(
    shared: &Shared,
    batch: usize,
    slab: usize,
    reader: &mut Sequential,
    requests: &mut Vec<ReadReq>,
) -> Result<()> {
    let plan = &*shared.plan;
    let base = shared.slabs[slab].0.0;
    let wanted = &plan.requests[plan.ranges[batch].clone()];
    requests.clear();
    requests.extend(wanted.iter().map(|request| ReadReq {
        dst: Destination(base.wrapping_add(request.dst.0.addr())),
        ..request.clone()
    }));
    // SAFETY: the pieces of a batch lie in its slab, apart from each other; the slab is this
    // thread's until it is handed out, and valid, as the caller of `start` promised.
    unsafe {
        reader.read(&plan.files, requests, &plan.probe, plan.verify, &*plan.index, &shared.control)
    }
}
