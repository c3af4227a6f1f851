//! Decoding of codes and scales to numbers: pure functions, in float32 with one rounding to the
//! target.
#![allow(unsafe_code)] // Functions for AVX2 and AVX-512 are unsafe to call, as a CPU may lack them.
#![expect(
    clippy::inline_always,
    reason = "what is inlined is compiled for AVX2, and vectorized, with its caller"
)]

use super::Target;

/// Codes in a stored byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// One `float8_e4m3fn`.
    E4m3,
    /// Two `float4_e2m1fn`, the first in the low half.
    E2m1,
    /// Two integers from 0 to 15, the first in the low half. Each stands for 8 less.
    Int4,
}

impl Code {
    /// Returns the number of codes in a byte.
    pub const fn per_byte(self) -> usize {
        match self {
            Self::E4m3 => 1,
            Self::E2m1 | Self::Int4 => 2,
        }
    }
}

/// One row of codes, and the scales of its groups of columns.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    /// The kind of codes in `bytes`.
    pub code: Code,
    /// The codes.
    pub bytes: &'a [u8],
    /// Codes to skip in the first byte.
    pub skip: usize,
    /// A scale for each group of columns, beginning with the group of the first column.
    pub scales: &'a [f32],
    /// Zero points, which are subtracted from the codes of each group; empty for none.
    pub zeros: &'a [f32],
    /// Columns of a group.
    pub group: usize,
    /// Columns of the first group before the row.
    pub before: usize,
}

/// Columns that are decoded together. Their numbers stay in the first-level cache.
const STEP: usize = 2048;

/// Decodes a row into `out`, which is a whole number of elements of `target`.
///
/// # Panics
/// If the row has fewer codes or scales than `out` has elements.
pub fn decode(row: Row<'_>, target: Target, out: &mut [u8]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        unsafe { decode_avx2(row, target, out) };
        return;
    }
    decode_any(row, target, out);
}

/// The decoded elements of each possible byte of codes under one scale, in `SIZE` bytes.
pub type Table<const SIZE: usize> = [[u8; SIZE]; 256];

/// Returns the table of a scale. `SIZE` is the size of the elements of one byte of codes.
///
/// # Panics
/// If `SIZE` is another size.
pub fn table<const SIZE: usize>(code: Code, scale: f32, target: Target) -> Table<SIZE> {
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    let row = Row {
        code,
        bytes: &bytes,
        skip: 0,
        scales: &[scale],
        zeros: &[],
        group: 256 * code.per_byte(),
        before: 0,
    };
    let mut table = [[0; SIZE]; 256];
    assert_eq!(SIZE, code.per_byte() * target.size(), "elements of a byte");
    decode(row, target, table.as_flattened_mut());
    table
}

/// Decodes with a table. For elements of 16 bits this is twice as fast as arithmetic.
pub fn look_up<const SIZE: usize>(table: &Table<SIZE>, bytes: &[u8], out: &mut [u8]) {
    let count = bytes.len().min(out.len() / SIZE);
    let (bytes, out) = (&bytes[..count], &mut out[..SIZE * count]);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
        match SIZE {
            // SAFETY: the CPU has both features.
            2 => return unsafe { avx512::one_a_byte(table.as_flattened(), bytes, out) },
            // SAFETY: as above.
            4 => return unsafe { avx512::two_a_byte(table.as_flattened(), bytes, out) },
            _ => {}
        }
    }
    for (to, byte) in out.chunks_exact_mut(SIZE).zip(bytes) {
        to.copy_from_slice(&table[usize::from(*byte)]);
    }
}

