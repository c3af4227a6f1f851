//! Reads rectangles of stored chunks into memory: planned purely (`plan`), then carried out in
//! parallel (`engine`).

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
pub(crate) use probe::span;
pub use sequential::{FileProbe, Sequential};
pub(crate) use verify::compare;

/// Ways in which bytes come from a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// For each file: [`Mmap`](Self::Mmap) if what is wanted of it is in the page cache and it lies
    /// on a local disk, else [`Direct`](Self::Direct) (unless it is [`shared`](Sharing)) where the
    /// file system takes that, else [`Buffered`](Self::Buffered).
    #[default]
    Auto,
    /// Copied from a mapping of the file.
    Mmap,
    /// Read past the page cache, many requests in flight. What is in the page cache already is
    /// taken from there. On a file system without direct I/O: [`Buffered`](Self::Buffered).
    Direct,
    /// Read through the page cache into a small buffer, copied from there.
    Buffered,
}

/// Reads of other processes of this machine at the same time. [`IoMode::Auto`] reads what they also
/// read through the page cache, so that the disk delivers it once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// Nothing of the same files.
    #[default]
    Nothing,
    /// It is not known, and guessed by the shape of what is wanted here: tensors wanted whole, and
    /// all that short rows lie in.
    Guess,
    /// It is known of each file, by its index in the slice given to [`read`]. A file of which a
    /// part is wanted by others is there twice.
    Known(Arc<[bool]>),
}

/// Which blocks are compared with their digests, in the pass that copies them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// None.
    #[default]
    Nothing,
    /// Blocks that come from a disk or a store and not from the page cache, for requests that are
    /// made of whole blocks.
    Auto,
    /// All. Blocks of which a part is wanted are read whole.
    All,
}

/// Options of a read.
#[derive(Clone, Debug)]
pub struct ReadOptions {
    /// The way in which bytes come from the files. Default: [`IoMode::Auto`].
    pub io: IoMode,
    /// Threads that copy; 0 (the default): as many as the cores this process may use. Reads that
    /// wait for a disk use more, to keep it busy.
    pub threads: usize,
    /// Which blocks that have digests are compared with them. Default: [`Verify::Nothing`].
    pub verify: Verify,
    /// The reads that other processes of this machine make too. Default: [`Sharing::Nothing`].
    pub shared: Sharing,
    /// Bytes of buffers that one call may hold, page cache and mappings aside. Default: 64 MiB. At
    /// least one buffer for a thread is always used.
    pub max_inflight_bytes: u64,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            io: IoMode::Auto,
            threads: 0,
            verify: Verify::Nothing,
            shared: Sharing::Nothing,
            max_inflight_bytes: 64 << 20,
        }
    }
}

/// Operations on elements on their way to the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Operation {
    /// They are copied as they are stored.
    #[default]
    Copy,
    /// They are added, with a weight, to the sums that are there. Requests for the same sums are
    /// for calls one after another: the order of the jobs of one call is not defined.
    Accumulate(Accumulate),
}

impl Operation {
    /// Bytes of an element at the destination, where a stored one has `itemsize`.
    #[must_use]
    pub fn element_size(self, itemsize: u64) -> u64 {
        match self {
            Self::Copy => itemsize,
            Self::Accumulate(sink) => sink.size(),
        }
    }
}

/// A rectangle of one stored chunk, and the memory it goes to.
#[derive(Clone, Debug)]
pub struct ReadReq {
    /// The file, as an index in the slice given to [`read`].
    pub file: u32,
    /// The tensor, as the [`Catalog`] knows it; for messages only.
    pub tensor: u32,
    /// Offset of the chunk in the file, in bytes.
    pub chunk_offset: u64,
    /// Bytes of the chunk in the file.
    pub chunk_length: u64,
    /// Number, in the [`Catalog`], of the digest of the chunk's first block; the others follow.
    /// `None`: it has none.
    pub digests: Option<u64>,
    /// Bytes of an element.
    pub itemsize: u64,
    /// Elements of the rectangle in each dimension.
    pub shape: Dims,
    /// Bytes from the chunk's first byte to the rectangle's first element.
    pub src_offset: u64,
    /// Bytes from an element to the next of each dimension, in the chunk.
    pub src_strides: Dims,
    /// Destination of the rectangle's first element.
    pub dst: Destination,
    /// Bytes from an element to the next of each dimension, in the destination.
    pub dst_strides: Dims,
    /// Changes to the elements once they are there.
    pub signs: SignBits,
    /// The operation on the way.
    pub operation: Operation,
    /// The coded tensor, if the elements are not stored as they are. The offset of the chunk, and
    /// strides in it, are estimates then.
    pub coded: Option<Arc<CodedReq>>,
}

/// Facts about the chunks that the engine reads. It asks only when it needs them.
pub trait Catalog: Sync {
    /// The name of a tensor, for a message.
    fn tensor_name(&self, tensor: u32) -> String;
    /// A digest of a block.
    fn digest(&self, i: u64) -> u64;
    /// Bytes of a tensor, all its chunks together; `None` where that is not known.
    fn tensor_bytes(&self, _tensor: u32) -> Option<u64> {
        None
    }
}

/// Counts of a call to [`read`], in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Delivered to destinations.
    pub bytes_wanted: u64,
    /// Read from files, or loaded from mappings; what lay around the wanted bytes and was read with
    /// them is included.
    pub bytes_read: u64,
    /// The part of `bytes_read` that came past the page cache.
    pub bytes_direct: u64,
    /// The part of `bytes_read` that came from mappings.
    pub bytes_mapped: u64,
    /// Bytes hashed and compared with digests.
    pub bytes_verified: u64,
    /// Units of work the requests were made into.
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
