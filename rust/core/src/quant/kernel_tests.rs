//! Decoding of codes and scales, compared with slow and plain arithmetic.

// Small numbers, to the bit.
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::float_cmp)]

use proptest::prelude::*;

use super::Target;
use super::kernel::{
    Code, Groups, Row, bf16, decode, e2m1, e4m3, e8m0, f16, from_bf16, from_f16, look_up, table,
};
use crate::copy::{Stores, fence};

/// Computes a small float by its definition: sign, exponent and fraction.
fn small_float(code: u8, exponent_bits: u32, fraction_bits: u32, bias: i32) -> f64 {
    let magnitude = u32::from(code) & ((1 << (exponent_bits + fraction_bits)) - 1);
    let (exponent, fraction) = (magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1));
    let part = f64::from(fraction) / f64::from(1 << fraction_bits);
    let value = if exponent == 0 {
        part * 2_f64.powi(1 - bias)
    } else {
        (1.0 + part) * 2_f64.powi(i32::try_from(exponent).unwrap() - bias)
    };
    let negative = u32::from(code) >> (exponent_bits + fraction_bits) & 1 == 1;
    if negative { -value } else { value }
}

#[test]
fn every_code_is_the_number_of_its_definition() {
    for code in 0..=255_u8 {
        if code & 0x7f == 0x7f {
            assert!(e4m3(code).is_nan());
        } else {
            let expected = small_float(code, 4, 3, 7) as f32;
            assert_eq!(e4m3(code).to_bits(), expected.to_bits(), "e4m3 {code}");
        }
        if code == 255 {
            assert!(e8m0(code).is_nan());
        } else {
            assert_eq!(f64::from(e8m0(code)), 2_f64.powi(i32::from(code) - 127), "e8m0 {code}");
        }
    }
    for code in 0..16 {
        let expected = small_float(code, 2, 1, 1) as f32;
        assert_eq!(e2m1(code).to_bits(), expected.to_bits(), "e2m1 {code}");
    }
}

#[test]
fn sixteen_bits_go_there_and_back() {
    for bits in 0..=u16::MAX {
        let (half, brain) = (from_f16(bits), from_bf16(bits));
        if half.is_nan() {
            assert_eq!(f16(half) & 0x7fff, 0x7e00);
        } else {
            assert_eq!(f16(half), bits);
        }
        if brain.is_nan() {
            assert_eq!(bf16(brain), 0x7fc0);
        } else {
            assert_eq!(bf16(brain), bits);
        }
    }
}

/// Returns the nearest of two neighbours, with float64, which represents all of these numbers.
fn nearest(x: f32, from: impl Fn(u16) -> f32, infinity: u16) -> u16 {
    let magnitude = f64::from(x.abs());
    let (mut low, mut high) = (0, infinity);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if f64::from(from(middle)) <= magnitude {
            low = middle;
        } else {
            high = middle;
        }
    }
    // Above the largest number, infinity becomes nearer.
    let above = if high == infinity {
        2.0 * f64::from(from(low)) - f64::from(from(low - 1))
    } else {
        f64::from(from(high))
    };
    let (down, up) = (magnitude - f64::from(from(low)), above - magnitude);
    let even = if low % 2 == 0 { low } else { high };
    let bits = if x.is_infinite() || down > up {
        high
    } else if down < up {
        low
    } else {
        even
    };
    bits | if x.is_sign_negative() { 0x8000 } else { 0 }
}

/// Returns elements, given a function of the group and the column.
fn expected(groups: Groups, count: usize, element: impl Fn(usize, usize) -> u16) -> Vec<u16> {
    (0..count).map(|i| element((groups.before + i) / groups.columns, i)).collect()
}

/// Elements at some distance from a line, with a line before and after.
struct Placed {
    memory: Vec<u8>,
    begin: usize,
    len: usize,
}

impl Placed {
    fn new(at: usize, elements: usize) -> Self {
        let memory = vec![7; 2 * elements + 256];
        let begin = memory.as_ptr().align_offset(64) + 64 + at;
        Self { memory, begin, len: 2 * elements }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.begin..self.begin + self.len]
    }

    fn check(&mut self, expected: &[u16]) {
        fence();
        let got = self.bytes().chunks_exact(2).map(|x| u16::from_le_bytes([x[0], x[1]]));
        assert!(got.eq(expected.iter().copied()));
        self.bytes().fill(7);
        assert!(self.memory.iter().all(|&byte| byte == 7), "written beside the elements");
    }
}

