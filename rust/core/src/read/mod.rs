//! Reads of rectangles of stored chunks into memory. Planning is pure (`plan`), and the engine
//! carries a plan out in parallel (`engine`).

mod batch;
mod bounce;
mod coded;
mod engine;
mod plan;
#[cfg(test)]
mod plan_tests;
mod policy;
mod probe;
mod scatter;
mod segments;
mod sequential;
mod verify;
mod worker;

use std::sync::Arc;

use crate::copy::{Accumulate, SignBits};
use crate::geometry::Dims;
pub use crate::store::{Destination, FileRef};
pub use coded::CodedReq;
pub use engine::read;
pub(crate) use engine::{FileRange, visit};
pub use probe::connect;
pub(crate) use probe::{bytes_of, span};
pub use sequential::{FileProbe, Sequential};

/// How the bytes of a file are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// Chosen for each file. Bytes in the page cache are taken from there, through a mapping if the
    /// file is on a local disk. Other files on a network file system are read
    /// [`Buffered`](Self::Buffered), and [`shared`](Sharing) ones through the page cache. All
    /// others are read [`Direct`](Self::Direct) if the file system supports it, and otherwise
    /// [`Buffered`](Self::Buffered).
    #[default]
    Auto,
    /// Copied from a mapping of the file.
    Mmap,
    /// Direct I/O, with many requests in flight. Bytes in the page cache are taken from there. On a
    /// file system without direct I/O, this is [`Buffered`](Self::Buffered).
    Direct,
    /// Read through the page cache into a small buffer, and copied from there.
    Buffered,
}

/// Reads of other processes of this machine at the same time. [`IoMode::Auto`] reads shared bytes
/// through the page cache, so that the disk delivers them once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// They read nothing of the same files.
    #[default]
    Nothing,
    /// Unknown. It is guessed from the requests: tensors that are read whole, and everything that
    /// contains short rows, count as shared.
    Guess,
    /// Known for each file, by its index in the slice given to [`read`]. A file that is shared in
    /// part is in the slice twice.
    Known(Arc<[bool]>),
}

/// Which blocks are compared with their digests, in the pass that copies them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// No block.
    #[default]
    Nothing,
    /// Blocks that come from a disk or a store and not from the page cache, if a request reads them
    /// whole and in one run.
    Auto,
    /// All blocks. A block is read whole even if only a part is requested.
    All,
}

/// Options of a read.
#[derive(Clone, Debug)]
pub struct ReadOptions {
    /// How the bytes of files are read. Default: [`IoMode::Auto`].
    pub io: IoMode,
    /// Threads that copy. 0, the default, means as many as the cores that this process may use.
    /// Reads that wait for a disk use more, to keep it busy.
    pub threads: usize,
    /// Which blocks with digests are compared with them. Default: [`Verify::Nothing`].
    pub verify: Verify,
    /// Reads of other processes of this machine. Default: [`Sharing::Nothing`].
    pub shared: Sharing,
    /// Ranks of this machine that load at the same time. They share its connections to a store.
    /// Default: 1.
    pub local_ranks: usize,
    /// Limit on the bytes of buffers in one call, apart from page cache and mappings. Default: 64
    /// MiB. There is always at least one buffer for each thread.
    pub max_inflight_bytes: u64,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            io: IoMode::Auto,
            threads: 0,
            verify: Verify::Nothing,
            shared: Sharing::Nothing,
            local_ranks: 1,
            max_inflight_bytes: 64 << 20,
        }
    }
}

/// Operation on elements on the way to the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Operation {
    /// Copies them as they are stored.
    #[default]
    Copy,
    /// Adds them, with a weight, to the sums in the destination. Requests for the same sums must be
    /// in separate calls, because the order of jobs within a call is not defined.
    Accumulate(Accumulate),
}

impl Operation {
    /// Returns the size of an element in the destination. `itemsize` is its stored size.
    #[must_use]
    pub fn element_size(self, itemsize: u64) -> u64 {
        match self {
            Self::Copy => itemsize,
            Self::Accumulate(sink) => sink.size(),
        }
    }
}

