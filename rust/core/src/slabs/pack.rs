//! Packs what is wanted into slabs: pure, so that tables and properties can test it.
//!
//! Bytes that lie together in a file lie the same way in a slab, page by page, so that a direct read can put them there. Such
//! a stretch is an [`Image`]. What is too small for a read of its own, or strided, is packed densely.

use std::ops::Range;

use super::split::split;
use crate::format::BLOCK_SIZE;
use crate::geometry::Dims;

/// Slabs begin at multiples of this, and images begin and end at pages of this many bytes that nothing else is on.
pub const PAGE: u64 = 4096;
/// What is packed densely begins at multiples of this.
const ALIGN: u64 = 64;
/// A gap in the file up to this is read with what lies around it.
const GAP: u64 = 16 << 10;
/// A stretch from here on is read straight into the slab.
const MIN_IMAGE: u64 = 64 << 10;
/// What is left of a slab is left empty rather than filled with the first bytes of something large, if it is less than this part.
const LEFT_OVER: u64 = 16;

/// Something to load.
#[derive(Clone, Debug)]
pub struct Item {
    /// The file it is in.
    pub file: u32,
    /// Its first byte in the file.
    pub offset: u64,
    /// Bytes from the start of its chunk.
    pub chunk_begin: u64,
    /// Bytes of an element.
    pub itemsize: u64,
    /// Elements in each dimension.
    pub sizes: Dims,
    /// Whether it is one run of bytes, both in the file and where it goes.
    pub flat: bool,
    /// Items of different groups never share a slab.
    pub group: u32,
}

impl Item {
    /// Bytes. Chunks are known to fit their files, so this cannot overflow.
    pub fn length(&self) -> u64 {
        self.sizes.iter().product::<u64>() * self.itemsize
    }
}

/// Which part of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Bytes from this one on, of a flat item.
    Bytes(u64),
    /// The rectangle of these offsets and sizes, packed in row-major order.
    Rectangle(Dims, Dims),
}

/// A part of an item, and its place in a slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the item.
    pub item: usize,
    /// First byte in the slab.
    pub at: u64,
    /// Bytes.
    pub length: u64,
    /// Of the item.
    pub part: Part,
}

/// Bytes `start..end` of a file that lie in a slab from `at` on. `at` is `start` modulo the page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The file.
    pub file: u32,
    /// First byte in the file.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
    /// First byte in the slab.
    pub at: u64,
    /// The pieces on it, as indices in [`Batch::pieces`].
    pub pieces: Range<usize>,
}

/// What one slab is filled with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The group of all its items.
    pub group: u32,
    /// In the order of their places.
    pub pieces: Vec<Piece>,
    /// In the order of their places.
    pub images: Vec<Image>,
}

/// Packs items, in their order, into slabs of `slab_bytes`, a multiple of [`PAGE`]. Batches of different groups take turns.
/// With `verify`, items are cut where blocks of their chunks end, if a slab holds a block.
pub fn pack(items: &[Item], slab_bytes: u64, verify: bool) -> Vec<Batch> {
    let mut groups: Vec<u32> = items.iter().map(|item| item.group).collect();
    groups.sort_unstable();
    groups.dedup();
    let packed: Vec<Vec<Batch>> = groups
        .into_iter()
        .map(|group| {
            let mut packer = Packer::new(group, slab_bytes, verify);
            let mut members = items
                .iter()
                .enumerate()
                .filter(|(_, item)| item.group == group)
                .peekable();
            while let Some((i, item)) = members.next() {
                packer.add(i, item, members.peek().map(|(_, next)| *next));
            }
            packer.finish()
        })
        .collect();
    take_turns(packed)
}

fn take_turns(lists: Vec<Vec<Batch>>) -> Vec<Batch> {
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
    done: Vec<Batch>,
    batch: Batch,
    used: u64,
    /// Whether the last image is the last thing in the slab.
    open: bool,
}

impl Packer {
    fn new(group: u32, slab: u64, verify: bool) -> Self {
        Self {
            slab,
            verify,
            done: Vec::new(),
            batch: Batch {
                group,
                ..Batch::default()
            },
            used: 0,
            open: false,
        }
    }

