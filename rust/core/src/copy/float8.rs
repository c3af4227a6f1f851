//! The values of the 8-bit floating-point types, as torch reads them.

use crate::Dtype;

/// A value for each byte.
pub type Table = [f32; 256];

static E4M3FN: Table = table(4, 3, 7, Special::LastIsNan);
static E4M3FNUZ: Table = table(4, 3, 8, Special::NegativeZeroIsNan);
static E5M2: Table = table(5, 2, 15, Special::Ieee);
static E5M2FNUZ: Table = table(5, 2, 16, Special::NegativeZeroIsNan);
static E8M0FNU: Table = powers();

/// Returns the table of a dtype; `None` unless its elements are numbers of 8 bits.
#[must_use]
pub fn float8(dtype: Dtype) -> Option<&'static Table> {
    match dtype.name() {
        "float8_e4m3fn" => Some(&E4M3FN),
        "float8_e4m3fnuz" => Some(&E4M3FNUZ),
        "float8_e5m2" => Some(&E5M2),
        "float8_e5m2fnuz" => Some(&E5M2FNUZ),
        "float8_e8m0fnu" => Some(&E8M0FNU),
        _ => None,
    }
}

/// Byte values that are not finite numbers.
#[derive(Clone, Copy)]
enum Special {
    /// The largest exponent means infinity and NaN.
    Ieee,
    /// All bits but the sign set means NaN. There is no infinity.
    LastIsNan,
    /// The sign bit alone means NaN. There is no infinity, and no negative zero.
    NegativeZeroIsNan,
}

const fn table(exponent_bits: u32, mantissa_bits: u32, bias: u32, special: Special) -> Table {
    let mut all = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        all[byte as usize] =
            f32::from_bits(bits(byte, exponent_bits, mantissa_bits, bias, special));
        byte += 1;
    }
    all
}

/// Returns the bits of the same value as a float32.
const fn bits(
    byte: u32,
    exponent_bits: u32,
    mantissa_bits: u32,
    bias: u32,
    special: Special,
) -> u32 {
    let sign = byte >> 7 << 31;
    let mantissa = byte & ((1 << mantissa_bits) - 1);
    let exponent = byte >> mantissa_bits & ((1 << exponent_bits) - 1);
    let is_nan = match special {
        Special::Ieee if exponent == (1 << exponent_bits) - 1 => {
            if mantissa == 0 {
                return sign | f32::INFINITY.to_bits();
            }
            true
        }
        Special::Ieee => false,
        Special::LastIsNan => byte & 0x7f == 0x7f,
        Special::NegativeZeroIsNan => byte == 0x80,
    };
    if is_nan {
        return sign | f32::NAN.to_bits();
    }
    if exponent > 0 {
        return sign | (exponent + 127 - bias) << 23 | mantissa << (23 - mantissa_bits);
    }
    // A small multiple of the smallest number. Both are exact.
    let smallest = f32::from_bits((127 + 1 - bias - mantissa_bits) << 23);
    #[expect(clippy::cast_precision_loss, reason = "three bits")]
    let mantissa = mantissa as f32;
    sign | (mantissa * smallest).to_bits()
}

/// Returns the powers of two from 2^-127 on. The last byte is NaN.
const fn powers() -> Table {
    let mut all = [0.0; 256];
    all[0] = f32::from_bits(1 << 22); // a subnormal float32
    let mut exponent = 1;
    while exponent < 255 {
        all[exponent as usize] = f32::from_bits(exponent << 23);
        exponent += 1;
    }
    all[255] = f32::NAN;
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_at_the_ends_of_each_type() {
        let value =
            |name: &str, byte: usize| float8(Dtype::from_name(name).unwrap()).unwrap()[byte];
        for (name, byte, expected) in [
            ("float8_e4m3fn", 0x01, 0.001_953_125),
            ("float8_e4m3fn", 0x38, 1.0),
            ("float8_e4m3fn", 0x7e, 448.0),
            ("float8_e4m3fn", 0xfe, -448.0),
            ("float8_e4m3fnuz", 0x40, 1.0),
            ("float8_e4m3fnuz", 0x7f, 240.0),
            ("float8_e5m2", 0x01, 2.0_f32.powi(-16)),
            ("float8_e5m2", 0x7b, 57344.0),
            ("float8_e5m2", 0x7c, f32::INFINITY),
            ("float8_e5m2", 0xfc, f32::NEG_INFINITY),
            ("float8_e5m2fnuz", 0x7f, 57344.0),
            ("float8_e8m0fnu", 0x00, 2.0_f32.powi(-127)),
            ("float8_e8m0fnu", 0x7f, 1.0),
            ("float8_e8m0fnu", 0xfe, 2.0_f32.powi(127)),
        ] {
            assert_eq!(value(name, byte).to_bits(), expected.to_bits(), "{name} {byte:#x}");
        }
        assert_eq!(value("float8_e4m3fn", 0x80).to_bits(), (-0.0_f32).to_bits());
        for (name, byte) in [
            ("float8_e4m3fn", 0xff),
            ("float8_e4m3fnuz", 0x80),
            ("float8_e5m2", 0x7d),
            ("float8_e5m2fnuz", 0x80),
            ("float8_e8m0fnu", 0xff),
        ] {
            assert!(value(name, byte).is_nan(), "{name} {byte:#x}");
        }
        assert!(float8(Dtype::from_name("bfloat16").unwrap()).is_none());
    }
}