/// A rectangle of one stored chunk, and its destination in memory.
#[derive(Clone, Debug)]
pub struct ReadReq {
    /// The file, as an index in the slice given to [`read`].
    pub file: u32,
    /// The tensor's number in the [`Catalog`], only for messages.
    pub tensor: u32,
    /// Offset of the chunk in the file, in bytes.
    pub chunk_offset: u64,
    /// Length of the chunk in the file, in bytes.
    pub chunk_length: u64,
    /// Number of the digest of the chunk's first block in the [`Catalog`]. Those of the other
    /// blocks follow. `None` if the chunk has no digests.
    pub digests: Option<u64>,
    /// Size of an element in bytes.
    pub itemsize: u64,
    /// Sizes of the rectangle.
    pub shape: Dims,
    /// Offset of the rectangle's first element in the chunk, in bytes.
    pub src_offset: u64,
    /// Strides in the chunk, in bytes.
    pub src_strides: Dims,
    /// Destination of the rectangle's first element.
    pub dst: Destination,
    /// Strides in the destination, in bytes.
    pub dst_strides: Dims,
    /// Sign changes of the elements after they were read.
    pub signs: SignBits,
    /// Operation on the way to the destination.
    pub operation: Operation,
    /// The coded tensor, if the elements are stored as codes. Then the offset in the chunk, and the
    /// strides there, are estimates.
    pub coded: Option<Arc<CodedReq>>,
}

impl ReadReq {
    /// Returns a request for all bytes of a chunk, to be copied as they are.
    pub fn bytes(file: u32, tensor: u32, offset: u64, length: u64, dst: Destination) -> Self {
        Self {
            file,
            tensor,
            chunk_offset: offset,
            chunk_length: length,
            digests: None,
            itemsize: 1,
            shape: Dims::from_slice(&[length]),
            src_offset: 0,
            src_strides: Dims::from_slice(&[1]),
            dst,
            dst_strides: Dims::from_slice(&[1]),
            signs: SignBits::default(),
            operation: Operation::Copy,
            coded: None,
        }
    }

    /// Reads the same bytes from another entry of the files, which stands for the same file.
    pub(crate) fn read_from(&mut self, file: u32) {
        let before = std::mem::replace(&mut self.file, file);
        if let Some(coded) = &mut self.coded {
            let places = Arc::make_mut(coded).files.iter_mut();
            places.filter(|(_, place)| *place == before).for_each(|(_, place)| *place = file);
        }
    }
}

/// Facts about the chunks that the engine reads. It asks for them only if it needs them.
pub trait Catalog: Sync {
    /// Returns the name of a tensor, for a message.
    fn tensor_name(&self, tensor: u32) -> String;
    /// Returns the digest of a block.
    fn digest(&self, i: u64) -> u64;
    /// Returns the bytes of a tensor, of all its chunks together; `None` if that is unknown.
    fn tensor_bytes(&self, _tensor: u32) -> Option<u64> {
        None
    }
}

/// Counts of a call to [`read`], mostly in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Delivered to destinations.
    pub bytes_wanted: u64,
    /// Read from files, or loaded from mappings. Includes bytes around the requested ones that were
    /// read with them.
    pub bytes_read: u64,
    /// The part of `bytes_read` that was read with direct I/O.
    pub bytes_direct: u64,
    /// The part of `bytes_read` that came from mappings.
    pub bytes_mapped: u64,
    /// Bytes hashed and compared with digests.
    pub bytes_verified: u64,
    /// Number of jobs into which the requests were divided.
    pub jobs: u64,
}

impl std::ops::Sub for ReadStats {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            bytes_wanted: self.bytes_wanted - earlier.bytes_wanted,
            bytes_read: self.bytes_read - earlier.bytes_read,
            bytes_direct: self.bytes_direct - earlier.bytes_direct,
            bytes_mapped: self.bytes_mapped - earlier.bytes_mapped,
            bytes_verified: self.bytes_verified - earlier.bytes_verified,
            jobs: self.jobs - earlier.jobs,
        }
    }
}

impl std::ops::AddAssign for ReadStats {
    fn add_assign(&mut self, other: Self) {
        self.bytes_wanted += other.bytes_wanted;
        self.bytes_read += other.bytes_read;
        self.bytes_direct += other.bytes_direct;
        self.bytes_mapped += other.bytes_mapped;
        self.bytes_verified += other.bytes_verified;
        self.jobs += other.jobs;
    }
}
