//! Limit on the open files of a process.

use rustix::process::{Resource, getrlimit};

/// Returns the limit of this process, which all of its threads share.
pub fn most_open() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_limit_beyond_the_standard_streams() {
        assert!(most_open() > 3);
    }
}
