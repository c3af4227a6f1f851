//! Destinations of a save's bytes: files, or objects on a store.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::item::SaveItem;
use super::jobs::{Job, Span, to_usize};
use crate::format::{
    BLOCK_SIZE, BlockCell, BlockDigests, BlockHasher, block_count, content_digest,
};
use crate::parallel::lock;
use crate::store::FileLock;
use crate::{Control, Error, Result};

/// Sizes of the jobs of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grain {
    /// The most bytes of a job; a multiple of `alignment`.
    pub job_bytes: u64,
    /// A job ends at a multiple of it in the file, or where the written bytes end.
    pub alignment: u64,
    /// Concurrent jobs.
    pub threads: usize,
}

/// Writes the bytes of one rank's data files. On drop it removes what it created, unless that is
/// [kept](Self::keep).
pub(super) trait Sink: Send + Sync {
    /// Returns the sizes for a call that writes `total` bytes.
    fn grain(&self, total: u64) -> Grain;

    /// Writes a job, whose bytes are in `spans`, and computes their digests.
    fn write(
        &self,
        job: &Job,
        spans: &[Span<'_>],
        digests: &Digests,
        control: &Control,
    ) -> Result<()>;

    /// Makes the files valid and durable, after everything was written.
    fn finish(&self, control: &Control) -> Result<()>;

    /// Returns whether this process began the save. A forked child has neither its threads nor its
    /// files.
    fn is_own(&self) -> bool;

    /// Returns the number of requests to a store that carry or copy data.
    fn requests(&self) -> u64 {
        0
    }

    /// Returns the number of buffers between calls.
    #[cfg(test)]
    fn buffers(&self) -> usize;

    /// Removes the objects from a store; later calls do nothing. Returns the reasons why something
    /// is still there. Files on a disk are removed on drop.
    fn give_up(&self) -> Vec<Error> {
        Vec::new()
    }

    /// Keeps the files. Returns the claim on them, if there is one, to hold until an index names
    /// them.
    fn keep(self: Box<Self>) -> Option<FileLock>;
}

/// Digests that are computed while bytes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// The digests of an index: XXH3 of blocks and of content.
    Digests,
    /// CRC-32, as in zip archives.
    Crc32,
    /// No digest.
    None,
}

/// The digests of all items, while they are computed.
///
/// A tensor may change while it is saved. The save therefore hashes and writes one and the same
/// copy, so that the digests always match the file.
pub(super) struct Digests {
    sums: Sums,
    /// Number of each item's first digest, followed by the end of the last.
    first: Vec<usize>,
    cells: Vec<BlockCell>,
    /// Blocks that several jobs share and that are still incomplete, by cell.
    shared: Mutex<HashMap<usize, Arc<Mutex<Shared>>>>,
}

/// A block that several jobs write.
struct Shared {
    hasher: Hasher,
    /// Bytes in the hasher, from the start of the block.
    done: usize,
    /// Copies of pieces that came before the bytes in front of them, by their offset in the block.
    early: BTreeMap<usize, Vec<u8>>,
}

enum Hasher {
    Digests(Box<BlockHasher>),
    Crc32(crc32fast::Hasher),
}

