//! Saving: where every chunk goes, and getting it there.

mod commit;
mod engine;
mod files;
mod header;
mod jobs;
mod layout;
mod options;
#[cfg(test)]
pub(crate) mod testing;

pub use commit::{Committed, commit, commit_index, discard, next_generation};
pub use engine::{Part, Save};
pub use layout::{FilePlan, HEADER_LIMIT, Layout, Place, SaveInfo, SaveItem, plan_files};
pub use options::{WriteIo, WriteOptions};
