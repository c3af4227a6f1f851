//! Codes and scales to numbers: pure functions, in float32 with one rounding to the target.
#![allow(unsafe_code)] // A function compiled for AVX2 is unsafe to call on a CPU that may lack it.
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
    /// Two integers from 0 to 15, the first in the low half, which stand for 8 less.
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
    /// Codes to pass over in the first byte.
    pub skip: usize,
    /// A scale for each group of columns, from that of the first column on.
    pub scales: &'a [f32],
    /// Zero points, subtracted from the codes of each group; empty for none.
    pub zeros: &'a [f32],
    /// Columns of a group.
    pub group: usize,
    /// Columns of the first group that come before the row.
    pub before: usize,
}

/// Columns that are decoded at a time: their numbers stay in the first-level cache.
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

/// Decoded elements for each byte of codes under one scale, in `SIZE` bytes.
pub type Table<const SIZE: usize> = [[u8; SIZE]; 256];

/// The table of a scale. `SIZE` is that of the elements that one byte holds.
///
/// # Panics
/// If it is another.
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

/// Decodes by a table: of 16 bits for each element, that is twice as fast as arithmetic.
pub fn look_up<const SIZE: usize>(table: &Table<SIZE>, bytes: &[u8], out: &mut [u8]) {
    for (to, byte) in out.chunks_exact_mut(SIZE).zip(bytes) {
        to.copy_from_slice(&table[usize::from(*byte)]);
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
    // Places in the row count from the first code of the first byte.
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

/// Multiplies the numbers of each group, from column `first` of the row on, with its scale.
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

/// The number that a `float8_e4m3fn` stands for.
#[inline(always)]
pub fn e4m3(code: u8) -> f32 {
    let (sign, magnitude) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
    // Below 8, the code is a multiple of the smallest number, 2^-9. No float32 here is subnormal,
    // which CPUs are slow with.
    let small = (f32::from(code & 0x7f) * (1.0 / 512.0)).to_bits();
    let large = (magnitude << 20) + (120 << 23);
    let bits = if magnitude < 8 { small } else { large };
    let bits = if magnitude == 0x7f { NAN } else { bits };
    f32::from_bits(bits | sign)
}

const NAN: u32 = 0x7fc0_0000;

/// The number that a `float4_e2m1fn` stands for, of the low half of a byte.
#[inline(always)]
pub fn e2m1(code: u8) -> f32 {
    // Twice the magnitudes: 0, 1, 2, 3, 4, 6, 8, 12.
    let magnitude = i16::from(code & 7);
    let twice = magnitude.max(2 * magnitude - 4).max(4 * magnitude - 16);
    f32::from_bits((f32::from(twice) * 0.5).to_bits() | u32::from(code & 8) << 28)
}

/// The power of two that a `float8_e8m0fnu` stands for.
#[inline(always)]
pub fn e8m0(code: u8) -> f32 {
    f32::from_bits(match code {
        0 => 1 << 22,
        255 => NAN,
        code => u32::from(code) << 23,
    })
}

/// The number that a `bfloat16` stands for.
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The number that a `float16` stands for.
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

/// The nearest `bfloat16`, of two the even one.
#[inline(always)]
pub fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    low_half(if x.is_nan() { NAN >> 16 } else { rounded })
}

/// The nearest `float16`, of two the even one.
#[inline(always)]
pub fn f16(x: f32) -> u16 {
    let (sign, bits) = (x.to_bits() >> 16 & 0x8000, x.to_bits() & 0x7fff_ffff);
    // From 2^-14 on: drops 13 bits of the fraction, and 112 from the exponent.
    let normal = (bits.wrapping_add(0xfff + (bits >> 13 & 1)) >> 13).wrapping_sub(112 << 10);
    // Below: a sum with 0.5 has its last bit at 2^-24, as these have.
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
