//! Detection of quantized weights by the names of their stored parts. Dtypes and shapes are
//! checked.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Coded, Config, Format, Target};
use crate::format::{Index, Kind};
use crate::geometry::Dims;
use crate::{Dtype, Error, Result};

/// The quantized weights of an index.
#[derive(Debug, Default)]
pub struct Found {
    /// The logical tensors, by name.
    pub coded: Vec<(String, Arc<Coded>)>,
    /// Stored tensors that are no longer entries of the checkpoint.
    pub hidden: Vec<u32>,
    /// Additional names of logical tensors, for look-ups.
    pub aliases: Vec<(String, String)>,
}

/// Suffixes of the tensors that are stored with the codes of a weight.
const BESIDE: [&str; 8] = [
    "_scale_inv",
    "_scale",
    "_scale_2",
    "_global_scale",
    "_zero_point",
    "_shape",
    "_g_idx",
    "_packed",
];
/// Names of tensors for the activations of a module, which weights do not need.
const ACTIVATIONS: [&str; 9] = [
    "input_scale",
    "output_scale",
    "activation_scale",
    "input_global_scale",
    "input_zero_point",
    "output_zero_point",
    "q_scale",
    "k_scale",
    "v_scale",
];

/// Finds the quantized weights of an index. `config` is the parsed configuration, if there is one.
/// `read_shape` reads a stored tensor of integers, if the shape of a weight is unknown without it.
///
/// # Errors
/// [`Error::Quantization`] for a part that is missing, or that has another dtype or shape than its
/// format requires.
pub fn detect(
    index: &Arc<Index>,
    config: Option<Config>,
    target: Target,
    read_shape: &mut dyn FnMut(u32) -> Result<Vec<i64>>,
) -> Result<Found> {
    let is_configured = config.is_some();
    let mut detector = Detector {
        index,
        config: config.unwrap_or_default(),
        target,
        read_shape,
        whole: HashSet::new(),
        found: Found::default(),
        is_part: vec![false; index.tensor_count() as usize],
    };
    for tensor in 0..index.tensor_count() {
        let name = index.name(tensor);
        if index.tensor(tensor).kind != Kind::Tensor {
            continue;
        }
        if let Some(weight) = name.strip_suffix("_packed").filter(|stem| stem.ends_with("weight")) {
            detector.packed(tensor, weight)?;
        } else if let Some(weight) = name.strip_suffix("_blocks") {
            detector.mxfp4(tensor, weight)?;
        } else {
            detector.weight(tensor, name)?;
        }
    }
    detector.check_rest(is_configured)?;
    let Detector { mut found, is_part, .. } = detector;
    if !found.coded.is_empty() {
        let coded: HashSet<&str> = found.coded.iter().map(|(name, _)| name.as_str()).collect();
        // A parameter may have such a suffix: Gemma 3n has a `correct_output_scale`.
        let is_of_activations = |tensor: &u32| {
            let name = index.name(*tensor);
            ACTIVATIONS.iter().filter_map(|end| name.strip_suffix(end)).any(|module| {
                module.is_empty()
                    || module.ends_with('.')
                    || module.strip_suffix('_').is_some_and(|weight| {
                        coded.contains(weight) || coded.contains(&*format!("{weight}_weight"))
                    })
            })
        };
        found.hidden = (0..index.tensor_count())
            .filter(|tensor| is_part[*tensor as usize] || is_of_activations(tensor))
            .collect();
    }
    Ok(found)
}

struct Detector<'a> {
    index: &'a Arc<Index>,
    config: Config,
    target: Target,
    read_shape: &'a mut dyn FnMut(u32) -> Result<Vec<i64>>,
    /// Rows, and words of a row, of INT4 weights whose stored shape shows that all words are full.
    whole: HashSet<[u64; 2]>,
    found: Found,
    is_part: Vec<bool>,
}