proptest! {
    #[test]
    fn rounds_to_the_nearest(bits: u32) {
        let x = f32::from_bits(bits);
        prop_assume!(!x.is_nan());
        prop_assert_eq!(bf16(x), nearest(x, from_bf16, 0x7f80));
        prop_assert_eq!(f16(x), nearest(x, from_f16, 0x7c00));
    }

    /// Midpoints between two `float16` are rare among random bits.
    #[test]
    fn rounds_ties_to_even(bits in 0_u16..0x7bff, negative: bool) {
        let sign = if negative { -1.0 } else { 1.0 };
        let tie = f32::midpoint(from_f16(bits), from_f16(bits + 1)) * sign;
        prop_assert_eq!(f16(tie), nearest(tie, from_f16, 0x7c00));
    }

    /// Uses vectors if the CPU has them. Nothing is written beside the elements, wherever they lie.
    #[test]
    fn looks_up_what_is_in_the_tables(
        bytes in prop::collection::vec(any::<u8>(), 1..700),
        (group, before, cut) in (1_usize..100, 0_usize..100, 0_usize..2),
        (at, streams) in (0_usize..64, any::<bool>()),
        target in prop::sample::select(vec![Target::BFloat16, Target::Float16]),
    ) {
        let stores = if streams { Stores::Streaming } else { Stores::Cached };
        let scales = [1.0, -0.3, 0.0, f32::INFINITY, f32::NAN, 1e-40, 3e38];
        let ones = scales.map(|scale| table::<256>(Code::E4m3, scale, target));
        let groups = Groups { columns: group, before: before % group };
        let expected = expected(groups, bytes.len(), |group, i| {
            ones[group % ones.len()][usize::from(bytes[i])]
        });
        let mut out = Placed::new(at, expected.len());
        let of_group = |group: usize| &ones[group % ones.len()];
        look_up(&bytes, groups, of_group, out.bytes(), stores);
        out.check(&expected);

        let halves = scales.map(|scale| table::<16>(Code::E2m1, scale, target));
        let groups = Groups { columns: 2 * group, before: 2 * (before % group) };
        let expected = self::expected(groups, 2 * bytes.len() - cut, |group, i| {
            halves[group % halves.len()][usize::from(bytes[i / 2] >> (4 * (i % 2)) & 15)]
        });
        let mut out = Placed::new(at, expected.len());
        let of_group = |group: usize| &halves[group % halves.len()];
        look_up(&bytes, groups, of_group, out.bytes(), stores);
        out.check(&expected);
    }

    /// A table has what arithmetic gives, for each code.
    #[test]
    fn tables_are_codes_by_a_scale(scale: u32, half: bool) {
        let scale = f32::from_bits(scale);
        let (target, round) =
            if half { (Target::Float16, f16 as fn(f32) -> u16) } else { (Target::BFloat16, bf16 as _) };
        for (code, element) in (0..=u8::MAX).zip(table::<256>(Code::E4m3, scale, target)) {
            prop_assert_eq!(element, round(e4m3(code) * scale));
        }
        for (code, element) in (0..16_u8).zip(table::<16>(Code::E2m1, scale, target)) {
            prop_assert_eq!(element, round(e2m1(code) * scale));
        }
    }

    /// At any position in the row, and wherever groups begin.
    #[test]
    fn a_row_is_its_codes_by_their_scales(
        code in prop::sample::select(vec![Code::E4m3, Code::E2m1, Code::Int4]),
        bytes in prop::collection::vec(any::<u8>(), 1..5000),
        group in 1_usize..200,
        (before, skip, cut, has_zeros) in (0_usize..200, 0_usize..2, 0_usize..2, any::<bool>()),
    ) {
        let halves = bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]);
        let codes: Vec<f32> = match code {
            Code::E4m3 => bytes.iter().map(|&byte| e4m3(byte)).collect(),
            Code::E2m1 => halves.map(e2m1).collect(),
            Code::Int4 => halves.map(|half| f32::from(half) - 8.0).collect(),
        };
        let (skip, cut) = if code == Code::E4m3 { (0, 0) } else { (skip, cut) };
        prop_assume!(codes.len() > skip + cut);
        let codes = &codes[skip..codes.len() - cut];
        let before = before % group;
        let groups = (before + codes.len()).div_ceil(group);
        let scales: Vec<f32> = (0..groups).map(|i| e8m0((i * 37 % 256) as u8) * 1.3).collect();
        let zero_points = if has_zeros { groups } else { 0 };
        let zeros: Vec<f32> = (0..zero_points).map(|i| (i % 16) as f32 - 8.0).collect();
        let groups = Groups { columns: group, before };
        let row = Row { code, bytes: &bytes, skip, scales: &scales, zeros: &zeros, groups };
        let expected: Vec<f32> = codes.iter().enumerate().map(|(i, x)| {
            let group = (before + i) / group;
            (x - zeros.get(group).unwrap_or(&0.0)) * scales[group]
        }).collect();
        let mut out = vec![0; 4 * codes.len()];
        decode(row, Target::Float32, &mut out, Stores::Streaming);
        for (got, expected) in out.chunks_exact(4).zip(&expected) {
            let got = f32::from_le_bytes(got.try_into().unwrap());
            prop_assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan());
        }
        let mut out = vec![0; 2 * codes.len()];
        let targets = [(Target::BFloat16, bf16 as fn(f32) -> u16), (Target::Float16, f16)];
        for (target, round) in targets {
            decode(row, target, &mut out, Stores::Cached);
            let words = out.chunks_exact(2);
            let got: Vec<u16> = words.map(|x| u16::from_le_bytes(x.try_into().unwrap())).collect();
            prop_assert_eq!(&got, &expected.iter().map(|&x| round(x)).collect::<Vec<_>>());
        }
    }
}
