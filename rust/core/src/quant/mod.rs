//! Quantized weights: the stored tensors that make up a logical one, and the numbers that they
//! stand for. No I/O.
//!
//! A checkpoint has codes of 4 or 8 bits, and a scale for each block of codes. `detect` finds these
//! parts by the configuration and by their names, and describes each weight as a [`Coded`] tensor.
//! The read engine reads the parts of a window and [decodes](Coded::decode) it.

mod config;
mod detect;
mod kernel;
#[cfg(test)]
mod kernel_tests;
mod known;

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use self::kernel::{Code, Groups, Row, Table};
use crate::copy::Stores;
use crate::format::Index;
use crate::geometry::{Dims, Region};
use crate::{Dtype, Error, Result};

pub use config::Config;
pub use detect::{About, Found, codes_beside_scales, detect, small_parts};

/// The dtype of decoded weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// `bfloat16`
    BFloat16,
    /// `float16`
    Float16,
    /// `float32`
    Float32,
}

impl Target {
    /// Returns the target with this name in torch.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "bfloat16" => Some(Self::BFloat16),
            "float16" => Some(Self::Float16),
            "float32" => Some(Self::Float32),
            _ => None,
        }
    }

    /// Returns the target as a dtype.
    ///
    /// # Panics
    /// Never: the table of dtypes has all three.
    #[must_use]
    pub fn dtype(self) -> Dtype {
        let name = match self {
            Self::BFloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Float32 => "float32",
        };
        Dtype::from_name(name).expect("it is in the table")
    }

    /// Returns the size of an element in bytes.
    const fn size(self) -> usize {
        match self {
            Self::BFloat16 | Self::Float16 => 2,
            Self::Float32 => 4,
        }
    }
}

/// Formats of the codes of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A `float8_e4m3fn` for each number.
    Fp8,
    /// Two numbers in a byte, in groups of 32. Scales are exponents. The 16 bytes of a group may be
    /// a dimension of their own.
    Mxfp4,
    /// Eight integers of 4 bits in an `int32`.
    Int4,
    /// Two numbers in a byte. Scales are `float8_e4m3fn`, and have a scale themselves.
    Nvfp4,
}

impl Format {
    /// Returns its name in messages and listings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Mxfp4 => "mxfp4",
            Self::Int4 => "int4",
            Self::Nvfp4 => "nvfp4",
        }
    }

    const fn code(self) -> Code {
        match self {
            Self::Fp8 => Code::E4m3,
            Self::Mxfp4 | Self::Nvfp4 => Code::E2m1,
            Self::Int4 => Code::Int4,
        }
    }
}

/// Order of the codes and the scales of a weight in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Scales are in rows. The low half of a byte is the first code.
    Rows,
    /// Scales are in tiles of 128 x 4, as cuBLAS takes them. The high half of a byte is the first
    /// code.
    Tiles,
}

/// Rows and columns of a tile of scales. Tiles are in rows, and the last ones are filled up. The
/// scale of row `r` and column `c` of a tile is at `r % 32 * 16 + r / 32 * 4 + c`.
const TILE: [u64; 2] = [128, 4];

/// A logical tensor of at least two dimensions, described by its stored tensors.
pub struct Coded {
    /// The index that has the stored tensors.
    pub index: Arc<Index>,
    /// Sizes of the logical tensor.
    pub shape: Dims,
    /// Dtype of its elements.
    pub target: Target,
    /// Format of its codes.
    pub format: Format,
    /// Order of its codes and scales. Those in tiles belong to matrices.
    pub order: Order,
    /// Rows and columns that share a scale. The last blocks may have fewer.
    pub block: [u64; 2],
    /// The codes.
    pub codes: u32,
    /// A scale for each block, or one for the whole tensor.
    pub scale: u32,
    /// Zero points, packed like the codes but along the rows.
    pub zeros: Option<u32>,
    /// Global scale. The scales are multiplied by it, or divided if the flag is true.
    pub global: Option<(u32, bool)>,
}

impl fmt::Debug for Coded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} {:?}", self.format, self.shape, self.index.name(self.codes))
    }
}

/// A region of a stored tensor.
pub struct StoredRegion {
    /// The tensor.
    pub tensor: u32,
    /// Region of it.
    pub region: Region,
    /// Size of an element in bytes.
    pub itemsize: u64,
}

impl StoredRegion {
    /// Returns the bytes of all elements.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.region.sizes.iter().product::<u64>() * self.itemsize
    }
}

