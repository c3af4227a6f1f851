//! An index, used in place: look-ups read the sections, and nothing is deserialized.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::layout::{
    CHUNK_CONJUGATE, CHUNK_DIGESTS, CHUNK_FROZEN, CHUNK_NEGATIVE, CHUNK_STRIDED, ChunkRecord,
    FILE_EXTERNAL, FILE_HEAD_DIGEST, FILE_LINKED, FileRecord, HEADER_LEN, Header, Kind,
    NO_POSITION, NO_SPLIT, Section, SourceKind, TensorRecord,
};
use super::view::{CodedChunk, View};
use super::{Value, block_count, validate};
use crate::copy::Signs;
use crate::geometry::{Dims, row_major, strided_length};
use crate::quant::StoredRegion;
use crate::store::{Remote, Tiers};
use crate::{Dtype, Result};

/// The bytes of an index: a mapping of its file, or a buffer.
pub type IndexBytes = Box<dyn AsRef<[u8]> + Send + Sync>;

/// The index of a checkpoint. All of it is validated when it is opened, so that no later look-up
/// fails.
pub struct Index {
    path: PathBuf,
    folder: Arc<Path>,
    bytes: IndexBytes,
    sections: [Range<usize>; 7],
    contents: Option<Range<usize>>,
    is_in_memory: bool,
    remote: Option<Arc<dyn Remote>>,
    tiers: Option<Arc<Tiers>>,
    pub(super) view: View,
}

/// A data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileView<'a> {
    /// Path relative to the folder of the index. It may be absolute if the file is external.
    pub name: &'a str,
    /// Length in bytes.
    pub size: u64,
    /// Offset of the payload.
    pub data_start: u64,
    /// True if another program wrote the file, and the index only refers to it.
    pub external: bool,
    /// True if it is a link to a file of another save.
    pub linked: bool,
    /// XXH3-64 of the bytes before the payload.
    pub head_digest: Option<u64>,
    /// Modification time in nanoseconds since 1970; 0 if it is not recorded.
    pub mtime_ns: i64,
}

/// An entry of the state dict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorView<'a> {
    /// FQN.
    pub name: &'a str,
    /// Tensor or bytes.
    pub kind: Kind,
    /// Element type; `None` for bytes.
    pub dtype: Option<Dtype>,
    /// Sizes of the whole tensor.
    pub shape: Dims,
    /// `requires_grad`, `pin_memory` and memory format: section 3.3 of the format.
    pub flags: u8,
    /// The dimension along which the chunks follow each other, each spanning the others whole.
    pub split_dim: Option<usize>,
    /// Its position among the entries of the state dict, if it is known.
    pub position: Option<u32>,
    /// Its chunks, as indices for [`Index::chunk`].
    pub chunks: Range<u64>,
}

/// A rectangle of a tensor, stored in one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkView {
    /// Index of the tensor.
    pub tensor: u32,
    /// Index of the data file.
    pub file: u32,
    /// First byte in the data file.
    pub offset: u64,
    /// Length in the data file, in bytes.
    pub length: u64,
    /// Offsets of the chunk in the tensor.
    pub offsets: Dims,
    /// Sizes of the chunk.
    pub sizes: Dims,
    /// Strides in elements; `None` if it is contiguous.
    pub strides: Option<Dims>,
    /// Meaning of its bytes.
    pub signs: Signs,
    /// Its digests, as indices for [`Index::digest`].
    pub digests: Option<Range<u64>>,
    /// The digest of its content, if it is known.
    pub content: Option<u128>,
    /// True if the caller of the save said that the chunk never changes.
    pub frozen: bool,
    /// Bytes of the stored range before its first element. In a view, several chunks may be parts
    /// of one range.
    pub lead: u64,
    /// In a view, the stored codes of its elements.
    pub coded: Option<Arc<CodedChunk>>,
}

impl Index {
    /// Checks the header in the start of an index of `size` bytes, before the rest is fetched. A
    /// start that is the whole index is left to [`from_bytes`](Self::from_bytes).
    pub(crate) fn check_start(start: &[u8], size: u64, path: &Path) -> Result<()> {
        if start.len() as u64 == size {
            return Ok(());
        }
        validate::header(start, size, path).map(drop)
    }