/// The first bytes of a job, if they continue a block that the previous job begins.
pub(super) struct Rest {
    cell: usize,
    /// Length of the whole block.
    block_len: usize,
    /// The offset of the bytes in the block.
    at: usize,
    /// Their range in the job's copy.
    bytes: Range<usize>,
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
            shared: Mutex::default(),
        }
    }

    /// Returns whether no digest is computed, so that bytes can be written without a copy.
    pub(super) fn are_none(&self) -> bool {
        self.sums == Sums::None
    }

    /// Returns the number of the digest of an item's block that begins at byte `at`.
    pub(super) fn start(&self, item: usize, at: u64) -> usize {
        self.first[item] + to_usize(at / BLOCK_SIZE)
    }

    /// Copies the bytes of the job from the spans to `to`, and hashes the copy. Reads each byte of
    /// the spans once.
    ///
    /// Pass the result to [`add_rest`](Self::add_rest) after the copy is written. By then the
    /// previous job has most likely hashed the bytes in front of it, so that the rest need not be
    /// stored.
    pub(super) fn copy(
        &self,
        spans: &[Span<'_>],
        job: &Job,
        to: &mut [u8],
    ) -> io::Result<Option<Rest>> {
        let block_size = to_usize(BLOCK_SIZE);
        let mut rest = None;
        let mut filled = 0;
        for span in spans {
            let Range { start: mut at, end } = span.within(&job.bytes);
            while at < end {
                let block = at / block_size;
                let begin = block * block_size;
                let next = (begin + block_size).min(end);
                let piece = filled..filled + (next - at);
                to[piece.clone()].copy_from_slice(&span.data[at..next]);
                let part = Rest {
                    cell: span.digest + block,
                    block_len: block_size.min(span.data.len() - begin),
                    at: at - begin,
                    bytes: piece.clone(),
                };
                if at == begin {
                    self.add(&part, &to[piece])?;
                } else {
                    // Only the first bytes of a job can continue a block.
                    rest = Some(part);
                }
                filled += next - at;
                at = next;
            }
        }
        Ok(rest)
    }

    /// Hashes the bytes that [`copy`](Self::copy) left, from the same copy.
    pub(super) fn add_rest(&self, rest: Option<Rest>, copy: &[u8]) -> io::Result<()> {
        rest.map_or(Ok(()), |rest| self.add(&rest, &copy[rest.bytes.clone()]))
    }

    fn add(&self, part: &Rest, piece: &[u8]) -> io::Result<()> {
        if piece.len() == part.block_len {
            self.sum(part.cell, piece);
            return Ok(());
        }
        let block = {
            let mut shared = lock(&self.shared);
            let hasher = match self.sums {
                Sums::Digests => || Hasher::Digests(Box::default()),
                Sums::Crc32 => || Hasher::Crc32(crc32fast::Hasher::new()),
                Sums::None => return Ok(()),
            };
            let new = || {
                Arc::new(Mutex::new(Shared { hasher: hasher(), done: 0, early: BTreeMap::new() }))
            };
            Arc::clone(shared.entry(part.cell).or_insert_with(new))
        };
        let mut block = lock(&block);
        if block.done != part.at {
            let mut copy = Vec::new();
            copy.try_reserve_exact(piece.len())?;
            copy.extend_from_slice(piece);
            block.early.insert(part.at, copy);
            return Ok(());
        }
        block.take(piece);
        while let Some(next) = {
            let done = block.done;
            block.early.remove(&done)
        } {
            block.take(&next);
        }
        if block.done == part.block_len {
            self.cells[part.cell].set(block.found());
            lock(&self.shared).remove(&part.cell);
        }
        Ok(())
    }

    fn sum(&self, cell: usize, block: &[u8]) {
        let found = match self.sums {
            Sums::Digests => BlockDigests::of(block),
            Sums::Crc32 => of_crc32(crc32fast::hash(block)),
            Sums::None => return,
        };
        self.cells[cell].set(found);
    }

    /// Returns the CRC-32 of a written item of `length` bytes.
    pub(super) fn crc32_of(&self, item: usize, length: u64) -> u32 {
        let mut whole = crc32fast::Hasher::new();
        for (block, cell) in (0..).zip(&self.cells[self.first[item]..self.first[item + 1]]) {
            let crc = u32::try_from(cell.digest()).expect("32 bits were set");
            let len = BLOCK_SIZE.min(length - block * BLOCK_SIZE);
            whole.combine(&crc32fast::Hasher::new_with_initial_len(crc, len));
        }
        whole.finalize()
    }

    /// Returns the digests of a written item: those of its blocks, and that of its content.
    pub(super) fn of_item(&self, item: usize) -> (Vec<u64>, u128) {
        let blocks = &self.cells[self.first[item]..self.first[item + 1]];
        let digests = blocks.iter().map(BlockCell::digest).collect();
        (digests, content_digest(blocks.iter().map(BlockCell::content)))
    }
}

impl Shared {
    fn take(&mut self, piece: &[u8]) {
        match &mut self.hasher {
            Hasher::Digests(hasher) => hasher.write(piece),
            Hasher::Crc32(hasher) => hasher.update(piece),
        }
        self.done += piece.len();
    }

    fn found(&self) -> BlockDigests {
        match &self.hasher {
            Hasher::Digests(hasher) => hasher.finish(),
            Hasher::Crc32(hasher) => of_crc32(hasher.clone().finalize()),
        }
    }
}

/// Stores a CRC-32 in place of a digest.
fn of_crc32(crc: u32) -> BlockDigests {
    BlockDigests { digest: crc.into(), content: 0 }
}
