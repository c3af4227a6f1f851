//! Copy and hash in one pass over the source.
#![allow(unsafe_code)] // Copies from raw memory

use std::hash::Hasher as _;

use twox_hash::xxhash3_64::Hasher;

use super::Stores;
use super::run::copy_run_unfenced;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::xxh3;

/// Bytes that are copied, and then hashed while they are in the second-level cache, if both cannot
/// be done at once. The copy comes first, because it reads memory at several positions at once,
/// which hashing cannot.
const PART: usize = 256 << 10;

/// Copies `len` bytes from byte `from` of a block, and returns the digest (XXH3-64) of the whole
/// block. Other threads may read the copy only after a [`fence`](super::fence).
///
/// # Safety
/// `block` is valid for reads of `block_len` bytes and `dst` for writes of `len`. They do not
/// overlap, and `from + len <= block_len`.
pub unsafe fn copy_with_digest_unfenced(
    dst: *mut u8,
    block: *const u8,
    block_len: usize,
    from: usize,
    len: usize,
    stores: Stores,
) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if stores == Stores::Streaming && len == block_len && xxh3::can_copy(dst, len) {
        // SAFETY: the caller guarantees it, and the block is copied whole.
        return unsafe { xxh3::copy_unfenced(dst, block, len) };
    }
    // SAFETY: the caller guarantees it.
    unsafe { copy_then_digest_unfenced(dst, block, block_len, from, len, stores) }
}

/// Does the same as [`copy_with_digest_unfenced`], part by part.
///
/// # Safety
/// That of [`copy_with_digest_unfenced`].
unsafe fn copy_then_digest_unfenced(
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
        // SAFETY: `start..stop` is inside `from..from + len`, and `at..end` inside the block.
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
    use proptest::prelude::*;
    use twox_hash::XxHash3_64;

    use super::super::fence;
    use super::*;

    /// Copies `len` bytes from byte `from` of the block to `skip` bytes after a cache line, in
    /// every possible way.
    fn check(block: &[u8], skip: usize, from: usize, len: usize, stores: Stores) {
        type Way<'a> = &'a dyn Fn(*mut u8) -> u64;
        let (bytes, size) = (block.as_ptr(), block.len());
        let expected = XxHash3_64::oneshot(block);
        let try_it = |name: &str, way: Way| {
            let mut room = vec![0u8; skip + len + 128];
            let begin = room.as_ptr().align_offset(64) + skip;
            let got = way(room[begin..].as_mut_ptr());
            fence();
            let what = format!("{name}: {size} bytes, {len} from {from} to {skip}, {stores:?}");
            assert_eq!(got, expected, "{what}");
            assert!(room[begin..begin + len] == block[from..from + len], "{what}");
            room[begin..begin + len].fill(0);
            assert!(room.iter().all(|&b| b == 0), "{what}: written beside");
        };
        // SAFETY: `from + len` is inside the block, and the room after its start is longer than
        // `len`.
        unsafe {
            try_it("chosen", &|dst| copy_with_digest_unfenced(dst, bytes, size, from, len, stores));
            try_it("parts", &|dst| copy_then_digest_unfenced(dst, bytes, size, from, len, stores));
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            if len == size && skip == 0 && size > 240 && is_x86_feature_detected!("avx2") {
                try_it("kernel", &|dst| xxh3::copy_unfenced(dst, bytes, len));
            }
        }
    }

    fn block(len: usize) -> Vec<u8> {
        let numbers = (0..u32::try_from(len).unwrap()).map(|i| i.wrapping_mul(2_654_435_761));
        numbers.map(|i| i.to_be_bytes()[0]).collect()
    }

    #[test]
    fn digests_are_of_the_whole_block() {
        let lengths = [
            0,
            1,
            240,
            241,
            255,
            256,
            257,
            1024,
            1025,
            4096,
            4097,
            5120,
            5121,
            16_384,
            65_536,
            65_537,
            100_003,
            1 << 20,
        ];
        // Miri takes a millisecond for each byte.
        for &size in lengths.iter().filter(|&&len| !cfg!(miri) || len < 1000) {
            let block = block(size);
            for (from, len) in [(0, size), (size / 3, size / 2), (size, 0)] {
                for stores in [Stores::Cached, Stores::Streaming] {
                    check(&block, 0, from, len, stores);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 256 }))]
        #[test]
        fn any_part_of_any_block(
            size in if cfg!(miri) { 0..500usize } else { 0..300_000usize },
            skip in prop_oneof![Just(0usize), 0..64usize],
            ends in prop_oneof![Just((0.0, 1.0)), (0.0..1.0, 0.0..1.0)],
            lead in 0..64usize,
            streaming: bool,
        ) {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "places in a block"
            )]
            let place = |share: f64| (share * size as f64) as usize;
            let (a, b) = (place(ends.0), place(ends.1));
            let (from, to) = (a.min(b), a.max(b));
            let bytes = block(lead + size);
            let stores = if streaming { Stores::Streaming } else { Stores::Cached };
            check(&bytes[lead..], skip, from, to - from, stores);
        }
    }
}
