//! How the bytes of a file are fetched: from a mapping, through the page cache or past it (`O_DIRECT`), in jobs of which size, how many at a time.

/// Reads in flight that keep a disk busy, whatever the number of cores.
pub const DISK_DEPTH: usize = 16;
/// The same for reads so small that their number is what limits the disk.
pub const SMALL_READ_DEPTH: usize = 64;
/// What counts as such.
pub const SMALL_READ: u64 = 32 << 10;
/// Bytes of a job that is copied from a mapping: large against the cost of a job, small against the work of a thread.
const MAPPED_JOB: u64 = 2 << 20;
/// Bytes of a job read past the page cache.
const DISK_JOB: u64 = 1 << 20;
/// Bytes of a job read from the page cache: buffer and all must stay in the second-level cache.
const CACHED_JOB: u64 = 512 << 10;
/// Jobs are made smaller than the above to give every thread some, but never below this.
pub const MIN_JOB: u64 = 256 << 10;

/// How the bytes of a file are best fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Bytes a job should fetch.
    pub target: u64,
    /// Ends of a segment are multiples of this, a power of two.
    pub align: u64,
    /// Whether a skipped gap saves reading it. Not so from memory, where only its pages are set up.
    pub skip_gaps: bool,
}

/// How one file is read in this call.
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
}

impl Access {
    /// Whether more threads than cores are useful.
    pub fn waits(self) -> bool {
        matches!(self, Self::Shared | Self::Buffered | Self::Direct { .. })
    }

    /// Whether bytes are copied from a mapping.
    pub fn maps(self) -> bool {
        matches!(self, Self::Mapped | Self::Shared)
    }

    pub fn policy(self, share: u64) -> Policy {
        let (target, align) = match self {
            Self::Mapped | Self::Shared => (MAPPED_JOB, 1),
            Self::Cached | Self::Buffered => (CACHED_JOB, 1),
            Self::Direct { align } => (DISK_JOB, align),
        };
        Policy {
            target: share.next_power_of_two().clamp(MIN_JOB, target),
            align,
            skip_gaps: !self.maps(),
        }
    }
}