/// Returns the steps of length `step` that contain `begin..begin + count`: the first, and their
/// number.
fn steps(begin: u64, count: u64, step: u64) -> (u64, u64) {
    let first = begin / step;
    (first, (begin + count).div_ceil(step) - first)
}

impl Coded {
    /// Returns whether the bytes of a group are a dimension of their own.
    fn has_groups(&self) -> bool {
        self.format == Format::Mxfp4 && self.index.tensor(self.codes).shape.len() > self.shape.len()
    }

    /// Returns the columns and the bytes of an indivisible unit.
    fn unit(&self) -> (u64, u64) {
        match self.format {
            Format::Fp8 => (1, 1),
            Format::Mxfp4 if self.has_groups() => (32, 16),
            Format::Mxfp4 | Format::Nvfp4 => (2, 1),
            Format::Int4 => (8, 4),
        }
    }

    /// Returns the stored parts of a rectangle: codes, scales and, if there are any, zero points
    /// and the global scale.
    #[must_use]
    pub fn parts(&self, offsets: &[u64], sizes: &[u64]) -> SmallVec<[StoredRegion; 4]> {
        let lead = self.shape.len() - 2;
        let rectangle = |rows: u64, columns: u64| {
            let mut region = Region::new(&offsets[..lead], &sizes[..lead]);
            for (dim, step) in [(lead, rows), (lead + 1, columns)] {
                let (first, count) = steps(offsets[dim], sizes[dim], step);
                region.offsets.push(first);
                region.sizes.push(count);
            }
            region
        };
        let part = |tensor: u32, region: Region| {
            let view = self.index.tensor(tensor);
            let is_one = view.shape.iter().all(|&size| size == 1);
            let region = if is_one {
                Region::new(&Dims::from_elem(0, view.shape.len()), &view.shape)
            } else if view.shape.len() == region.sizes.len() + 2 {
                spread(&region)
            } else {
                // A scale for each row may have no dimension for columns.
                let ndim = region.sizes.len().min(view.shape.len());
                Region::new(&region.offsets[..ndim], &region.sizes[..ndim])
            };
            let itemsize = view.dtype.map_or(1, Dtype::size);
            StoredRegion { tensor, region, itemsize }
        };
        let mut codes = rectangle(1, self.unit().0);
        if self.has_groups() {
            codes.offsets.push(0);
            codes.sizes.push(16);
        }
        let mut parts = smallvec![
            part(self.codes, codes),
            part(self.scale, self.scales_in(rectangle(self.block[0], self.block[1]))),
        ];
        parts.extend(self.zeros.map(|zeros| part(zeros, rectangle(8, self.block[1]))));
        parts.extend(self.global.map(|(global, _)| part(global, Region::new(&[], &[]))));
        parts
    }

    /// Returns the region of the stored scales that contains a region of scales.
    fn scales_in(&self, mut region: Region) -> Region {
        if self.order == Order::Tiles {
            let (first, count) = steps(region.offsets[0], region.sizes[0], TILE[0]);
            region.offsets = smallvec![first * TILE[0], 0];
            region.sizes = smallvec![count * TILE[0], self.index.tensor(self.scale).shape[1]];
        }
        region
    }

    /// Returns the codes and the scales of a rectangle in the order of rows.
    fn in_rows<'a>(
        &self,
        offsets: &[u64],
        sizes: &[u64],
        stored: &[&'a [u8]],
    ) -> [Cow<'a, [u8]>; 2] {
        let [codes, scales] = [stored[0], stored[1]];
        if self.order == Order::Rows {
            return [codes.into(), scales.into()];
        }
        let codes = match self.format.code().per_byte() {
            1 => codes.into(),
            _ => codes.iter().map(|byte| byte.rotate_left(4)).collect(),
        };
        let [tall, wide] = TILE.map(usize_of);
        let columns = usize_of(self.index.tensor(self.scale).shape[1]);
        let (first, count) = steps(offsets[1], sizes[1], self.block[1]);
        let (first, row) = (usize_of(first), usize_of(offsets[0]) % tall);
        let scales = (row..row + usize_of(sizes[0])).flat_map(|row| {
            let row_of_tiles = &scales[row / tall * tall * columns..][..tall * columns];
            let at = row % 32 * 16 + row % tall / 32 * 4;
            (first..first + usize_of(count))
                .map(move |column| row_of_tiles[column / wide * tall * wide + at + column % wide])
        });
        [codes, scales.collect()]
    }

