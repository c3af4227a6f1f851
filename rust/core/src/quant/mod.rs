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
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use self::kernel::{Code, Row, Table};
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

    /// Decodes a rectangle into `out`, in row-major order. `stored` has the bytes of its
    /// [parts](Self::parts), in the same order.
    ///
    /// # Errors
    /// [`Error::Internal`] for a part with a dtype that [`detect`] does not accept.
    ///
    /// # Panics
    /// If `stored` or `out` do not have the lengths of the rectangle.
    pub fn decode(
        &self,
        offsets: &[u64],
        sizes: &[u64],
        stored: &[&[u8]],
        out: &mut [u8],
    ) -> Result<()> {
        let lead = self.shape.len() - 2;
        let [rows, columns] = [usize_of(sizes[lead]), usize_of(sizes[lead + 1])];
        if sizes.contains(&0) {
            return Ok(());
        }
        let [codes, scales] = self.in_rows(offsets, sizes, stored);
        let mut in_rows: SmallVec<[&[u8]; 4]> = SmallVec::from_slice(stored);
        (in_rows[0], in_rows[1]) = (&codes, &scales);
        let stored = &in_rows[..];
        let of_column = |step: u64| usize_of(offsets[lead + 1] % step);
        let (unit, unit_bytes) = self.unit();
        let bytes = usize_of(steps(offsets[lead + 1], sizes[lead + 1], unit).1 * unit_bytes);
        let groups = usize_of(steps(offsets[lead + 1], sizes[lead + 1], self.block[1]).1);
        let (first_scale, scale_rows) = steps(offsets[lead], sizes[lead], self.block[0]);
        let mut scales = self.scales(stored)?;
        if let [one] = scales[..] {
            // A single scale may be that of all matrices.
            let outer = usize_of(sizes[..lead].iter().product());
            scales.resize(outer * usize_of(scale_rows) * groups, one);
        }
        let rectangle = Rectangle { rows, columns, bytes, groups };
        if self.target.size() == 2 && self.look_up(offsets, &rectangle, &scales, stored, out) {
            return Ok(());
        }
        let zeros = self.zeros.map(|_| stored[2]);
        let zero_rows = usize_of(steps(offsets[lead], sizes[lead], 8).1);
        let mut row_zeros = vec![0.0; if zeros.is_some() { groups } else { 0 }];
        let out_bytes = columns * self.target.size();
        for (i, out) in out.chunks_exact_mut(out_bytes).enumerate() {
            let (outer, row) = (i / rows, offsets[lead] + (i % rows) as u64);
            let scale_row =
                outer * usize_of(scale_rows) + usize_of(row / self.block[0] - first_scale);
            if let Some(zeros) = zeros {
                let at = (outer * zero_rows + usize_of(row / 8 - offsets[lead] / 8)) * groups;
                for (group, zero) in row_zeros.iter_mut().enumerate() {
                    let byte = zeros[4 * (at + group) + usize_of(row % 8 / 2)];
                    *zero = f32::from(if row % 2 == 0 { byte & 15 } else { byte >> 4 }) - 8.0;
                }
            }
            let row = Row {
                code: self.format.code(),
                bytes: &stored[0][i * bytes..(i + 1) * bytes],
                skip: of_column(unit),
                scales: &scales[scale_row * groups..(scale_row + 1) * groups],
                zeros: &row_zeros,
                group: usize_of(self.block[1]),
                before: of_column(self.block[1]),
            };
            kernel::decode(row, self.target, out);
        }
        Ok(())
    }

    /// Decodes with tables if each is used often enough. Otherwise returns false and does nothing.
    fn look_up(
        &self,
        offsets: &[u64],
        of: &Rectangle,
        scales: &[f32],
        stored: &[&[u8]],
        out: &mut [u8],
    ) -> bool {
        let lead = self.shape.len() - 2;
        let [tall, wide] = self.block.map(usize_of);
        let [row, column] = [usize_of(offsets[lead]), usize_of(offsets[lead + 1])];
        let code = self.format.code();
        let codes = stored[0];
        match self.format {
            Format::Fp8 if of.rows.min(tall) * of.columns.min(wide) >= OFTEN => {
                let scale_rows = (row + of.rows).div_ceil(tall) - row / tall;
                for (number, scale) in scales.iter().enumerate() {
                    let (outer, inner) =
                        (number / (scale_rows * of.groups), number % (scale_rows * of.groups));
                    let of_block = |at: usize, size: usize, first: usize, count: usize| {
                        let begin = ((first / size + at) * size).max(first) - first;
                        begin..((first / size + at + 1) * size - first).min(count)
                    };
                    let rows = of_block(inner / of.groups, tall, row, of.rows);
                    let columns = of_block(inner % of.groups, wide, column, of.columns);
                    let table: Table<2> = kernel::table(code, *scale, self.target);
                    for row in rows {
                        let at = (outer * of.rows + row) * of.columns;
                        let (begin, end) = (at + columns.start, at + columns.end);
                        kernel::look_up(&table, &codes[begin..end], &mut out[2 * begin..2 * end]);
                    }
                }
                true
            }
            // Scales of one byte: there are few different ones, and they recur.
            Format::Mxfp4 | Format::Nvfp4
                if column % wide == 0 && of.columns.is_multiple_of(2) && scales.len() >= OFTEN =>
            {
                let mut tables: Vec<Option<Box<Table<4>>>> = vec![None; 256];
                let rows = codes.chunks_exact(of.bytes).zip(out.chunks_exact_mut(2 * of.columns));
                let of_rows = scales.chunks_exact(of.groups).zip(stored[1].chunks_exact(of.groups));
                for ((codes, out), (scales, names)) in rows.zip(of_rows) {
                    let groups = codes.chunks(wide / 2).zip(out.chunks_mut(2 * wide));
                    for ((codes, out), (scale, name)) in groups.zip(scales.iter().zip(names)) {
                        let table = tables[usize::from(*name)].get_or_insert_with(|| {
                            Box::new(kernel::table(code, *scale, self.target))
                        });
                        kernel::look_up(table, codes, out);
                    }
                }
                true
            }
            _ => false,
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

/// A rectangle with its parts in memory: its rows and columns, the bytes of a row of codes, and its
/// groups of columns.
struct Rectangle {
    rows: usize,
    columns: usize,
    bytes: usize,
    groups: usize,
}

/// Number of elements, or of scales, that makes tables worthwhile.
const OFTEN: usize = 2048;

/// Converts the size of something in memory.
fn usize_of(value: u64) -> usize {
    usize::try_from(value).expect("it is in memory")
}
