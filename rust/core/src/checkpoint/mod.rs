//! A checkpoint as a whole: found and opened, read from, verified, committed, and its index rebuilt where that was lost.

mod clean;
mod commit;
mod data_header;
pub mod gather;
mod locate;
mod open;
mod payload;
mod recover;
pub mod verify;

pub use clean::{Cleaned, Kind as LeftoverKind, Leftover, Verdict, clean, leftovers};
pub use commit::{Committed, commit, commit_index, discard, next_generation, replace_index};
pub(crate) use data_header::part_of;
pub use gather::{Gather, Memory};
pub use locate::{Found, check_no_rank_indexes, find, find_data, has_native_data};
pub use open::{index, open, open_data};
pub use recover::{RecoverOptions, recover};
