//! What the ranks of a machine want alike, found out from a sample of what each of them wants: of a fixed size, so that ranks can tell each other.
//!
//! Files are cut into blocks. Of those that a rank wants, its [`Sketch`] keeps the ones with the smallest hashes, which are the same on every rank: so
//! the blocks that two ranks both want are in both sketches, as far down as both reach. [`compare`] tells each rank which blocks of its own
//! sample others want too, and with that ([`Common`]) a rank decides for everything that it reads. Pure.

use std::collections::{BTreeMap, HashMap};

use smallvec::SmallVec;
use twox_hash::XxHash3_64;

use super::policy::SMALL_READ;
use crate::{Error, Result};

/// Blocks that a sketch keeps.
pub const SAMPLES: usize = 128;
/// Bytes of a block: what is shorter is dearer to read alone than with what lies around it.
pub const BLOCK: u64 = SMALL_READ;
/// Rows shorter than a block, no further apart than this, are taken as one with what lies between them: columns, of which others have the rest. Those that are
/// further apart are better read each alone.
const MAX_PITCH: u64 = 8 * BLOCK;
/// Bytes of a hash: a block has that of one of 2^20 others once in a million times.
pub(super) const HASH_BYTES: usize = 5;

/// A sample of the blocks that a rank wants.
#[derive(Clone, Debug, Default)]
pub struct Sketch {
    /// File and number of a block, by its hash.
    kept: BTreeMap<u64, (u32, u64)>,
}

/// What a file goes by in hashes: the same on every rank.
#[must_use]
pub fn file_key(name: &str) -> u64 {
    XxHash3_64::oneshot(name.as_bytes())
}

/// Of a block: 40 bits, each of which depends on all of file and number.
fn hash(file: u64, block: u64) -> u64 {
    let mut bits = file ^ block.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (bits ^ (bits >> 31)) >> (64 - 8 * HASH_BYTES)
}

/// The blocks whose middle lies in these bytes, so that neighbours have none in common.
fn blocks_within(start: u64, end: u64) -> std::ops::Range<u64> {
    let number = |at: u64| at.saturating_add(BLOCK / 2 - 1) / BLOCK;
    number(start)..number(end)
}

/// The same of bytes that are wanted alone; where they are shorter than a block, what they touch.
fn blocks_of(start: u64, end: u64) -> std::ops::Range<u64> {
    if end.saturating_sub(start) < BLOCK {
        start / BLOCK..end.div_ceil(BLOCK)
    } else {
        blocks_within(start, end)
    }
}

impl Sketch {
    /// Adds a rectangle of a file: elements of `itemsize` bytes from `start` on, so many in each dimension, with so many bytes from one to the next. `file`
    /// is the caller's number of it, `key` its [`file_key`].
    pub fn add(&mut self, file: u32, key: u64, start: u64, itemsize: u64, shape: &[u64], strides: &[u64]) {
        if shape.contains(&0) {
            return;
        }
        let mut loops: SmallVec<[(u64, u64); 4]> = shape.iter().copied().zip(strides.iter().copied()).collect();
        loops.retain(|(count, _)| *count > 1);
        loops.sort_unstable_by_key(|&(_, stride)| std::cmp::Reverse(stride));
        let mut run = itemsize;
        while let Some(&(count, stride)) = loops.last()
            && (stride <= run || run < BLOCK && stride <= MAX_PITCH)
        {
            run = run.saturating_add((count - 1).saturating_mul(stride));
            loops.pop();
        }
        if loops.is_empty() {
            self.keep(
                file,
                blocks_of(start, start.saturating_add(run)).map(|block| (hash(key, block), block)),
            );
        } else {
            self.add_rows(file, key, start, run, &loops);
        }
    }

    /// Rows with more than a row between.
    fn add_rows(&mut self, file: u32, key: u64, start: u64, run: u64, loops: &[(u64, u64)]) {
        if let Some((&(count, stride), inner)) = loops.split_first() {
            for i in 0..count {
                self.add_rows(file, key, start.saturating_add(i.saturating_mul(stride)), run, inner);
            }
        } else if run < BLOCK {
            // Others may want other parts of the same block: a row is one of its own.
            self.keep(file, [(hash(!key, start), start / BLOCK)].into_iter());
        } else {
            let blocks = blocks_within(start, start.saturating_add(run));
            self.keep(file, blocks.map(|block| (hash(key, block), block)));
        }
    }

    fn keep(&mut self, file: u32, blocks: impl Iterator<Item = (u64, u64)>) {
        let mut limit = self.limit();
        for (hash, block) in blocks {
            if hash < limit {
                self.kept.insert(hash, (file, block));
                if self.kept.len() > SAMPLES {
                    self.kept.pop_last();
                }
                limit = self.limit();
            }
        }
    }

    /// Only what is less is kept.
    fn limit(&self) -> u64 {
        let last = self.kept.last_key_value().filter(|_| self.kept.len() == SAMPLES);
        last.map_or(u64::MAX, |(&hash, _)| hash)
    }

