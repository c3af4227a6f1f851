//! Saving: where every chunk goes, and getting it there.

mod header;
mod layout;
#[cfg(test)]
mod testing;

pub use layout::{FilePlan, HEADER_LIMIT, Layout, Place, SaveInfo, SaveItem, plan_files};
