//! The items of one rank, encoded for a collective.
//!
//! ```text
//! version u8 | count varint | items
//! item: shared varint, rest varint, rest bytes (the name: `shared` bytes of the one before it, and
//!       these)
//!       tag u8: bits 0-4 dtype (0: a value, and nothing follows), bit 5 WHOLE, bit 6 SAME_SHAPE
//!       without SAME_SHAPE: ndim varint, shape varints
//!       without WHOLE: offsets varints, sizes varints
//! ```
//!
//! A varint has 7 bits in each byte, lowest bits first. All bytes but the last have the high bit
//! set.

use crate::format::Kind;
use crate::geometry::Dims;
use crate::write::SaveItem;
use crate::{Dtype, Error, Result};

const VERSION: u8 = 1;
const DTYPE: u8 = 0x1F;
const WHOLE: u8 = 0x20;
const SAME_SHAPE: u8 = 0x40;
const MAX_NDIM: u64 = 64;

/// An item of a request. It borrows from [`decode`].
#[derive(Debug, PartialEq, Eq)]
pub struct Requested<'a> {
    /// FQN.
    pub name: &'a str,
    /// Element type; `None` for a value that is not a tensor.
    pub dtype: Option<Dtype>,
    /// Sizes of the whole tensor.
    pub shape: &'a [u64],
    /// Offsets and sizes of the chunk; `None` for the whole tensor.
    pub chunk: Option<(&'a [u64], &'a [u64])>,
}

/// Returns the request of a rank with these items.
pub fn encode(items: &[SaveItem]) -> Vec<u8> {
    let mut out = Vec::with_capacity(items.len() * 24 + 16);
    out.push(VERSION);
    push(&mut out, items.len() as u64);
    let (mut last_name, mut last_shape): (&str, &[u64]) = ("", &[]);
    for item in items {
        let shared = (last_name.bytes().zip(item.name.bytes())).take_while(|(a, b)| a == b).count();
        push(&mut out, shared as u64);
        push(&mut out, (item.name.len() - shared) as u64);
        out.extend(&item.name.as_bytes()[shared..]);
        last_name = &item.name;
        let Some(dtype) = item.dtype.filter(|_| item.kind == Kind::Tensor) else {
            out.push(0);
            continue;
        };
        let whole = item.sizes == item.shape && item.offsets.iter().all(|&offset| offset == 0);
        let same_shape = *item.shape == *last_shape;
        out.push(
            dtype.code() | if whole { WHOLE } else { 0 } | if same_shape { SAME_SHAPE } else { 0 },
        );
        if !same_shape {
            push(&mut out, item.shape.len() as u64);
            push_all(&mut out, &item.shape);
            last_shape = &item.shape;
        }
        if !whole {
            push_all(&mut out, &item.offsets);
            push_all(&mut out, &item.sizes);
        }
    }
    out
}

