//! Threads that live for one call.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Result;
use crate::store::spare_address_space;

/// Number of first calls, which show whether the others will wait.
const FIRST: usize = 8;
/// A call that takes longer waits for a server or for another program: memory accesses take
/// microseconds.
const WAIT: Duration = Duration::from_micros(100);
/// Concurrent calls that wait.
const WAITING: usize = 64;

/// Locks a mutex, even if a thread panicked while it held the lock. Whoever waits for that thread
/// passes the panic on.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `work` with every number below `count`, in order, on up to `workers` threads. One of them
/// is the caller's. After the first error, which is returned, no thread starts another call.
///
/// If the system has no more threads to spare, fewer do the work.
pub(crate) fn for_each(
    count: usize,
    workers: usize,
    work: impl Fn(usize) -> Result<()> + Sync,
) -> Result<()> {
    for_each_with(count, workers, || (), |(), job| work(job))
}

/// Does the same as [`for_each`], with a state for each thread.
pub(crate) fn for_each_with<S>(
    count: usize,
    workers: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let stopped = AtomicBool::new(false);
    let run = || {
        let mut state = state();
        while !stopped.load(Ordering::Relaxed) {
            let job = next.fetch_add(1, Ordering::Relaxed);
            if job >= count {
                break;
            }
            if let Err(error) = work(&mut state, job) {
                stopped.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    };
    let workers = affordable(workers.min(count));
    thread::scope(|scope| {
        let helpers: Vec<_> = (1..workers)
            .map_while(|_| {
                thread::Builder::new().name("dcp-rs".into()).spawn_scoped(scope, run).ok()
            })
            .collect();
        let own = run();
        helpers
            .into_iter()
            .map(|helper| helper.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .fold(own, Result::and)
    })
}

/// Returns `make(0), make(1), … make(count - 1)` in this order, made like [`for_each`]. With 0
/// workers, there are as many as cores.
pub(crate) fn map<T: Send + Sync>(
    count: usize,
    workers: usize,
    make: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let workers = threads(workers);
    let made: Vec<OnceLock<T>> = std::iter::repeat_with(OnceLock::new).take(count).collect();
    for_each(count, workers, |i| {
        let value = make(i)?;
        // Each number occurs once.
        let _ = made[i].set(value);
        Ok(())
    })?;
    Ok(made.into_iter().filter_map(OnceLock::into_inner).collect())
}

/// Result of [`map_waiting`], and whether the call waited.
pub(crate) struct Waited<T> {
    pub made: Vec<T>,
    pub waits: bool,
}

/// Does the same as [`map`], for calls that need no core but may wait, such as opening a file on a
/// network. The first few calls run alone. If even the fastest of them waits, the others run
/// concurrently and are told that calls wait. Otherwise no thread is started.
pub(crate) fn map_waiting<T: Send + Sync>(
    count: usize,
    make: impl Fn(usize, bool) -> Result<T> + Sync,
) -> Result<Waited<T>> {
    let mut made = Vec::with_capacity(count);
    let mut quickest = Duration::MAX;
    for i in 0..FIRST.min(count) {
        let begin = Instant::now();
        made.push(make(i, false)?);
        quickest = quickest.min(begin.elapsed());
    }
    let first = made.len();
    let waits = first > 0 && quickest > WAIT;
    if waits {
        made.append(&mut map(count - first, WAITING, |i| make(first + i, true))?);
    } else {
        for i in first..count {
            made.push(make(i, false)?);
        }
    }
    Ok(Waited { made, waits })
}

/// Runs both at the same time: the first on another thread, if the system has one to spare.
pub(crate) fn both<A: Send, B>(
    first: impl FnOnce() -> A + Send,
    second: impl FnOnce() -> B,
) -> (A, B) {
    // The thread takes the closure instead of owning it, so it is still here if there is no thread.
    let first = Mutex::new(Some(first));
    let run = || {
        let first = lock(&first).take();
        first.expect("it is taken once")()
    };
    thread::scope(|scope| {
        let beside = thread::Builder::new().name("dcp-rs".into()).spawn_scoped(scope, run);
        let second = second();
        let first = match beside {
            Ok(beside) => beside.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => run(),
        };
        (first, second)
    })
}

/// Returns this number of threads. 0 stands for as many as cores.
pub(crate) fn threads(wanted: usize) -> usize {
    if wanted == 0 { available() } else { wanted }
}

/// Returns the number of cores that this process may use, by its affinity and by its cgroup's quota
/// of CPU time. The standard library reads the quota of cgroup v1 and v2.
pub fn available() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Address space of a thread: its stack, its buffer, and memory of the allocator and for copied
/// pages.
const SPACE: u64 = 16 << 20;

/// Returns how many of the `wanted` threads fit in the address space, if that is limited; at least
/// the caller's.
pub(crate) fn affordable(wanted: usize) -> usize {
    if wanted <= 1 {
        return 1;
    }
    within(wanted, spare_address_space())
}

fn within(wanted: usize, spare: Option<u64>) -> usize {
    let most =
        spare.map_or(usize::MAX, |spare| usize::try_from(spare / SPACE).unwrap_or(usize::MAX));
    wanted.min(most).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn does_everything_once() {
        for workers in [0, 1, 3, 100] {
            let seen = Mutex::new(Vec::new());
            for_each(50, workers, |job| {
                seen.lock().unwrap().push(job);
                Ok(())
            })
            .unwrap();
            let mut seen = seen.into_inner().unwrap();
            seen.sort_unstable();
            assert_eq!(seen, (0..50).collect::<Vec<_>>());
        }
    }

    #[test]
    fn threads_fit_in_the_address_space() {
        for (wanted, spare, expected) in [
            (0, None, 1),
            (1, None, 1),
            (64, None, 64),
            (64, Some(0), 1),
            (64, Some(SPACE - 1), 1),
            (64, Some(40 << 20), 2),
            (64, Some(1 << 40), 64),
            (2, Some(1 << 40), 2),
        ] {
            assert_eq!(within(wanted, spare), expected, "{wanted} {spare:?}");
        }
    }

    #[test]
    fn maps_in_order() {
        for workers in [0, 1, 3, 100] {
            assert_eq!(
                map(50, workers, |i| Ok(i * i)).unwrap(),
                (0..50).map(|i| i * i).collect::<Vec<_>>()
            );
            let failed =
                map(50, workers, |i| if i == 7 { Err(Error::Plan("seven".into())) } else { Ok(i) });
            assert_eq!(failed.unwrap_err().to_string(), "seven");
        }
    }

    #[test]
    fn what_waits_is_made_many_at_a_time() {
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let waited = map_waiting(100, |i, _| {
            most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            thread::sleep(WAIT * 20);
            now.fetch_sub(1, Ordering::Relaxed);
            Ok(i)
        })
        .unwrap();
        assert_eq!(waited.made, (0..100).collect::<Vec<_>>());
        assert!(waited.waits && most.into_inner() > 1);
    }

    #[test]
    fn what_does_not_wait_stays_on_its_thread() {
        let here = thread::current().id();
        let waited = map_waiting(1000, |i, _| Ok((i, thread::current().id()))).unwrap();
        assert!(!waited.waits);
        assert!(waited.made.iter().enumerate().all(|(i, made)| *made == (i, here)));
        assert!(map_waiting(0, |i, _| Ok(i)).unwrap().made.is_empty());
        assert!(map_waiting(3, |_, _| Err::<(), _>(Error::Plan("no".into()))).is_err());
    }

    #[test]
    fn both_are_made() {
        let (here, second) = (thread::current().id(), AtomicUsize::new(0));
        let (there, own) = both(
            || {
                while second.load(Ordering::Relaxed) == 0 {
                    thread::yield_now();
                }
                thread::current().id()
            },
            || {
                second.store(1, Ordering::Relaxed);
                thread::current().id()
            },
        );
        assert!(there != here && own == here);
    }

    #[test]
    fn an_error_stops_the_rest() {
        let done = AtomicUsize::new(0);
        let result = for_each(1_000_000, 4, |job| {
            done.fetch_add(1, Ordering::Relaxed);
            if job == 10 { Err(Error::Plan("ten".into())) } else { Ok(()) }
        });
        assert_eq!(result.unwrap_err().to_string(), "ten");
        assert!(done.into_inner() < 1_000_000);
    }
}
