//! The threads that fill slabs, and the queue between them and the consumer.
#![allow(unsafe_code)] // slabs are handed over by address

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::pack::ALIGN;
use super::plan::Plan;
use crate::read::{Destination, ReadStats, Sequential};
use crate::{Control, Error, Result, parallel};

/// Memory for one batch: [`Plan::slab_bytes`] at an address that is a multiple of [`ALIGN`].
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
    /// No batch was filled within the given time.
    Waiting,
    /// Every batch has been handed out.
    Done,
}

/// A load in progress. On drop it stops its threads and waits for them.
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
    /// Signals that a batch is filled, or that something failed.
    filled: Condvar,
    /// Signals that a slab is free, or that there is no more work.
    freed: Condvar,
}

#[derive(Default)]
struct State {
    free: Vec<usize>,
    /// Number of batches that threads have taken.
    taken: usize,
    /// The slabs of batches that were taken and not yet handed out, in order; `None` until a slab
    /// is filled.
    ahead: VecDeque<Option<usize>>,
    /// Number of batches handed out.
    handed: usize,
    error: Option<Error>,
    closed: bool,
    stats: ReadStats,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No thread panics while it holds the lock.
        parallel::lock(&self.state)
    }
}

impl Session {
    /// Begins to fill slabs, on up to `workers` threads.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no thread to spare; those of [`connect`].
    ///
    /// # Safety
    /// All bytes of every slab are valid for writes from any thread until [`close`](Self::close)
    /// returns or the session is dropped. No two slabs overlap. The caller accesses a slab only
    /// between [`next`](Self::next) and [`release`](Self::release). No data file is truncated
    /// meanwhile.
    pub unsafe fn start(plan: Arc<Plan>, slabs: Vec<Slab>, workers: usize) -> Result<Self> {
        let misplaced = |slab: &Slab| !(slab.0.0.addr() as u64).is_multiple_of(ALIGN);
        if slabs.is_empty() || slabs.iter().any(misplaced) {
            return Err(Error::Plan(format!(
                "slabs are at multiples of {ALIGN}, and at least one"
            )));
        }
        let workers = parallel::affordable(workers.clamp(1, slabs.len()).min(plan.batches.len()));
        // The threads own the connection, which closes with the last of them.
        let connection = plan.reads.connect()?;
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
                // Continue with fewer threads.
                Err(_) if !threads.is_empty() => break,
                Err(error) => {
                    return Err(Error::io(
                        "start a thread for",
                        session.shared.plan.reads.index().path(),
                        error,
                    ));
                }
            }
        }
        *parallel::lock(&session.threads) = threads;
        Ok(session)
    }

    /// Returns the next batch in order, once its slab is filled. Waits for up to `timeout`.
    ///
    /// # Errors
    /// - The reason why a slab could not be filled: see [`read`](crate::read::read). Later calls
    ///   return [`Error::Interrupted`].
    /// - [`Error::Plan`] in a fork of the process that began the load.
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

    /// Returns a slab that [`next`](Self::next) handed out.
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

    /// Stops the threads and waits for them. After this returns, nothing accesses the slabs.
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
        let threads = std::mem::take(&mut *parallel::lock(&self.threads));
        for thread in threads {
            // Panics were caught, and returned as errors.
            let _ = thread.join();
        }
    }

    /// Returns the counts of threads that have ended.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        if self.is_own() { self.shared.lock().stats } else { ReadStats::default() }
    }

    /// Returns whether this process began the load. A fork has none of the threads, and one of them
    /// may have held the lock.
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
    while let Some((batch, slab)) = take(shared) {
        let slab_at = shared.slabs[slab].0.0;
        // SAFETY: the pieces of a batch are disjoint and inside its slab. Only this thread uses the
        // slab until it is handed out. The caller of `start` guarantees its memory.
        let filled = catch_unwind(AssertUnwindSafe(|| unsafe {
            shared.plan.reads.read(batch, slab_at, &mut reader, &shared.control)
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
                // Keep only the first error, since it stops the other threads.
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

/// Takes a batch and a slab for it; returns `None` if there is no more work.
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
