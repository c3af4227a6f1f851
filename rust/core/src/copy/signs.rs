//! Signs: torch may store a tensor as the conjugate, or as the negative, of the bytes that it
//! writes.
#![allow(unsafe_code)] // changes memory of any origin, which was just filled

use crate::Dtype;

/// Relation of a tensor to its stored bytes: conjugated, negated, or neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    /// The elements are the conjugates of the stored ones.
    pub conjugate: bool,
    /// The elements are the negatives of the stored ones.
    pub negative: bool,
}

impl Signs {
    /// Returns the sign bits that differ; `None` for a dtype without conjugates or negatives.
    pub fn bits(self, dtype: Dtype) -> Option<SignBits> {
        if self == Self::default() {
            return Some(SignBits::default());
        }
        let size = dtype.size();
        let last = |bytes: u64| 1_u16 << (bytes - 1);
        let (real, imaginary) = match dtype.name() {
            "float16" | "float32" | "float64" | "bfloat16" if !self.conjugate => (last(size), 0),
            name if name.contains("complex") => (last(size / 2), last(size)),
            _ => return None,
        };
        let all = if self.negative { real | imaginary } else { 0 };
        Some(SignBits(if self.conjugate { all ^ imaginary } else { all }))
    }
}

/// The bytes of an element whose highest bit is flipped: one bit for each byte, none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignBits(u16);

impl SignBits {
    /// Returns whether no sign changes.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Flips the sign bits of a rectangle of at least one element, with strides in bytes.
    ///
    /// # Safety
    /// The elements are valid for reads and writes, and disjoint. Nothing else uses them meanwhile.
    /// No offset exceeds `isize`.
    pub unsafe fn change(self, first: *mut u8, shape: &[u64], strides: &[u64]) {
        let ([n, shape @ ..], [stride, strides @ ..]) = (shape, strides) else {
            for byte in (0..16).filter(|byte| self.0 >> byte & 1 == 1) {
                let byte = first.wrapping_add(byte);
                // SAFETY: a byte of the element, which the caller guarantees.
                unsafe { byte.write(byte.read() ^ 0x80) };
            }
            return;
        };
        for i in 0..*n {
            let step = usize::try_from(i * stride).expect("within memory");
            // SAFETY: the caller guarantees it.
            unsafe { self.change(first.wrapping_add(step), shape, strides) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(dtype: &str, conjugate: bool, negative: bool, bytes: &[u8]) -> Option<Vec<u8>> {
        let dtype = Dtype::from_name(dtype).unwrap();
        let mut bytes = bytes.to_vec();
        let count = bytes.len() as u64 / dtype.size();
        let bits = Signs { conjugate, negative }.bits(dtype)?;
        // SAFETY: all elements of a vector.
        unsafe { bits.change(bytes.as_mut_ptr(), &[count], &[dtype.size()]) };
        Some(bytes)
    }

    #[test]
    fn conjugates_and_negatives() {
        let bytes = |values: &[f32]| {
            values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>()
        };
        let complex = bytes(&[1.0, -2.0, 0.0, 3.0]);
        assert_eq!(
            changed("complex64", true, false, &complex),
            Some(bytes(&[1.0, 2.0, 0.0, -3.0]))
        );
        assert_eq!(
            changed("complex64", false, true, &complex),
            Some(bytes(&[-1.0, 2.0, -0.0, -3.0]))
        );
        assert_eq!(
            changed("complex64", true, true, &complex),
            Some(bytes(&[-1.0, -2.0, -0.0, 3.0]))
        );
        assert_eq!(
            changed("float32", false, true, &complex),
            Some(bytes(&[-1.0, 2.0, -0.0, -3.0]))
        );
        assert_eq!(changed("bfloat16", false, true, &[0, 1, 2, 3]), Some(vec![0, 0x81, 2, 0x83]));
        assert_eq!(changed("complex32", true, false, &[0; 4]), Some(vec![0, 0, 0, 0x80]));
        let double = [1.5_f64, 2.5].map(f64::to_le_bytes).concat();
        assert_eq!(
            changed("complex128", true, false, &double),
            Some([1.5_f64, -2.5].map(f64::to_le_bytes).concat())
        );
        for (dtype, conjugate, negative) in
            [("float32", true, false), ("int32", false, true), ("bool", true, true)]
        {
            assert_eq!(changed(dtype, conjugate, negative, &[0; 8]), None);
        }
        assert_eq!(changed("int64", false, false, &[7; 8]), Some(vec![7; 8]));
    }

    #[test]
    fn only_the_elements_of_a_rectangle() {
        let mut bytes = [0_u8; 32];
        let negative = Signs { negative: true, ..Signs::default() };
        let bits = negative.bits(Dtype::from_name("float16").unwrap()).unwrap();
        // SAFETY: elements at 0, 4, 16 and 20 of 32 bytes.
        unsafe { bits.change(bytes.as_mut_ptr(), &[2, 2], &[16, 4]) };
        let at: Vec<_> = (0..32).filter(|&i| bytes[i] != 0).collect();
        assert_eq!(at, [1, 5, 17, 21]);
    }
}
