//! Files and mappings: what the operating system offers, without knowledge of the format.

mod file;
mod mapping;
mod private;
mod residency;

pub use file::FileRef;
pub(crate) use file::{read_at, read_direct_at};
pub use mapping::Mapping;
pub use private::PrivateMapping;
pub use residency::{direct_align, is_remote, resident_bytes};
