//! The bytes of an index: the header, and then its records, section by section (section 3 of
//! `docs/format.md`).

use zerocopy::{FromBytes as _, IntoBytes as _};

use super::digest::index_digest;
use super::entry::{ChunkEntry, FileEntry, TensorEntry};
use super::layout::{
    CHUNK_CONJUGATE, CHUNK_DIGESTS, CHUNK_FROZEN, CHUNK_NEGATIVE, CHUNK_STRIDED, COMPAT_CONTENTS,
    ChunkRecord, DIGEST_AT, FILE_EXTERNAL, FILE_HEAD_DIGEST, FILE_LINKED, FileRecord, HEADER_LEN,
    HEADER_LEN_U32, Header, INCOMPAT_LINKED, INCOMPAT_SIGNS, Kind, MAGIC, NO_POSITION, NO_SPLIT,
    SECTIONS, SectionRecord, SourceKind, TensorRecord, VERSION, WRITER_LEN,
};
use super::{BLOCK_SIZE, Value};
use crate::copy::Signs;
use crate::{Dtype, Error, Result};

/// The sections of an index during construction.
pub(super) struct Sections {
    files: Vec<u8>,
    tensors: Vec<u8>,
    chunks: Vec<u8>,
    chunk_count: u64,
    incompat: u64,
    dims: Vec<u8>,
    digests: Vec<u8>,
    strings: Vec<u8>,
    planner: Vec<u8>,
    contents: Vec<u8>,
    has_contents: bool,
}

impl Sections {
    /// Makes empty sections, except for the values that belong to no tensor.
    pub(super) fn new(values: &[&Value]) -> Result<Self> {
        let mut planner = Vec::new();
        for value in values {
            let encoded = value.encode(&mut planner);
            encoded.map_err(|reason| Error::Unsupported(reason.into()))?;
        }
        Ok(Self {
            files: Vec::new(),
            tensors: Vec::new(),
            chunks: Vec::new(),
            chunk_count: 0,
            incompat: 0,
            dims: Vec::new(),
            digests: Vec::new(),
            strings: Vec::new(),
            planner,
            contents: Vec::new(),
            has_contents: false,
        })
    }

    fn text(&mut self, text: &str) -> Result<(u64, u32)> {
        let at = self.strings.len() as u64;
        self.strings.extend(text.as_bytes());
        let len = u32::try_from(text.len())
            .map_err(|_| Error::Unsupported("a name cannot be over 4 GiB long".into()))?;
        Ok((at, len))
    }

    fn push_dims(&mut self, dims: &[u64]) -> u64 {
        let at = self.dims.len() as u64 / 8;
        for dim in dims {
            self.dims.extend(dim.to_le_bytes());
        }
        at
    }

    pub(super) fn file(&mut self, file: &FileEntry) -> Result<()> {
        let (name_offset, name_len) = self.text(&file.name)?;
        let mut flags = 0;
        if file.external {
            flags |= FILE_EXTERNAL;
        }
        if file.linked {
            flags |= FILE_LINKED;
            self.incompat |= INCOMPAT_LINKED;
        }
        if file.head_digest.is_some() {
            flags |= FILE_HEAD_DIGEST;
        }
        let record = FileRecord {
            name_offset: name_offset.into(),
            name_len: name_len.into(),
            flags: flags.into(),
            file_size: file.size.into(),
            data_start: file.data_start.into(),
            head_digest: file.head_digest.unwrap_or(0).into(),
            mtime_ns: file.mtime_ns.into(),
            reserved: [0; 16],
        };
        self.files.extend(record.as_bytes());
        Ok(())
    }

    /// Adds a tensor and its chunks, in order. `place` is the number of the tensor.
    pub(super) fn tensor(
        &mut self,
        tensor: &TensorEntry,
        place: u32,
        chunks: &[&ChunkEntry],
    ) -> Result<()> {
        let bad = |reason: String| Error::tensor_plan(None, &tensor.name, reason);
        let ndim = tensor.shape.len();
        let (name_offset, name_len) = self.text(&tensor.name)?;
        if let Some(chunk) = chunks.iter().find(|c| {
            c.offsets.len() != ndim
                || c.sizes.len() != ndim
                || c.strides.as_ref().is_some_and(|s| s.len() != ndim)
        }) {
            return Err(bad(format!(
                "a chunk at {:?} of sizes {:?} in a tensor of {ndim} dimensions",
                chunk.offsets, chunk.sizes
            )));
        }
        let path_offset = self.planner.len();
        if let Some(path) = &tensor.path {
            if !path.is_path() {
                return Err(bad("its path is not a tuple of keys and places".into()));
            }
            path.encode(&mut self.planner).map_err(|reason| bad(reason.into()))?;
        }
        let record = TensorRecord {
            name_offset: name_offset.into(),
            name_len: name_len.into(),
            kind: u8::from(tensor.kind == Kind::Bytes),
            dtype: tensor.dtype.map_or(0, Dtype::code),
            ndim: u8::try_from(ndim).map_err(|_| bad(format!("{ndim} dimensions")))?,
            flags: tensor.flags,
            shape: self.push_dims(&tensor.shape).into(),
            first_chunk: self.chunk_count.into(),
            chunk_count: (chunks.len() as u64).into(),
            path_offset: (path_offset as u64).into(),
            path_len: u32::try_from(self.planner.len() - path_offset)
                .map_err(|_| bad("a path of over 4 GiB".into()))?
                .into(),
            split_dim: split_dim(&tensor.shape, chunks)
                .map_or(NO_SPLIT, |d| u32::try_from(d).expect("at most 255 dimensions"))
                .into(),
            position: tensor.position.unwrap_or(NO_POSITION).into(),
            reserved: [0; 4],
        };
        self.tensors.extend(record.as_bytes());
        for chunk in chunks {
            self.chunk(chunk, place);
        }
        Ok(())
    }

