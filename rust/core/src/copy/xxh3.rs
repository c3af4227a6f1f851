//! A copy around the cache that also hashes (XXH3-64): each vector is loaded once.
//!
//! XXH3 reads its input in rounds of 1024 bytes. What the sixteen stripes of a round add to the
//! eight accumulators depends only on those bytes. Then the accumulators are scrambled, which needs
//! the rounds in order. So this adds up rounds at four positions side by side, as a fast copy from
//! memory advances, and then takes their sums in order. Constants and offsets in the secret are
//! those of xxHash's specification. Tests compare the result with the library that hashes
//! elsewhere.
#![allow(unsafe_code)] // Vector intrinsics on raw memory

use std::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_setzero_si256,
    _mm256_shuffle_epi32, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_stream_si256,
    _mm256_xor_si256,
};

use twox_hash::xxhash3_64::{DEFAULT_SECRET_LENGTH, SecretBuffer};

/// Bytes of a stripe, which is a cache line.
const STRIPE: usize = 64;
/// Stripes of a round.
const STRIPES: usize = 16;
/// Bytes of a round.
const ROUND: usize = STRIPE * STRIPES;
/// Most rounds of a position: positions are this many rounds apart. It is odd, as every distance
/// is: so positions are 1,024 bytes apart modulo 4,096, and the loads of one do not look to the
/// core as if they read what another just stored (see [`walk`](super::walk)).
const MOST: usize = 63;
/// Shortest input of this variant; XXH3 hashes shorter ones differently.
const LONG: usize = 241;

/// Bytes by which the secret advances from stripe to stripe.
const SECRET_STEP: usize = 8;
/// Offsets in the secret: for the last stripe, for scrambling, and for the final merge.
const SECRET_LAST: usize = DEFAULT_SECRET_LENGTH - STRIPE - 7;
const SECRET_SCRAMBLE: usize = DEFAULT_SECRET_LENGTH - STRIPE;
const SECRET_END: usize = 11;

const PRIMES_32: [u64; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
const PRIMES_64: [u64; 5] = [
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
];
const AVALANCHE: u64 = 0x1656_6791_9E37_79F9;

type Secret = [u8; DEFAULT_SECRET_LENGTH];

/// The eight accumulators, or a sum that is added to them.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([u64; 8]);

impl Lanes {
    const ZERO: Self = Self([0; 8]);
    const START: Self = Self([
        PRIMES_32[2],
        PRIMES_64[0],
        PRIMES_64[1],
        PRIMES_64[2],
        PRIMES_64[3],
        PRIMES_32[1],
        PRIMES_64[4],
        PRIMES_32[0],
    ]);

    /// Adds the sum of a round that is not the last, and scrambles.
    #[inline]
    fn take(&mut self, sum: &Self, secret: &Secret) {
        for (i, (lane, sum)) in self.0.iter_mut().zip(sum.0).enumerate() {
            let mixed = lane.wrapping_add(sum);
            let mixed = mixed ^ (mixed >> 47) ^ word(secret, SECRET_SCRAMBLE + 8 * i);
            *lane = mixed.wrapping_mul(PRIMES_32[0]);
        }
    }

    /// Adds a stripe, with the secret from `at` on.
    fn stripe(&mut self, stripe: &[u8], secret: &Secret, at: usize) {
        for i in 0..8 {
            let value = word(stripe, 8 * i);
            let keyed = value ^ word(secret, at + 8 * i);
            self.0[i ^ 1] = self.0[i ^ 1].wrapping_add(value);
            self.0[i] =
                self.0[i].wrapping_add((keyed & u64::from(u32::MAX)).wrapping_mul(keyed >> 32));
        }
    }

    /// Returns the digest of `len` bytes, all of which were added.
    #[expect(clippy::cast_possible_truncation, reason = "the halves of a product")]
    fn digest(&self, len: usize, secret: &Secret) -> u64 {
        let mut sum = (len as u64).wrapping_mul(PRIMES_64[0]);
        for i in (0..8).step_by(2) {
            let factor = |i: usize| u128::from(self.0[i] ^ word(secret, SECRET_END + 8 * i));
            let product = factor(i) * factor(i + 1);
            sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        let mixed = (sum ^ (sum >> 37)).wrapping_mul(AVALANCHE);
        mixed ^ (mixed >> 32)
    }
}

/// Returns the eight bytes from `at` on.
#[inline]
fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("it ends before what it is read from"))
}

/// Returns whether [`copy_unfenced`] can copy `len` bytes to `dst` on this CPU.
pub fn can_copy(dst: *const u8, len: usize) -> bool {
    len >= LONG && dst.align_offset(STRIPE) == 0 && is_x86_feature_detected!("avx2")
}

