//! Packing of regions into slabs. It is pure, so that tables and properties can test it.

use super::split::split;
use crate::format::BLOCK_SIZE;
use crate::geometry::Dims;

/// Slabs, and the pieces in them, are aligned to this.
pub const ALIGN: u64 = 64;
/// If less than this part of a slab is free, it stays empty instead of taking the first bytes of a
/// large item.
const LEFT_OVER: u64 = 16;

/// A region to load.
#[derive(Clone, Debug)]
pub struct SlabItem {
    /// The file it is in.
    pub file: u32,
    /// Its first byte in the file.
    pub offset: u64,
    /// Its first byte in its chunk.
    pub chunk_begin: u64,
    /// Size of an element in bytes.
    pub itemsize: u64,
    /// Sizes of the region.
    pub sizes: Dims,
    /// True if it is one run of bytes, both in the file and at its destination.
    pub flat: bool,
    /// Group of the item. Items of different groups never share a slab.
    pub group: u32,
}

impl SlabItem {
    /// Returns the length in bytes. It cannot overflow, because chunks were checked to fit in their
    /// files.
    pub fn length(&self) -> u64 {
        self.sizes.iter().product::<u64>() * self.itemsize
    }
}

/// Part of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ItemPart {
    /// Bytes of a flat item, from this one on.
    Bytes(u64),
    /// The rectangle with these offsets and sizes, packed in row-major order.
    Rectangle(Dims, Dims),
}

/// A part of an item, and its offset in a slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabPiece {
    /// Index of the item.
    pub item: usize,
    /// First byte in the slab.
    pub at: u64,
    /// Length in bytes.
    pub length: u64,
    /// The part of the item.
    pub part: ItemPart,
}

/// Contents of one slab.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlabBatch {
    /// The group of all its items.
    pub group: u32,
    /// Pieces in the order of their offsets.
    pub pieces: Vec<SlabPiece>,
}

/// Packs items in order into slabs of `slab_bytes`, a multiple of [`ALIGN`]. Batches of different
/// groups alternate. With `verify`, items are split at the blocks of their chunks, if a slab can
/// hold a block.
pub fn pack(items: &[SlabItem], slab_bytes: u64, verify: bool) -> Vec<SlabBatch> {
    let mut groups: Vec<u32> = items.iter().map(|item| item.group).collect();
    groups.sort_unstable();
    groups.dedup();
    let packed: Vec<Vec<SlabBatch>> = groups
        .into_iter()
        .map(|group| {
            let mut packer = Packer::new(group, slab_bytes, verify);
            for (i, item) in items.iter().enumerate().filter(|(_, item)| item.group == group) {
                packer.add(i, item);
            }
            packer.finish()
        })
        .collect();
    take_turns(packed)
}

fn take_turns(lists: Vec<Vec<SlabBatch>>) -> Vec<SlabBatch> {
    let mut lists: Vec<_> = lists.into_iter().map(Vec::into_iter).collect();
    let mut all = Vec::new();
    while !lists.is_empty() {
        lists.retain_mut(|list| match list.next() {
            Some(batch) => {
                all.push(batch);
                true
            }
            None => false,
        });
    }
    all
}

struct Packer {
    slab: u64,
    verify: bool,
    done: Vec<SlabBatch>,
    batch: SlabBatch,
    used: u64,
}

impl Packer {
    fn new(group: u32, slab: u64, verify: bool) -> Self {
        Self {
            slab,
            verify,
            done: Vec::new(),
            batch: SlabBatch { group, pieces: Vec::new() },
            used: 0,
        }
    }

    fn add(&mut self, i: usize, item: &SlabItem) {
        if item.flat {
            self.bytes(i, item);
        } else {
            split(&item.sizes, item.itemsize, self.slab, &mut |offsets, sizes| {
                let length = sizes.iter().product::<u64>() * item.itemsize;
                let part = ItemPart::Rectangle(Dims::from_slice(offsets), Dims::from_slice(sizes));
                if self.next() + length > self.slab {
                    self.flush();
                }
                self.push(i, length, part);
            });
        }
    }

    fn bytes(&mut self, i: usize, item: &SlabItem) {
        let length = item.length();
        let mut from = 0;
        while from < length {
            let left = length - from;
            let room = self.slab.saturating_sub(self.next());
            let n = if left <= room { left } else { self.cut(item, from, room) };
            if n == 0 || n < left && n < self.slab / LEFT_OVER && self.used > 0 {
                self.flush();
                continue;
            }
            self.push(i, n, ItemPart::Bytes(from));
            from += n;
        }
    }

    /// Returns how many more bytes of an item go into `room` bytes, which cannot hold the rest of
    /// it.
    fn cut(&self, item: &SlabItem, from: u64, room: u64) -> u64 {
        let room = room / ALIGN * ALIGN;
        let begin = item.chunk_begin + from;
        let block_end = (begin + room) / BLOCK_SIZE * BLOCK_SIZE;
        if !self.verify || self.slab < BLOCK_SIZE {
            room
        } else if block_end > begin && (block_end - begin).is_multiple_of(item.itemsize) {
            block_end - begin
        } else if self.used > 0 {
            0
        } else {
            room
        }
    }

    /// Returns the start of the next piece.
    fn next(&self) -> u64 {
        self.used.next_multiple_of(ALIGN)
    }

    fn push(&mut self, item: usize, length: u64, part: ItemPart) {
        let at = self.next();
        self.used = at + length;
        self.batch.pieces.push(SlabPiece { item, at, length, part });
    }

    fn flush(&mut self) {
        let group = self.batch.group;
        let pieces = std::mem::take(&mut self.batch.pieces);
        if !pieces.is_empty() {
            self.done.push(SlabBatch { group, pieces });
        }
        self.used = 0;
    }

    fn finish(mut self) -> Vec<SlabBatch> {
        self.flush();
        self.done
    }
}
