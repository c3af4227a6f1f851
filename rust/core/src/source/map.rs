//! The results of a list of jobs, in their order.

use std::sync::{Mutex, PoisonError};

use crate::{Result, parallel};

/// `f(0), f(1), … f(count - 1)`, on up to `threads` threads; 0: as many as there are cores.
pub(super) fn map<T: Send>(count: usize, threads: usize, f: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    let threads = if threads == 0 { parallel::available() } else { threads };
    let done = Mutex::new(Vec::with_capacity(count));
    parallel::for_each(
        count,
        threads,
        || (),
        |(), job| {
            let result = f(job)?;
            done.lock().unwrap_or_else(PoisonError::into_inner).push((job, result));
            Ok(())
        },
    )?;
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(job, _)| *job);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}
