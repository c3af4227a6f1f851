//! Policies for reading the bytes of a file: from a mapping, through the page cache or with direct
//! I/O (`O_DIRECT`), with the size and the number of concurrent jobs.

/// Reads in flight that keep a disk busy, whatever the number of cores.
const DISK_DEPTH: usize = 16;
/// Reads in flight, if reads are so small that their number limits the disk.
pub const SMALL_READ_DEPTH: usize = 64;
/// Largest read that counts as small.
pub const SMALL_READ: u64 = 32 << 10;
/// Bytes of a job that copies from a mapping: large compared with the cost of a job, small compared
/// with the work of a thread.
const MAPPED_JOB: u64 = 2 << 20;
/// Bytes of a job that reads with direct I/O.
const DISK_JOB: u64 = 1 << 20;
/// Bytes of a job that reads from the page cache. Its buffer must stay in the second-level cache.
const CACHED_JOB: u64 = 512 << 10;
/// Lower limit on the bytes of a job. Jobs get smaller than the sizes above to give every thread
/// some.
pub const MIN_JOB: u64 = 256 << 10;

/// Requests to a store in flight.
pub const REMOTE_DEPTH: usize = 64;
/// Bytes of a job that fetches from a store: large compared with the cost of a request.
const REMOTE_JOB: u64 = 8 << 20;
/// Lower limit on the bytes of such a job, if there is little to fetch.
const REMOTE_MIN_JOB: u64 = 1 << 20;
/// A request to a store takes about as long as this many more bytes (20 ms at 50 MB/s of one
/// connection).
const REQUEST_COST: u64 = 1 << 20;
/// Gaps up to this are read instead of skipped, if the over-read stays within bounds.
pub const MAX_GAP: u64 = 64 << 10;
/// A separate read from a disk takes about as long as this many more bytes.
pub const SEEK_COST: u64 = 32 << 10;

/// Limit on the over-read factor for thin rows. A disk delivers the additional bytes sooner than it
/// answers a request for each row.
pub const ROWS_OVER_READ: u64 = 4;

/// Tiny pieces in memory that are worth a thread of their own.
const MAX_PIECES: usize = 2048;
/// Tiny pieces on a store that are worth a request of their own.
const REMOTE_PIECES: usize = 1 << 16;

/// Parameters for reading a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Target for the bytes that a job fetches.
    pub target: u64,
    /// Segments end at multiples of this, a power of two.
    pub align: u64,
    /// True if skipping a gap saves a read. In a mapping it saves only the setup of pages.
    pub skip_gaps: bool,
    /// Gaps up to this are read instead of skipped, unless the over-read is too large.
    pub max_gap: u64,
    /// True if there is no bound on the over-read.
    pub over_reads: bool,
    /// Gaps up to this between thin rows of a rectangle are read, unless that reads more than
    /// [`ROWS_OVER_READ`] times the bytes.
    pub row_gap: u64,
    /// A separate read takes about as long as this many more bytes.
    pub seek_cost: u64,
    /// Limit on the pieces of a job, so that threads can share tiny pieces.
    pub max_pieces: usize,
}

/// How one file is read in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Mapped,
    /// From the page cache, with no more threads than copy.
    Cached,
    /// From storage through the page cache.
    Buffered,
    /// From storage into the page cache, also for other processes, and copied from a mapping.
    Shared,
    /// From storage with direct I/O.
    Direct {
        align: u64,
    },
    /// From a store.
    Remote,
}

impl Access {
    /// Returns whether more threads than cores are useful.
    pub fn waits(self) -> bool {
        matches!(self, Self::Shared | Self::Buffered | Self::Direct { .. } | Self::Remote)
    }

    /// Returns whether bytes are copied from a mapping.
    pub fn maps(self) -> bool {
        matches!(self, Self::Mapped | Self::Shared)
    }

    /// Returns the number of large reads in flight.
    pub fn depth(self) -> usize {
        match self {
            Self::Remote => REMOTE_DEPTH,
            _ => DISK_DEPTH,
        }
    }

    pub fn policy(self, share: u64) -> Policy {
        let (target, align) = match self {
            Self::Mapped | Self::Shared => (MAPPED_JOB, 1),
            Self::Cached | Self::Buffered => (CACHED_JOB, 1),
            Self::Direct { align } => (DISK_JOB, align),
            Self::Remote => (REMOTE_JOB, 1),
        };
        let is_remote = self == Self::Remote;
        let least = if is_remote { REMOTE_MIN_JOB } else { MIN_JOB };
        Policy {
            target: share.next_power_of_two().clamp(least, target),
            align,
            skip_gaps: !self.maps(),
            max_gap: if is_remote { REQUEST_COST } else { MAX_GAP },
            over_reads: is_remote,
            row_gap: if matches!(self, Self::Direct { .. }) { MAX_GAP } else { 0 },
            max_pieces: if is_remote { REMOTE_PIECES } else { MAX_PIECES },
            seek_cost: if is_remote { REQUEST_COST } else { SEEK_COST },
        }
    }
}
