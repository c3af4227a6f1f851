//! Adding weighted elements to sums, instead of copying them.
#![allow(unsafe_code)] // Reads and writes raw memory of any origin
#![expect(
    clippy::inline_always,
    reason = "only what is inlined is compiled for the features of its caller"
)]

use super::Loop;
use super::float8::{Table, float8};
use crate::Dtype;

/// Computes `sum = weight * element + sum` for every element with one fused multiply-add, so the
/// product is not rounded.
///
/// torch computes `sum.add_(element.float(), alpha=weight)` in the same way on a CPU with that
/// instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accumulate {
    stored: Stored,
    weight: f64,
    is_double: bool,
}

/// Conversions from a stored element to a number.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    Float8(&'static Table),
    Float16,
    BFloat16,
    Float32,
    Float64,
}

impl Accumulate {
    /// Makes the operation that adds elements of type `stored`, times `weight`, to sums of float64
    /// (`is_double`) or float32.
    ///
    /// Returns `None` for a type that cannot be summed: integers, complex numbers, two numbers in a
    /// byte, and float64 with sums of float32.
    #[must_use]
    pub fn new(stored: Dtype, weight: f64, is_double: bool) -> Option<Self> {
        let stored = match stored.name() {
            "float16" => Stored::Float16,
            "bfloat16" => Stored::BFloat16,
            "float32" => Stored::Float32,
            "float64" if is_double => Stored::Float64,
            _ => Stored::Float8(float8(stored)?),
        };
        Some(Self { stored, weight, is_double })
    }

    /// Returns the operation with a negated weight.
    #[must_use]
    pub fn negated(self) -> Self {
        Self { weight: -self.weight, ..self }
    }

    /// Returns the size of a sum in bytes.
    #[must_use]
    pub fn size(self) -> u64 {
        if self.is_double { 8 } else { 4 }
    }

    /// Returns the size of a stored element in bytes.
    fn stored_size(self) -> usize {
        match self.stored {
            Stored::Float8(_) => 1,
            Stored::Float16 | Stored::BFloat16 => 2,
            Stored::Float32 => 4,
            Stored::Float64 => 8,
        }
    }

    /// Adds `run` bytes of elements for every step of `loops`. Steps of the destination are in
    /// bytes of sums.
    ///
    /// # Safety
    /// All bytes that the loops reach are valid: from `src` for reads, from `dst` for reads and
    /// writes. They do not overlap, and nothing else uses the sums meanwhile. Every offset fits in
    /// `isize`.
    pub unsafe fn run(self, dst: *mut u8, src: *const u8, loops: &[Loop], run: u64) {
        // The steps of a loop in memory fit in a `usize`. Saturation keeps this infallible.
        let fit = |x: u64| usize::try_from(x).unwrap_or(usize::MAX);
        let item = self.stored_size();
        match loops {
            [] => {
                let row = Row { count: fit(run) / item, src: item, dst: fit(self.size()) };
                // SAFETY: a run is contiguous on both sides, and the caller guarantees it.
                unsafe { self.add(dst, src, row) };
            }
            // Otherwise columns would be added one element per call.
            [inner] if fit(run) == item => {
                let row = Row { count: fit(inner.n), src: fit(inner.src), dst: fit(inner.dst) };
                // SAFETY: each element is at a step of the loop, which the caller guarantees.
                unsafe { self.add(dst, src, row) };
            }
            [outer, rest @ ..] => {
                for i in 0..fit(outer.n) {
                    // SAFETY: the caller guarantees it for each step.
                    unsafe {
                        self.run(
                            dst.add(i * fit(outer.dst)),
                            src.add(i * fit(outer.src)),
                            rest,
                            run,
                        );
                    };
                }
            }
        }
    }

