//! Detection of quantized weights by the names of their stored parts. Dtypes and shapes are
//! checked, and every stored tensor is accounted for: it is a part of a weight, a scale for
//! activations, or not quantized.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde_json::Value;

use super::known::{self, ACTIVATIONS, KNOWN, Known, Scaling, UNKNOWN};
use super::{Coded, Config, Format, Order, TILE, Target};
use crate::format::{Index, Kind};
use crate::geometry::Dims;
use crate::{Dtype, Error, Result, json};

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

/// Facts about the weights of a checkpoint that its index does not hold.
#[derive(Debug, Default)]
pub struct About {
    /// The parsed configuration, if there is one.
    pub config: Option<Config>,
    /// The contents of the [small parts](small_parts).
    pub small: HashMap<u32, Vec<u8>>,
    /// `ComfyUI`'s description of each layer, from the metadata of the files.
    pub layers: BTreeMap<String, Value>,
}

/// End of the name of a tensor with `ComfyUI`'s description of a layer, as JSON.
const COMFY: &str = ".comfy_quant";
/// `ComfyUI`'s name of a format that others have as well.
const COMFY_FP8: &str = "float8_e4m3fn";
/// Name of a tensor in older files of `ComfyUI`. Its dtype is that of the quantized weights.
const COMFY_SCALED: &str = "scaled_fp8";

/// Returns the stored tensors whose contents [`detect`] needs: shapes of INT4 weights, and
/// descriptions of layers.
pub fn small_parts(index: &Index) -> Vec<u32> {
    let is_shape = |name: &str| {
        name.strip_suffix("_shape")
            .is_some_and(|weight| index.find(&format!("{weight}_packed")).is_some())
    };
    (0..index.tensor_count())
        .filter(|&tensor| {
            let name = index.name(tensor);
            index.tensor(tensor).kind == Kind::Tensor && (is_shape(name) || name.ends_with(COMFY))
        })
        .collect()
}

/// Finds the quantized weights of an index.
///
/// # Errors
/// [`Error::Quantization`] for a part that is missing, or that has another dtype or shape than its
/// format requires, and for a tensor that looks like a part of a weight of an unknown format.
pub fn detect(index: &Arc<Index>, about: About, target: Target) -> Result<Found> {
    let mut detector = Detector {
        index,
        config: about.config.unwrap_or_default(),
        target,
        small: about.small,
        layers: HashMap::new(),
        found: Found::default(),
        is_part: vec![false; index.tensor_count() as usize],
    };
    detector.read_layers(about.layers)?;
    for tensor in 0..index.tensor_count() {
        if index.tensor(tensor).kind == Kind::Tensor {
            detector.find_weight(tensor)?;
        }
    }
    detector.hide_activations();
    detector.check_rest()?;
    let Detector { mut found, is_part, .. } = detector;
    found.hidden = (0..index.tensor_count()).filter(|&part| is_part[part as usize]).collect();
    Ok(found)
}

/// Returns tensors of codes, each with a scale, by dtypes and names alone.
pub fn codes_beside_scales(index: &Index) -> Vec<(u32, u32)> {
    let may_have_codes = |&tensor: &u32| {
        let dtype = index.tensor(tensor).dtype.map_or("", Dtype::name);
        is_byte(dtype) || matches!(dtype, "int16" | "int32" | "uint32")
    };
    let mut codes = (0..index.tensor_count()).filter(may_have_codes).peekable();
    if codes.peek().is_none() {
        return Vec::new();
    }
    let scales = Scales::new(index);
    codes.filter_map(|tensor| Some((tensor, scales.of_codes(tensor)??))).collect()
}

fn is_byte(dtype: &str) -> bool {
    dtype.starts_with("float8") || dtype.starts_with("float4") || matches!(dtype, "int8" | "uint8")
}

/// The tensors of an index with names like scales.
struct Scales<'a> {
    index: &'a Index,
    /// All of them, in the order of their names.
    sorted: Vec<u32>,
    /// One of each module.
    modules: HashMap<&'a str, u32>,
}

