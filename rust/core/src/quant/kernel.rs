//! Decoding of codes and scales to numbers: pure functions, in float32 with one rounding to the
//! target.
#![allow(unsafe_code)] // Functions for AVX2 and AVX-512, and copies
#![expect(
    clippy::inline_always,
    reason = "what is inlined is compiled for AVX2, and vectorized, with its caller"
)]

use super::Target;
use crate::copy::{Stores, copy_run_unfenced};

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
    /// The groups.
    pub groups: Groups,
}

/// The groups of columns of a row, which share a scale.
#[derive(Clone, Copy, Debug)]
pub struct Groups {
    /// Columns of a group.
    pub columns: usize,
    /// Columns of the first group before the row.
    pub before: usize,
}

/// Columns that are decoded together. Their numbers stay in the first-level cache.
const STEP: usize = 512;

/// Decodes a row into `out`, which is a whole number of elements of `target`. Call
/// [`fence`](crate::copy::fence) after streaming stores.
///
/// # Panics
/// If the row has fewer codes or scales than `out` has elements.
pub fn decode(row: Row<'_>, target: Target, out: &mut [u8], stores: Stores) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        unsafe { decode_avx2(row, target, out, stores) };
        return;
    }
    decode_any(row, target, out, stores);
}

/// The decoded elements of 16 bits of all codes under one scale: 256 codes of a byte, or 16 of half
/// a byte.
pub type Table<const CODES: usize> = [u16; CODES];

/// Returns the table of a scale, for a target of 16 bits.
pub fn table<const CODES: usize>(code: Code, scale: f32, target: Target) -> Table<CODES> {
    let bytes: Vec<u8> = match code.per_byte() {
        1 => (0..=u8::MAX).collect(),
        _ => (0..16).step_by(2).map(|low| low | ((low + 1) << 4)).collect(),
    };
    let row = Row {
        code,
        bytes: &bytes,
        skip: 0,
        scales: &[scale],
        zeros: &[],
        groups: Groups { columns: CODES, before: 0 },
    };
    let mut table = [[0; 2]; CODES];
    decode(row, target, table.as_flattened_mut(), Stores::Cached);
    table.map(u16::from_le_bytes)
}

impl Groups {
    /// Calls `each` with the number, the codes and the elements of each group of a row. No byte of
    /// two codes may belong to two groups.
    #[inline(always)]
    fn split<const CODES: usize>(
        self,
        codes: &[u8],
        out: &mut [u8],
        mut each: impl FnMut(usize, &[u8], &mut [u8]),
    ) {
        let per_byte = if CODES == 256 { 1 } else { 2 };
        let columns = out.len() / 2;
        let (mut begin, mut end) = (0, self.columns - self.before);
        for group in 0.. {
            end = end.min(columns);
            let codes = &codes[begin / per_byte..end.div_ceil(per_byte)];
            each(group, codes, &mut out[2 * begin..2 * end]);
            if end == columns {
                return;
            }
            (begin, end) = (end, end + self.columns);
        }
    }
}

/// Decodes a row with the table of each group, which is several times as fast as arithmetic. Call
/// [`fence`](crate::copy::fence) after streaming stores.
///
/// # Panics
/// If the row has fewer codes than `out` has elements.
pub fn look_up<'t, const CODES: usize>(
    codes: &[u8],
    groups: Groups,
    table: impl Fn(usize) -> &'t Table<CODES>,
    out: &mut [u8],
    stores: Stores,
) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let stream = stores == Stores::Streaming;
        if CODES == 256 && is_x86_feature_detected!("avx512bw") {
            // SAFETY: the CPU has the feature.
            return unsafe { x86::row_of_bytes(codes, groups, table, out, stream) };
        }
        if CODES == 16 && is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has the feature.
            return unsafe { x86::row_of_halves(codes, groups, table, out, stream) };
        }
    }
    let mut part = [0; 2 * STEP];
    groups.split::<CODES>(codes, out, |group, codes, out| {
        let per_byte = if CODES == 256 { 1 } else { 2 };
        for (codes, out) in codes.chunks(STEP / per_byte).zip(out.chunks_mut(2 * STEP)) {
            let part = &mut part[..out.len()];
            one_by_one(table(group), codes, part);
            copy(out, part, stores);
        }
    });
}

