//! The records of an index, field by field as section 3 of `docs/format.md` draws them.
//!
//! ```text
//! header 256 | files 64 each | tensors 64 each | chunks 48 each | dims 8 | digests 8
//! strings | planner | contents 16
//! ```

use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(super) const MAGIC: [u8; 8] = *b"\x89DCPRS\r\n";
pub(super) const VERSION: u32 = 1;
pub(super) const HEADER_LEN: usize = size_of::<Header>();
pub(super) const HEADER_LEN_U32: u32 = 256;
pub(super) const DIGEST_AT: usize = std::mem::offset_of!(Header, digest);
pub(super) const MAX_NDIM: usize = 64;
pub(super) const NO_SPLIT: u32 = u32::MAX;
pub(super) const NO_POSITION: u32 = u32::MAX;

/// Alignment of the payload in a data file.
pub const PAYLOAD_ALIGNMENT: u64 = 4096;

/// Feature bits of version 1. This one: there are digests of the contents of chunks.
pub(super) const COMPAT_CONTENTS: u64 = 1;
/// Some chunk has sign bits that change when it is read.
pub(super) const INCOMPAT_SIGNS: u64 = 1;
/// Some file is a link to a file of another save.
pub(super) const INCOMPAT_LINKED: u64 = 2;
pub(super) const KNOWN_INCOMPAT: u64 = INCOMPAT_SIGNS | INCOMPAT_LINKED;

pub(super) const FILE_EXTERNAL: u32 = 1;
pub(super) const FILE_HEAD_DIGEST: u32 = 2;
pub(super) const FILE_LINKED: u32 = 4;
/// The bits of the memory format. It is invalid if all of them are set.
pub(super) const TENSOR_MEMORY_FORMAT: u8 = 0b1100;
pub(super) const CHUNK_STRIDED: u32 = 1;
pub(super) const CHUNK_DIGESTS: u32 = 2;
pub(super) const CHUNK_FROZEN: u32 = 4;
pub(super) const CHUNK_CONJUGATE: u32 = 8;
pub(super) const CHUNK_NEGATIVE: u32 = 16;

/// Identity of the save that an index belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub save_id: [u8; 16],
    pub generation: u64,
}

impl Identity {
    /// Bytes at the start of an index that contain it.
    pub(crate) const LEN: usize = std::mem::offset_of!(Header, generation) + 8;

    /// Parses the start of an index; returns `None` if it is not one.
    pub(crate) fn of(start: &[u8; Self::LEN]) -> Option<Self> {
        const SAVE_ID: usize = std::mem::offset_of!(Header, save_id);
        const GENERATION: usize = std::mem::offset_of!(Header, generation);
        start.starts_with(&MAGIC).then_some(Self {
            save_id: *start[SAVE_ID..].first_chunk()?,
            generation: u64::from_le_bytes(*start[GENERATION..].first_chunk()?),
        })
    }
}

/// Kinds of data files in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// Written by this crate.
    Native,
    /// safetensors files of other programs.
    Safetensors,
    /// Files of torch's `FileSystemWriter`.
    Dcp,
    /// Files of `torch.save`.
    Torch,
}

impl SourceKind {
    pub(super) const fn code(self) -> u64 {
        match self {
            Self::Native => 0,
            Self::Safetensors => 1,
            Self::Dcp => 2,
            Self::Torch => 3,
        }
    }

    pub(super) const fn from_code(code: u64) -> Option<Self> {
        match code {
            0 => Some(Self::Native),
            1 => Some(Self::Safetensors),
            2 => Some(Self::Dcp),
            3 => Some(Self::Torch),
            _ => None,
        }
    }
}

/// Kinds of entries of a state dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A tensor.
    Tensor,
    /// A non-tensor value: the bytes that DCP's planner made of it.
    Bytes,
}

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct SectionRecord {
    pub offset: U64,
    pub length: U64,
}

impl SectionRecord {
    pub(super) const fn new(offset: u64, length: u64) -> Self {
        Self { offset: U64::new(offset), length: U64::new(length) }
    }
}

/// Bytes of the header for the program that wrote the index.
pub(super) const WRITER_LEN: usize = 24;

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[expect(clippy::struct_field_names, reason = "the names of docs/format.md")]
pub(super) struct Header {
    pub magic: [u8; 8],
    pub version: U32,
    pub header_len: U32,
    pub compat: U64,
    pub incompat: U64,
    pub file_len: U64,
    pub digest: U64,
    pub save_id: [u8; 16],
    pub generation: U64,
    pub block_size: U64,
    pub source: U64,
    pub reserved: U64,
    pub sections: [SectionRecord; 7],
    pub contents: SectionRecord,
    pub writer: [u8; WRITER_LEN],
    pub reserved_end: [u8; 8],
}

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct FileRecord {
    pub name_offset: U64,
    pub name_len: U32,
    pub flags: U32,
    pub file_size: U64,
    pub data_start: U64,
    pub head_digest: U64,
    pub mtime_ns: I64,
    pub reserved: [u8; 16],
}

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct TensorRecord {
    pub name_offset: U64,
    pub name_len: U32,
    pub kind: u8,
    pub dtype: u8,
    pub ndim: u8,
    pub flags: u8,
    pub shape: U64,
    pub first_chunk: U64,
    pub chunk_count: U64,
    pub path_offset: U64,
    pub path_len: U32,
    pub split_dim: U32,
    pub position: U32,
    pub reserved: [u8; 4],
}

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct ChunkRecord {
    pub tensor: U32,
    pub file: U32,
    pub offset: U64,
    pub length: U64,
    pub dims: U64,
    pub digest: U64,
    pub flags: U32,
    pub reserved: U32,
}

const _: () = assert!(size_of::<Header>() == 256);
const _: () = assert!(size_of::<FileRecord>() == 64);
const _: () = assert!(size_of::<TensorRecord>() == 64);
const _: () = assert!(size_of::<ChunkRecord>() == 48);

/// The sections, in the order of the header.
#[derive(Clone, Copy)]
pub(super) enum Section {
    Files,
    Tensors,
    Chunks,
    Dims,
    Digests,
    Strings,
    Planner,
}

pub(super) const SECTIONS: [(Section, usize); 7] = [
    (Section::Files, size_of::<FileRecord>()),
    (Section::Tensors, size_of::<TensorRecord>()),
    (Section::Chunks, size_of::<ChunkRecord>()),
    (Section::Dims, 8),
    (Section::Digests, 8),
    (Section::Strings, 1),
    (Section::Planner, 1),
];