    /// Adds a row of elements.
    ///
    /// # Safety
    /// That of [`run`](Self::run).
    unsafe fn add(self, dst: *mut u8, src: *const u8, row: Row) {
        // SAFETY: the caller guarantees it. For `fast`, the processor has the required features.
        unsafe {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return self.fast(dst, src, row);
            }
            self.plain(dst, src, row);
        }
    }

    /// Does the same as [`add`](Self::add), compiled for processors since 2013.
    ///
    /// # Safety
    /// That of [`run`](Self::run), and the processor has AVX2 and FMA.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn fast(self, dst: *mut u8, src: *const u8, row: Row) {
        // SAFETY: the caller guarantees it.
        unsafe { self.plain(dst, src, row) };
    }

    /// # Safety
    /// That of [`run`](Self::run).
    #[inline(always)]
    unsafe fn plain(self, dst: *mut u8, src: *const u8, row: Row) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "torch rounds the weight of float32 sums as well"
        )]
        let weight = self.weight as f32;
        // SAFETY: the caller guarantees it. Sums and elements have the types in `self`.
        unsafe {
            match (self.stored, self.is_double) {
                (Stored::Float8(table), false) => {
                    row.add(dst, src, weight, |x: u8| table[usize::from(x)]);
                }
                (Stored::Float16, false) => row.add(dst, src, weight, half),
                (Stored::BFloat16, false) => row.add(dst, src, weight, brain),
                (Stored::Float32 | Stored::Float64, false) => {
                    row.add(dst, src, weight, |x: f32| x);
                }
                (Stored::Float8(table), true) => {
                    row.add(dst, src, self.weight, |x: u8| f64::from(table[usize::from(x)]));
                }
                (Stored::Float16, true) => {
                    row.add(dst, src, self.weight, |x: u16| f64::from(half(x)));
                }
                (Stored::BFloat16, true) => {
                    row.add(dst, src, self.weight, |x: u16| f64::from(brain(x)));
                }
                (Stored::Float32, true) => row.add(dst, src, self.weight, |x: f32| f64::from(x)),
                (Stored::Float64, true) => row.add(dst, src, self.weight, |x: f64| x),
            }
        }
    }
}