impl<'a> Scales<'a> {
    fn new(index: &'a Index) -> Self {
        // The tensors of an index are sorted by name.
        let sorted: Vec<u32> = (0..index.tensor_count())
            .filter(|&tensor| Self::is_named_so(index.name(tensor)))
            .collect();
        let modules = sorted.iter().map(|&scale| (module(index.name(scale)), scale)).collect();
        Self { index, sorted, modules }
    }

    fn is_named_so(name: &str) -> bool {
        let leaf = leaf(name);
        ["scale", "absmax", "SCB"].iter().any(|word| leaf.contains(word))
            && !ACTIVATIONS.contains(&leaf)
    }

    /// Returns the scale whose name begins with that of a tensor: `X_scale` or `X.scale` of `X`.
    fn own(&self, name: &str) -> Option<u32> {
        let begin = format!("{name}_");
        let first = self.sorted.partition_point(|&scale| self.index.name(scale) < &*begin);
        let beside = self.sorted[first..]
            .iter()
            .take_while(|&&scale| self.index.name(scale).starts_with(&begin))
            .find(|&&scale| module(self.index.name(scale)) == module(name));
        self.modules.get(name).or(beside).copied()
    }

    /// Returns the scale of a tensor of codes, if it has one; `None` for a tensor without codes.
    #[expect(clippy::option_option, reason = "codes may lack a scale")]
    fn of_codes(&self, tensor: u32) -> Option<Option<u32>> {
        let view = self.index.tensor(tensor);
        let dtype = view.dtype.map_or("", Dtype::name);
        let is_integer = matches!(dtype, "int8" | "uint8" | "int16" | "int32" | "uint32");
        if !is_byte(dtype) && !is_integer || is_integer && view.shape.len() < 2 {
            return None;
        }
        let (name, leaf) = (view.name, leaf(view.name));
        let own = self.own(name);
        let scale = own
            .or_else(|| self.modules.get(module(name)).copied())
            .filter(|_| !Self::is_named_so(name));
        let is_weight = leaf.ends_with("weight")
            || leaf.ends_with("_packed")
            || leaf.ends_with("_blocks") && view.shape.last() == Some(&16);
        // Names of HQQ, AQLM, quanto and torchao, among others.
        let may_be_weight = matches!(leaf, "W_q" | "codes" | "_data")
            || leaf.ends_with("qdata")
            || leaf.ends_with("_blocks")
            || leaf.contains("weight");
        let has_codes = match dtype {
            "int8" => is_weight || scale.is_some(),
            _ if is_integer => is_weight || scale.is_some() && (own.is_some() || may_be_weight),
            _ => true,
        };
        has_codes.then_some(scale)
    }
}

/// Returns the name of a parameter in its module.
fn leaf(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(_, leaf)| leaf)
}

/// Returns the name of the module that has a parameter of this name.
fn module(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}