/// Look-ups of 32 elements of 16 bits at a time, in tables in registers.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512 {
    use std::arch::x86_64::{
        __m512i, _mm_maskz_loadu_epi8, _mm256_maskz_loadu_epi8, _mm512_and_si512,
        _mm512_cvtepu8_epi16, _mm512_cvtepu8_epi32, _mm512_loadu_si512, _mm512_mask_blend_epi16,
        _mm512_mask_storeu_epi16, _mm512_or_si512, _mm512_permutex2var_epi16,
        _mm512_permutexvar_epi16, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_slli_epi32,
        _mm512_test_epi16_mask,
    };

    /// Elements of a register.
    const LANES: usize = 32;

    /// Looks up each byte in a table of 256 elements.
    #[target_feature(enable = "avx512bw,avx512vl")]
    pub fn one_a_byte(table: &[u8], bytes: &[u8], out: &mut [u8]) {
        let parts: [__m512i; 8] = std::array::from_fn(|part| load(table, part * LANES));
        for (bytes, out) in bytes.chunks(LANES).zip(out.chunks_mut(2 * LANES)) {
            // SAFETY: the mask has a bit for each byte.
            let codes = unsafe {
                _mm256_maskz_loadu_epi8(u32::MAX >> (LANES - bytes.len()), bytes.as_ptr().cast())
            };
            let codes = _mm512_cvtepu8_epi16(codes);
            let quarter = |i: usize| _mm512_permutex2var_epi16(parts[i], codes, parts[i + 1]);
            let upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64));
            let half = |i: usize| _mm512_mask_blend_epi16(upper, quarter(i), quarter(i + 2));
            let negative = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(128));
            store(_mm512_mask_blend_epi16(negative, half(0), half(4)), out);
        }
    }

    /// Looks up both halves of each byte in a table of 256 pairs.
    #[target_feature(enable = "avx512bw,avx512vl")]
    pub fn two_a_byte(table: &[u8], bytes: &[u8], out: &mut [u8]) {
        // The pair of each byte below 16 begins with the number of the byte's lower half.
        let pairs = load(table, 0);
        for (bytes, out) in bytes.chunks(LANES / 2).zip(out.chunks_mut(2 * LANES)) {
            // SAFETY: the mask has a bit for each byte.
            let codes = unsafe {
                _mm_maskz_loadu_epi8(u16::MAX >> (LANES / 2 - bytes.len()), bytes.as_ptr().cast())
            };
            let codes = _mm512_cvtepu8_epi32(codes);
            // Each half twice, in 16 bits of its own.
            let lower = _mm512_and_si512(_mm512_slli_epi32(codes, 1), _mm512_set1_epi32(0x1e));
            let upper =
                _mm512_and_si512(_mm512_slli_epi32(codes, 13), _mm512_set1_epi32(0x1e << 16));
            store(_mm512_permutexvar_epi16(_mm512_or_si512(lower, upper), pairs), out);
        }
    }

    /// Loads the elements of a table from `first` on.
    #[target_feature(enable = "avx512bw")]
    fn load(table: &[u8], first: usize) -> __m512i {
        let bytes: &[u8; 2 * LANES] = table[2 * first..].first_chunk().expect("256 elements");
        // SAFETY: the elements are as long as a register.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    /// Stores as many elements as fit in `out`.
    #[target_feature(enable = "avx512bw")]
    fn store(elements: __m512i, out: &mut [u8]) {
        let mask = u32::MAX >> (LANES - (out.len() / 2).min(LANES));
        // SAFETY: the mask has a bit for each element of `out`.
        unsafe { _mm512_mask_storeu_epi16(out.as_mut_ptr().cast(), mask, elements) };
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2")]
fn decode_avx2(row: Row<'_>, target: Target, out: &mut [u8]) {
    decode_any(row, target, out);
}

#[inline(always)]
fn decode_any(row: Row<'_>, target: Target, out: &mut [u8]) {
    let mut numbers = [0_f32; STEP];
    let (size, per_byte) = (target.size(), row.code.per_byte());
    let count = row.skip + out.len() / size;
    // Positions in the row count from the first code of the first byte.
    let mut begin = 0;
    while begin < count {
        let end = count.min(begin + STEP);
        let bytes = &row.bytes[begin / per_byte..end.div_ceil(per_byte)];
        let numbers = &mut numbers[..bytes.len() * per_byte];
        match row.code {
            Code::E4m3 => each(bytes, numbers, e4m3),
            Code::E2m1 => each_half(bytes, numbers, e2m1),
            Code::Int4 => each_half(bytes, numbers, |half| f32::from(half) - 8.0),
        }
        let first = begin.max(row.skip);
        let numbers = &mut numbers[first - begin..end - begin];
        scale(row, first - row.skip, numbers);
        let out = &mut out[(first - row.skip) * size..(end - row.skip) * size];
        match target {
            Target::Float32 => store(numbers, out, f32::to_le_bytes),
            Target::BFloat16 => store(numbers, out, |x| bf16(x).to_le_bytes()),
            Target::Float16 => store(numbers, out, |x| f16(x).to_le_bytes()),
        }
        begin = end;
    }
}

#[inline(always)]
fn each(bytes: &[u8], numbers: &mut [f32], number: impl Fn(u8) -> f32) {
    for (to, byte) in numbers.iter_mut().zip(bytes) {
        *to = number(*byte);
    }
}

#[inline(always)]
fn each_half(bytes: &[u8], numbers: &mut [f32], number: impl Fn(u8) -> f32) {
    for (to, byte) in numbers.chunks_exact_mut(2).zip(bytes) {
        to[0] = number(byte & 15);
        to[1] = number(byte >> 4);
    }
}

/// Multiplies the numbers of each group with its scale. The numbers begin at column `first` of the
/// row.
#[inline(always)]
fn scale(row: Row<'_>, first: usize, numbers: &mut [f32]) {
    let mut at = 0;
    while at < numbers.len() {
        let column = row.before + first + at;
        let group = column / row.group;
        let end = numbers.len().min(at + (group + 1) * row.group - column);
        let scale = row.scales[group];
        let zero = row.zeros.get(group).copied().unwrap_or(0.0);
        for number in &mut numbers[at..end] {
            *number = (*number - zero) * scale;
        }
        at = end;
    }
}

#[inline(always)]
fn store<const SIZE: usize>(numbers: &[f32], out: &mut [u8], bytes: impl Fn(f32) -> [u8; SIZE]) {
    for (to, number) in out.chunks_exact_mut(SIZE).zip(numbers) {
        to.copy_from_slice(&bytes(*number));
    }
}

/// Returns the value of a `float8_e4m3fn`.
#[inline(always)]
pub fn e4m3(code: u8) -> f32 {
    let (sign, magnitude) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
    // Below 8, the code is a multiple of the smallest number, 2^-9. No float32 here is subnormal,
    // since CPUs are slow with those.
    let small = (f32::from(code & 0x7f) * (1.0 / 512.0)).to_bits();
    let large = (magnitude << 20) + (120 << 23);
    let bits = if magnitude < 8 { small } else { large };
    let bits = if magnitude == 0x7f { NAN } else { bits };
    f32::from_bits(bits | sign)
}

const NAN: u32 = 0x7fc0_0000;

/// Returns the value of a `float4_e2m1fn` in the low half of a byte.
#[inline(always)]
pub fn e2m1(code: u8) -> f32 {
    // Twice the magnitudes: 0, 1, 2, 3, 4, 6, 8, 12.
    let magnitude = i16::from(code & 7);
    let twice = magnitude.max(2 * magnitude - 4).max(4 * magnitude - 16);
    f32::from_bits((f32::from(twice) * 0.5).to_bits() | u32::from(code & 8) << 28)
}

/// Returns the value of a `float8_e8m0fnu`, a power of two.
#[inline(always)]
pub fn e8m0(code: u8) -> f32 {
    f32::from_bits(match code {
        0 => 1 << 22,
        255 => NAN,
        code => u32::from(code) << 23,
    })
}

/// Returns the value of a `bfloat16`.
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the value of a `float16`.
pub fn from_f16(bits: u16) -> f32 {
    let (sign, magnitude) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
    let bits = match magnitude {
        // Multiples of 2^-24.
        0..0x400 => (f32::from(bits & 0x7fff) / 16_777_216.0).to_bits(),
        0x400..0x7c00 => (magnitude << 13) + (112 << 23),
        _ => (magnitude << 13) | 0x7f80_0000,
    };
    f32::from_bits(bits | sign)
}

/// Returns the nearest `bfloat16`, ties to even.
#[inline(always)]
pub fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    low_half(if x.is_nan() { NAN >> 16 } else { rounded })
}

/// Returns the nearest `float16`, ties to even.
#[inline(always)]
pub fn f16(x: f32) -> u16 {
    let (sign, bits) = (x.to_bits() >> 16 & 0x8000, x.to_bits() & 0x7fff_ffff);
    // From 2^-14 on: drop 13 bits of the fraction, and subtract 112 from the exponent.
    let normal = (bits.wrapping_add(0xfff + (bits >> 13 & 1)) >> 13).wrapping_sub(112 << 10);
    // Below: the last bit of a sum with 0.5 is worth 2^-24, like that of these numbers.
    let small = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let rounded = if bits < 113 << 23 { small } else { normal };
    let rounded = if bits >= 143 << 23 { 0x7c00 } else { rounded };
    low_half(if x.is_nan() { 0x7e00 } else { rounded | sign })
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "that is what it does")]
fn low_half(bits: u32) -> u16 {
    bits as u16
}
