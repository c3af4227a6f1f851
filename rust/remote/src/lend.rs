//! Memory of a caller, lent to requests: whoever lends gets it back before the call returns.
//!
//! A request is sent by tasks of the client that may live longer than whoever waits for its answer: after a timeout, a cancelled call, or an answer that came
//! before all was sent. Each holds what it sends as [`Bytes`], and the last of these to be dropped gives the memory back.
#![allow(unsafe_code)] // what is lent outlives its lifetime as far as the compiler knows

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::link::PERIOD;

/// Calls `work` with the pieces, and returns once nobody holds any of them.
///
/// While somebody holds some after `work`, `waits_on` is asked again and again whether to wait on after so long; once it says no they are made to let go
/// by `end`, which has to end all that could.
pub fn lend<T>(
    pieces: &[&[u8]],
    waits_on: &dyn Fn(Duration) -> bool,
    end: &dyn Fn(),
    work: impl FnOnce(Vec<Bytes>) -> T,
) -> T {
    let gate = Arc::new(Gate::default());
    // Waits also where `work` panics.
    let _lending = Lending {
        gate: &gate,
        waits_on,
        end,
    };
    let lent = pieces.iter().filter(|piece| !piece.is_empty()).map(|piece| {
        *gate.out() += 1;
        Bytes::from_owner(Lent {
            data: piece.as_ptr(),
            len: piece.len(),
            gate: Arc::clone(&gate),
        })
    });
    work(lent.collect())
}

/// How many pieces are out.
#[derive(Default)]
struct Gate {
    out: Mutex<usize>,
    back: Condvar,
}

impl Gate {
    fn out(&self) -> MutexGuard<'_, usize> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a while until all are back; false where that takes longer.
    fn wait(&self) -> bool {
        let wait = self
            .back
            .wait_timeout_while(self.out(), PERIOD, |out| *out > 0)
            .unwrap_or_else(PoisonError::into_inner);
        *wait.0 == 0
    }
}

struct Lending<'a> {
    gate: &'a Gate,
    waits_on: &'a dyn Fn(Duration) -> bool,
    end: &'a dyn Fn(),
}

impl Drop for Lending<'_> {
    // Nothing here may panic before all are back: what is lent would be freed.
    fn drop(&mut self) {
        let begin = Instant::now();
        let mut waits = true;
        while !self.gate.wait() {
            if waits && !(self.waits_on)(begin.elapsed()) {
                waits = false;
                (self.end)();
            }
        }
    }
}

struct Lent {
    data: *const u8,
    len: usize,
    gate: Arc<Gate>,
}

// SAFETY: the bytes are only read, and whoever lent them lets nobody change them meanwhile, as a shared slice has it.
unsafe impl Send for Lent {}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `data` and `len` are of a slice that `lend` borrows until it returns, which it does not before this was dropped.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        *self.gate.out() -= 1;
        self.gate.back.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn what_is_lent_comes_back() {
        let memory: Vec<u8> = (0..100).collect();
        let held = Arc::new(Mutex::new(Vec::new()));
        let ended = AtomicBool::new(false);
        let (holder, end) = (Arc::clone(&held), || {
            ended.store(true, Ordering::Relaxed);
            held.lock().unwrap().clear();
        });
        let sum = lend(
            &[&memory[..10], &[], &memory[50..]],
            &|waited| waited < Duration::from_millis(20),
            &end,
            |bytes| {
                assert_eq!(bytes.iter().map(Bytes::len).collect::<Vec<_>>(), [10, 50]);
                holder.lock().unwrap().push(bytes[1].slice(3..9));
                bytes.iter().flatten().map(|&byte| u32::from(byte)).sum::<u32>()
            },
        );
        assert_eq!(sum, (0..10).sum::<u32>() + (50..100).sum::<u32>());
        assert!(ended.into_inner(), "somebody held a slice of it");
    }

    #[test]
    fn another_thread_may_hold_it_for_a_while() {
        let memory = vec![7_u8; 1000];
        let done = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&done);
        lend(&[&memory], &|_| true, &|| panic!("nothing is to be ended"), |bytes| {
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                seen.store(bytes[0].iter().all(|&byte| byte == 7), Ordering::Relaxed);
                drop(bytes);
            });
        });
        assert!(done.load(Ordering::Relaxed));
    }
}