struct Detector<'a> {
    index: &'a Arc<Index>,
    config: Config,
    target: Target,
    small: HashMap<u32, Vec<u8>>,
    /// `ComfyUI`'s formats of layers, but for those that others have as well.
    layers: HashMap<String, &'static str>,
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

    fn beside(&self, stem: &str, end: &str) -> Option<u32> {
        self.index.find(&format!("{stem}{end}"))
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

    fn mark(&mut self, part: u32) {
        self.is_part[part as usize] = true;
    }

    fn is_part(&self, tensor: u32) -> bool {
        self.is_part[tensor as usize]
    }

    /// Checks `ComfyUI`'s description of each layer.
    fn read_layers(&mut self, mut layers: BTreeMap<String, Value>) -> Result<()> {
        for tensor in 0..self.index.tensor_count() {
            let name = self.index.name(tensor);
            if leaf(name) == COMFY_SCALED {
                self.mark(tensor);
            }
            let Some(layer) = name.strip_suffix(COMFY) else { continue };
            let text = self.small.get(&tensor).map_or(&[][..], Vec::as_slice);
            let Ok(about) = json::parse(text) else {
                return self.bad(name, "it is no JSON");
            };
            layers.insert(layer.to_owned(), about);
            self.mark(tensor);
        }
        for (layer, about) in layers {
            let name = format!("{layer}.weight");
            let format = about["format"].as_str().unwrap_or("none");
            let known = KNOWN.iter().find(|known| known.layer == Some(format));
            let is_group = |value: &Value| match known.map(|known| known.scaling) {
                Some(Scaling::Columns(count)) => value.as_u64() == Some(count),
                _ => false,
            };
            let is_plain = |(key, value): (&String, &Value)| {
                matches!(&**key, "format" | "full_precision_matrix_mult")
                    || matches!(value, Value::Null | Value::Bool(false))
                    || key == "group_size" && is_group(value)
            };
            if (known.is_none() && format != COMFY_FP8)
                || !about.as_object().is_some_and(|about| about.iter().all(is_plain))
            {
                let formats: Vec<&str> = KNOWN.iter().filter_map(|known| known.layer).collect();
                return self.bad(
                    &name,
                    format!(
                        "ComfyUI's format {about} is not known; known are {COMFY_FP8}, {}. Take \
                         the model that this one was made from, or its codes (without dequantize=)",
                        formats.join(", ")
                    ),
                );
            }
            let dtypes = known.map_or(&[COMFY_FP8][..], |known| known.codes.1);
            let codes = self.index.find(&name);
            if codes.is_none_or(|codes| !dtypes.contains(&self.dtype(codes))) {
                return self.bad(
                    &name,
                    format!("it should be {}, as ComfyUI describes it", dtypes.join(" or ")),
                );
            }
            if let Some(format) = known.and_then(|known| known.layer) {
                self.layers.insert(layer, format);
            }
        }
        Ok(())
    }

    /// Adds a weight if a tensor contains its codes.
    fn find_weight(&mut self, codes: u32) -> Result<()> {
        let (name, dtype) = (self.index.name(codes), self.dtype(codes));
        let layer = name.strip_suffix(".weight").and_then(|layer| self.layers.get(layer));
        for known in &KNOWN {
            if known.layer != layer.copied() || !known.codes.1.contains(&dtype) {
                continue;
            }
            let Some(stem) = name.strip_suffix(known.codes.0) else { continue };
            let Some(scale) = self.beside(stem, known.scale.0) else { continue };
            if !known.scale.1.contains(&self.dtype(scale)) {
                continue;
            }
            let global = match known.global {
                None => None,
                Some((end, divides)) => match self.beside(stem, end) {
                    None => continue,
                    Some(global) => Some((global, divides)),
                },
            };
            let weight = Weight {
                known,
                stem,
                name: format!("{stem}{}", known.weight),
                codes,
                scale,
                global,
            };
            return self.add(&weight);
        }
        Ok(())
    }

    fn add(&mut self, weight: &Weight<'_>) -> Result<()> {
        let Weight { known, name, .. } = weight;
        let is_other = |other: u32| other != weight.codes;
        if self.index.find(name).is_some_and(is_other) {
            let codes = self.index.name(weight.codes);
            return self
                .bad(name, format!("there is {codes} beside it: which of the two is the weight?"));
        }
        let (shape, block) = match known.format {
            Format::Fp8 => self.fp8(weight)?,
            Format::Mxfp4 | Format::Nvfp4 => self.fp4(weight)?,
            Format::Int4 => self.int4(weight)?,
        };
        let zeros = known.zeros.and_then(|end| self.beside(weight.stem, end));
        if let Some(zeros) = zeros {
            let (lead, rows, _) = self.matrix(name, &shape)?;
            let groups = self.index.tensor(weight.scale).shape.last().copied().unwrap_or(1);
            let mut sizes = Dims::from_slice(lead);
            sizes.extend([rows.div_ceil(8), groups]);
            if self.dtype(zeros) != "int32" {
                return self.bad(name, format!("{}, and not int32", self.describe(zeros)));
            }
            self.check_shape(weight, zeros, &sizes)?;
        }
        if let Some((global, _)) = weight.global
            && (self.index.tensor(global).shape.iter().any(|&size| size != 1)
                || self.dtype(global) != "float32")
        {
            return self.bad(name, format!("{}, and not one float32", self.describe(global)));
        }
        let shape_part = known.shape.and_then(|end| self.beside(weight.stem, end));
        let global = weight.global.map(|(global, _)| global);
        let parts = [Some(weight.codes), Some(weight.scale), zeros, global, shape_part];
        parts.into_iter().flatten().for_each(|part| self.mark(part));
        let stored = self.index.name(weight.codes);
        if known.codes.0 == "_blocks" {
            self.found.aliases.push((stored.to_owned(), name.clone()));
        }
        let coded = Coded {
            index: Arc::clone(self.index),
            shape,
            target: self.target,
            format: known.format,
            order: known.order,
            block: block.map(|size| size.max(1)),
            codes: weight.codes,
            scale: weight.scale,
            zeros,
            global: weight.global,
        };
        self.found.coded.push((name.clone(), Arc::new(coded)));
        Ok(())
    }

    fn check_shape(&self, weight: &Weight<'_>, part: u32, sizes: &[u64]) -> Result<()> {
        if self.index.tensor(part).shape.as_slice() == sizes {
            return Ok(());
        }
        let Known { title, used_by, .. } = weight.known;
        let is = self.describe(part);
        let reason =
            format!("{is}, and should have the shape {sizes:?}, as in {title} of {used_by}");
        self.bad(&weight.name, reason)
    }

    /// Returns an error if a weight has leading dimensions, or its tiles have another shape than the
    /// scales of all blocks need.
    fn check_tiles(&self, weight: &Weight<'_>, shape: &[u64], block: [u64; 2]) -> Result<()> {
        let &[rows, columns] = shape else {
            return self
                .bad(&weight.name, format!("a weight of shape {shape:?} has no scales in tiles"));
        };
        let filled = |count: u64, step: u64| count.div_ceil(step).saturating_mul(step);
        let groups = columns.div_ceil(block[1]);
        self.check_shape(weight, weight.scale, &[filled(rows, TILE[0]), filled(groups, TILE[1])])
    }

    /// Returns the shape of a weight, and that of the blocks with a scale.
    fn fp8(&self, weight: &Weight<'_>) -> Result<(Dims, [u64; 2])> {
        let (name, scale) = (&weight.name, weight.scale);
        let shape = self.index.tensor(weight.codes).shape;
        let (lead, rows, columns) = self.matrix(name, &shape)?;
        if let (Order::Tiles, Scaling::Columns(count)) = (weight.known.order, weight.known.scaling)
        {
            self.check_tiles(weight, &shape, [1, count])?;
            return Ok((shape, [1, count]));
        }
        let scales = self.index.tensor(scale).shape;
        let grid = |block: [u64; 2]| {
            let mut sizes = Dims::from_slice(lead);
            sizes.extend([rows.div_ceil(block[0].max(1)), columns.div_ceil(block[1].max(1))]);
            sizes
        };
        let scaling = weight.known.scaling;
        // A single number beside DeepSeek-V4's names could as well be a divisor.
        let is_one = scaling != Scaling::Blocks && scales.iter().all(|&size| size == 1);
        let is_row = |sizes: &[u64]| matches!(sizes, [count] | [count, 1] if *count == rows);
        let has_exponents = matches!(self.dtype(scale), "float8_e8m0fnu" | "uint8");
        let configured = self.config.block;
        let of_each = scales.strip_prefix(lead);
        let is_grid = matches!(scaling, Scaling::Blocks | Scaling::BlocksOrTensor)
            && matches!(of_each, Some([_, _]));
        let block = match (scaling, of_each, configured) {
            (Scaling::Tensor | Scaling::Matrices, ..) => [rows, columns],
            (Scaling::Columns(count), ..) => [1, count],
            (.., Some(block)) if is_grid && grid(block) == scales => block,
            // Exponents for each 32 columns can stand beside blocks of another size.
            _ if has_exponents && grid([1, 32]) == scales => [1, 32],
            (.., Some(block)) if is_grid => block,
            _ if is_one => [rows, columns],
            (_, Some([1, 1]), _) if scaling != Scaling::Blocks => [rows, columns],
            (Scaling::Rows, Some(sizes), _) if is_row(sizes) => [1, columns],
            (Scaling::Rows, ..) => configured.unwrap_or([1, columns]),
            _ => configured.unwrap_or([128, 128]),
        };
        let expected = grid(block);
        // modelopt keeps the dimensions within a block.
        let is_spread = configured == Some(block)
            && matches!(of_each, Some(&[r, 1, c, 1]) if expected[lead.len()..] == [r, c]);
        let is_short = scaling == Scaling::Matrices && matches!(of_each, Some([] | [1]));
        let fits = scales == expected
            || is_spread
            || is_short
            || is_one && block == [rows, columns]
            || scaling == Scaling::Rows && block == [1, columns] && of_each.is_some_and(is_row);
        if !fits {
            self.check_shape(weight, scale, &expected)?;
        }
        Ok((shape, block))
    }

    fn fp4(&self, weight: &Weight<'_>) -> Result<(Dims, [u64; 2])> {
        let Scaling::Columns(group) = weight.known.scaling else {
            return Err(Error::Internal("a format of FP4 without groups".into()));
        };
        let packed = self.index.tensor(weight.codes).shape;
        // The bytes of a group can be a dimension of their own.
        let outer = (weight.known.codes.0 == "_blocks").then(|| match packed.as_slice() {
            [outer @ .., groups, 16] if !outer.is_empty() => Some((outer, groups.checked_mul(16))),
            _ => None,
        });
        let (outer, bytes) = match (outer, packed.as_slice()) {
            (Some(Some((outer, bytes))), _) => (outer, bytes),
            (None, [outer @ .., bytes]) if !outer.is_empty() => (outer, Some(*bytes)),
            _ => {
                return self
                    .bad(&weight.name, format!("{} is no matrix", self.describe(weight.codes)));
            }
        };
        let Some(columns) = bytes.and_then(|bytes| bytes.checked_mul(2)) else {
            return self.bad(&weight.name, format!("{packed:?} bytes are too many"));
        };
        let mut shape = Dims::from_slice(outer);
        shape.push(columns);
        if weight.known.order == Order::Tiles {
            self.check_tiles(weight, &shape, [1, group])?;
            return Ok((shape, [1, group]));
        }
        let mut scales = Dims::from_slice(outer);
        scales.push(columns.div_ceil(group));
        self.check_shape(weight, weight.scale, &scales)?;
        Ok((shape, [1, group]))
    }

    fn int4(&self, weight: &Weight<'_>) -> Result<(Dims, [u64; 2])> {
        let name = &weight.name;
        let packed = self.index.tensor(weight.codes).shape;
        let (lead, rows, words) = self.matrix(name, &packed)?;
        let Some(most) = words.checked_mul(8) else {
            return self.bad(name, format!("{words} words a row are too many"));
        };
        let columns = match self.beside(weight.stem, "_shape") {
            Some(part) => self.columns(name, part, &packed)?,
            None => most,
        };
        let groups = *self.index.tensor(weight.scale).shape.last().unwrap_or(&1);
        let group = self.group(name, weight.scale, columns, groups)?;
        let mut shape = Dims::from_slice(lead);
        shape.extend([rows, columns]);
        let mut scales = Dims::from_slice(lead);
        scales.extend([rows, groups]);
        self.check_shape(weight, weight.scale, &scales)?;
        Ok((shape, [1, group]))
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

    /// Returns the number of columns in a stored shape, which has to be that of the codes but for
    /// the columns of the last word.
    fn columns(&self, name: &str, part: u32, packed: &[u64]) -> Result<u64> {
        let bytes = self.small.get(&part).map_or(&[][..], Vec::as_slice);
        let told: Vec<i64> = match self.dtype(part) {
            "int64" => bytes.as_chunks().0.iter().map(|&n| i64::from_le_bytes(n)).collect(),
            "int32" => {
                bytes.as_chunks().0.iter().map(|&n| i64::from(i32::from_le_bytes(n))).collect()
            }
            _ => return self.bad(name, format!("{}, and no shape", self.describe(part))),
        };
        let sizes: Option<Vec<u64>> = told.iter().map(|&size| u64::try_from(size).ok()).collect();
        if let Some([lead @ .., rows, columns]) = sizes.as_deref()
            && let [packed_lead @ .., packed_rows, words] = packed
            && (lead.is_empty() || lead == packed_lead)
            && rows == packed_rows
            && columns.div_ceil(8) == *words
        {
            return Ok(*columns);
        }
        let part = self.index.name(part);
        self.bad(name, format!("{part} says {told:?}, and the codes are {packed:?} words of eight"))
    }

    /// Marks the scales of the activations of modules with quantized weights, and those of caches
    /// of keys and values. A parameter may have such a name: others stay.
    fn hide_activations(&mut self) {
        if self.found.coded.is_empty() {
            return;
        }
        let coded: HashSet<&str> = self.found.coded.iter().map(|(name, _)| &**name).collect();
        let modules: HashSet<&str> = coded.iter().map(|name| module(name)).collect();
        let is_of_weight =
            |weight: &str| coded.contains(weight) || coded.contains(&*format!("{weight}_weight"));
        for tensor in 0..self.index.tensor_count() {
            let view = self.index.tensor(tensor);
            let (name, leaf) = (view.name, leaf(view.name));
            // One number. Learned scales of heads have one for each.
            let is_of_cache = matches!(leaf, "q_scale" | "k_scale" | "v_scale")
                && view.shape.iter().all(|&size| size == 1);
            let is_of_module =
                ACTIVATIONS.contains(&leaf) && (is_of_cache || modules.contains(module(name)));
            let mut weights = ACTIVATIONS.iter().filter_map(|end| name.strip_suffix(end));
            self.is_part[tensor as usize] |= is_of_module
                || weights.any(|weight| weight.strip_suffix('_').is_some_and(is_of_weight));
        }
    }

    /// Returns an error for a tensor that looks like a part of a quantized weight, but belongs to
    /// none.
    fn check_rest(&self) -> Result<()> {
        let rest = || {
            (0..self.index.tensor_count()).filter(|&tensor| {
                !self.is_part(tensor) && self.index.tensor(tensor).kind == Kind::Tensor
            })
        };
        // The message about codes tells more than that about their scale.
        let scales = Scales::new(self.index);
        for tensor in rest() {
            self.check_no_codes(tensor, &scales)?;
        }
        let coded: HashSet<&str> = self.found.coded.iter().map(|(name, _)| &**name).collect();
        for tensor in rest() {
            let name = self.index.name(tensor);
            if let Some((_, library)) = UNKNOWN.iter().find(|(end, _)| *end == leaf(name)) {
                return self.bad(
                    name,
                    format!(
                        "it is a part of a weight that {library} quantized, which is not known"
                    ),
                );
            }
            let is_of = |stem: &str| stem.ends_with("weight") || coded.contains(stem);
            let is_left = known::parts().any(|end| name.strip_suffix(end).is_some_and(is_of));
            if is_left || name.ends_with("_scale_inv") {
                return self.bad(name, "there is no quantized weight that it belongs to");
            }
            if name.ends_with("_scales") && self.dtype(tensor) == "uint8" {
                return self.bad(name, "there is no _blocks that it belongs to");
            }
        }
        Ok(())
    }

    /// Returns an error if a tensor that belongs to no weight has codes.
    fn check_no_codes(&self, tensor: u32, scales: &Scales<'_>) -> Result<()> {
        let Some(scale) = scales.of_codes(tensor) else { return Ok(()) };
        let dtype = self.dtype(tensor);
        let is = format!("it is {dtype} {:?}", self.index.tensor(tensor).shape.as_slice());
        let reason = match scale {
            Some(scale) => {
                format!("{is}, and {}: no known format has both", self.describe(scale))
            }
            None if dtype.starts_with("float8") => format!(
                "{is} and has no scale; if its numbers are the weights, load it without \
                 dequantize= and cast it (dtype=)"
            ),
            None => format!("{is} and has no scale"),
        };
        self.bad(self.index.name(tensor), reason)
    }
}

/// The parts of a weight.
struct Weight<'a> {
    known: &'static Known,
    /// Beginning of the names of all parts.
    stem: &'a str,
    /// Name of the weight.
    name: String,
    codes: u32,
    scale: u32,
    global: Option<(u32, bool)>,
}

#[cfg(test)]
#[path = "detect_tests.rs"]
mod tests;