    /// For the others: the hashes, ascending.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let bytes = |hash: &u64| -> [u8; HASH_BYTES] { hash.to_le_bytes()[..HASH_BYTES].try_into().expect("so many") };
        self.kept.keys().flat_map(bytes).collect()
    }

    /// With what [`compare`] found for this one. `None` where that is nothing, or of another sketch.
    #[must_use]
    pub fn judged(&self, answer: &[u8]) -> Option<Common> {
        let (&count, bits) = answer.split_first()?;
        let count = usize::from(count);
        if count == 0 || count > self.kept.len() || bits.len() != count.div_ceil(8) {
            return None;
        }
        let mut common = Common::default();
        for (i, &(file, block)) in self.kept.values().take(count).enumerate() {
            let is_common = bits[i / 8] >> (i % 8) & 1 == 1;
            common.blocks.entry(file).or_default().push((block, is_common));
        }
        for blocks in common.blocks.values_mut() {
            blocks.sort_unstable();
        }
        Some(common)
    }
}

/// Tells each of the ranks of one machine, by what [`Sketch::to_bytes`] gave, which blocks of its sample others want: how many it is sure of, from the smallest hash
/// on, and a bit for each. None where others want so much more that their samples end before its own begins.
///
/// # Errors
/// [`Error::Plan`] for what is no sketch.
pub fn compare(sketches: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
    let all = sketches
        .iter()
        .map(|sketch| hashes(sketch))
        .collect::<Result<Vec<_>>>()?;
    let mut merged: Vec<u64> = all.iter().flatten().copied().collect();
    #[expect(
        clippy::stable_sort_primitive,
        reason = "it merges runs, of which each sketch is one"
    )]
    merged.sort();
    let common: Vec<u64> = merged
        .windows(2)
        .filter(|pair| pair[0] == pair[1])
        .map(|pair| pair[0])
        .collect();
    // As far as a sketch tells what its rank does not want, too.
    let mut ends: Vec<(u64, usize)> = (all.iter().enumerate())
        .filter(|(_, hashes)| hashes.len() == SAMPLES)
        .map(|(rank, hashes)| (hashes[SAMPLES - 1], rank))
        .collect();
    ends.sort_unstable();
    let answer = |(rank, hashes): (usize, &Vec<u64>)| {
        let end = ends
            .iter()
            .find(|(_, of)| *of != rank)
            .map_or(u64::MAX, |&(end, _)| end);
        let sure = hashes.partition_point(|&hash| hash <= end);
        let mut answer = vec![0; 1 + sure.div_ceil(8)];
        answer[0] = u8::try_from(sure).expect("no more than are kept");
        for (i, hash) in hashes[..sure].iter().enumerate() {
            answer[1 + i / 8] |= u8::from(common.binary_search(hash).is_ok()) << (i % 8);
        }
        answer
    };
    Ok(all.iter().enumerate().map(answer).collect())
}

fn hashes(sketch: &[u8]) -> Result<Vec<u64>> {
    let (each, rest) = sketch.as_chunks::<HASH_BYTES>();
    let hashes: Vec<u64> = each
        .iter()
        .map(|bytes| bytes.iter().rev().fold(0, |hash, &byte| hash << 8 | u64::from(byte)))
        .collect();
    if !rest.is_empty() || hashes.len() > SAMPLES || !hashes.is_sorted_by(|a, b| a < b) {
        return Err(Error::Plan(
            "a rank sent an invalid sample of the blocks that it wants".into(),
        ));
    }
    Ok(hashes)
}

/// The blocks of a rank's sample, and whether others want them too.
#[derive(Clone, Debug, Default)]
pub struct Common {
    /// By the caller's number of the file, in order.
    pub(super) blocks: HashMap<u32, Vec<(u64, bool)>>,
}

impl Common {
    /// For stretches of files (number, first byte, the byte after the last) that this rank wants: whether others do. One without a block in the sample is small;
    /// it goes as most others of its file do, or as most of all.
    #[must_use]
    pub fn judge(&self, stretches: &[(u32, u64, u64)]) -> Vec<bool> {
        let own: Vec<Option<bool>> = stretches.iter().map(|stretch| self.of(stretch)).collect();
        let mut votes: HashMap<u32, (usize, usize)> = HashMap::new();
        let mut all = (0, 0);
        for (&(file, ..), is_common) in stretches.iter().zip(&own) {
            if let &Some(is_common) = is_common {
                vote(votes.entry(file).or_default(), is_common);
                vote(&mut all, is_common);
            }
        }
        let like_others = |file| won(*votes.get(&file).unwrap_or(&all));
        (stretches.iter().zip(own))
            .map(|(&(file, ..), own)| own.unwrap_or_else(|| like_others(file)))
            .collect()
    }

    /// By the blocks of a stretch that are in the sample, if any are.
    fn of(&self, &(file, start, end): &(u32, u64, u64)) -> Option<bool> {
        let blocks = self.blocks.get(&file)?;
        let range = blocks_of(start, end);
        let first = blocks.partition_point(|&(block, _)| block < range.start);
        let last = blocks.partition_point(|&(block, _)| block < range.end);
        let mut votes = (0, 0);
        for &(_, is_common) in blocks.get(first..last)? {
            vote(&mut votes, is_common);
        }
        (votes != (0, 0)).then(|| won(votes))
    }
}

/// For and against.
fn vote((yes, no): &mut (usize, usize), is_common: bool) {
    *(if is_common { yes } else { no }) += 1;
}

fn won((yes, no): (usize, usize)) -> bool {
    yes > no
}