    /// Decodes a rectangle into its rows, in row-major order. `stored` has the bytes of its
    /// [parts](Self::parts), in the same order. Call [`fence`](crate::copy::fence) after streaming
    /// stores.
    ///
    /// # Errors
    /// [`Error::Internal`] for a part with a dtype that [`detect`] does not accept.
    ///
    /// # Panics
    /// If `stored` or `rows` do not have the lengths of the rectangle.
    pub fn decode<'o>(
        &self,
        offsets: &[u64],
        sizes: &[u64],
        stored: &[&[u8]],
        rows: impl Iterator<Item = &'o mut [u8]>,
        stores: Stores,
    ) -> Result<()> {
        if sizes.contains(&0) {
            return Ok(());
        }
        let [codes, scales] = self.in_rows(offsets, sizes, stored);
        let mut in_rows: SmallVec<[&[u8]; 4]> = SmallVec::from_slice(stored);
        (in_rows[0], in_rows[1]) = (&codes, &scales);
        let stored = &in_rows[..];
        let lead = self.shape.len() - 2;
        let (first_row, first_column) = (offsets[lead], offsets[lead + 1]);
        let of = Rectangle {
            rows: usize_of(sizes[lead]),
            first_row,
            tall: self.block[0],
            bands: usize_of(steps(first_row, sizes[lead], self.block[0]).1),
            in_row: usize_of(steps(first_column, sizes[lead + 1], self.block[1]).1),
            groups: Groups {
                columns: usize_of(self.block[1]),
                before: usize_of(first_column % self.block[1]),
            },
        };
        let (unit, unit_bytes) = self.unit();
        let bytes = usize_of(steps(first_column, sizes[lead + 1], unit).1 * unit_bytes);
        let skip = usize_of(first_column % unit);
        let rows = stored[0].chunks_exact(bytes).zip(rows).enumerate();
        let mut scales = self.scales(stored)?;
        // Scales of one byte: there are few different ones, and they recur.
        let names = (scales.len() > 1 && scales.len() == stored[1].len()).then_some(stored[1]);
        if let [one] = scales[..] {
            // A single scale may be that of all matrices.
            let outer = usize_of(sizes[..lead].iter().product());
            scales.resize(outer * of.bands * of.in_row, one);
        }
        let tables = names.map_or(scales.len(), |names| names.len().min(256));
        let elements = stored[0].len() * self.format.code().per_byte();
        let is_worthwhile = |codes: usize| {
            self.target.size() == 2 && skip == 0 && elements >= OFTEN * codes * tables
        };
        match self.format {
            Format::Fp8 if is_worthwhile(256) => {
                self.look_up::<256>(&of, &scales, names, rows, stores);
            }
            Format::Mxfp4 | Format::Nvfp4 if is_worthwhile(16) => {
                self.look_up::<16>(&of, &scales, names, rows, stores);
            }
            _ => {
                let zeros = self.zeros.map(|_| stored[2]);
                self.compute(&of, skip, &scales, zeros, rows, stores);
            }
        }
        Ok(())
    }

    /// Decodes rows by arithmetic.
    fn compute<'c, 'o>(
        &self,
        of: &Rectangle,
        skip: usize,
        scales: &[f32],
        zeros: Option<&[u8]>,
        rows: impl Iterator<Item = (usize, (&'c [u8], &'o mut [u8]))>,
        stores: Stores,
    ) {
        let zero_rows = usize_of(steps(of.first_row, of.rows as u64, 8).1);
        let mut row_zeros = vec![0.0; if zeros.is_some() { of.in_row } else { 0 }];
        for (i, (bytes, out)) in rows {
            if let Some(zeros) = zeros {
                let (outer, row) = (i / of.rows, of.first_row + (i % of.rows) as u64);
                let at = (outer * zero_rows + usize_of(row / 8 - of.first_row / 8)) * of.in_row;
                for (group, zero) in row_zeros.iter_mut().enumerate() {
                    let byte = zeros[4 * (at + group) + usize_of(row % 8 / 2)];
                    *zero = f32::from(if row % 2 == 0 { byte & 15 } else { byte >> 4 }) - 8.0;
                }
            }
            let row = Row {
                code: self.format.code(),
                bytes,
                skip,
                scales: &scales[of.scales_of(i)],
                zeros: &row_zeros,
                groups: of.groups,
            };
            kernel::decode(row, self.target, out, stores);
        }
    }

    /// Decodes rows with tables.
    fn look_up<'c, 'o, const CODES: usize>(
        &self,
        of: &Rectangle,
        scales: &[f32],
        names: Option<&[u8]>,
        rows: impl Iterator<Item = (usize, (&'c [u8], &'o mut [u8]))>,
        stores: Stores,
    ) {
        let table = |scale: f32| kernel::table::<CODES>(self.format.code(), scale, self.target);
        let mut tables: Vec<Table<CODES>> = Vec::new();
        if let Some(names) = names {
            let mut places = [None; 256];
            for (name, scale) in names.iter().zip(scales) {
                places[usize::from(*name)].get_or_insert_with(|| {
                    tables.push(table(*scale));
                    tables.len() - 1
                });
            }
            let places = places.map(Option::unwrap_or_default);
            for (i, (codes, out)) in rows {
                let names = &names[of.scales_of(i)];
                let table = |group: usize| &tables[places[usize::from(names[group])]];
                kernel::look_up(codes, of.groups, table, out, stores);
            }
            return;
        }
        let mut known = 0..0;
        for (i, (codes, out)) in rows {
            let wanted = of.scales_of(i);
            if wanted != known {
                tables.clear();
                tables.extend(scales[wanted.clone()].iter().copied().map(table));
                known = wanted;
            }
            kernel::look_up(codes, of.groups, |group| &tables[group], out, stores);
        }
    }

    /// Returns the scales of a rectangle, multiplied by the global one.
    fn scales(&self, stored: &[&[u8]]) -> Result<Vec<f32>> {
        let mut scales = self.numbers(self.scale, stored[1])?;
        if let (Some((global, divides)), Some(bytes)) = (self.global, stored.last()) {
            let global = self.numbers(global, bytes)?[0];
            for scale in &mut scales {
                *scale = if divides { *scale / global } else { *scale * global };
            }
        }
        Ok(scales)
    }

    /// Returns the elements of a stored tensor of scales.
    fn numbers(&self, tensor: u32, bytes: &[u8]) -> Result<Vec<f32>> {
        let words = || bytes.chunks_exact(2).map(|word| u16::from_le_bytes([word[0], word[1]]));
        let name = self.index.tensor(tensor).dtype.map_or("bytes", Dtype::name);
        Ok(match name {
            "float32" => (bytes.chunks_exact(4))
                .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect(),
            "bfloat16" => words().map(kernel::from_bf16).collect(),
            "float16" => words().map(kernel::from_f16).collect(),
            "float8_e8m0fnu" | "uint8" => bytes.iter().map(|&byte| kernel::e8m0(byte)).collect(),
            "float8_e4m3fn" => bytes.iter().map(|&byte| kernel::e4m3(byte)).collect(),
            other => return Err(Error::Internal(format!("scales of dtype {other}"))),
        })
    }
}

