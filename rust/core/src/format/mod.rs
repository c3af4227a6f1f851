//! The format on disk, without I/O: `docs/format.md` as code, with the same names.

mod build;
mod data_file;
mod digest;
mod entry;
mod index;
mod layout;
mod name;
mod overlap;
pub mod safetensors;
mod sections;
mod validate;
mod value;
mod view;

pub use build::IndexBuilder;
pub use data_file::DataFileName;
pub use digest::{BLOCK_SIZE, BlockDigests, block_count, block_digest, content_digest};
pub(crate) use digest::{BlockCell, BlockHasher};
pub use entry::{ChunkEntry, FileEntry, TensorEntry};
pub use index::{ChunkView, FileView, Index, IndexBytes, TensorView};
pub(crate) use layout::Identity;
pub use layout::{Kind, PAYLOAD_ALIGNMENT, SourceKind};
pub(crate) use name::parse_rank_index_name;
pub use name::{INDEX_NAME, from_header_name, parse_uuid, rank_index_name, to_header_name, uuid};
pub use overlap::{Overlap, cover, touching};
pub use value::Value;
pub use view::{CodedChunk, Logical, Origin, ViewSource, derive};
