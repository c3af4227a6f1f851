//! Saving: where every chunk goes, and getting it there.

mod engine;
mod files;
mod header;
mod item;
mod jobs;
mod layout;
mod options;
#[cfg(test)]
pub(crate) mod testing;

pub use engine::{Finished, Part, Save};
pub use item::{SaveInfo, SaveItem};
pub use layout::{FilePlan, HEADER_LIMIT, Layout, Place, plan_files};
pub use options::{WriteIo, WriteOptions};
