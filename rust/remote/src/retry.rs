//! Retries of a request, limited in time and number.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::answers::Failure;
use crate::config::Limits;
use crate::transport::Hold;

/// Wait after the first failure. It doubles up to [`LONGEST`].
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);
/// Slowest assumed rate for sending a body, in bytes a second. Each retry allows twice the time.
const SLOWEST: u64 = 256 << 10;
/// Bytes a second that must arrive on the average of `retry_timeout`. A slower request is
/// abandoned. Otherwise a server that sends a byte now and then would hold it forever.
const LEAST_RATE: u64 = 1 << 10;

/// Retries left for one request.
pub struct RetryState {
    limits: Limits,
    /// Time of the last progress.
    since: Instant,
    /// Part of the time since then that sending may have taken.
    worked: Duration,
    /// Failures since then.
    failures: u32,
    /// Bytes since then.
    bytes: u64,
    /// Failures in all.
    total: u32,
    hold: Arc<Hold>,
}

impl RetryState {
    pub fn new(limits: Limits, hold: Arc<Hold>) -> Self {
        Self {
            limits,
            since: Instant::now(),
            worked: Duration::ZERO,
            failures: 0,
            bytes: 0,
            total: 0,
            hold,
        }
    }

    /// Records the arrival of `bytes`, which resets the count of failures. Enough of them also
    /// reset the time. Returns false if the time is over and too few arrived.
    pub fn progressed(&mut self, bytes: u64) -> bool {
        self.bytes = self.bytes.saturating_add(bytes);
        let passed = self.since.elapsed();
        let least = LEAST_RATE.saturating_mul(self.limits.time.as_secs().max(1));
        // Any byte shows that the last failure is over.
        self.failures = 0;
        if self.bytes >= least {
            self.since = Instant::now();
            self.worked = Duration::ZERO;
            self.bytes = 0;
            return true;
        }
        passed < self.limits.time
    }

    /// Returns the time limit for an answer.
    pub fn silence(&self) -> Duration {
        self.limits.silence.min(self.left()).max(Duration::from_millis(1))
    }

    /// Returns the time to allow for sending this many bytes. It is unknown how many were already
    /// sent.
    pub const fn sending(bytes: u64) -> Duration {
        Duration::from_millis(bytes.saturating_mul(1000) / SLOWEST)
    }

    /// Returns the time limit for the answer to a request that takes `work`.
    pub fn answer(&self, work: Duration) -> Duration {
        self.silence().saturating_add(self.granted(work))
    }

    /// Records that no answer came within the limit. The part of it for `work` does not count, up
    /// to three times `retry_timeout`. So a slow uplink gets longer attempts, and a store that
    /// never answers is abandoned.
    pub fn timed_out(&mut self, work: Duration) -> Failure {
        let most = self.limits.time.saturating_mul(3);
        self.worked = self.worked.saturating_add(self.granted(work)).min(most);
        Failure::passing("no answer in time")
    }

    fn granted(&self, work: Duration) -> Duration {
        work.saturating_mul(1 << self.failures.min(8))
    }

    /// Returns the time left for attempts.
    fn left(&self) -> Duration {
        self.limits.time.saturating_sub(self.since.elapsed().saturating_sub(self.worked))
    }

    /// Waits until the request may be retried after this failure. Returns false if it may not.
    pub async fn wait_to_retry(&mut self, failure: &Failure) -> bool {
        let passed = self.since.elapsed();
        let limit = if failure.nobody_listens { self.limits.refused } else { Duration::MAX };
        let is_in_time = |wait: Duration| passed.saturating_add(wait) < limit;
        let wait = self.failed().filter(|&wait| failure.is_worth_another_try && is_in_time(wait));
        if let Some(wait) = wait {
            if passed >= self.limits.notice {
                self.hold.tell(|| {
                    let (seconds, attempts) = (passed.as_secs(), self.attempts());
                    let reason = &failure.reason;
                    format!(
                        "no progress for {seconds} s, in {attempts} attempts, the last of \
                        which failed: {reason}; trying again"
                    )
                });
            }
            tokio::time::sleep(wait).await;
        }
        wait.is_some()
    }

    /// Counts a failure. Returns the wait before the next attempt, or `None` if there is none.
    /// Waits are random, so that requests that failed together are not retried together.
    fn failed(&mut self) -> Option<Duration> {
        self.failures += 1;
        self.total = self.total.saturating_add(1);
        if self.failures > self.limits.retries {
            return None;
        }
        let longest = FIRST.saturating_mul(1 << (self.failures - 1).min(16)).min(LONGEST);
        let own = longest
            .mul_f64(0.5 + 0.5 * part(dcp_rs_core::store::random_bytes().unwrap_or([0x80; 16])));
        let wait = own.max(self.hold.left());
        (wait < self.left()).then_some(wait)
    }

    /// Returns the number of attempts.
    pub fn attempts(&self) -> u32 {
        self.total.max(1)
    }
}

/// Converts random bytes to a number between 0 and 1.
fn part(bytes: [u8; 16]) -> f64 {
    f64::from(u16::from_le_bytes([bytes[0], bytes[1]])) / f64::from(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_with_the_number_or_the_time() {
        let limits = Limits {
            time: Duration::from_secs(60),
            retries: 2,
            refused: Duration::from_secs(5),
            silence: Duration::from_secs(1),
            notice: Duration::from_secs(1),
        };
        let mut retry = RetryState::new(limits, Arc::default());
        let first = retry.failed().unwrap();
        assert!(first >= FIRST / 2 && first <= FIRST);
        assert!(retry.failed().is_some());
        assert!(retry.failed().is_none());
        assert_eq!(retry.attempts(), 3);
        assert!(retry.progressed(1));
        assert!(retry.failed().is_some_and(|wait| wait <= FIRST));
        assert_eq!(retry.attempts(), 4);
        let none = Limits { time: Duration::ZERO, ..limits };
        assert!(RetryState::new(none, Arc::default()).failed().is_none());
    }

    #[test]
    fn a_slow_uplink_has_longer_attempts_and_an_end() {
        let mut retry = RetryState::new(Limits::default(), Arc::default());
        let work = RetryState::sending(8 << 20);
        for seconds in [47, 79, 143] {
            let limit = retry.answer(work);
            assert_eq!(limit.as_secs(), seconds);
            retry.since -= limit;
            retry.timed_out(work);
            assert!(retry.failed().is_some());
        }
        retry.since -= retry.answer(work);
        retry.timed_out(work);
        assert!(retry.failed().is_none());
    }

    #[test]
    fn a_long_wait_is_told_of_once_a_minute() {
        let limits = Limits { notice: Duration::ZERO, ..Limits::default() };
        let hold = Arc::new(Hold::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            for mut retry in
                [limits, limits].map(|limits| RetryState::new(limits, Arc::clone(&hold)))
            {
                assert!(retry.wait_to_retry(&Failure::passing("503 Slow Down")).await);
            }
        });
        let [notice] = &hold.take_notices()[..] else { panic!("one notice") };
        assert!(notice.contains("in 1 attempts") && notice.contains("503 Slow Down"), "{notice}");
        assert!(hold.take_notices().is_empty());
    }

    #[test]
    fn a_byte_now_and_then_is_no_progress() {
        let limits = Limits { time: Duration::from_millis(30), ..Limits::default() };
        let mut retry = RetryState::new(limits, Arc::default());
        assert!(retry.progressed(1));
        std::thread::sleep(limits.time);
        assert!(!retry.progressed(1));
        // Bytes that were too few before still count.
        assert!(retry.progressed(LEAST_RATE - 2) && retry.progressed(1));
    }
}
