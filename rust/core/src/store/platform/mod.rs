//! Differences between operating systems. No other code in this crate knows them.
//!
//! `--cfg posix_only` disables what only Linux has: `make test-posix` runs the tests of this crate
//! as on macOS.

#[cfg(all(target_os = "linux", not(posix_only)))]
mod linux;
#[cfg(any(not(target_os = "linux"), posix_only))]
mod other;

#[cfg(all(target_os = "linux", not(posix_only)))]
pub use linux::*;
#[cfg(any(not(target_os = "linux"), posix_only))]
pub use other::*;
