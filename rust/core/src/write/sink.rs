//! Where the bytes of a save go: to files, or to objects of a store.

use std::ops::Range;

use super::item::SaveItem;
use super::jobs::{Job, Span};
use crate::format::{BLOCK_SIZE, BlockCell, BlockDigests, block_count, content_digest};
use crate::store::FileLock;
use crate::{Control, Result};

/// How a call cuts what it writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grain {
    /// The most bytes of a job; a multiple of `alignment`.
    pub job_bytes: u64,
    /// Jobs end at multiples of it in their file, or where what is written does.
    pub alignment: u64,
    /// Jobs at a time.
    pub threads: usize,
}

/// Takes the bytes of one rank's data files. Dropped without [`keep`](Self::keep), it removes what it made.
pub(super) trait Sink: Send + Sync {
    /// How a call that writes `total` bytes is cut.
    fn grain(&self, total: u64) -> Grain;

    /// What one thread writes with, in one call.
    fn hand<'a>(&'a self, digests: &'a Digests, control: &'a Control) -> Box<dyn Hand + 'a>;

    /// Everything was written: makes the files valid and durable.
    fn finish(&self, control: &Control) -> Result<()>;

    /// Whether this is the process that began it: a forked child has neither its threads nor its files.
    fn is_own(&self) -> bool;

    /// How many requests to a store have the bytes in them, or have it copy some.
    fn requests(&self) -> u64 {
        0
    }

    /// How many buffers there are between calls.
    #[cfg(test)]
    fn buffers(&self) -> usize;

    /// The files shall stay. Returns the claim on them, if there is one, to be held until an index names them.
    fn keep(self: Box<Self>) -> Option<FileLock>;
}

/// What one thread writes with.
pub(super) trait Hand {
    /// Writes a job, of which `spans` are the bytes, and digests the blocks that begin in it.
    fn write(&mut self, job: &Job, spans: &[Span<'_>]) -> Result<()>;
}

/// What is found out about the bytes of a save on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// What an index has of them: XXH3, by block and of content.
    Digests,
    /// CRC-32, which zip archives have.
    Crc32,
    /// Nothing.
    None,
}

/// The digests of all items, while they are found out.
pub(super) struct Digests {
    sums: Sums,
    /// For each item, the index of its first; and the end of the last.
    first: Vec<usize>,
    cells: Vec<BlockCell>,
}

impl Digests {
    pub(super) fn of(items: &[SaveItem], sums: Sums) -> Self {
        let mut first = Vec::with_capacity(items.len() + 1);
        let mut count = 0;
        for item in items {
            first.push(count);
            count += to_usize(block_count(item.length));
        }
        first.push(count);
        Self {
            sums,
            first,
            cells: std::iter::repeat_with(BlockCell::default).take(count).collect(),
        }
    }

    /// Where those of an item begin, from its byte `at` on, which begins a block.
    pub(super) fn start(&self, item: usize, at: u64) -> usize {
        self.first[item] + to_usize(at / BLOCK_SIZE)
    }

    /// Hashes the blocks of a span that begin in the job, and hands on the bytes of the span that lie in the job, each
    /// piece right after it was hashed. A block that reaches beyond the job is hashed here and handed on with the next.
    pub(super) fn digest<'a>(&self, span: &Span<'a>, job: &Job, mut hand_on: impl FnMut(&'a [u8])) {
        let block_size = to_usize(BLOCK_SIZE);
        let Range { start: mut at, end } = span.within(&job.bytes);
        while at < end {
            let block = at / block_size;
            let next = (block + 1) * block_size;
            if at.is_multiple_of(block_size) {
                self.sum(span.digest + block, &span.data[at..next.min(span.data.len())]);
            }
            hand_on(&span.data[at..next.min(end)]);
            at = next;
        }
    }

    fn sum(&self, cell: usize, block: &[u8]) {
        let found = match self.sums {
            Sums::Digests => BlockDigests::of(block),
            // In the place of a digest.
            Sums::Crc32 => BlockDigests {
                digest: crc32fast::hash(block).into(),
                content: 0,
            },
            Sums::None => return,
        };
        self.cells[cell].set(found);
    }

    /// The CRC-32 of an item of `length` bytes that was written.
    pub(super) fn crc32_of(&self, item: usize, length: u64) -> u32 {
        let mut whole = crc32fast::Hasher::new();
        for (block, cell) in (0..).zip(&self.cells[self.first[item]..self.first[item + 1]]) {
            let crc = u32::try_from(cell.digest()).expect("32 bits were set");
            let len = BLOCK_SIZE.min(length - block * BLOCK_SIZE);
            whole.combine(&crc32fast::Hasher::new_with_initial_len(crc, len));
        }
        whole.finalize()
    }

    /// Those of an item that was written: by block, and of its content.
    pub(super) fn of_item(&self, item: usize) -> (Vec<u64>, u128) {
        let blocks = &self.cells[self.first[item]..self.first[item + 1]];
        let digests = blocks.iter().map(BlockCell::digest).collect();
        (digests, content_digest(blocks.iter().map(BlockCell::content)))
    }
}

/// For lengths of what is in memory.
pub(super) fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("the length of something in memory")
}
