//! The dtypes of section 6 of `docs/format.md`.

/// A dtype, as its code in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dtype(u8);

struct Row {
    code: u8,
    name: &'static str,
    size: u8,
    header: &'static str,
}

const fn row(code: u8, name: &'static str, size: u8, header: &'static str) -> Row {
    Row { code, name, size, header }
}

const TABLE: [Row; 23] = [
    row(1, "bool", 1, "BOOL"),
    row(2, "uint8", 1, "U8"),
    row(3, "int8", 1, "I8"),
    row(4, "int16", 2, "I16"),
    row(5, "int32", 4, "I32"),
    row(6, "int64", 8, "I64"),
    row(7, "uint16", 2, "U16"),
    row(8, "uint32", 4, "U32"),
    row(9, "uint64", 8, "U64"),
    row(11, "float16", 2, "F16"),
    row(12, "float32", 4, "F32"),
    row(13, "float64", 8, "F64"),
    row(14, "bfloat16", 2, "BF16"),
    row(15, "complex64", 8, "C64"),
    row(16, "complex128", 16, "U8"),
    row(17, "complex32", 4, "U8"),
    row(18, "bcomplex32", 4, "U8"),
    row(19, "float8_e4m3fn", 1, "F8_E4M3"),
    row(20, "float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    row(21, "float8_e5m2", 1, "F8_E5M2"),
    row(22, "float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    row(23, "float8_e8m0fnu", 1, "U8"),
    row(24, "float4_e2m1fn_x2", 1, "U8"),
];

impl Dtype {
    /// `uint8`, which also stands for raw bytes in data files.
    pub const UINT8: Self = Self(2);

    fn row(self) -> &'static Row {
        TABLE
            .iter()
            .find(|row| row.code == self.0)
            .expect("a Dtype is only made from a row of the table")
    }

    /// Returns the dtype with this code.
    pub fn from_code(code: u8) -> Option<Self> {
        TABLE.iter().any(|row| row.code == code).then_some(Self(code))
    }

    /// Returns the dtype with this name in torch, such as `bfloat16`.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.name == name).map(|row| Self(row.code))
    }

    /// Returns the dtype with this name in a safetensors header, such as `BF16`.
    pub fn from_header_name(header: &str) -> Option<Self> {
        match header {
            // This crate never writes it, but other programs do.
            "F8_E8M0" => Self::from_name("float8_e8m0fnu"),
            _ => TABLE.iter().find(|row| row.header == header).map(|row| Self(row.code)),
        }
    }

    /// Returns its code in the index.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Returns its name in torch.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns whether torch considers it a real floating-point type.
    pub fn is_floating_point(self) -> bool {
        let name = self.name();
        name.starts_with("float") || name == "bfloat16"
    }

    /// Returns whether its elements have an imaginary part.
    pub fn is_complex(self) -> bool {
        self.name().starts_with("complex")
    }

    /// Returns the size of an element in bytes.
    pub fn size(self) -> u64 {
        u64::from(self.row().size)
    }

    /// Returns its name in a data file's header: `U8` for types that safetensors or torch's reader
    /// cannot name.
    pub fn header_name(self) -> &'static str {
        self.row().header
    }

    /// Returns whether a data file's header can name the type itself.
    pub fn is_native_to_safetensors(self) -> bool {
        self == Self::UINT8 || self.header_name() != "U8"
    }

    /// Iterates over all dtypes, in the order of their codes.
    #[cfg(test)]
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| Self(row.code))
    }
}
