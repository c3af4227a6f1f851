//! Progress and cancellation of a long read or write.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::parallel::lock;
use crate::{Error, Result};

/// Waits longer than this are reported.
pub const NOTICE: Duration = Duration::from_secs(10);
/// Interval of the following reports.
pub const NOTICE_AGAIN: Duration = Duration::from_secs(60);

/// A cancellation flag, a progress counter and notices, shared by a caller and the workers of one
/// call.
///
/// Workers check the flag between blocks, so a cancelled call returns within a few milliseconds.
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
    /// Makes a control for a new call.
    #[must_use]
    pub const fn new() -> Self {
        Self::with_notice(NOTICE)
    }

    /// Makes a control for a call that reports waits longer than `notice`.
    #[must_use]
    pub const fn with_notice(notice: Duration) -> Self {
        Self {
            cancelled: AtomicBool::new(false),
            done_bytes: AtomicU64::new(0),
            notices: Mutex::new(Vec::new()),
            notice,
        }
    }

    /// Leaves a notice for the caller, which logs it.
    pub fn tell(&self, notice: String) {
        lock(&self.notices).push(notice);
    }

    /// Returns the notices since the last call.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.notices))
    }

    /// Returns the schedule of reports for a wait that begins now.
    #[must_use]
    pub fn reminder(&self) -> Reminder {
        Reminder { begin: Instant::now(), next: self.notice }
    }

    /// Asks the work to stop. This cannot be undone: use a new `Control` for the next call.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns [`Error::Interrupted`] after [`cancel`](Self::cancel).
    pub fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Adds `bytes` to the progress.
    pub fn add(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes delivered so far.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }
}

/// Schedule of the reports about a wait.
#[derive(Debug)]
pub struct Reminder {
    begin: Instant,
    next: Duration,
}

impl Reminder {
    /// Returns the duration of the wait in seconds, if a report is due.
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
