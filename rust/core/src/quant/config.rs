//! Quantization settings in `config.json`.

use serde_json::Value;

/// The part of a configuration that describes how weights are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Rows and columns of a block, if they are given.
    pub block: Option<[u64; 2]>,
    /// Sorted numbers of columns that a group of integers may have. `u64::MAX` stands for a group
    /// without a number, which is a whole row.
    pub groups: Vec<u64>,
}

/// Known methods: `quant_method` of transformers, `format` of compressed-tensors, `quant_algo` of
/// modelopt.
const METHODS: [&str; 5] = ["fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt"];
const FORMATS: [&str; 6] = [
    "dense",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
];
const ALGORITHMS: [&str; 3] = ["FP8", "NVFP4", "MIXED_PRECISION"];

impl Config {
    /// Parses `config.json`; returns `None` if it has no quantization.
    ///
    /// # Errors
    /// The reason why weights with this quantization cannot be read.
    pub fn parse(json: &[u8]) -> Result<Option<Self>, String> {
        let config: Value =
            serde_json::from_slice(json).map_err(|e| format!("config.json is no JSON: {e}"))?;
        let places = [&config, &config["text_config"]];
        let names = ["quantization_config", "compression_config"];
        let found =
            (places.iter()).find_map(|place| names.iter().find_map(|&name| place.get(name)));
        match found.filter(|found| !found.is_null()) {
            Some(found) => Self::of(found).map(Some),
            None => Ok(None),
        }
    }

    fn of(config: &Value) -> Result<Self, String> {
        one_of(&config["quant_method"], "quant_method", &METHODS, false)?;
        one_of(&config["format"], "format", &FORMATS, true)?;
        one_of(&config["quant_algo"], "quant_algo", &ALGORITHMS, true)?;
        one_of(&config["fmt"], "fmt", &["e4m3", "float8_e4m3fn"], true)?;
        let mut found = Self {
            block: block(&config["weight_block_size"], "weight_block_size")?,
            groups: Vec::new(),
        };
        for group in
            config["config_groups"].as_object().into_iter().flat_map(|groups| groups.values())
        {
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
            if kind.0 == "int" {
                let size = weights["group_size"].as_u64().filter(|&size| size > 0);
                found.groups.push(size.unwrap_or(u64::MAX));
            }
            found.block = found.block.or(block(&weights["block_structure"], "block_structure")?);
        }
        found.groups.sort_unstable();
        found.groups.dedup();
        Ok(found)
    }
}

fn one_of(value: &Value, name: &str, known: &[&str], may_lack: bool) -> Result<(), String> {
    if may_lack && value.is_null() || value.as_str().is_some_and(|text| known.contains(&text)) {
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
