//! Policies of fetching the bytes of a file: from a mapping, through the page cache or past it
//! (`O_DIRECT`), in jobs of which size, how many at a time.

/// Reads in flight that keep a disk busy, whatever the number of cores.
const DISK_DEPTH: usize = 16;
/// The same for reads so small that their number is what limits the disk.
pub const SMALL_READ_DEPTH: usize = 64;
/// Largest read that counts as small.
pub const SMALL_READ: u64 = 32 << 10;
/// Bytes of a job that is copied from a mapping: large against the cost of a job, small against the
/// work of a thread.
const MAPPED_JOB: u64 = 2 << 20;
/// Bytes of a job read past the page cache.
const DISK_JOB: u64 = 1 << 20;
/// Bytes of a job read from the page cache: buffer and all must stay in the second-level cache.
const CACHED_JOB: u64 = 512 << 10;
/// Jobs are made smaller than the above to give every thread some, but never below this.
pub const MIN_JOB: u64 = 256 << 10;

/// Requests to a store in flight.
pub const REMOTE_DEPTH: usize = 64;
/// Bytes of a job fetched from a store: large against what a request costs.
const REMOTE_JOB: u64 = 8 << 20;
/// The least of one, where there is little to fetch.
const REMOTE_MIN_JOB: u64 = 1 << 20;
/// A request to a store takes about as long as this many bytes of one connection (20 ms at 50
/// MB/s).
const REQUEST_COST: u64 = 1 << 20;
/// Gaps up to this are read rather than skipped wherever the over-read stays within bounds.
pub const MAX_GAP: u64 = 64 << 10;
/// A separate read costs the disk about as much as this many bytes more.
pub const SEEK_COST: u64 = 32 << 10;

/// Factor by which bytes may be over-read to read thin rows in one: a disk delivers these sooner
/// than it answers a request for each row.
pub const ROWS_OVER_READ: u64 = 4;

/// Tiny pieces that are worth a thread of their own where they are in memory.
const MAX_PIECES: usize = 2048;
/// Tiny pieces that are worth a request of their own.
const REMOTE_PIECES: usize = 1 << 16;

/// Numbers by which the bytes of a file are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Bytes a job should fetch.
    pub target: u64,
    /// Ends of a segment are multiples of this, a power of two.
    pub align: u64,
    /// A skipped gap saves reading it. Not so from memory, where only its pages are set up.
    pub skip_gaps: bool,
    /// Gaps up to this are read rather than skipped, within the bounds of
    /// [`over_reads`](Self::over_reads).
    pub max_gap: u64,
    /// That is so however much more is read than requested.
    pub over_reads: bool,
    /// Gaps up to this between thin rows of a rectangle are read, where that reads at most
    /// [`ROWS_OVER_READ`] times the bytes.
    pub row_gap: u64,
    /// A separate read costs about as much as this many bytes more.
    pub seek_cost: u64,
    /// Pieces of a job at most: keeps jobs of tiny pieces small enough to share between threads.
    pub max_pieces: usize,
}

/// Ways in which one file is read in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Mapped,
    /// From the page cache, by as many threads as copy.
    Cached,
    /// From storage through the page cache.
    Buffered,
    /// From storage into the page cache, for others too, and copied from a mapping.
    Shared,
    /// From storage past the page cache.
    Direct {
        align: u64,
    },
    /// From a store.
    Remote,
}

impl Access {
    /// True if more threads than cores are useful.
    pub fn waits(self) -> bool {
        matches!(self, Self::Shared | Self::Buffered | Self::Direct { .. } | Self::Remote)
    }

    /// True if bytes are copied from a mapping.
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