    /// Makes an index of its bytes, after a check of every rule of the format.
    ///
    /// `path` is the file of the bytes. It appears in messages, and its folder is that of the data
    /// files.
    pub fn from_bytes(
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
        path: &Path,
    ) -> Result<Self> {
        let (sections, contents) = validate::sections(bytes.as_ref(), path)?;
        let index = Self {
            path: path.to_owned(),
            folder: path.parent().unwrap_or(Path::new("")).into(),
            bytes: Box::new(bytes),
            sections,
            contents,
            is_in_memory: false,
            remote: None,
            tiers: None,
            view: View::default(),
        };
        validate::check(&index)?;
        Ok(index)
    }

    /// Makes the index of a view of `base`, from records that were derived from those of `base`.
    pub(super) fn of_view(
        bytes: Vec<u8>,
        base: &Self,
        view: impl FnOnce(&Self) -> View,
    ) -> Result<Self> {
        let (sections, contents) = validate::sections(&bytes, &base.path)?;
        let mut index = Self {
            path: base.path.clone(),
            folder: Arc::clone(&base.folder),
            bytes: Box::new(bytes),
            sections,
            contents,
            is_in_memory: base.is_in_memory,
            remote: base.remote.clone(),
            tiers: base.tiers.clone(),
            view: View::default(),
        };
        index.view = view(&index);
        Ok(index)
    }

    /// Returns whether the index has logical tensors, which no index file stores.
    pub fn is_view(&self) -> bool {
        self.view.is_logical
    }

    /// Makes this the index of a foreign checkpoint at `path`, which has no index file. Its data
    /// files may be symbolic links, because their names come from the folder itself.
    #[must_use]
    pub(crate) fn made_of(self, path: &Path) -> Self {
        Self { path: path.to_owned(), is_in_memory: true, ..self }
    }

    /// Makes this copy of an index the one at `path`, with the data files beside that.
    #[must_use]
    pub(crate) fn copied_from(self, path: &Path) -> Self {
        let folder = path.parent().unwrap_or(Path::new("")).into();
        Self { path: path.to_owned(), folder, ..self }
    }

    /// Sets the store of the data, if it is on one.
    #[must_use]
    pub(crate) fn on(self, remote: Option<Arc<dyn Remote>>) -> Self {
        Self { remote, ..self }
    }

    /// Returns the store of the data files, if they are on one. Then paths are URLs.
    pub fn remote(&self) -> Option<&Arc<dyn Remote>> {
        self.remote.as_ref()
    }

    /// Reads data files from these folders if they have them, the first of them first.
    #[must_use]
    pub fn in_tiers(self, folders: Vec<PathBuf>) -> Self {
        let files = (0..self.file_count()).map(|file| self.file(file));
        let tiers = Tiers::new(folders, files.map(|file| (file.name, file.size)));
        Self { tiers: Some(Arc::new(tiers)), ..self }
    }

    /// Returns the folders that data files are looked for in first, if there are any.
    pub fn tiers(&self) -> Option<&Arc<Tiers>> {
        self.tiers.as_ref()
    }

    /// Reads the data file at `path` from elsewhere from now on, if that is in a tier. Returns
    /// whether it is, and the file is no longer read from there.
    pub fn pass_over(&self, path: &Path, reason: &str) -> bool {
        let Some(tiers) = &self.tiers else { return false };
        (0..self.file_count()).any(|number| {
            let file = self.file(number);
            tiers.pass_over(number, file.name, file.size, path, reason) && {
                let now = tiers.folder_of(number).map(|folder| folder.join(file.name));
                now.unwrap_or_else(|| self.file_path(number)) != path
            }
        })
    }

    /// Returns whether the index has no file: it was made from a foreign checkpoint.
    pub fn is_in_memory(&self) -> bool {
        self.is_in_memory
    }