/// Returns a region of the rows and columns of blocks with a dimension of 1 after each.
fn spread(region: &Region) -> Region {
    let lead = region.sizes.len() - 2;
    let of = |sizes: &[u64], one: u64| {
        let mut dims = Dims::from_slice(&sizes[..lead]);
        dims.extend([sizes[lead], one, sizes[lead + 1], one]);
        dims
    };
    Region { offsets: of(&region.offsets, 0), sizes: of(&region.sizes, 1) }
}

/// A rectangle, and the scales of its rows.
struct Rectangle {
    /// Rows of a matrix.
    rows: usize,
    first_row: u64,
    /// Rows that share scales.
    tall: u64,
    /// Rows of scales of a matrix.
    bands: usize,
    /// Scales of a row.
    in_row: usize,
    groups: Groups,
}

impl Rectangle {
    /// Returns the range of the scales of row `i`, counted through all matrices.
    fn scales_of(&self, i: usize) -> Range<usize> {
        let row = self.first_row + (i % self.rows) as u64;
        let band = usize_of(row / self.tall - self.first_row / self.tall);
        let first = (i / self.rows * self.bands + band) * self.in_row;
        first..first + self.in_row
    }
}

/// Uses of each element of a table that make tables worthwhile.
const OFTEN: usize = 4;

/// Converts the size of something in memory.
fn usize_of(value: u64) -> usize {
    usize::try_from(value).expect("it is in memory")
}