/// Looks up code after code.
#[inline(always)]
fn one_by_one<const CODES: usize>(table: &Table<CODES>, codes: &[u8], out: &mut [u8]) {
    if CODES == 256 {
        store_words(codes.iter().map(|&code| table[usize::from(code)]), out);
    } else {
        let halves = codes.iter().flat_map(|&byte| [byte & 15, byte >> 4]);
        store_words(halves.map(|code| table[usize::from(code)]), out);
    }
}

#[inline(always)]
fn store_words(words: impl Iterator<Item = u16>, out: &mut [u8]) {
    for (to, word) in out.chunks_exact_mut(2).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
}

/// Copies what was decoded to its destination. Call [`fence`](crate::copy::fence) after streaming
/// stores.
fn copy(out: &mut [u8], decoded: &[u8], stores: Stores) {
    assert_eq!(out.len(), decoded.len(), "a part of a row");
    // SAFETY: both have this length, and `out` is borrowed alone.
    unsafe { copy_run_unfenced(out.as_mut_ptr(), decoded.as_ptr(), decoded.len(), stores) };
}

/// Look-ups of 16 or 32 elements at a time, in tables in registers. They are stored around the
/// cache, if that is wanted and a group begins at a multiple of the length of a store.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _mm_and_si128, _mm_loadl_epi64, _mm_loadu_si128,
        _mm_packus_epi16, _mm_set1_epi8, _mm_set1_epi16, _mm_shuffle_epi8, _mm_srli_epi16,
        _mm_unpackhi_epi8, _mm_unpacklo_epi8, _mm256_loadu_si256, _mm256_set_m128i,
        _mm256_storeu_si256, _mm256_stream_si256, _mm512_cvtepu8_epi16, _mm512_loadu_si512,
        _mm512_mask_blend_epi16, _mm512_permutex2var_epi16, _mm512_set1_epi16, _mm512_storeu_si512,
        _mm512_stream_si512, _mm512_test_epi16_mask,
    };

    use super::{Groups, Table, one_by_one};

    /// Looks up bytes, 32 at a time.
    #[target_feature(enable = "avx512bw")]
    pub fn row_of_bytes<'t, const CODES: usize>(
        codes: &[u8],
        groups: Groups,
        table: impl Fn(usize) -> &'t Table<CODES>,
        out: &mut [u8],
        stream: bool,
    ) {
        groups.split::<CODES>(codes, out, |group, codes, out| {
            let table = table(group);
            let parts: [__m512i; 8] = std::array::from_fn(|part| {
                let part: &[u16; 32] = table[32 * part..].first_chunk().expect("256 elements");
                // SAFETY: it is as long as a register.
                unsafe { _mm512_loadu_si512(part.as_ptr().cast()) }
            });
            let stream = stream && out.as_ptr().addr().is_multiple_of(64);
            let (codes, last_codes) = codes.as_chunks::<32>();
            let (out, last) = out.as_chunks_mut::<64>();
            for (codes, out) in codes.iter().zip(out) {
                // SAFETY: the codes are as long as a register.
                let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
                let codes = _mm512_cvtepu8_epi16(codes);
                let quarter = |i: usize| _mm512_permutex2var_epi16(parts[i], codes, parts[i + 1]);
                let upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64));
                let half = |i: usize| _mm512_mask_blend_epi16(upper, quarter(i), quarter(i + 2));
                let negative = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(128));
                let elements = _mm512_mask_blend_epi16(negative, half(0), half(4));
                // SAFETY: the elements are as long as a register, and aligned if they are streamed.
                unsafe {
                    if stream {
                        _mm512_stream_si512(out.as_mut_ptr().cast(), elements);
                    } else {
                        _mm512_storeu_si512(out.as_mut_ptr().cast(), elements);
                    }
                }
            }
            if !last.is_empty() {
                one_by_one(table, last_codes, last);
            }
        });
    }

    /// Looks up half bytes, 16 at a time.
    #[target_feature(enable = "avx2")]
    pub fn row_of_halves<'t, const CODES: usize>(
        codes: &[u8],
        groups: Groups,
        table: impl Fn(usize) -> &'t Table<CODES>,
        out: &mut [u8],
        stream: bool,
    ) {
        groups.split::<CODES>(codes, out, |group, codes, out| {
            let table = table(group);
            let (lower, upper) = bytes_of(table.first_chunk().expect("16 elements"));
            let stream = stream && out.as_ptr().addr().is_multiple_of(32);
            let (out, last) = out.as_chunks_mut::<32>();
            // The last element may have a whole byte of codes.
            let (codes, last_codes) = codes.split_at(8 * out.len());
            let (codes, _) = codes.as_chunks::<8>();
            for (codes, out) in codes.iter().zip(out) {
                // SAFETY: there are eight bytes.
                let bytes = unsafe { _mm_loadl_epi64(codes.as_ptr().cast()) };
                let mask = _mm_set1_epi8(15);
                let codes = _mm_unpacklo_epi8(
                    _mm_and_si128(bytes, mask),
                    _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask),
                );
                let (lower, upper) =
                    (_mm_shuffle_epi8(lower, codes), _mm_shuffle_epi8(upper, codes));
                let elements: __m256i = _mm256_set_m128i(
                    _mm_unpackhi_epi8(lower, upper),
                    _mm_unpacklo_epi8(lower, upper),
                );
                // SAFETY: the elements are as long as a register, and aligned if they are streamed.
                unsafe {
                    if stream {
                        _mm256_stream_si256(out.as_mut_ptr().cast(), elements);
                    } else {
                        _mm256_storeu_si256(out.as_mut_ptr().cast(), elements);
                    }
                }
            }
            if !last.is_empty() {
                one_by_one(table, last_codes, last);
            }
        });
    }

    /// Returns the lower and the upper bytes of 16 elements.
    #[target_feature(enable = "avx2")]
    fn bytes_of(table: &[u16; 16]) -> (__m128i, __m128i) {
        // SAFETY: both halves are as long as a register.
        let [a, b] =
            unsafe { [table.as_ptr(), table[8..].as_ptr()].map(|at| _mm_loadu_si128(at.cast())) };
        let mask = _mm_set1_epi16(0xff);
        (
            _mm_packus_epi16(_mm_and_si128(a, mask), _mm_and_si128(b, mask)),
            _mm_packus_epi16(_mm_srli_epi16::<8>(a), _mm_srli_epi16::<8>(b)),
        )
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2")]
fn decode_avx2(row: Row<'_>, target: Target, out: &mut [u8], stores: Stores) {
    decode_any(row, target, out, stores);
}

#[inline(always)]
fn decode_any(row: Row<'_>, target: Target, out: &mut [u8], stores: Stores) {
    let mut numbers = [0_f32; STEP];
    let mut part = [0; 4 * STEP];
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
        let part = &mut part[..out.len()];
        match target {
            Target::Float32 => store(numbers, part, f32::to_le_bytes),
            Target::BFloat16 => store(numbers, part, |x| bf16(x).to_le_bytes()),
            Target::Float16 => store(numbers, part, |x| f16(x).to_le_bytes()),
        }
        copy(out, part, stores);
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
        let column = row.groups.before + first + at;
        let group = column / row.groups.columns;
        let end = numbers.len().min(at + (group + 1) * row.groups.columns - column);
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
