//! The limit of this machine, measured on demand: what the benchmarks compare every reader and
//! writer with.
//!
//! `limit FILE…` answers lines on stdin, words separated by tabs, with a line of JSON each:
//!
//! * `copy`: streaming stores from a populated mapping of the files, kept from the first call, on
//!   all cores;
//! * `direct`: `O_DIRECT` reads of the files, 16 in flight;
//! * `drain`: the same into 16 buffers that are used again and again: what the disk gives,
//!   delivered nowhere;
//! * `write PATH BYTES`: `O_DIRECT` writes to a new file, 4 in flight, and fsync.
//!
//! Destinations are touched before the first measurement. Figures are seconds.
#![allow(unsafe_code)] // Measures raw copies and mappings.

mod answers;
mod raw;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    answers::run(std::env::args().skip(1).collect())
}
