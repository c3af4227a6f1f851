//! What the elements of a tensor are: the least, the greatest, their mean and spread, how many are NaN, infinite, zero.

#![allow(clippy::inline_always)] // what is compiled anew for other instructions has to be compiled into one function

use crate::{Dtype, Result, parallel};

/// Elements that are looked at together: as `f64` they stay in a core's first cache.
const BLOCK: usize = 2048;
/// Bytes for one task of a thread, a multiple of every element's size.
const TASK_BYTES: usize = 1 << 20;
const LANES: usize = 8;

/// What was found of some elements. Of complex numbers, of both parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tally {
    /// How many are finite.
    pub finite: u64,
    /// The mean of those.
    pub mean: f64,
    /// The sum of the squares of their differences from the mean.
    pub squares: f64,
    /// The least of them; of 64-bit integers, see `exact`.
    pub least: f64,
    /// The greatest of them.
    pub greatest: f64,
    /// The least and the greatest of 64-bit integers, which `f64` cannot tell apart.
    pub exact: Option<(i128, i128)>,
    /// How many are NaN.
    pub nan: u64,
    /// How many are infinite.
    pub infinite: u64,
    /// How many are zero, of either sign.
    pub zeros: u64,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            finite: 0,
            mean: 0.0,
            squares: 0.0,
            least: f64::INFINITY,
            greatest: f64::NEG_INFINITY,
            exact: None,
            nan: 0,
            infinite: 0,
            zeros: 0,
        }
    }
}

impl Tally {
    /// Adds what was found of other elements (Chan, Golub, `LeVeque` 1979).
    #[expect(clippy::cast_precision_loss, reason = "counts, as weights")]
    pub fn add(&mut self, other: &Self) {
        self.nan += other.nan;
        self.infinite += other.infinite;
        self.zeros += other.zeros;
        self.least = self.least.min(other.least);
        self.greatest = self.greatest.max(other.greatest);
        self.exact = match (self.exact, other.exact) {
            (Some((a, b)), Some((c, d))) => Some((a.min(c), b.max(d))),
            (one, another) => one.or(another),
        };
        let total = self.finite + other.finite;
        if other.finite > 0 {
            let (own, others) = (self.finite as f64, other.finite as f64);
            let apart = other.mean - self.mean;
            self.mean += apart * (others / total as f64);
            self.squares += other.squares + apart * apart * (own * others / total as f64);
        }
        self.finite = total;
    }
}

/// What the elements of each piece are, by `threads` threads (0: as many as cores). A piece is whole elements, as they lie in files.
pub fn tally(pieces: &[(&[u8], Dtype)], threads: usize) -> Result<Vec<Tally>> {
    let tasks: Vec<(usize, &[u8])> = pieces
        .iter()
        .enumerate()
        .flat_map(|(place, (data, _))| data.chunks(TASK_BYTES).map(move |part| (place, part)))
        .collect();
    let found = parallel::map(tasks.len(), threads, |task| {
        let (place, part) = tasks[task];
        Ok(of_elements(part, pieces[place].1))
    })?;
    let mut sums = vec![Tally::default(); pieces.len()];
    for ((place, _), found) in tasks.iter().zip(&found) {
        sums[*place].add(found);
    }
    Ok(sums)
}

macro_rules! numbers {
    ($data:expr, $type:ty) => {
        by_blocks($data, |bytes: [u8; size_of::<$type>()]| {
            #[allow(
                clippy::cast_precision_loss,
                clippy::cast_lossless,
                reason = "64-bit integers, of which `exact` knows more"
            )]
            let number = <$type>::from_le_bytes(bytes) as f64;
            [number]
        })
    };
}

fn of_elements(data: &[u8], dtype: Dtype) -> Tally {
    match dtype.name() {
        "bool" | "uint8" => numbers!(data, u8),
        "int8" => numbers!(data, i8),
        "int16" => numbers!(data, i16),
        "int32" => numbers!(data, i32),
        "uint16" => numbers!(data, u16),
        "uint32" => numbers!(data, u32),
        "int64" => Tally {
            exact: extremes(data, |bytes| i64::from_le_bytes(bytes).into()),
            ..numbers!(data, i64)
        },
        "uint64" => Tally {
            exact: extremes(data, |bytes| u64::from_le_bytes(bytes).into()),
            ..numbers!(data, u64)
        },
        "float32" | "complex64" => numbers!(data, f32),
        "float64" | "complex128" => numbers!(data, f64),
        "bfloat16" | "bcomplex32" => by_blocks(data, |bytes| [from_bfloat16(u16::from_le_bytes(bytes)).into()]),
        "float16" | "complex32" => by_blocks(data, |bytes| [from_float16(u16::from_le_bytes(bytes)).into()]),
        "float4_e2m1fn_x2" => {
            let nibble = |bits: u8| small(bits, 4, 2, 1, 1);
            let table: [[f64; 2]; 256] = table(|byte| [nibble(byte & 15), nibble(byte >> 4)]);
            by_blocks(data, |[byte]: [u8; 1]| table[usize::from(byte)])
        }
        name => {
            let table = table(|byte| [float8(name, byte)]);
            by_blocks(data, |[byte]: [u8; 1]| table[usize::from(byte)])
        }
    }
}