    /// Returns the file of the index; for an index in memory, the path of its checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder of the index. Names of files are relative to it.
    pub fn folder(&self) -> Arc<Path> {
        Arc::clone(&self.folder)
    }

    /// Returns the index as it is on disk.
    pub fn bytes(&self) -> &[u8] {
        (*self.bytes).as_ref()
    }

    pub(super) fn header(&self) -> &Header {
        Header::ref_from_bytes(&self.bytes()[..HEADER_LEN]).expect("validated at open")
    }

    pub(super) fn section(&self, section: Section) -> &[u8] {
        &self.bytes()[self.sections[section as usize].clone()]
    }

    pub(super) fn section_start(&self, section: Section) -> u64 {
        self.sections[section as usize].start as u64
    }

    fn slice<T: FromBytes + Immutable + KnownLayout>(&self, section: Section) -> &[T] {
        <[T]>::ref_from_bytes(self.section(section)).expect("validated at open")
    }

    pub(super) fn file_records(&self) -> &[FileRecord] {
        self.slice(Section::Files)
    }

    pub(super) fn tensor_records(&self) -> &[TensorRecord] {
        self.slice(Section::Tensors)
    }

    pub(super) fn chunk_records(&self) -> &[ChunkRecord] {
        self.slice(Section::Chunks)
    }

    pub(super) fn dims_pool(&self) -> &[U64] {
        self.slice(Section::Dims)
    }

    /// Returns the 16 random bytes that identify the save.
    pub fn save_id(&self) -> [u8; 16] {
        self.header().save_id
    }

    /// Returns the version of the format.
    pub fn version(&self) -> u32 {
        self.header().version.get()
    }

    /// Returns the program that wrote the index and its release, if they are recorded in printable
    /// characters.
    pub fn writer(&self) -> Option<&str> {
        let field = &self.header().writer;
        let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
        let text = str::from_utf8(&field[..end]).ok()?;
        (!text.is_empty() && text.chars().all(|c| c == ' ' || c.is_ascii_graphic())).then_some(text)
    }

    /// Returns the number of the save into the folder.
    pub fn generation(&self) -> u64 {
        self.header().generation.get()
    }

    /// Returns the kind of the data files.
    pub fn source(&self) -> SourceKind {
        SourceKind::from_code(self.header().source.get()).expect("validated at open")
    }

    /// Returns the number of data files.
    #[expect(clippy::cast_possible_truncation, reason = "validated at open")]
    pub fn file_count(&self) -> u32 {
        self.file_records().len() as u32
    }

    /// Returns the number of tensors and other values.
    #[expect(clippy::cast_possible_truncation, reason = "validated at open")]
    pub fn tensor_count(&self) -> u32 {
        self.tensor_records().len() as u32
    }

    /// Returns the number of chunks.
    pub fn chunk_count(&self) -> u64 {
        self.chunk_records().len() as u64
    }

    fn text(&self, offset: U64, len: u32) -> &str {
        std::str::from_utf8(self.text_bytes(offset, len)).expect("validated at open")
    }

    fn text_bytes(&self, offset: U64, len: u32) -> &[u8] {
        let at = to_usize(offset.get());
        &self.section(Section::Strings)[at..at + to_usize(u64::from(len))]
    }

    fn dims(&self, at: u64, count: usize) -> Dims {
        let at = to_usize(at);
        self.dims_pool()[at..at + count].iter().map(|d| d.get()).collect()
    }

