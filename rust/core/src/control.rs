//! How a caller follows a long read or write, and stops it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{Error, Result};

/// A cancellation flag and a progress counter, shared between a caller and the workers of one call.
///
/// Workers look at the flag between blocks, so a cancelled call returns within a few milliseconds.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: AtomicBool,
    done_bytes: AtomicU64,
}

impl Control {
    /// Not cancelled, nothing done.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            cancelled: AtomicBool::new(false),
            done_bytes: AtomicU64::new(0),
        }
    }

    /// Asks the work to stop. It cannot be taken back: use a new `Control` for the next call.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// [`Error::Interrupted`] once [`cancel`](Self::cancel) was called.
    pub fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            Err(Error::Interrupted)
        } else {
            Ok(())
        }
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

#[cfg(test)]
mod tests {
    use super::*;

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
