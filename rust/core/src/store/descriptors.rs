//! How many files a process may have open.
#![allow(unsafe_code)] // getrlimit has no safe wrapper here

/// The process's own limit, which all of it shares.
pub fn most_open() -> usize {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid place for the answer.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0;
    if failed {
        return 0;
    }
    usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_limit_beyond_the_standard_streams() {
        assert!(most_open() > 3);
    }
}
