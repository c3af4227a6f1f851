//! Saving: layout of the chunks, the writes themselves, and reuse of chunks that exist already.

mod copies;
mod engine;
mod files;
mod header;
mod index;
mod item;
mod jobs;
mod layout;
mod links;
mod object;
mod options;
mod reuse;
mod sink;
#[cfg(test)]
pub(crate) mod testing;
mod to_files;
mod to_store;
mod upload;

pub use engine::{Finished, Save};
pub use item::{Part, SaveInfo, SaveItem};
pub use layout::{FilePlan, HEADER_LIMIT, Place, SaveLayout};
pub use options::{WriteIo, WriteOptions};
pub use reuse::Reuse;
pub use sink::Sums;
pub use upload::{upload_file, upload_folder};
