//! Progress and cancellation of a long read or write.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// A longer wait is reported.
pub const NOTICE: Duration = Duration::from_secs(10);
/// And again after so long.
pub const NOTICE_AGAIN: Duration = Duration::from_secs(60);

/// A cancellation flag, a progress counter and notices, shared between a caller and the workers of
/// one call.
///
/// Workers look at the flag between blocks, so a cancelled call returns within a few milliseconds.
#[derive(Debug)]
pub struct Control {
    cancelled: AtomicBool,
    done_bytes: AtomicU64,
    notices: Mutex<Vec<String>>,
    notice: Duration,
}

impl Default for Control {
    fn default() -> Self {
        Self::new()
    }
}

impl Control {
    /// Not cancelled, nothing done.
    #[must_use]
    pub const fn new() -> Self {
        Self::with_notice(NOTICE)
    }

    /// The same, of a call that tells of waits that last longer than `notice`.
    #[must_use]
    pub const fn with_notice(notice: Duration) -> Self {
        Self {
            cancelled: AtomicBool::new(false),
            done_bytes: AtomicU64::new(0),
            notices: Mutex::new(Vec::new()),
            notice,
        }
    }

    /// Leaves a notice for the caller, who logs it.
    pub fn tell(&self, notice: String) {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).push(notice);
    }

    /// The notices since this was last called.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut *self.notices.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// For a wait that begins now.
    #[must_use]
    pub fn reminder(&self) -> Reminder {
        Reminder { begin: Instant::now(), next: self.notice }
    }

    /// Asks the work to stop. It cannot be taken back: use a new `Control` for the next call.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// [`Error::Interrupted`] once [`cancel`](Self::cancel) was called.
    pub fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Counts `bytes` more as delivered.
    pub fn add(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes delivered so far.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }
}

/// Schedule of the notices about a wait.
#[derive(Debug)]
pub struct Reminder {
    begin: Instant,
    next: Duration,
}

impl Reminder {
    /// The seconds that the wait has lasted, where it is to be told of now.
    pub fn due(&mut self) -> Option<u64> {
        let passed = self.begin.elapsed();
        (passed >= self.next).then(|| {
            self.next = passed + NOTICE_AGAIN;
            passed.as_secs()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_once_and_then_each_minute() {
        let control = Control::with_notice(Duration::ZERO);
        let mut reminder = control.reminder();
        assert_eq!(reminder.due(), Some(0));
        assert_eq!(reminder.due(), None);
        assert_eq!(Control::new().reminder().due(), None);
        control.tell("a".into());
        assert_eq!(control.take_notices(), ["a"]);
        assert!(control.take_notices().is_empty());
    }

    #[test]
    fn cancels_and_counts() {
        let control = Control::new();
        assert!(control.check().is_ok());
        control.add(3);
        control.add(4);
        assert_eq!(control.done(), 7);
        control.cancel();
        assert!(matches!(control.check(), Err(Error::Interrupted)));
    }
}
