//! The formats of quantized weights that are decoded, in one table. The table of
//! `docs/quantized.md` is made from it.

use super::{Format, Order};

/// A way to store a quantized weight.
///
/// The names of its parts differ in their ends. `scale`, `global` and the other ends replace the
/// end `codes`.
pub struct Known {
    /// Name of the format, for people.
    pub title: &'static str,
    /// Models and libraries that use it.
    pub used_by: &'static str,
    /// Format of the codes.
    pub format: Format,
    /// `ComfyUI`'s name of the format, which its description of the layer has to have. Other
    /// weights have no description.
    pub layer: Option<&'static str>,
    /// Order of the codes and the scales.
    pub order: Order,
    /// End of the name of the weight.
    pub weight: &'static str,
    /// End of the name of the codes, and their dtypes.
    pub codes: (&'static str, &'static [&'static str]),
    /// End of the name of the scales, and their dtypes.
    pub scale: (&'static str, &'static [&'static str]),
    /// Elements that share a scale.
    pub scaling: Scaling,
    /// End of the name of the scale of the scales. Without it, a weight has another format. The
    /// scales are divided by it if the flag is true.
    pub global: Option<(&'static str, bool)>,
    /// End of the name of the zero points, which a weight may lack.
    pub zeros: Option<&'static str>,
    /// End of the name of the shape, which a weight may lack.
    pub shape: Option<&'static str>,
}

/// Elements of a weight that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// Rectangles of the size in the configuration, or of 128 x 128.
    Blocks,
    /// The same, or the whole tensor.
    BlocksOrTensor,
    /// The whole tensor, a row, or rectangles of the size in the configuration.
    Rows,
    /// The whole tensor.
    Tensor,
    /// The whole tensor, or each of its matrices.
    Matrices,
    /// This number of columns of a row.
    Columns(u64),
    /// A number of columns of a row that the configuration has, or that divides the row evenly.
    Groups,
}

#[cfg(test)]
impl Scaling {
    const fn text(self) -> &'static str {
        match self {
            Self::Blocks => "block as configured, or 128 x 128",
            Self::BlocksOrTensor => "block as configured, or 128 x 128; or tensor",
            Self::Rows => "tensor, row, or block as configured",
            Self::Tensor => "tensor",
            Self::Matrices => "tensor or expert",
            Self::Columns(16) => "16 columns",
            Self::Columns(_) => "32 columns",
            Self::Groups => "group of columns",
        }
    }
}

const NUMBERS: &[&str] = &["float32", "bfloat16", "float16"];
const NUMBERS_OR_EXPONENTS: &[&str] = &["float32", "bfloat16", "float16", "float8_e8m0fnu"];
/// Powers of two: exponents with a bias of 127.
const EXPONENTS: &[&str] = &["float8_e8m0fnu", "uint8"];

const PLAIN: Known = Known {
    title: "",
    used_by: "",
    format: Format::Fp8,
    layer: None,
    order: Order::Rows,
    weight: "",
    codes: ("", &["float8_e4m3fn"]),
    scale: ("_scale", NUMBERS_OR_EXPONENTS),
    scaling: Scaling::Rows,
    global: None,
    zeros: None,
    shape: None,
};

/// The formats. The first that fits the names and the dtypes of the parts is that of a weight.
pub static KNOWN: [Known; 16] = [
    Known {
        title: "FP8 blocks",
        used_by: "DeepSeek-V3, GLM, Qwen",
        scale: ("_scale_inv", NUMBERS_OR_EXPONENTS),
        scaling: Scaling::BlocksOrTensor,
        ..PLAIN
    },
    Known {
        title: "FP8 blocks",
        used_by: "DeepSeek-V4",
        weight: ".weight",
        codes: (".weight", &["float8_e4m3fn"]),
        scale: (".scale", NUMBERS_OR_EXPONENTS),
        scaling: Scaling::Blocks,
        ..PLAIN
    },
    Known {
        title: "MXFP4",
        used_by: "experts of DeepSeek-V4",
        format: Format::Mxfp4,
        weight: ".weight",
        codes: (".weight", &["int8", "uint8"]),
        scale: (".scale", &["float8_e8m0fnu"]),
        scaling: Scaling::Columns(32),
        ..PLAIN
    },
    Known { title: "FP8", used_by: "compressed-tensors, modelopt, fbgemm, ComfyUI", ..PLAIN },
    Known {
        title: "FP8",
        used_by: "ComfyUI (`scaled_fp8`)",
        weight: ".weight",
        codes: (".weight", &["float8_e4m3fn"]),
        scale: (".scale_weight", NUMBERS),
        scaling: Scaling::Tensor,
        ..PLAIN
    },
    Known {
        title: "FP8",
        used_by: "modelopt (fused experts)",
        scale: ("_weight_scale", NUMBERS),
        scaling: Scaling::Matrices,
        ..PLAIN
    },
    Known {
        title: "MXFP8",
        used_by: "compressed-tensors, modelopt",
        scale: ("_scale", EXPONENTS),
        scaling: Scaling::Columns(32),
        ..PLAIN
    },
    Known {
        title: "MXFP8",
        used_by: "transformers",
        scale: ("_scale_inv", &["uint8"]),
        scaling: Scaling::Columns(32),
        ..PLAIN
    },
    Known {
        title: "MXFP8",
        used_by: "ComfyUI",
        layer: Some("mxfp8"),
        order: Order::Tiles,
        weight: ".weight",
        codes: (".weight", &["float8_e4m3fn"]),
        scale: (".weight_scale", EXPONENTS),
        scaling: Scaling::Columns(32),
        ..PLAIN
    },
    Known {
        title: "MXFP4",
        used_by: "gpt-oss",
        format: Format::Mxfp4,
        codes: ("_blocks", &["uint8"]),
        scale: ("_scales", EXPONENTS),
        scaling: Scaling::Columns(32),
        ..PLAIN
    },
    Known {
        title: "MXFP4",
        used_by: "compressed-tensors",
        format: Format::Mxfp4,
        codes: ("_packed", &["uint8"]),
        scale: ("_scale", EXPONENTS),
        scaling: Scaling::Columns(32),
        ..PLAIN
    },
    Known {
        title: "MXFP4",
        used_by: "modelopt",
        format: Format::Mxfp4,
        codes: ("", &["uint8"]),
        scale: ("_scale", EXPONENTS),
        scaling: Scaling::Columns(32),
        ..PLAIN
    },
    Known {
        title: "NVFP4",
        used_by: "modelopt",
        format: Format::Nvfp4,
        codes: ("", &["uint8"]),
        scale: ("_scale", &["float8_e4m3fn"]),
        scaling: Scaling::Columns(16),
        global: Some(("_scale_2", false)),
        ..PLAIN
    },
    Known {
        title: "NVFP4",
        used_by: "compressed-tensors",
        format: Format::Nvfp4,
        codes: ("_packed", &["uint8"]),
        scale: ("_scale", &["float8_e4m3fn"]),
        scaling: Scaling::Columns(16),
        global: Some(("_global_scale", true)),
        ..PLAIN
    },
    Known {
        title: "NVFP4",
        used_by: "ComfyUI",
        format: Format::Nvfp4,
        layer: Some("nvfp4"),
        order: Order::Tiles,
        weight: ".weight",
        codes: (".weight", &["uint8"]),
        scale: (".weight_scale", &["float8_e4m3fn"]),
        scaling: Scaling::Columns(16),
        global: Some((".weight_scale_2", false)),
        ..PLAIN
    },
    Known {
        title: "INT4",
        used_by: "Kimi K2, compressed-tensors",
        format: Format::Int4,
        codes: ("_packed", &["int32"]),
        scale: ("_scale", NUMBERS),
        scaling: Scaling::Groups,
        zeros: Some("_zero_point"),
        shape: Some("_shape"),
        ..PLAIN
    },
];

/// Names of tensors for the activations of a module, which weights do not need.
pub const ACTIVATIONS: [&str; 10] = [
    "input_scale",
    "output_scale",
    "activation_scale",
    "input_global_scale",
    "input_zero_point",
    "output_zero_point",
    "scale_input",
    "q_scale",
    "k_scale",
    "v_scale",
];

/// Ends of the names of tensors that only quantized weights of unknown formats have, and the
/// libraries that write them.
pub const UNKNOWN: [(&str, &str); 12] = [
    ("qweight", "GPTQ or AWQ"),
    ("qzeros", "GPTQ or AWQ"),
    ("absmax", "bitsandbytes"),
    ("quant_map", "bitsandbytes"),
    ("SCB", "bitsandbytes"),
    ("weight_format", "bitsandbytes"),
    ("pre_quant_scale", "modelopt (AWQ)"),
    ("svdquant_lora_a", "modelopt (SVDQuant)"),
    ("svdquant_lora_b", "modelopt (SVDQuant)"),
    ("weight_codebook", "ComfyUI"),
    ("weight_s_rel", "ComfyUI"),
    ("scale_weight", "ComfyUI"),
];

/// Returns the ends of all parts that a weight may have beside its codes.
pub fn parts() -> impl Iterator<Item = &'static str> {
    // `_g_idx` belongs to INT4 weights whose columns are in another order.
    let of = |known: &'static Known| {
        let ends = [Some(known.scale.0), known.global.map(|global| global.0), known.zeros];
        ends.into_iter().chain([known.shape, Some(known.codes.0)]).flatten()
    };
    KNOWN.iter().flat_map(of).filter(|end| end.starts_with('_')).chain(["_g_idx"])
}

/// Returns the table of the documentation.
#[cfg(test)]
fn table() -> String {
    use std::fmt::Write;
    let mut text = String::from(
        "| format | used by | codes | scales | a scale for each | further parts |\n\
         |---|---|---|---|---|---|\n",
    );
    let part = |(end, dtypes): (&str, &[&str])| format!("`X{end}`: {}", dtypes.join(", "));
    for known in &KNOWN {
        let global = known.global.map(|(end, _)| format!("`X{end}`"));
        let may = [known.zeros, known.shape].into_iter().flatten();
        let others: Vec<String> =
            global.into_iter().chain(may.map(|end| format!("maybe `X{end}`"))).collect();
        let tiles = if known.order == Order::Tiles { ", in tiles" } else { "" };
        writeln!(
            text,
            "| {} | {} | {} | {} | {}{tiles} | {} |",
            known.title,
            known.used_by,
            part(known.codes),
            part(known.scale),
            known.scaling.text(),
            others.join(", "),
        )
        .expect("a String takes all");
    }
    text
}

#[cfg(test)]
mod tests {
    /// `DCP_RS_WRITE_PAGES=1` writes the table to the page.
    #[test]
    fn the_page_has_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/quantized.md");
        let page = std::fs::read_to_string(path).unwrap();
        let table = super::table();
        let head = table.lines().next().unwrap();
        let begin = page.find(head).expect("the page has a table");
        let end = begin + page[begin..].find("\n\n").map_or(page.len() - begin, |end| end + 1);
        if std::env::var_os("DCP_RS_WRITE_PAGES").is_some() {
            let made = format!("{}{table}{}", &page[..begin], &page[end..]);
            std::fs::write(path, made).unwrap();
        } else {
            assert_eq!(page[begin..end], table, "DCP_RS_WRITE_PAGES=1 cargo test writes it");
        }
    }
}
