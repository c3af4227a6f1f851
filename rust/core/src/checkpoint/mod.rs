//! Whole checkpoints: finding, opening, reading, verifying and committing them, and recovering a
//! lost index.

mod blocks;
mod check;
mod clean;
mod clean_remote;
mod commit;
mod commit_remote;
mod copy_index;
mod data_files;
mod data_header;
pub mod gather;
mod index_file;
mod locate;
mod open;
mod recover;
pub mod sum;
pub mod verify;
mod views;

pub use check::{check_expanded, check_files, check_regions};
pub use clean::{Cleaned, Leftover, LeftoverKind, Verdict, clean, leftovers};
pub use clean_remote::{clean_remote, leftovers_remote};
pub use commit::{Committed, commit_index, discard, next_generation, replace_index};
pub use commit_remote::{
    Begun, begin_remote, commit_remote, discard_remote, is_there_remote, may_be_stored,
    replace_index_remote,
};
pub use copy_index::{CopyOptions, copy_index};
pub(crate) use data_files::explain;
pub use data_files::{file_ref, find_link_outside, map_data_file};
pub(crate) use data_header::part_of;
pub use gather::{Gather, Memory};
pub use locate::{check_no_rank_indexes, has_native_data};
pub use open::{open, open_data, open_in_tiers};
pub use recover::{RecoverOptions, recover};
pub use views::dequantize;
