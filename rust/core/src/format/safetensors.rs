//! The header of a safetensors file, as <https://github.com/huggingface/safetensors> defines it.
//!
//! ```text
//! 0    8  header length N, u64, at most 100,000,000
//! 8    N  JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//!                "__metadata__": {"key": "text", ...}}
//! 8+N     the payload; offsets count from here
//! ```
//!
//! The tensors cover the payload exactly, without gaps or overlaps.
//!
//! It accepts the headers that the `safetensors` crate accepts, with two deliberate and tested
//! differences. A duplicate name (of a tensor, or in `__metadata__`) is refused here, while the
//! crate keeps the last one. The value of an unknown field is skipped here and decoded there, so a
//! number out of range in it is refused only by the crate.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use crate::Dtype;

/// Limit on the length of a header in bytes, which is that of the `safetensors` crate.
pub const MAX_HEADER_LEN: u64 = 100_000_000;

/// Bytes before the JSON, which contain its length.
pub const PREFIX_LEN: u64 = 8;

/// The checked header of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Offset of the payload in the file.
    pub data_start: u64,
    /// The tensors, in the order of their bytes in the file.
    pub tensors: Vec<HeaderTensor>,
    /// The texts of `__metadata__`; empty if there are none.
    pub metadata: BTreeMap<String, String>,
}

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: HeaderDtype,
    /// Its sizes, in elements.
    pub shape: Vec<u64>,
    /// Its first byte, relative to `data_start`.
    pub begin: u64,
    /// The byte after its last, relative to `data_start`.
    pub end: u64,
}

/// Reason for which a header was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderError {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// The broken rule.
    pub reason: String,
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (at byte {})", self.reason, self.offset)
    }
}

impl std::error::Error for HeaderError {}

fn refuse<T>(offset: u64, reason: impl Into<String>) -> Result<T, HeaderError> {
    Err(HeaderError { offset, reason: reason.into() })
}

/// Defines the dtypes by their names in headers, and the bits of an element.
macro_rules! header_dtypes {
    ($($name:ident: $bits:literal),* $(,)?) => {
        /// A dtype, as headers name it.
        #[allow(non_camel_case_types, missing_docs)] // the names of the format
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
        pub enum HeaderDtype { $($name),* }

        impl HeaderDtype {
            /// Returns the header's spelling of the dtype.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name)),* }
            }

            /// Returns the number of bits of an element.
            #[must_use]
            pub const fn bits(self) -> u64 {
                match self { $(Self::$name => $bits),* }
            }
        }
    };
}

header_dtypes! {
    BOOL: 8, U8: 8, I8: 8, I16: 16, U16: 16, I32: 32, U32: 32, I64: 64, U64: 64,
    F16: 16, BF16: 16, F32: 32, F64: 64, C64: 64, F4: 4, F6_E2M3: 6, F6_E3M2: 6,
    F8_E5M2: 8, F8_E4M3: 8, F8_E8M0: 8, F8_E4M3FNUZ: 8, F8_E5M2FNUZ: 8,
}

impl HeaderDtype {
    /// Returns torch's dtype, and the sizes in its elements; `None` if torch has no such type.
    ///
    /// `F4` counts single values and torch counts pairs, so the last size is halved.
    #[must_use]
    pub fn to_torch(self, shape: &[u64]) -> Option<(Dtype, Vec<u64>)> {
        let mut shape = shape.to_vec();
        if self == Self::F4 {
            let last = shape.last_mut()?;
            if *last % 2 != 0 {
                return None;
            }
            *last /= 2;
            return Some((Dtype::from_name("float4_e2m1fn_x2")?, shape));
        }
        Some((Dtype::from_header_name(self.name())?, shape))
    }
}

/// Returns the length of the JSON, from the first eight bytes of a file of `file_size` bytes.
pub fn header_len(prefix: [u8; 8], file_size: u64) -> Result<u64, HeaderError> {
    let len = u64::from_le_bytes(prefix);
    if len > MAX_HEADER_LEN {
        return refuse(0, format!("header of {len} bytes, more than {MAX_HEADER_LEN}"));
    }
    if len + PREFIX_LEN > file_size {
        return refuse(0, format!("header of {len} bytes in a file of {file_size} bytes"));
    }
    Ok(len)
}