fn table<const N: usize>(of: impl Fn(u8) -> [f64; N]) -> [[f64; N]; 256] {
    std::array::from_fn(|byte| of(u8::try_from(byte).expect("256 of them")))
}

fn from_bfloat16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn from_float16(bits: u16) -> f32 {
    let bits = u32::from(bits);
    // 2^112 moves the exponent's bias, and makes subnormal numbers normal ones.
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let finite = magnitude.to_bits();
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(finite | special | (bits & 0x8000) << 16)
}

/// An 8-bit float: of the OCP's specification, or of its "fnuz" kin, which has one NaN where others have -0, and no infinity.
fn float8(name: &str, bits: u8) -> f64 {
    match (name, bits) {
        ("float8_e8m0fnu", 255)
        | ("float8_e4m3fn", 0x7f | 0xff)
        | ("float8_e4m3fnuz" | "float8_e5m2fnuz", 0x80)
        | ("float8_e5m2", 0x7d..=0x7f | 0xfd..) => f64::NAN,
        ("float8_e8m0fnu", _) => f64::from(i16::from(bits) - 127).exp2(),
        ("float8_e5m2", 0x7c) => f64::INFINITY,
        ("float8_e5m2", 0xfc) => f64::NEG_INFINITY,
        ("float8_e4m3fn", _) => small(bits, 8, 4, 3, 7),
        ("float8_e4m3fnuz", _) => small(bits, 8, 4, 3, 8),
        ("float8_e5m2", _) => small(bits, 8, 5, 2, 15),
        _ => small(bits, 8, 5, 2, 16),
    }
}

/// A finite float of few bits: sign, exponent, mantissa.
fn small(bits: u8, width: u32, exponent_bits: u32, mantissa_bits: u32, bias: i32) -> f64 {
    let exponent = i32::from(bits >> mantissa_bits & ((1 << exponent_bits) - 1));
    let fraction = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1_u32 << mantissa_bits);
    let magnitude = if exponent == 0 { fraction } else { 1.0 + fraction } * f64::from(exponent.max(1) - bias).exp2();
    if bits >> (width - 1) & 1 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

fn by_blocks<const SIZE: usize, const N: usize>(data: &[u8], number: impl Fn([u8; SIZE]) -> [f64; N]) -> Tally {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn with_avx2<const SIZE: usize, const N: usize>(data: &[u8], number: impl Fn([u8; SIZE]) -> [f64; N]) -> Tally {
            in_blocks(data, number)
        }
        // SAFETY: the processor has what the function is compiled for.
        #[expect(unsafe_code, reason = "instructions that not every processor has")]
        return unsafe { with_avx2(data, number) };
    }
    in_blocks(data, number)
}

/// Compiled anew, as all that it calls, for each set of instructions.
#[inline(always)]
fn in_blocks<const SIZE: usize, const N: usize>(data: &[u8], number: impl Fn([u8; SIZE]) -> [f64; N]) -> Tally {
    let (elements, _) = data.as_chunks::<SIZE>();
    let mut sums = Tally::default();
    let mut numbers = [[0.0; N]; BLOCK];
    for block in elements.chunks(BLOCK) {
        for (number_at, element) in numbers.iter_mut().zip(block) {
            *number_at = number(*element);
        }
        sums.add(&of_block(numbers[..block.len()].as_flattened_mut()));
    }
    sums
}

#[expect(clippy::cast_precision_loss, reason = "at most twice a block")]
#[inline(always)]
fn of_block(numbers: &mut [f64]) -> Tally {
    let (total, zeros) = total(numbers);
    let (mut nan, mut infinite) = (0, 0);
    let mut total = total;
    let mut kept = numbers.len();
    if !total.is_finite() {
        kept = 0;
        for at in 0..numbers.len() {
            let number = numbers[at];
            nan += u64::from(number.is_nan());
            infinite += u64::from(number.is_infinite());
            if number.is_finite() {
                numbers[kept] = number;
                kept += 1;
            }
        }
        total = numbers[..kept].iter().sum();
    }
    let numbers = &numbers[..kept];
    let rest = Tally {
        nan,
        infinite,
        zeros,
        ..Tally::default()
    };
    if numbers.is_empty() {
        return rest;
    }
    let mean = total / numbers.len() as f64;
    let (squares, least, greatest) = spread(numbers, mean);
    Tally {
        finite: numbers.len() as u64,
        mean,
        squares,
        least,
        greatest,
        ..rest
    }
}