/// Returns the largest odd number up to `number`, which is not 0.
fn odd(number: usize) -> usize {
    (number - 1) | 1
}

/// Copies `rounds` rounds at each position, and adds them. The positions follow one another in
/// memory.
///
/// # Safety
/// The CPU has the feature. `src` is valid for reads of the rounds of all positions, which have at
/// most [`MOST`] each, and `dst` for writes of as many. `dst` begins at a cache line, and the two
/// do not overlap.
#[target_feature(enable = "avx2")]
#[expect(clippy::cast_ptr_alignment, reason = "unaligned loads, and stores to whole lines")]
unsafe fn copy_rounds<const PLACES: usize>(
    lanes: &mut Lanes,
    secret: &Secret,
    dst: *mut u8,
    src: *const u8,
    rounds: usize,
) {
    const WIDTH: usize = size_of::<__m256i>();
    const VECTORS: usize = STRIPE / WIDTH;
    let mut sums = [[Lanes::ZERO; MOST]; PLACES];
    for round in 0..rounds {
        let mut sum = [[_mm256_setzero_si256(); VECTORS]; PLACES];
        for stripe in 0..STRIPES {
            for (place, sum) in sum.iter_mut().enumerate() {
                let line = (place * rounds + round) * ROUND + stripe * STRIPE;
                for (i, sum) in sum.iter_mut().enumerate() {
                    // SAFETY: the line is in one of the rounds, which the caller guarantees. The
                    // secret is longer than fifteen steps and a stripe. Loads are unaligned. The
                    // store is aligned because `dst` is.
                    let (data, key) = unsafe {
                        let data = _mm256_loadu_si256(src.add(line + i * WIDTH).cast());
                        _mm256_stream_si256(dst.add(line + i * WIDTH).cast::<__m256i>(), data);
                        let key = secret.as_ptr().add(stripe * SECRET_STEP + i * WIDTH);
                        (data, _mm256_loadu_si256(key.cast()))
                    };
                    let keyed = _mm256_xor_si256(data, key);
                    let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
                    // Swaps the halves of each 16 bytes.
                    let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
                    *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(product, swapped));
                }
            }
        }
        for (sums, sum) in sums.iter_mut().zip(sum) {
            for (i, sum) in sum.into_iter().enumerate() {
                // SAFETY: eight lanes are as long as the vectors of a stripe.
                unsafe {
                    _mm256_storeu_si256(sums[round].0.as_mut_ptr().cast::<__m256i>().add(i), sum);
                };
            }
        }
    }
    for sum in sums.iter().flat_map(|place| &place[..rounds]) {
        lanes.take(sum, secret);
    }
}

/// Copies `len` bytes, and returns their digest. Other threads may read the copy only after a
/// [`fence`](super::fence).
///
/// # Safety
/// `src` is valid for reads of `len` bytes and `dst` for writes, and they do not overlap.
/// [`can_copy`] is true.
pub unsafe fn copy_unfenced(dst: *mut u8, src: *const u8, len: usize) -> u64 {
    let secret: &Secret = SecretBuffer::default().into_secret();
    let mut lanes = Lanes::START;
    // The last round, even if it is complete, is processed differently.
    let last = (len - 1) / ROUND * ROUND;
    let mut at = 0;
    while at < last {
        let left = (last - at) / ROUND;
        let (places, rounds) = if left < 4 { (1, left) } else { (4, odd(left / 4).min(MOST)) };
        // SAFETY: this many rounds are left, which the caller guarantees. `at` is a whole number of
        // rounds.
        unsafe {
            let (dst, src) = (dst.add(at), src.add(at));
            if places == 4 {
                copy_rounds::<4>(&mut lanes, secret, dst, src, rounds);
            } else {
                copy_rounds::<1>(&mut lanes, secret, dst, src, rounds);
            }
        };
        at += places * rounds * ROUND;
    }
    // SAFETY: the rest, which is at least one byte. Together with the bytes before it, it is a
    // stripe.
    let (rest, stripe) = unsafe {
        std::ptr::copy_nonoverlapping(src.add(at), dst.add(at), len - at);
        let rest = std::slice::from_raw_parts(src.add(at), len - at);
        (rest, std::slice::from_raw_parts(src.add(len - STRIPE), STRIPE))
    };
    for (i, stripe) in rest[..rest.len() - 1].chunks_exact(STRIPE).enumerate() {
        lanes.stripe(stripe, secret, i * SECRET_STEP);
    }
    lanes.stripe(stripe, secret, SECRET_LAST);
    lanes.digest(len, secret)
}