/// Parses and checks the header of a file of `file_size` bytes. `bytes` is the start of the file,
/// with at least the whole header.
pub fn parse(bytes: &[u8], file_size: u64) -> Result<Header, HeaderError> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<8>() else {
        return refuse(0, format!("{} bytes, too few for a header", bytes.len()));
    };
    let len = header_len(*prefix, file_size)?;
    let Some(json) = usize::try_from(len).ok().and_then(|len| rest.get(..len)) else {
        return refuse(0, format!("header of {len} bytes, of which {} are there", rest.len()));
    };
    let json = match std::str::from_utf8(json) {
        Ok(json) => json,
        Err(e) => return refuse(PREFIX_LEN + e.valid_up_to() as u64, "header is not UTF-8"),
    };
    let raw: RawHeader = match serde_json::from_str(json) {
        Ok(raw) => raw,
        Err(e) => return refuse(PREFIX_LEN + place(json, &e), format!("header: {e}")),
    };
    let mut tensors = raw.tensors;
    tensors.sort_by_key(|tensor| (tensor.begin, tensor.end));
    let end = check_cover(&tensors)?;
    let data_start = PREFIX_LEN + len;
    if data_start.checked_add(end) != Some(file_size) {
        return refuse(
            data_start,
            format!("tensors take {end} bytes, and {} follow the header", file_size - data_start),
        );
    }
    Ok(Header { data_start, tensors, metadata: raw.metadata.unwrap_or_default() })
}

/// Checks that the tensors follow each other without a gap and have the length that their shape
/// needs. Returns their end.
fn check_cover(tensors: &[HeaderTensor]) -> Result<u64, HeaderError> {
    let mut at = 0;
    for tensor in tensors {
        let HeaderTensor { name, begin, end, .. } = tensor;
        if *begin != at || end < begin {
            return refuse(
                PREFIX_LEN,
                format!(
                    "tensor {name:?} has bytes {begin}..{end}, where {at} ends the one before it"
                ),
            );
        }
        let bits = tensor
            .shape
            .iter()
            .try_fold(1_u64, |count, size| count.checked_mul(*size))
            .and_then(|count| count.checked_mul(tensor.dtype.bits()));
        match bits {
            Some(bits) if bits % 8 == 0 && bits / 8 == end - begin => at = *end,
            _ => {
                return refuse(
                    PREFIX_LEN,
                    format!(
                        "tensor {name:?} has {} bytes, which is not its shape {:?} of {}",
                        end - begin,
                        tensor.shape,
                        tensor.dtype.name()
                    ),
                );
            }
        }
    }
    Ok(at)
}

/// Returns the byte offset of a JSON error, which serde reports as line and column.
fn place(json: &str, error: &serde_json::Error) -> u64 {
    let before: usize =
        json.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
    (before + error.column().saturating_sub(1)).min(json.len()) as u64
}

struct RawHeader {
    tensors: Vec<HeaderTensor>,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(rename = "TensorInfo")]
struct RawTensor {
    dtype: HeaderDtype,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(de::Error::custom(format!("the name {name:?} is there twice")));
            }
            if name == "__metadata__" {
                metadata = map.next_value::<Option<Texts>>()?.map(|texts| texts.0);
                continue;
            }
            let raw: RawTensor = map.next_value()?;
            tensors.push(HeaderTensor {
                name,
                dtype: raw.dtype,
                shape: raw.shape,
                begin: raw.data_offsets.0,
                end: raw.data_offsets.1,
            });
        }
        Ok(RawHeader { tensors, metadata })
    }
}

/// A map of texts that refuses duplicate keys.
struct Texts(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(TextsVisitor)
    }
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Texts;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
        let mut texts = BTreeMap::new();
        while let Some((key, text)) = map.next_entry::<String, String>()? {
            if texts.contains_key(&key) {
                return Err(de::Error::custom(format!("the name {key:?} is there twice")));
            }
            texts.insert(key, text);
        }
        Ok(Texts(texts))
    }
}

#[cfg(test)]
pub(crate) mod tests;