    /// Returns a data file. `file` must be below [`Self::file_count`].
    pub fn file(&self, file: u32) -> FileView<'_> {
        let record = &self.file_records()[file as usize];
        let flags = record.flags.get();
        FileView {
            name: self.text(record.name_offset, record.name_len.get()),
            size: record.file_size.get(),
            data_start: record.data_start.get(),
            external: flags & FILE_EXTERNAL != 0,
            linked: flags & FILE_LINKED != 0,
            head_digest: (flags & FILE_HEAD_DIGEST != 0).then(|| record.head_digest.get()),
            mtime_ns: record.mtime_ns.get(),
        }
    }

    /// Returns the path of a data file.
    pub fn file_path(&self, file: u32) -> PathBuf {
        self.folder.join(self.file(file).name)
    }

    /// Returns the FQN of a tensor. `tensor` must be below [`Self::tensor_count`].
    pub fn name(&self, tensor: u32) -> &str {
        let record = &self.tensor_records()[tensor as usize];
        self.text(record.name_offset, record.name_len.get())
    }

    /// Returns a tensor. `tensor` must be below [`Self::tensor_count`].
    pub fn tensor(&self, tensor: u32) -> TensorView<'_> {
        let record = &self.tensor_records()[tensor as usize];
        let first = record.first_chunk.get();
        let (split_dim, position) = (record.split_dim.get(), record.position.get());
        TensorView {
            name: self.text(record.name_offset, record.name_len.get()),
            kind: if record.kind == 0 { Kind::Tensor } else { Kind::Bytes },
            dtype: Dtype::from_code(record.dtype),
            shape: self.dims(record.shape.get(), usize::from(record.ndim)),
            flags: record.flags,
            split_dim: (split_dim != NO_SPLIT).then_some(split_dim as usize),
            position: (position != NO_POSITION).then_some(position),
            chunks: first..first + record.chunk_count.get(),
        }
    }

    /// Returns the tensor with this FQN. Takes O(log n).
    pub fn find(&self, fqn: &str) -> Option<u32> {
        let found = self.find_in(fqn, 0..self.tensor_records().len());
        found.or_else(|| self.view.aliases.get(fqn).copied())
    }

    /// Returns the tensor with this FQN, which is likely to be near the tensor `near`. Takes O(log
    /// d) for a distance of d tensors.
    pub fn find_near(&self, fqn: &str, near: u32) -> Option<u32> {
        let count = self.tensor_records().len();
        let is_before = |at: usize| self.name_bytes(at) < fqn.as_bytes();
        let near = (near as usize).min(count);
        let mut step = 1;
        let (mut low, mut high) = (near, near);
        if near < count && is_before(near) {
            // All tensors below `low` are before it.
            while high < count && is_before(high) {
                low = high + 1;
                high += step;
                step *= 2;
            }
        } else {
            // No tensor from `high` on is before it.
            while low > 0 && !is_before(low - 1) {
                high = low - 1;
                low = low.saturating_sub(step);
                step *= 2;
            }
        }
        let found = self.find_in(fqn, low..(high + 1).min(count));
        found.or_else(|| self.view.aliases.get(fqn).copied())
    }

    fn find_in(&self, fqn: &str, range: Range<usize>) -> Option<u32> {
        let wanted = fqn.as_bytes();
        let at = range.start
            + self.tensor_records()[range]
                .partition_point(|record| self.bytes_of_name(record) < wanted);
        (at < self.tensor_records().len() && self.name_bytes(at) == wanted)
            .then(|| u32::try_from(at).expect("validated at open"))
    }

    fn name_bytes(&self, tensor: usize) -> &[u8] {
        self.bytes_of_name(&self.tensor_records()[tensor])
    }

    fn bytes_of_name(&self, record: &TensorRecord) -> &[u8] {
        self.text_bytes(record.name_offset, record.name_len.get())
    }

    /// Returns a chunk. `chunk` must be below [`Self::chunk_count`].
    pub fn chunk(&self, chunk: u64) -> ChunkView {
        let record = &self.chunk_records()[to_usize(chunk)];
        let tensor = record.tensor.get();
        let ndim = usize::from(self.tensor_records()[tensor as usize].ndim);
        let dims = record.dims.get();
        let flags = record.flags.get();
        let length = record.length.get();
        let first_digest = record.digest.get();
        ChunkView {
            tensor,
            file: record.file.get(),
            offset: record.offset.get(),
            length,
            offsets: self.dims(dims, ndim),
            sizes: self.dims(dims + ndim as u64, ndim),
            strides: (flags & CHUNK_STRIDED != 0).then(|| self.dims(dims + 2 * ndim as u64, ndim)),
            digests: (flags & CHUNK_DIGESTS != 0)
                .then(|| first_digest..first_digest + block_count(length)),
            signs: Signs {
                conjugate: flags & CHUNK_CONJUGATE != 0,
                negative: flags & CHUNK_NEGATIVE != 0,
            },
            content: self.content(to_usize(chunk)),
            frozen: flags & CHUNK_FROZEN != 0,
            lead: self.view.pieces.get(&chunk).map_or(0, |piece| piece.lead),
            coded: self.view.pieces.get(&chunk).and_then(|piece| piece.coded.clone()),
        }
    }

    /// Returns the first byte of a chunk's elements in its file, and the number of bytes that they
    /// span. For a coded chunk, that is the number of all its stored bytes.
    pub fn span(&self, chunk: u64) -> (u64, u64) {
        let view = self.chunk(chunk);
        if let Some(coded) = &view.coded {
            let region = coded.region(&Dims::from_elem(0, view.sizes.len()), &view.sizes);
            let parts = coded.of.parts(&region.offsets, &region.sizes);
            return (view.offset, parts.iter().map(StoredRegion::length).sum());
        }
        let itemsize = self.tensor(view.tensor).dtype.filter(|_| self.is_view());
        let Some(itemsize) = itemsize.map(Dtype::size) else {
            return (view.offset, view.length);
        };
        let strides = view.strides.unwrap_or_else(|| row_major(&view.sizes));
        let length = strided_length(&view.sizes, &strides, itemsize);
        (view.offset + view.lead, length.unwrap_or(view.length))
    }

    fn content(&self, chunk: usize) -> Option<u128> {
        let contents = &self.bytes()[self.contents.clone()?];
        let digest = contents[16 * chunk..].first_chunk().expect("validated at open");
        Some(u128::from_le_bytes(*digest)).filter(|&digest| digest != 0)
    }

    /// Returns the length of the section of contents, if there is one.
    pub(super) fn contents_len(&self) -> Option<usize> {
        self.contents.as_ref().map(Range::len)
    }

    /// Returns the data file of a chunk, without reading its other properties.
    pub fn chunk_file(&self, chunk: u64) -> u32 {
        self.chunk_records()[to_usize(chunk)].file.get()
    }

    /// Returns the range of a chunk along one dimension, without reading its other properties.
    pub fn chunk_extent(&self, chunk: u64, dim: usize) -> Range<u64> {
        let record = &self.chunk_records()[to_usize(chunk)];
        let ndim = usize::from(self.tensor_records()[record.tensor.get() as usize].ndim);
        let at = to_usize(record.dims.get());
        let dims = self.dims_pool();
        let begin = dims[at + dim].get();
        begin..begin + dims[at + ndim + dim].get()
    }

    /// Returns one digest. `digest` must be in the range of some [`ChunkView::digests`].
    pub fn digest(&self, digest: u64) -> u64 {
        self.slice::<U64>(Section::Digests)[to_usize(digest)].get()
    }

    /// Returns the path of a tensor in the saved state dict.
    pub fn planner_path(&self, tensor: u32) -> Option<Value> {
        let record = &self.tensor_records()[tensor as usize];
        let len = to_usize(u64::from(record.path_len.get()));
        if len == 0 {
            return None;
        }
        let at = to_usize(record.path_offset.get());
        Some(
            Value::decode(&self.section(Section::Planner)[at..at + len])
                .expect("validated at open"),
        )
    }

    /// Returns the planner data that belongs to no tensor.
    pub fn planner_root(&self) -> Value {
        self.planner_values().0
    }

    /// Returns the containers of the state dict, if they are known: a value that [is
    /// nesting](Value::is_nesting).
    pub fn nesting(&self) -> Value {
        self.planner_values().1
    }

    fn planner_values(&self) -> (Value, Value) {
        let decode = |bytes| Value::decode_prefix(bytes).expect("validated at open");
        let (root, rest) = decode(self.section(Section::Planner));
        (root, decode(rest).0)
    }
}

/// Converts a value that was validated against the length of a buffer in memory.
fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("validated at open")
}