/// Returns the value of a bfloat16.
#[inline(always)]
fn brain(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Returns the value of a float16. It has no branches, so that it is compiled to vector
/// instructions.
#[inline(always)]
fn half(x: u16) -> f32 {
    const INFINITE: u32 = 0x7c00;
    let x = u32::from(x);
    let magnitude = x & 0x7fff;
    // The bias of the exponent is 15 instead of 127. Unlike a product, a difference is right even
    // if subnormal operands count as zero (torch.set_flush_denormal).
    let normal = (magnitude << 13) + ((127 - 15) << 23);
    let subnormal = f32::from_bits((113 << 23) + (magnitude << 13)) - f32::from_bits(113 << 23);
    let finite = if magnitude < 0x0400 { subnormal.to_bits() } else { normal };
    let bits = if magnitude >= INFINITE { 0x7f80_0000 | magnitude << 13 } else { finite };
    f32::from_bits(bits | (x & 0x8000) << 16)
}

/// Evenly spaced elements: the steps in bytes on both sides.
#[derive(Clone, Copy)]
struct Row {
    count: usize,
    src: usize,
    dst: usize,
}

impl Row {
    /// # Safety
    /// That of [`Accumulate::run`], for elements of type `T` and sums of type `S`.
    #[inline(always)]
    unsafe fn add<T: Copy, S: Sum>(
        self,
        dst: *mut u8,
        src: *const u8,
        weight: S,
        cast: impl Fn(T) -> S,
    ) {
        // SAFETY: the caller guarantees every position. The accesses need no alignment.
        unsafe {
            // Constant steps are compiled to vector instructions.
            if self.src == size_of::<T>() && self.dst == size_of::<S>() {
                for i in 0..self.count {
                    one(dst.add(i * size_of::<S>()), src.add(i * size_of::<T>()), weight, &cast);
                }
            } else {
                for i in 0..self.count {
                    one(dst.add(i * self.dst), src.add(i * self.src), weight, &cast);
                }
            }
        }
    }
}

/// # Safety
/// `src` is valid for reads of a `T`, and `dst` for reads and writes of an `S`.
#[inline(always)]
unsafe fn one<T: Copy, S: Sum>(dst: *mut u8, src: *const u8, weight: S, cast: &impl Fn(T) -> S) {
    // SAFETY: the caller guarantees it.
    unsafe {
        let element = cast(src.cast::<T>().read_unaligned());
        let sum = dst.cast::<S>();
        sum.write_unaligned(S::mul_add(element, weight, sum.read_unaligned()));
    }
}

/// Rounds float32 to bfloat16, to nearest, ties to even.
///
/// # Safety
/// `src` is valid for reads of `count` elements, and `dst` for writes of as many. They do not
/// overlap.
pub unsafe fn round_to_bfloat16(dst: *mut u8, src: *const u8, count: usize) {
    /// # Safety
    /// That of the enclosing function, and the processor has AVX2.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[target_feature(enable = "avx2")]
    unsafe fn fast(dst: *mut u8, src: *const u8, count: usize) {
        // SAFETY: the caller guarantees it.
        unsafe { round_all(dst, src, count) };
    }
    // SAFETY: the caller guarantees it. For `fast`, the processor has the required features.
    unsafe {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if is_x86_feature_detected!("avx2") {
            return fast(dst, src, count);
        }
        round_all(dst, src, count);
    }
}

/// # Safety
/// That of [`round_to_bfloat16`].
#[inline(always)]
unsafe fn round_all(dst: *mut u8, src: *const u8, count: usize) {
    for i in 0..count {
        // SAFETY: the caller guarantees it.
        unsafe {
            let bits = src.add(4 * i).cast::<u32>().read_unaligned();
            dst.add(2 * i).cast::<u16>().write_unaligned(rounded(bits));
        }
    }
}

/// Returns the upper half of a float32, rounded. NaN becomes a quiet NaN.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper half")]
fn rounded(bits: u32) -> u16 {
    // Wrapping addition, because only the bits of NaN overflow.
    let up = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    (if is_nan { bits >> 16 | 0x40 } else { up }) as u16
}

/// A type of sums.
trait Sum: Copy {
    fn mul_add(a: Self, b: Self, c: Self) -> Self;
}

impl Sum for f32 {
    #[inline(always)]
    fn mul_add(a: Self, b: Self, c: Self) -> Self {
        a.mul_add(b, c)
    }
}

impl Sum for f64 {
    #[inline(always)]
    fn mul_add(a: Self, b: Self, c: Self) -> Self {
        a.mul_add(b, c)
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the sums are exact")]
mod tests {
    use super::super::Strided;
    use super::*;

    fn accumulate(dtype: &str, weight: f64, is_double: bool) -> Option<Accumulate> {
        Accumulate::new(Dtype::from_name(dtype).unwrap(), weight, is_double)
    }

    /// Adds a whole run of bytes to sums of float32.
    fn added(dtype: &str, weight: f64, bytes: &[u8], sums: &mut [f32]) {
        let sink = accumulate(dtype, weight, false).unwrap();
        // SAFETY: the tests pass as many sums as elements.
        unsafe {
            sink.run(sums.as_mut_ptr().cast(), bytes.as_ptr(), &[], bytes.len() as u64);
        };
    }

    #[test]
    fn every_float16_and_bfloat16_becomes_the_number_that_it_is() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut sums = vec![0.0; 1 << 16];
        added("bfloat16", 1.0, &bytes, &mut sums);
        for (bits, &sum) in (0_u32..).zip(&sums) {
            let expected = f32::from_bits(bits << 16);
            assert!(sum == expected || sum.is_nan() && expected.is_nan(), "{bits:#x}: {sum}");
        }
        sums.fill(0.0);
        added("float16", 1.0, &bytes, &mut sums);
        for (bits, &sum) in (0_i32..).zip(&sums) {
            // By its definition: sign, five bits of exponent, ten of mantissa.
            let (exponent, mantissa) = (bits >> 10 & 31, f64::from(bits & 1023));
            let magnitude = match exponent {
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                0 => mantissa * 2_f64.powi(-24),
                _ => (1024.0 + mantissa) * 2_f64.powi(exponent - 25),
            };
            let expected = if bits >> 15 == 1 { -magnitude } else { magnitude };
            let same = f64::from(sum) == expected || sum.is_nan() && expected.is_nan();
            assert!(same, "{bits:#x}: {sum}, not {expected}");
        }
    }

    #[test]
    fn products_are_not_rounded_before_they_are_added() {
        // (1 + 2^-12)^2 needs 25 bits: rounded before the sum, its last bit is lost.
        let x = 1.0 + 2_f32.powi(-12);
        let mut sums = [-1.0_f32];
        added("float32", f64::from(x), &x.to_le_bytes(), &mut sums);
        let exact = f64::from(x) * f64::from(x) - 1.0;
        assert_eq!(f64::from(sums[0]), exact);
    }

    #[test]
    fn zeros_infinities_and_nan_are_those_of_the_arithmetic() {
        let stored = [-0.0_f32, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0];
        let bytes: Vec<u8> = stored.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut sums = [0.0_f32, 1.0, f32::INFINITY, 1.0, -1.0];
        added("float32", 1.0, &bytes, &mut sums);
        assert_eq!(sums[0].to_bits(), 0.0_f32.to_bits());
        assert_eq!(sums[1], f32::INFINITY);
        assert!(sums[2].is_nan() && sums[3].is_nan());
        assert_eq!(sums[4].to_bits(), 0.0_f32.to_bits());
    }

    #[test]
    fn double_sums_take_every_type() {
        let wanted = 0.3_f64.mul_add(1.5, 2.0);
        for (dtype, bytes) in [
            ("float8_e4m3fn", vec![0x3c]),
            ("float16", 0x3e00_u16.to_le_bytes().to_vec()),
            ("bfloat16", 0x3fc0_u16.to_le_bytes().to_vec()),
            ("float32", 1.5_f32.to_le_bytes().to_vec()),
            ("float64", 1.5_f64.to_le_bytes().to_vec()),
        ] {
            let mut sum = 2.0_f64;
            let sink = accumulate(dtype, 0.3, true).unwrap();
            // SAFETY: one element, and one sum.
            unsafe {
                sink.run((&raw mut sum).cast(), bytes.as_ptr(), &[], bytes.len() as u64);
            };
            assert_eq!(sum.to_bits(), wanted.to_bits(), "{dtype}");
        }
        for (dtype, is_double) in [
            ("float64", false),
            ("int32", true),
            ("complex64", true),
            ("float4_e2m1fn_x2", false),
            ("bool", false),
        ] {
            assert!(accumulate(dtype, 1.0, is_double).is_none(), "{dtype}");
        }
    }

    #[test]
    fn float32_is_rounded_to_the_nearest_bfloat16() {
        for (from, to) in [
            (0x3f80_0000_u32, 0x3f80_u16),
            (0x3f80_7fff, 0x3f80),
            (0x3f80_8000, 0x3f80), // halfway: to even
            (0x3f81_8000, 0x3f82),
            (0x3f80_8001, 0x3f81),
            (0x8000_0000, 0x8000),
            (0x0000_8001, 0x0001),
            (0x7f7f_ffff, 0x7f80), // to infinity
            (0x7f80_0000, 0x7f80),
            (0x7f80_0001, 0x7fc0), // NaN
            (0xffff_ffff, 0xffff),
        ] {
            let mut got = 0_u16;
            // SAFETY: one element each.
            unsafe { round_to_bfloat16((&raw mut got).cast(), (&raw const from).cast(), 1) };
            assert_eq!(got, to, "{from:#x}");
        }
    }

    #[test]
    fn columns_and_transposes_are_added_where_they_belong() {
        // Rows 1 to 3 of columns 2 to 6 of a matrix of 4 x 8, and their transpose.
        let stored: Vec<u8> = (0_u16..32).flat_map(|x| (x << 7 | 0x3f80).to_le_bytes()).collect();
        let value = |row: usize, column: usize| {
            let at = 2 * (8 * row + column);
            brain(u16::from_le_bytes([stored[at], stored[at + 1]]))
        };
        for (shape, src, dst) in [([2_u64, 4], [16, 2], [16, 4]), ([4, 2], [2, 16], [8, 4])] {
            // `Strided` counts both sides in bytes of stored elements.
            let halved = dst.map(|step| step / 2);
            let copy = Strided::new(2, &shape, &src, &halved).unwrap();
            let loops: Vec<Loop> =
                copy.loops.iter().map(|l| Loop { dst: 2 * l.dst, ..*l }).collect();
            let mut sums = [1.0_f32; 8];
            let sink = accumulate("bfloat16", 2.0, false).unwrap();
            let first = stored[2 * (8 + 2)..].as_ptr();
            // SAFETY: the rectangle is inside the matrix, and there is a sum for each of its
            // elements.
            unsafe { sink.run(sums.as_mut_ptr().cast(), first, &loops, copy.run) };
            for row in 1..3 {
                for column in 2..6 {
                    let at =
                        (row - 1) * usize::try_from(dst[usize::from(shape[0] == 4)]).unwrap() / 4;
                    let step = usize::try_from(dst[usize::from(shape[0] == 2)]).unwrap() / 4;
                    let got = sums[at + (column - 2) * step];
                    assert_eq!(got, 2.0 * value(row, column) + 1.0, "{shape:?} {row} {column}");
                }
            }
        }
    }
}