    fn add(&mut self, i: usize, item: &Item, next: Option<&Item>) {
        if item.flat {
            let end = item.offset + item.length();
            let joined = next.is_some_and(|next| {
                next.flat && next.file == item.file && next.offset >= end && next.offset - end <= GAP && aligned(next)
            });
            self.bytes(i, item, joined);
        } else {
            split(&item.sizes, item.itemsize, self.slab, &mut |offsets, sizes| {
                let length = sizes.iter().product::<u64>() * item.itemsize;
                let part = Part::Rectangle(Dims::from_slice(offsets), Dims::from_slice(sizes));
                if self.used.next_multiple_of(ALIGN) + length > self.slab {
                    self.flush();
                }
                self.dense(i, length, part);
            });
        }
    }

    fn bytes(&mut self, i: usize, item: &Item, joined: bool) {
        let length = item.length();
        let mut from = 0;
        while from < length {
            let left = length - from;
            let begin = item.offset + from;
            let continued = self.continued(item, begin);
            let image =
                continued.is_some() || aligned(item) && !self.verify && (left >= MIN_IMAGE || joined || from > 0);
            let at = match continued {
                Some(at) => at,
                None if image => self.used.next_multiple_of(PAGE) + begin % PAGE,
                None => self.used.next_multiple_of(ALIGN),
            };
            let room = self.slab.saturating_sub(at);
            let n = if left <= room {
                left
            } else {
                self.cut(item, from, room, image)
            };
            if n == 0 || n < left && n < self.slab / LEFT_OVER && self.used > 0 {
                self.flush();
                continue;
            }
            if image {
                self.image(item.file, begin, at, n, continued.is_some());
                self.push(i, at, n, Part::Bytes(from));
            } else {
                self.dense(i, n, Part::Bytes(from));
            }
            from += n;
        }
    }

    /// Where byte `begin` of the file lies if the last image goes on to it.
    fn continued(&self, item: &Item, begin: u64) -> Option<u64> {
        let last = self.batch.images.last().filter(|_| self.open && aligned(item))?;
        let near = last.file == item.file && begin >= last.end && begin - last.end <= GAP;
        near.then(|| last.at + (begin - last.start))
    }

    /// How much of the rest of an item goes into `room` bytes that cannot hold all of it.
    fn cut(&self, item: &Item, from: u64, room: u64, image: bool) -> u64 {
        if image {
            return room; // ends with the slab, so at a page of the file
        }
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

    /// Makes bytes of a file at `at` a new image, or the next part of the last.
    fn image(&mut self, file: u32, begin: u64, at: u64, n: u64, continues: bool) {
        let place = self.batch.pieces.len();
        match self.batch.images.last_mut().filter(|_| continues) {
            Some(last) => {
                last.end = begin + n;
                last.pieces.end = place + 1;
            }
            None => self.batch.images.push(Image {
                file,
                start: begin,
                end: begin + n,
                at,
                pieces: place..place + 1,
            }),
        }
        self.open = true;
        self.used = (at + n).next_multiple_of(PAGE);
    }

    fn dense(&mut self, item: usize, length: u64, part: Part) {
        let at = self.used.next_multiple_of(ALIGN);
        self.open = false;
        self.used = at + length;
        self.push(item, at, length, part);
    }

    fn push(&mut self, item: usize, at: u64, length: u64, part: Part) {
        self.batch.pieces.push(Piece { item, at, length, part });
    }

    fn flush(&mut self) {
        let fresh = Batch {
            group: self.batch.group,
            ..Batch::default()
        };
        let batch = std::mem::replace(&mut self.batch, fresh);
        if !batch.pieces.is_empty() {
            self.done.push(batch);
        }
        self.used = 0;
        self.open = false;
    }

    fn finish(mut self) -> Vec<Batch> {
        self.flush();
        self.done
    }
}

/// Whether elements stay aligned in memory where the item lies as it does in its file.
fn aligned(item: &Item) -> bool {
    item.offset.is_multiple_of(item.itemsize)
}
