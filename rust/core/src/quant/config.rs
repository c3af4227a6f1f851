//! Quantization settings in `config.json` and `hf_quant_config.json`.

use serde_json::Value;

use crate::json;

/// The part of a configuration that describes how weights are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Rows and columns of a block, if they are given.
    pub block: Option<[u64; 2]>,
    /// Sorted numbers of columns that a group of integers may have. `u64::MAX` stands for a group
    /// without a number, which is a whole row.
    pub groups: Vec<u64>,
}

/// Keys of a configuration, at the top of a file or in a configuration inside it (`text_config`).
const KEYS: [&str; 3] = ["quantization_config", "compression_config", "quantization"];
/// Most configurations inside each other.
const DEPTH: u32 = 3;

/// Known methods: `quant_method` of transformers, `format` of compressed-tensors, `quant_algo` of
/// modelopt.
const METHODS: [&str; 5] = ["fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt"];
const FORMATS: [&str; 8] = [
    "dense",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
];
/// `modelopt`'s FP8 with scales of blocks, which are always of this size.
const FP8_BLOCKS: &str = "FP8_PB_WO";
const FP8_BLOCK: [u64; 2] = [128, 128];
const ALGORITHMS: [&str; 10] = [
    "FP8",
    FP8_BLOCKS,
    "FP8_PER_CHANNEL_PER_TOKEN",
    "MXFP8",
    "MXFP4",
    "W4A8_MXFP4_FP8",
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "MIXED_PRECISION",
];

impl Config {
    /// The files that can have a configuration, in the order in which they are looked at: that of
    /// transformers, and that of modelopt.
    pub const FILES: [&str; 2] = ["config.json", "hf_quant_config.json"];

    /// Parses one of the [files](Self::FILES); returns `None` if it has no quantization.
    ///
    /// # Errors
    /// The reason why weights with this quantization cannot be read.
    pub fn parse(text: &[u8]) -> Result<Option<Self>, String> {
        let config = json::parse(text).map_err(|e| format!("it is no JSON: {e}"))?;
        if has_any(&config["transform_config"]) {
            return Err(TRANSFORMED.into());
        }
        let mut found: Option<Self> = None;
        for one in search(&config, DEPTH) {
            let one = Self::of(one)?;
            match &mut found {
                None => found = Some(one),
                Some(found) => {
                    found.block = found.block.or(one.block);
                    found.groups.extend(one.groups);
                }
            }
        }
        Ok(found.map(|mut found| {
            found.groups.sort_unstable();
            found.groups.dedup();
            found
        }))
    }

    fn of(config: &Value) -> Result<Self, String> {
        // modelopt's own file has no method.
        let is_modelopt = config.get("quant_algo").is_some();
        one_of(&config["quant_method"], "quant_method", &METHODS, is_modelopt)?;
        one_of(&config["format"], "format", &FORMATS, true)?;
        one_of(&config["quant_algo"], "quant_algo", &ALGORITHMS, true)?;
        one_of(&config["fmt"], "fmt", &["e4m3", "float8_e4m3fn"], true)?;
        one_of(&config["sparsity_config"]["format"], "format of sparsity", &["dense"], true)?;
        if has_any(&config["transform_config"]) {
            return Err(TRANSFORMED.into());
        }
        if config["pre_quant_scale"].as_bool() == Some(true) {
            return Err("columns of weights have scales beside the codes (pre_quant_scale)".into());
        }
        let mut found = Self {
            block: block(&config["weight_block_size"], "weight_block_size")?,
            groups: Vec::new(),
        };
        for layer in values(&config["quantized_layers"]) {
            one_of(&layer["quant_algo"], "quant_algo", &ALGORITHMS, false)?;
        }
        let has_blocks = std::iter::once(config)
            .chain(values(&config["quantized_layers"]))
            .any(|about| one_of(&about["quant_algo"], "", &[FP8_BLOCKS], false).is_ok());
        if has_blocks {
            found.block = found.block.or(Some(FP8_BLOCK));
        }
        for group in values(&config["config_groups"]) {
            one_of(&group["format"], "format", &FORMATS, true)?;
            let weights = &group["weights"];
            if weights.is_null() {
                continue;
            }
            let kind = (weights["type"].as_str().unwrap_or("int"), weights["num_bits"].as_u64());
            if !matches!(kind, ("float", None | Some(4 | 8)) | ("int", None | Some(4))) {
                return Err(format!(
                    "weights of {} bits of type {:?}",
                    weights["num_bits"], kind.0
                ));
            }
            let size = weights["group_size"].as_u64().filter(|&size| size > 0);
            if kind.0 == "int" {
                found.groups.push(size.unwrap_or(u64::MAX));
            }
            found.block = found.block.or(block(&weights["block_structure"], "block_structure")?);
            if kind == ("float", Some(8)) {
                found.block = found.block.or(size.map(|size| [1, size]));
            }
        }
        Ok(found)
    }
}

const TRANSFORMED: &str = "weights are stored transformed (transform_config)";

/// Returns the configurations of quantization: that at the top, or those inside.
fn search(config: &Value, depth: u32) -> Vec<&Value> {
    let own = KEYS.iter().find_map(|&key| config.get(key)).filter(|own| !own.is_null());
    if let Some(own) = own {
        return vec![own];
    }
    let inner = config.as_object().into_iter().flatten();
    let inner = inner.filter(|(key, _)| depth > 0 && key.ends_with("_config"));
    inner.flat_map(|(_, inner)| search(inner, depth - 1)).collect()
}

fn values(of: &Value) -> impl Iterator<Item = &Value> {
    of.as_object().into_iter().flat_map(|values| values.values())
}

/// Returns whether a value is an object or a list with anything in it.
fn has_any(value: &Value) -> bool {
    match value {
        Value::Object(values) => values.values().any(has_any),
        Value::Array(values) => !values.is_empty(),
        Value::Null => false,
        _ => true,
    }
}

fn one_of(value: &Value, name: &str, known: &[&str], may_lack: bool) -> Result<(), String> {
    // modelopt writes some algorithms in lower case.
    let is_known = |text: &str| known.iter().any(|known| text.eq_ignore_ascii_case(known));
    if may_lack && value.is_null() || value.as_str().is_some_and(is_known) {
        return Ok(());
    }
    Err(format!("{name} is {value}; known are {}", known.join(", ")))
}

fn block(value: &Value, name: &str) -> Result<Option<[u64; 2]>, String> {
    if value.is_null() {
        return Ok(None);
    }
    let sizes: Option<Vec<u64>> =
        (value.as_array()).and_then(|sizes| sizes.iter().map(Value::as_u64).collect());
    match sizes.as_deref() {
        Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok(Some([rows, columns])),
        _ => Err(format!("{name} is {value}, and not two positive integers")),
    }
}
