//! Digests: XXH3-64 of blocks of payload, and XXH3-128 of whole chunks.

use std::hash::Hasher as _;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;
use twox_hash::xxhash3_64::Hasher;
use twox_hash::{XxHash3_64, XxHash3_128, xxhash3_128};

/// Bytes of payload that one digest covers.
pub const BLOCK_SIZE: u64 = 1 << 20;

/// Longest input for which the lower half of XXH3-128 differs from XXH3-64.
const SHORT: usize = 240;

/// Returns the number of digests of a chunk of `length` bytes.
pub const fn block_count(length: u64) -> u64 {
    length.div_ceil(BLOCK_SIZE)
}

/// Returns the XXH3-64 of a block with seed 0.
pub fn block_digest(block: &[u8]) -> u64 {
    XxHash3_64::oneshot(block)
}

/// Digest of a block, and its contribution to the digest of the chunk's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockDigests {
    /// The [`block_digest`].
    pub digest: u64,
    /// The XXH3-128 with seed 0.
    pub content: u128,
}

impl BlockDigests {
    /// Hashes a block.
    pub fn of(block: &[u8]) -> Self {
        let content = XxHash3_128::oneshot(block);
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        let digest = if block.len() > SHORT { content as u64 } else { block_digest(block) };
        Self { digest, content }
    }
}

/// Computes [`BlockDigests`] of a block that arrives in pieces.
#[derive(Default)]
pub(crate) struct BlockHasher {
    wide: xxhash3_128::Hasher,
    /// Hash of the first bytes, up to the length at which the two digests of a block can differ.
    narrow: Hasher,
    len: usize,
}

impl BlockHasher {
    pub(crate) fn write(&mut self, piece: &[u8]) {
        if self.len <= SHORT {
            self.narrow.write(&piece[..piece.len().min(SHORT + 1 - self.len)]);
        }
        self.wide.write(piece);
        self.len += piece.len();
    }

    pub(crate) fn finish(&self) -> BlockDigests {
        let content = self.wide.finish_128();
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        let digest = if self.len > SHORT { content as u64 } else { self.narrow.finish() };
        BlockDigests { digest, content }
    }
}

/// [`BlockDigests`] that one thread computes and another reads: the digest, and both halves of that
/// of the content.
#[derive(Default)]
pub(crate) struct BlockCell([AtomicU64; 3]);

impl BlockCell {
    pub(crate) fn set(&self, found: BlockDigests) {
        let bytes = found.content.to_le_bytes();
        let half = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("16 bytes"));
        for (cell, value) in self.0.iter().zip([found.digest, half(0), half(8)]) {
            cell.store(value, Ordering::Relaxed);
        }
    }

    pub(crate) fn digest(&self) -> u64 {
        self.0[0].load(Ordering::Relaxed)
    }

    pub(crate) fn content(&self) -> u128 {
        u128::from(self.0[2].load(Ordering::Relaxed)) << 64
            | u128::from(self.0[1].load(Ordering::Relaxed))
    }
}

/// Returns the digest of a chunk's content: XXH3-128 of the digests of its blocks, in order.
pub fn content_digest(blocks: impl IntoIterator<Item = u128>) -> u128 {
    let bytes: SmallVec<[u8; 64]> = blocks.into_iter().flat_map(u128::to_le_bytes).collect();
    XxHash3_128::oneshot(&bytes)
}

/// Returns the digest of an index: that of the whole file, with the digest's own eight bytes at
/// `at` taken as zero.
pub(super) fn index_digest(bytes: &[u8], at: usize) -> u64 {
    let mut hasher = Hasher::new();
    hasher.write(&bytes[..at]);
    hasher.write(&[0; 8]);
    hasher.write(&bytes[at + 8..]);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pass_gives_both_digests() {
        let bytes: Vec<u8> = (0..70_000u32).map(|i| (i * 31 % 251).to_le_bytes()[0]).collect();
        let lengths = [0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 239, 240, 241, 1023, 1024, 1025, 70_000];
        for length in lengths {
            let block = &bytes[..length];
            let expected = BlockDigests {
                digest: XxHash3_64::oneshot(block),
                content: XxHash3_128::oneshot(block),
            };
            assert_eq!(BlockDigests::of(block), expected, "{length}");
            for cut in [0, length / 3, length.saturating_sub(1)] {
                let mut hasher = BlockHasher::default();
                hasher.write(&block[..cut]);
                hasher.write(&block[cut..]);
                assert_eq!(hasher.finish(), expected, "{length} cut at {cut}");
            }
        }
    }

    #[test]
    fn contents_tell_the_order_of_blocks() {
        assert_ne!(content_digest([1, 2]), content_digest([2, 1]));
        assert_ne!(content_digest([1]), content_digest([1, 1]));
    }
}