    fn chunk(&mut self, chunk: &ChunkEntry, place: u32) {
        let dims = self.push_dims(&chunk.offsets);
        self.push_dims(&chunk.sizes);
        let mut flags = 0;
        if let Some(strides) = &chunk.strides {
            self.push_dims(strides);
            flags |= CHUNK_STRIDED;
        }
        if chunk.signs != Signs::default() {
            self.incompat |= INCOMPAT_SIGNS;
        }
        if chunk.signs.conjugate {
            flags |= CHUNK_CONJUGATE;
        }
        if chunk.signs.negative {
            flags |= CHUNK_NEGATIVE;
        }
        if chunk.frozen {
            flags |= CHUNK_FROZEN;
        }
        self.has_contents |= chunk.content.is_some();
        self.contents.extend(chunk.content.unwrap_or(0).to_le_bytes());
        let digest = self.digests.len() as u64 / 8;
        if let Some(digests) = &chunk.digests {
            flags |= CHUNK_DIGESTS;
            self.digests.extend(digests.iter().flat_map(|d| d.to_le_bytes()));
        }
        let record = ChunkRecord {
            tensor: place.into(),
            file: chunk.file.into(),
            offset: chunk.offset.into(),
            length: chunk.length.into(),
            dims: dims.into(),
            digest: digest.into(),
            flags: flags.into(),
            reserved: 0.into(),
        };
        self.chunks.extend(record.as_bytes());
        self.chunk_count += 1;
    }

    /// Returns header and sections, with the digest of all of them.
    pub(super) fn assemble(
        self,
        source: SourceKind,
        save_id: [u8; 16],
        generation: u64,
    ) -> Vec<u8> {
        let parts = [
            self.files,
            self.tensors,
            self.chunks,
            self.dims,
            self.digests,
            self.strings,
            self.planner,
        ];
        let mut bytes = vec![0; HEADER_LEN];
        let mut records = [const { SectionRecord::new(0, 0) }; SECTIONS.len()];
        for (part, record) in parts.iter().zip(&mut records) {
            *record = SectionRecord::new(bytes.len() as u64, part.len() as u64);
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        let mut contents = SectionRecord::new(0, 0);
        if self.has_contents {
            contents = SectionRecord::new(bytes.len() as u64, self.contents.len() as u64);
            bytes.extend(self.contents);
        }
        let header = Header {
            magic: MAGIC,
            version: VERSION.into(),
            header_len: HEADER_LEN_U32.into(),
            compat: (if self.has_contents { COMPAT_CONTENTS } else { 0 }).into(),
            incompat: self.incompat.into(),
            file_len: (bytes.len() as u64).into(),
            digest: 0.into(),
            save_id,
            generation: generation.into(),
            block_size: BLOCK_SIZE.into(),
            source: source.code().into(),
            reserved: 0.into(),
            sections: records,
            contents,
            writer: written_by(),
            reserved_end: [0; 8],
        };
        bytes[..HEADER_LEN].copy_from_slice(header.as_bytes());
        let digest = index_digest(&bytes, DIGEST_AT);
        Header::mut_from_bytes(&mut bytes[..HEADER_LEN])
            .expect("the header was just written")
            .digest = digest.into();
        bytes
    }
}

/// Returns this program and its release, in the form of the header.
fn written_by() -> [u8; WRITER_LEN] {
    let mut field = [0; WRITER_LEN];
    let text = concat!("dcp-rs ", env!("CARGO_PKG_VERSION")).as_bytes();
    let len = text.len().min(WRITER_LEN);
    field[..len].copy_from_slice(&text[..len]);
    field
}

/// Returns the dimension along which sorted chunks follow each other, each spanning the others
/// whole.
fn split_dim(shape: &[u64], chunks: &[&ChunkEntry]) -> Option<usize> {
    let spans = |c: &ChunkEntry, split: usize| {
        (0..shape.len()).all(|d| d == split || c.sizes[d] == shape[d])
    };
    (0..shape.len()).find(|&split| {
        chunks.iter().all(|c| spans(c, split))
            && chunks.windows(2).all(|pair| {
                pair[0].offsets[split]
                    .checked_add(pair[0].sizes[split])
                    .is_some_and(|end| end <= pair[1].offsets[split])
            })
    })
}