/// The sum, and how many are zero. In lanes, for instructions that take several.
#[inline(always)]
fn total(numbers: &[f64]) -> (f64, u64) {
    let (lanes, rest) = numbers.as_chunks::<LANES>();
    let (mut sums, mut zeros) = ([0.0; LANES], [0_u64; LANES]);
    for lane in lanes {
        for at in 0..LANES {
            sums[at] += lane[at];
            zeros[at] += u64::from(lane[at] == 0.0);
        }
    }
    let sum = sums.iter().chain(rest).sum();
    let zero = |number: &f64| u64::from(*number == 0.0);
    (sum, zeros.iter().sum::<u64>() + rest.iter().map(zero).sum::<u64>())
}

/// The sum of the squares of the differences from the mean, the least and the greatest.
#[inline(always)]
fn spread(numbers: &[f64], mean: f64) -> (f64, f64, f64) {
    let (lanes, rest) = numbers.as_chunks::<LANES>();
    let (mut squares, mut least, mut greatest) = ([0.0; LANES], [f64::INFINITY; LANES], [f64::NEG_INFINITY; LANES]);
    for lane in lanes {
        for at in 0..LANES {
            let number = lane[at];
            squares[at] += (number - mean) * (number - mean);
            least[at] = if number < least[at] { number } else { least[at] };
            greatest[at] = if number > greatest[at] { number } else { greatest[at] };
        }
    }
    let square = |number: &f64| (number - mean) * (number - mean);
    (
        squares.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>(),
        least.iter().chain(rest).copied().fold(f64::INFINITY, f64::min),
        greatest.iter().chain(rest).copied().fold(f64::NEG_INFINITY, f64::max),
    )
}

fn extremes(data: &[u8], number: impl Fn([u8; 8]) -> i128) -> Option<(i128, i128)> {
    let (elements, _) = data.as_chunks::<8>();
    let first = number(*elements.first()?);
    Some(elements.iter().fold((first, first), |(low, high), element| {
        let number = number(*element);
        (low.min(number), high.max(number))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(data: &[u8], name: &str) -> Tally {
        let dtype = Dtype::from_name(name).expect("a dtype");
        tally(&[(data, dtype)], 1).expect("counted")[0]
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "exact in binary")]
    fn numbers_that_are_not_finite_are_counted_and_left_out() {
        let numbers = [1.0_f32, f32::NAN, -3.0, f32::INFINITY, 0.0, -0.0, f32::NEG_INFINITY];
        let data: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let found = one(&data, "float32");
        assert_eq!((found.finite, found.nan, found.infinite, found.zeros), (4, 1, 2, 2));
        assert_eq!((found.least, found.greatest, found.mean), (-3.0, 1.0, -0.5));
        assert_eq!(found.squares, 2.25 + 6.25 + 0.25 + 0.25);
    }

    #[test]
    fn pieces_of_any_length_add_up() {
        let numbers: Vec<f64> = (0..70_001).map(|i| f64::from(i % 997) - 300.0).collect();
        let data: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let whole = one(&data, "float64");
        let mean = numbers.iter().sum::<f64>() / 70_001.0;
        let squares: f64 = numbers.iter().map(|number| (number - mean).powi(2)).sum();
        assert!((whole.mean - mean).abs() < 1e-9 && (whole.squares / squares - 1.0).abs() < 1e-12);
        let mut sums = Tally::default();
        for part in data.chunks(8 * 333) {
            sums.add(&one(part, "float64"));
        }
        assert!((sums.mean - mean).abs() < 1e-9 && (sums.squares / squares - 1.0).abs() < 1e-12);
        assert_eq!((sums.finite, sums.zeros), (whole.finite, whole.zeros));
    }

    #[test]
    fn every_set_of_instructions_counts_the_same() {
        let bits = (0..40_000_u32).map(|i| i.wrapping_mul(2_654_435_761));
        let data: Vec<u8> = bits.flat_map(u32::to_le_bytes).collect();
        let number = |bytes| [f64::from(from_bfloat16(u16::from_le_bytes(bytes)))];
        let found = by_blocks(&data, number);
        assert_eq!(found, in_blocks(&data, number));
        assert!(found.nan > 0 && found.finite > 70_000);
    }

    #[test]
    fn integers_of_64_bits_are_told_apart() {
        let data: Vec<u8> = [u64::MAX, u64::MAX - 1].iter().flat_map(|n| n.to_le_bytes()).collect();
        assert_eq!(
            one(&data, "uint64").exact,
            Some((i128::from(u64::MAX) - 1, i128::from(u64::MAX)))
        );
        assert_eq!(one(&data, "int64").exact, Some((-2, -1)));
    }

    #[test]
    fn every_dtype_is_counted() {
        for dtype in Dtype::all() {
            let data = vec![0; 16];
            let found = tally(&[(&data, dtype), (&[], dtype)], 2).expect("counted");
            assert!(found[0].finite > 0, "{}", dtype.name());
            assert_eq!(found[1], Tally::default());
        }
    }
}
