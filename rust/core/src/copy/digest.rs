//! Copies and hashes in one pass over the source.
#![allow(unsafe_code)] // Copies from raw memory: this is one of the few places that need it.

use std::hash::Hasher as _;

use twox_hash::xxhash3_64::Hasher;

use super::Stores;
use super::run::copy_run_unfenced;

/// Bytes copied, then hashed while they are still in the second-level cache. The copy goes first because it reads memory from
/// several places at once, which hashing cannot.
const PART: usize = 256 << 10;

/// Copies `len` bytes from byte `from` of a block, and returns the digest (XXH3-64) of all of the block. Other threads
/// may see what is written only after a [`fence`](super::fence).
///
/// # Safety
/// `block` is valid for reads of `block_len` bytes and `dst` for writes of `len`, and they do not overlap;
/// `from + len <= block_len`.
pub unsafe fn copy_with_digest_unfenced(
    dst: *mut u8,
    block: *const u8,
    block_len: usize,
    from: usize,
    len: usize,
    stores: Stores,
) -> u64 {
    let mut hasher = Hasher::new();
    let mut at = 0;
    while at < block_len {
        let end = block_len.min(at + PART);
        let (start, stop) = (at.max(from), end.min(from + len));
        // SAFETY: `start..stop` lies within `from..from + len` and `at..end` within the block.
        unsafe {
            if start < stop {
                copy_run_unfenced(dst.add(start - from), block.add(start), stop - start, stores);
            }
            hasher.write(std::slice::from_raw_parts(block.add(at), end - at));
        }
        at = end;
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::super::fence;
    use super::*;

    #[test]
    fn digests_are_of_the_whole_block() {
        let block: Vec<u8> = (0..100_003u32).map(|i| (i % 253).to_le_bytes()[0]).collect();
        let lengths = [0, 1, 240, 241, 16_384, 16_385, 100_003];
        // Miri takes a millisecond for a byte.
        for &block_len in lengths.iter().filter(|&&len| !cfg!(miri) || len < 1000) {
            for (from, len) in [(0, block_len), (block_len / 3, block_len / 2), (block_len, 0)] {
                let mut dst = vec![0u8; len];
                // SAFETY: `from + len <= block_len`, and `dst` is `len` bytes long.
                let got = unsafe {
                    copy_with_digest_unfenced(
                        dst.as_mut_ptr(),
                        block.as_ptr(),
                        block_len,
                        from,
                        len,
                        Stores::Streaming,
                    )
                };
                fence();
                assert_eq!(got, twox_hash::XxHash3_64::oneshot(&block[..block_len]));
                assert!(dst == block[from..from + len]);
            }
        }
    }
}