impl Detector<'_> {
    fn bad<T>(&self, name: &str, reason: impl Into<String>) -> Result<T> {
        Err(Error::Quantization {
            path: self.index.path().to_owned(),
            tensor: name.to_owned(),
            reason: reason.into(),
        })
    }

    fn beside(&self, weight: &str, end: &str) -> Option<u32> {
        self.index.find(&format!("{weight}{end}"))
    }

    fn dtype(&self, tensor: u32) -> &'static str {
        self.index.tensor(tensor).dtype.map_or("no tensor", Dtype::name)
    }

    /// Describes a tensor for messages.
    fn describe(&self, tensor: u32) -> String {
        let shape = self.index.tensor(tensor).shape;
        let name = self.index.name(tensor);
        format!("{name:?} is {} {:?}", self.dtype(tensor), shape.as_slice())
    }

    /// Returns the leading sizes, and the sizes of the last two dimensions.
    fn matrix<'s>(&self, name: &str, shape: &'s [u64]) -> Result<(&'s [u64], u64, u64)> {
        match shape {
            [lead @ .., rows, columns] => Ok((lead, *rows, *columns)),
            _ => self.bad(name, format!("a quantized weight of shape {shape:?} is no matrix")),
        }
    }

    fn add(&mut self, name: &str, coded: Coded) {
        let parts = [
            Some(coded.codes),
            Some(coded.scale),
            coded.zeros,
            coded.global.map(|(tensor, _)| tensor),
        ];
        for part in parts.into_iter().flatten() {
            self.is_part[part as usize] = true;
        }
        self.found.coded.push((name.to_owned(), Arc::new(coded)));
    }

    fn coded(
        &self,
        shape: Dims,
        format: Format,
        block: [u64; 2],
        [codes, scale]: [u32; 2],
    ) -> Coded {
        Coded {
            index: Arc::clone(self.index),
            shape,
            target: self.target,
            format,
            block: block.map(|size| size.max(1)),
            codes,
            scale,
            zeros: None,
            global: None,
        }
    }

    /// Returns an error unless a scale has one of the dtypes, and the sizes.
    fn check_scale(&self, name: &str, scale: u32, dtypes: &[&str], sizes: &[u64]) -> Result<()> {
        let shape = self.index.tensor(scale).shape;
        if !dtypes.contains(&self.dtype(scale)) {
            return self.bad(
                name,
                format!("{}, and its dtype is none of {}", self.describe(scale), dtypes.join(", ")),
            );
        }
        if shape.as_slice() != sizes {
            return self.bad(
                name,
                format!("{}, and should have the shape {sizes:?}", self.describe(scale)),
            );
        }
        Ok(())
    }

    /// Adds a weight if a tensor with its name contains codes.
    fn weight(&mut self, codes: u32, name: &str) -> Result<()> {
        let scale = self.beside(name, "_scale_inv").or_else(|| self.beside(name, "_scale"));
        let Some(scale) = scale else { return Ok(()) };
        match self.dtype(codes) {
            "float8_e4m3fn" => self.fp8(codes, scale, name),
            "uint8" if self.dtype(scale) == "float8_e4m3fn" => {
                let Some(global) = self.beside(name, "_scale_2") else {
                    return self.bad(name, format!("it has no {name}_scale_2"));
                };
                self.nvfp4(codes, scale, (global, false), name)
            }
            "bfloat16" | "float16" | "float32" | "float64" if !name.ends_with("weight") => Ok(()),
            _ => {
                self.bad(name, format!("{}: this is no format that is known", self.describe(codes)))
            }
        }
    }

    fn fp8(&mut self, codes: u32, scale: u32, name: &str) -> Result<()> {
        if let Some(zeros) = self.beside(name, "_zero_point") {
            return self.bad(name, format!("{}: FP8 has no zero points", self.describe(zeros)));
        }
        let shape = self.index.tensor(codes).shape;
        let (lead, rows, columns) = self.matrix(name, &shape)?;
        let scales = self.index.tensor(scale).shape;
        let is_one = scales.iter().all(|&size| size == 1) && lead.iter().all(|&size| size == 1);
        let is_inverse = self.index.name(scale).ends_with("_inv");
        let block = match (scales.strip_prefix(lead), self.config.block) {
            // The configuration has their number.
            (Some([_, _]), Some(block)) if is_inverse => block,
            _ if is_one => [rows, columns],
            (Some([1, 1]), _) => [rows, columns],
            (Some([count, 1]), _) if *count == rows && !is_inverse => [1, columns],
            (_, block) => block.unwrap_or([128, 128]),
        };
        let mut expected = Dims::from_slice(lead);
        expected.extend([rows.div_ceil(block[0].max(1)), columns.div_ceil(block[1].max(1))]);
        let expected = if is_one && block == [rows, columns] { scales } else { expected };
        let dtypes = ["float32", "bfloat16", "float16", "float8_e8m0fnu"];
        self.check_scale(name, scale, &dtypes, &expected)?;
        let coded = self.coded(shape, Format::Fp8, block, [codes, scale]);
        self.add(name, coded);
        Ok(())
    }

    fn mxfp4(&mut self, codes: u32, name: &str) -> Result<()> {
        let shape = self.index.tensor(codes).shape;
        let [outer @ .., 16] = shape.as_slice() else {
            return Ok(());
        };
        if self.dtype(codes) != "uint8" || outer.len() < 2 {
            return Ok(());
        }
        let Some(scale) = self.beside(name, "_scales") else {
            return self.bad(&format!("{name}_blocks"), format!("it has no {name}_scales"));
        };
        self.check_scale(name, scale, &["uint8", "float8_e8m0fnu"], outer)?;
        let mut logical = Dims::from_slice(outer);
        let groups = logical.pop().unwrap_or_default();
        let Some(columns) = groups.checked_mul(32) else {
            return self.bad(name, format!("{groups} groups are too many"));
        };
        logical.push(columns);
        let coded = self.coded(logical, Format::Mxfp4, [1, 32], [codes, scale]);
        self.add(name, coded);
        self.found.aliases.push((format!("{name}_blocks"), name.to_owned()));
        Ok(())
    }

    /// Adds a weight from codes of compressed-tensors, where no tensor has the weight's own name.
    fn packed(&mut self, codes: u32, name: &str) -> Result<()> {
        let Some(scale) = self.beside(name, "_scale") else {
            return self.bad(name, format!("it has no {name}_scale"));
        };
        if self.index.find(name).is_some() {
            return self.bad(
                name,
                format!("there is {name}_packed beside it: which of the two is the weight?"),
            );
        }
        if self.beside(name, "_g_idx").is_some() {
            return self
                .bad(name, format!("{name}_g_idx says that its columns are in another order"));
        }
        match self.dtype(codes) {
            "int32" => self.int4(codes, scale, name),
            "uint8" => {
                let Some(global) = self.beside(name, "_global_scale") else {
                    return self.bad(name, format!("it has no {name}_global_scale"));
                };
                self.nvfp4(codes, scale, (global, true), name)
            }
            _ => {
                self.bad(name, format!("{}: this is no format that is known", self.describe(codes)))
            }
        }
    }

    fn int4(&mut self, codes: u32, scale: u32, name: &str) -> Result<()> {
        let packed = self.index.tensor(codes).shape;
        let (lead, rows, words) = self.matrix(name, &packed)?;
        let groups = *self.index.tensor(scale).shape.last().unwrap_or(&1);
        let Some(most) = words.checked_mul(8) else {
            return self.bad(name, format!("{words} words a row are too many"));
        };
        let shape_part = self.beside(name, "_shape");
        // Rows that end inside a word can look like rows of full words with longer groups. A single
        // group may be longer than the rows.
        let fills =
            |group: &u64| Some(most) == group.checked_mul(groups) && group.is_multiple_of(8);
        let is_even = groups > 1 && self.config.groups.iter().any(fills);
        let columns = match shape_part {
            // A model can have tens of thousands of weights of a few sizes. If full words make full
            // groups, one look at each size is enough.
            Some(part) if !is_even || !self.whole.contains(&[rows, words]) => {
                self.columns(name, part, rows, words)?
            }
            _ => most,
        };
        if shape_part.is_some() && columns == most {
            self.whole.insert([rows, words]);
        }
        let group = self.group(name, scale, columns, groups)?;
        let mut shape = Dims::from_slice(lead);
        shape.extend([rows, columns]);
        let mut scales = Dims::from_slice(lead);
        scales.extend([rows, groups]);
        self.check_scale(name, scale, &["bfloat16", "float16", "float32"], &scales)?;
        let zeros = self.beside(name, "_zero_point");
        if let Some(zeros) = zeros {
            let mut sizes = Dims::from_slice(lead);
            sizes.extend([rows.div_ceil(8), groups]);
            self.check_scale(name, zeros, &["int32"], &sizes)?;
        }
        let coded = Coded { zeros, ..self.coded(shape, Format::Int4, [1, group], [codes, scale]) };
        self.add(name, coded);
        shape_part.inspect(|&part| self.is_part[part as usize] = true);
        Ok(())
    }

    /// Returns the columns of a group. Without a configuration, all groups of a row have the same
    /// size.
    fn group(&self, name: &str, scale: u32, columns: u64, groups: u64) -> Result<u64> {
        let known = &self.config.groups;
        let mut fitting: Vec<u64> = if known.is_empty() {
            let size = columns.checked_div(groups).filter(|size| size * groups == columns);
            size.into_iter().collect()
        } else {
            let fits = known.iter().filter(|&&size| columns.div_ceil(size) == groups);
            fits.map(|&size| size.min(columns)).collect()
        };
        fitting.dedup();
        let (has, sizes) = match fitting[..] {
            [size] => return Ok(size),
            [] => ("has no", known),
            _ => ("could have", &fitting),
        };
        let sizes: Vec<String> = sizes.iter().map(|size| size.min(&columns).to_string()).collect();
        let sizes = if sizes.is_empty() { "one size".into() } else { sizes.join(" or ") };
        let scale = self.describe(scale);
        self.bad(name, format!("{scale}, and {has} groups of {sizes} for {columns} columns"))
    }

    /// Returns the number of columns in a stored shape.
    fn columns(&mut self, name: &str, part: u32, rows: u64, words: u64) -> Result<u64> {
        let told = (self.read_shape)(part)?;
        match told.as_slice() {
            [.., height, width] if u64::try_from(*height) == Ok(rows) => {
                match u64::try_from(*width) {
                    Ok(columns) if columns.div_ceil(8) == words => Ok(columns),
                    _ => self.bad(
                        name,
                        format!(
                            "{name}_shape says {told:?}, and {words} words a row hold no such rows"
                        ),
                    ),
                }
            }
            _ => self.bad(name, format!("{name}_shape says {told:?}, and there are {rows} rows")),
        }
    }

    fn nvfp4(&mut self, codes: u32, scale: u32, global: (u32, bool), name: &str) -> Result<()> {
        let packed = self.index.tensor(codes).shape;
        let (lead, rows, bytes) = self.matrix(name, &packed)?;
        let Some(columns) = bytes.checked_mul(2) else {
            return self.bad(name, format!("{bytes} bytes a row are too many"));
        };
        let mut shape = Dims::from_slice(lead);
        shape.extend([rows, columns]);
        let mut scales = Dims::from_slice(lead);
        scales.extend([rows, columns.div_ceil(16)]);
        self.check_scale(name, scale, &["float8_e4m3fn"], &scales)?;
        let whole = self.index.tensor(global.0).shape;
        if whole.iter().any(|&size| size != 1) || self.dtype(global.0) != "float32" {
            return self.bad(name, format!("{}, and not one float32", self.describe(global.0)));
        }
        let coded = Coded {
            global: Some(global),
            ..self.coded(shape, Format::Nvfp4, [1, 16], [codes, scale])
        };
        self.add(name, coded);
        Ok(())
    }

    /// Returns an error for a tensor that looks like a part of a quantized weight, but belongs to
    /// none.
    fn check_rest(&mut self, is_configured: bool) -> Result<()> {
        for tensor in 0..self.index.tensor_count() {
            let view = self.index.tensor(tensor);
            if self.is_part[tensor as usize] || view.kind != Kind::Tensor {
                continue;
            }
            let of_weight = |end: &str| {
                view.name.strip_suffix(end).is_some_and(|stem| stem.ends_with("weight"))
            };
            if view.name.ends_with("_scale_inv") || BESIDE.iter().any(|end| of_weight(end)) {
                return self.bad(view.name, "there is no quantized weight that it belongs to");
            }
            if view.name.ends_with("_scales") && view.dtype == Some(Dtype::UINT8) {
                return self.bad(view.name, "there is no _blocks that it belongs to");
            }
            if is_configured
                && (self.dtype(tensor).starts_with("float8") || view.name.ends_with("_packed"))
            {
                return self
                    .bad(view.name, format!("it is {} and has no scale", self.dtype(tensor)));
            }
        }
        Ok(())
    }
}
