//! Digests: XXH3-64, by block of payload.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;
use twox_hash::xxhash3_64::Hasher;

/// Bytes of payload that one digest covers.
pub const BLOCK_SIZE: u64 = 1 << 20;

/// How many digests a chunk of `length` bytes has.
pub const fn block_count(length: u64) -> u64 {
    length.div_ceil(BLOCK_SIZE)
}

/// XXH3-64 with seed 0.
pub fn block_digest(block: &[u8]) -> u64 {
    XxHash3_64::oneshot(block)
}

/// The digest of an index: of the whole file with its own eight bytes at `at` taken as zero.
pub(super) fn index_digest(bytes: &[u8], at: usize) -> u64 {
    let mut hasher = Hasher::new();
    hasher.write(&bytes[..at]);
    hasher.write(&[0; 8]);
    hasher.write(&bytes[at + 8..]);
    hasher.finish()
}