/// Decodes a request, and calls `take` with each item. Returns the number of items.
///
/// # Errors
/// [`Error::Plan`] if the bytes are not a request, and the errors of `take`.
pub fn decode(bytes: &[u8], mut take: impl FnMut(Requested<'_>) -> Result<()>) -> Result<u32> {
    let mut input = Input(bytes);
    if input.byte()? != VERSION {
        return Err(Error::Plan(
            "ranks run different releases of dcp-rs: their save plans do not match".into(),
        ));
    }
    let count = u32::try_from(input.varint()?).map_err(|_| broken())?;
    let (mut name, mut shape, mut offsets, mut sizes) =
        (Vec::new(), Dims::new(), Dims::new(), Dims::new());
    for _ in 0..count {
        let shared = usize::try_from(input.varint()?).map_err(|_| broken())?;
        if shared > name.len() {
            return Err(broken());
        }
        name.truncate(shared);
        let rest = input.varint()?;
        name.extend(input.bytes(rest)?);
        let text = std::str::from_utf8(&name).map_err(|_| broken())?;
        let tag = input.byte()?;
        if tag == 0 {
            take(Requested { name: text, dtype: None, shape: &[], chunk: None })?;
            continue;
        }
        let dtype = Dtype::from_code(tag & DTYPE).ok_or_else(broken)?;
        if tag & SAME_SHAPE == 0 {
            let ndim = input.varint()?;
            if ndim > MAX_NDIM {
                let reason = format!("it has {ndim} dimensions; at most {MAX_NDIM} can be saved");
                return Err(Error::tensor_plan(None, text, reason));
            }
            input.extent(&mut shape, ndim)?;
        }
        let chunk = if tag & WHOLE == 0 {
            input.extent(&mut offsets, shape.len() as u64)?;
            input.extent(&mut sizes, shape.len() as u64)?;
            Some((offsets.as_slice(), sizes.as_slice()))
        } else {
            None
        };
        take(Requested { name: text, dtype: Some(dtype), shape: &shape, chunk })?;
    }
    if input.0.is_empty() { Ok(count) } else { Err(broken()) }
}

fn broken() -> Error {
    Error::Plan("a rank sent a save plan that is damaged".into())
}

fn push(out: &mut Vec<u8>, mut number: u64) {
    loop {
        let low = (number & 0x7F) as u8;
        number >>= 7;
        if number == 0 {
            out.push(low);
            return;
        }
        out.push(low | 0x80);
    }
}

fn push_all(out: &mut Vec<u8>, numbers: &[u64]) {
    for &number in numbers {
        push(out, number);
    }
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Result<u8> {
        let (&first, rest) = self.0.split_first().ok_or_else(broken)?;
        self.0 = rest;
        Ok(first)
    }

    fn varint(&mut self) -> Result<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7F);
            if shift == 63 && bits > 1 {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(broken())
    }

    fn bytes(&mut self, count: u64) -> Result<&'a [u8]> {
        let count = usize::try_from(count).map_err(|_| broken())?;
        let (bytes, rest) = self.0.split_at_checked(count).ok_or_else(broken)?;
        self.0 = rest;
        Ok(bytes)
    }

    fn extent(&mut self, dims: &mut Dims, ndim: u64) -> Result<()> {
        dims.clear();
        for _ in 0..ndim {
            dims.push(self.varint()?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn items() -> impl Strategy<Value = Vec<SaveItem>> {
        let dims = || prop::collection::vec(prop_oneof![0_u64..300, any::<u64>()], 0..5);
        let item = ("[a-c.é]{0,9}", 0..24_usize, dims(), any::<bool>(), any::<u64>()).prop_map(
            |(name, dtype, shape, whole, offset)| {
                let dtype = Dtype::all().nth(dtype);
                let shape: Dims = if dtype.is_some() { shape.into() } else { Dims::new() };
                SaveItem {
                    kind: if dtype.is_some() { Kind::Tensor } else { Kind::Bytes },
                    dtype,
                    offsets: shape.iter().map(|_| if whole { 0 } else { offset }).collect(),
                    sizes: shape.iter().map(|&s| if whole { s } else { s / 2 }).collect(),
                    shape,
                    ..SaveItem::bytes(name, 0)
                }
            },
        );
        prop::collection::vec(item, 0..12)
    }

    proptest! {
        #[test]
        fn what_goes_in_comes_out(items in items()) {
            let bytes = encode(&items);
            let mut left = items.iter();
            let count = decode(&bytes, |got| {
                let want = left.next().unwrap();
                let expected = (want.name.as_str(), want.dtype, want.shape.as_slice());
                assert_eq!((got.name, got.dtype, got.shape), expected);
                let zeros = Dims::from_elem(0, want.shape.len());
                let (offsets, sizes) = got.chunk.unwrap_or((&zeros, got.shape));
                assert_eq!((offsets, sizes), (want.offsets.as_slice(), want.sizes.as_slice()));
                Ok(())
            }).unwrap();
            prop_assert_eq!(count as usize, items.len());
        }

        #[test]
        fn damage_is_an_error_or_another_plan(
            items in items(),
            at in any::<prop::sample::Index>(),
            bit in 0..8_u32,
        ) {
            let mut bytes = encode(&items);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let _ = decode(&bytes, |_| Ok(()));
            bytes.truncate(at);
            prop_assert!(decode(&bytes, |_| Ok(())).is_err());
        }
    }
}
