//! Differences between operating systems, and the only place in this crate that knows them.
//!
//! `--cfg posix_only` takes what Linux alone has away from it: `make test-posix` runs the tests of
//! this crate as on macOS.

#[cfg(all(target_os = "linux", not(posix_only)))]
mod linux;
#[cfg(any(not(target_os = "linux"), posix_only))]
mod other;

#[cfg(all(target_os = "linux", not(posix_only)))]
pub use linux::*;
#[cfg(any(not(target_os = "linux"), posix_only))]
pub use other::*;
