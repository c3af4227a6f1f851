//! The options of a save: threads, direct or buffered writes, fsync, memory in flight.

use crate::format::PAYLOAD_ALIGNMENT;
use crate::parallel;
use crate::store::Buffer;

/// Ways of writing to the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteIo {
    /// Direct for large files that are synced, otherwise buffered.
    #[default]
    Auto,
    /// Bypasses the page cache, if the file system supports that.
    Direct,
    /// Writes through the page cache.
    Buffered,
}

/// Options of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOptions {
    /// How to write to the disk.
    pub io: WriteIo,
    /// Threads, each with one write in flight. 0 chooses: 16 for direct writes, which mostly wait
    /// for the disk; for buffered writes the cores that this process may use, at most four for each
    /// file. The ranks of a machine share these, and small writes use fewer.
    pub threads: usize,
    /// Sync all files to stable storage before a save is done.
    pub fsync: bool,
    /// Limit on the memory for bytes in flight.
    pub max_inflight_bytes: u64,
    /// Ranks of this machine that save at the same time. They share its cores and its disk.
    pub local_ranks: usize,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            io: WriteIo::Auto,
            threads: 0,
            fsync: true,
            max_inflight_bytes: 64 << 20,
            local_ranks: 1,
        }
    }
}

/// If no file has this many bytes, a synced save is written through the page cache too: one flush
/// instead of a wait for each write.
const DIRECT_MIN: u64 = 4 << 20;
const DIRECT_THREADS: usize = 16;
/// Limit on the threads for a file. A file system lets one buffered write to a file in at a time,
/// so more threads would only hash and copy.
const WRITERS_A_FILE: usize = 4;
/// Threads that keep a disk nearly busy.
const FEW_THREADS: usize = 4;
/// A call gets one thread for this many bytes.
const BYTES_A_THREAD: u64 = 8 << 20;
/// Bytes of a write. Larger writes were not faster on the disks we tried, and no longer fit in the
/// processor's cache between digest and copy.
const JOB_BYTES: u64 = 1 << 20;

/// [`WriteOptions`] after every choice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resolved {
    pub direct: bool,
    pub threads: usize,
    /// Threads for a call that writes little.
    pub few_threads: usize,
    pub fsync: bool,
    pub job_bytes: u64,
    /// Alignment of offsets, lengths and memory for direct writes: a page, so that direct and
    /// buffered writes never share a page of the cache.
    pub alignment: u64,
}

impl Resolved {
    /// Returns the threads for a call that writes `total` bytes. A new thread zeroes a buffer,
    /// which takes as long as writing a good part of it.
    pub(super) fn threads_for(&self, total: u64) -> usize {
        let worth = usize::try_from(total / BYTES_A_THREAD).unwrap_or(usize::MAX);
        self.threads.min(worth.max(self.few_threads))
    }

    /// Returns the bytes of a job for such a call. Jobs are smaller if there would be too few for
    /// all threads.
    pub(super) fn job_bytes_for(&self, total: u64) -> u64 {
        (total / self.threads_for(total) as u64)
            .next_multiple_of(self.alignment)
            .clamp((128 << 10_u64).min(self.job_bytes), self.job_bytes)
    }
}

impl WriteOptions {
    /// Makes the choices for a save of `files` files, of which the largest has `largest` bytes.
    pub(super) fn resolve(&self, files: usize, largest: u64) -> Resolved {
        let direct = match self.io {
            WriteIo::Auto => self.fsync && largest >= DIRECT_MIN,
            WriteIo::Direct => true,
            WriteIo::Buffered => false,
        };
        let alignment = PAYLOAD_ALIGNMENT.max(rustix::param::page_size() as u64);
        let threads = match self.threads {
            0 => threads_of_rank(direct, parallel::available(), self.local_ranks, files),
            threads => threads,
        };
        let room = usize::try_from(self.max_inflight_bytes).unwrap_or(usize::MAX);
        let threads = threads.min(room / Buffer::footprint(0)).max(1);
        // One page less, because a buffer begins at the start of the page of its first byte.
        let largest = Buffer::largest_within(room / threads) as u64;
        let job_bytes = largest.saturating_sub(alignment).clamp(alignment, JOB_BYTES);
        Resolved {
            direct,
            threads,
            few_threads: if self.threads == 0 { FEW_THREADS } else { threads },
            fsync: self.fsync,
            job_bytes,
            alignment,
        }
    }
}

/// Returns the default number of threads of a rank.
fn threads_of_rank(direct: bool, cores: usize, local_ranks: usize, files: usize) -> usize {
    let ranks = local_ranks.max(1);
    if direct {
        // Threads wait for the disk, and a few of each rank keep it busy.
        (DIRECT_THREADS / ranks).max(FEW_THREADS)
    } else {
        (cores / ranks).min(WRITERS_A_FILE * files).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_machine_share_its_threads() {
        for (direct, cores, ranks, files, expected) in [
            (true, 2, 1, 1, 16),
            (true, 128, 1, 1, 16),
            (true, 128, 2, 1, 8),
            (true, 128, 8, 1, 4),
            (true, 128, 1000, 1, 4),
            (true, 4, 0, 1, 16),
            (false, 128, 1, 100, 128),
            (false, 128, 1, 3, 12),
            (false, 128, 1, 1, 4),
            (false, 128, 8, 100, 16),
            (false, 2, 1, 1, 2),
            (false, 4, 8, 1, 1),
            (false, 4, 0, 1, 4),
            (false, 4, 1, 0, 1),
        ] {
            assert_eq!(
                threads_of_rank(direct, cores, ranks, files),
                expected,
                "{direct} {cores} {ranks} {files}"
            );
        }
    }

    #[test]
    fn memory_is_bounded() {
        for max_inflight_bytes in [0, 5000, 100_000, 3 << 20, 64 << 20, u64::MAX] {
            for threads in [0, 1, 2, 1000] {
                let options =
                    WriteOptions { threads, max_inflight_bytes, ..WriteOptions::default() };
                let resolved = options.resolve(1, u64::MAX);
                assert!(
                    resolved.job_bytes >= resolved.alignment
                        && resolved.job_bytes.is_multiple_of(resolved.alignment)
                );
                assert!(resolved.threads >= 1 && (threads == 0 || resolved.threads <= threads));
                let each = Buffer::footprint(
                    usize::try_from(resolved.job_bytes + resolved.alignment).unwrap(),
                );
                let used = (resolved.threads * each) as u64;
                assert!(
                    used <= max_inflight_bytes.max(each as u64) && each <= 2 << 20,
                    "{options:?}: {resolved:?}"
                );
            }
        }
    }

    #[test]
    fn direct_is_for_large_synced_files() {
        let options = WriteOptions::default();
        assert!(options.resolve(1, 1 << 30).direct);
        assert!(!options.resolve(1, 1 << 20).direct);
        assert!(!WriteOptions { fsync: false, ..options }.resolve(1, 1 << 30).direct);
        assert!(WriteOptions { io: WriteIo::Direct, ..options }.resolve(1, 1).direct);
        assert!(!WriteOptions { io: WriteIo::Buffered, ..options }.resolve(1, 1 << 30).direct);
    }
}
