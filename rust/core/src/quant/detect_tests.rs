//! Detection of quantized weights by names, dtypes and shapes.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;

use super::{About, detect};
use crate::copy::{Stores, fence};
use crate::format::{Index, IndexBuilder, Kind, SourceKind, TensorEntry, Value};
use crate::geometry::{Dims, Region, row_major};
use crate::quant::{Config, Target};
use crate::{Dtype, Error, Result};

/// Makes an index of tensors, given as `name dtype sizes` in lines: `m.weight float32 3x4`. A
/// tensor without dimensions has `-`.
fn index(stored: &str) -> Arc<Index> {
    let mut builder = IndexBuilder::new(SourceKind::Safetensors);
    for line in stored.split(';').filter(|line| !line.trim().is_empty()) {
        let [name, dtype, sizes] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{line:?} is no tensor")
        };
        let entry = TensorEntry {
            name: name.into(),
            kind: Kind::Tensor,
            dtype: Some(Dtype::from_name(dtype).expect("a dtype")),
            shape: shape(sizes),
            flags: 0,
            path: Some(Value::Tuple(vec![Value::Str(name.into())])),
            position: None,
        };
        builder.add_tensor(entry).unwrap();
    }
    Arc::new(Index::from_bytes(builder.build().unwrap(), Path::new("q/index.dcprs")).unwrap())
}

fn shape(sizes: &str) -> Dims {
    sizes.split('x').filter(|size| *size != "-").map(|size| size.parse().unwrap()).collect()
}

fn by(sizes: &[u64]) -> String {
    sizes.iter().map(u64::to_string).collect::<Vec<_>>().join("x")
}

/// Facts about a checkpoint: the blocks of its configuration, and `ComfyUI`'s format of the layer
/// `t`.
fn about(block: Option<[u64; 2]>, stored: &str) -> About {
    let form = ["mxfp8", "nvfp4"].into_iter().find(|form| stored.contains(&format!("t.{form}")));
    let layers = form.map(|form| (format!("t.{form}"), serde_json::json!({ "format": form })));
    let config = block.map(|block| Config { block: Some(block), groups: Vec::new() });
    About { config, layers: layers.into_iter().collect(), ..About::default() }
}

/// Describes the entries that a checkpoint has after detection, or names the tensor of the error.
fn entries(stored: &str, block: Option<[u64; 2]>) -> String {
    let index = index(stored);
    match detect(&index, about(block, stored), Target::Float32) {
        Ok(found) => {
            let mut text = String::new();
            let is_coded = |tensor: u32| found.hidden.contains(&tensor);
            for tensor in (0..index.tensor_count()).filter(|&tensor| !is_coded(tensor)) {
                write!(text, "{}; ", index.name(tensor)).unwrap();
            }
            for (name, coded) in &found.coded {
                let (shape, block) = (by(&coded.shape), by(&coded.block));
                write!(text, "{name} {} {shape} / {block}; ", coded.format.name()).unwrap();
            }
            text.trim_end_matches("; ").to_owned()
        }
        Err(Error::Quantization { tensor, .. }) => format!("error {tensor}"),
        Err(error) => panic!("{error}"),
    }
}

#[track_caller]
fn assert_entries(stored: &str, block: Option<[u64; 2]>, expected: &str) {
    assert_eq!(entries(stored, block), expected, "{stored} with blocks of {block:?}");
}

#[test]
fn scales_have_the_shape_of_their_format() {
    let blocks = Some([128, 128]);
    let inverse = |weight: &str, scale: &str| {
        format!("m.weight float8_e4m3fn {weight}; m.weight_scale_inv float32 {scale}")
    };
    for (weight, scale, block, expected) in [
        ("130x200", "2x2", None, "130x200 / 128x128"),
        ("130x200", "2x2", Some([65, 100]), "130x200 / 65x100"),
        ("130x200", "-", blocks, "130x200 / 130x200"),
        ("130x200", "1", None, "130x200 / 130x200"),
        ("130x200", "1x1", None, "130x200 / 130x200"),
        ("1x30", "1x1", blocks, "1x30 / 128x128"),
        ("3x130x200", "3x2x2", None, "3x130x200 / 128x128"),
        ("3x130x200", "3x1x1", None, "3x130x200 / 130x200"),
        ("3x130x200", "-", None, "3x130x200 / 130x200"),
        ("3x130x200", "1", blocks, "3x130x200 / 130x200"),
        ("8x4x3x3", "1", None, "8x4x3x3 / 3x3"),
        ("0x200", "0x2", None, "0x200 / 128x128"),
    ] {
        let expected = format!("m.weight fp8 {expected}");
        assert_entries(&inverse(weight, scale), block, &expected);
    }
    for (weight, scale, block) in [
        ("130x200", "2x3", None),
        ("130x200", "3x2", None),
        ("130x200", "2", None),
        ("130x200", "2x2x1", None),
        ("130x200", "1x2x2", None),
        ("130x200", "130x1", None),
        ("130x200", "1x1", blocks),
        ("130x200", "2x2", Some([64, 64])),
        ("130x200", "0x2", None),
        ("3x130x200", "2x2", None),
        ("3x130x200", "1x2x2", None),
        ("3x130x200", "3x2", None),
        ("3x130x200", "3", None),
        ("130", "2", None),
    ] {
        assert_entries(&inverse(weight, scale), block, "error m.weight");
    }
}

#[test]
fn blocks_beside_a_scale_of_rows_are_those_of_the_configuration() {
    let rows =
        |scale: &str| format!("m.weight float8_e4m3fn 130x200; m.weight_scale bfloat16 {scale}");
    for (scale, block, expected) in [
        ("130x1", None, "m.weight fp8 130x200 / 1x200"),
        ("130", None, "m.weight fp8 130x200 / 1x200"),
        ("-", None, "m.weight fp8 130x200 / 130x200"),
        ("2x2", Some([128, 128]), "m.weight fp8 130x200 / 128x128"),
        ("130x2", Some([1, 100]), "m.weight fp8 130x200 / 1x100"),
        // Nothing says how large these blocks are.
        ("2x2", None, "error m.weight"),
        // Scales of columns.
        ("200", None, "error m.weight"),
        ("1x200", None, "error m.weight"),
        ("130x1x1", None, "error m.weight"),
    ] {
        assert_entries(&rows(scale), block, expected);
    }
}

#[test]
fn packed_codes_and_their_scales() {
    for (stored, expected) in [
        ("e_blocks uint8 2x5x3x16; e_scales uint8 2x5x3", "e mxfp4 2x5x96 / 1x32"),
        ("e_blocks uint8 2x5x3x16; e_scales uint8 2x5x4", "error e"),
        ("e_blocks uint8 2x5x3x8; e_scales uint8 2x5x3", "error e"),
        ("e_blocks uint8 3x16; e_scales uint8 3", "error e"),
        ("e_blocks uint8 2x5x3x16; e_scales float32 2x5x3", "error e_blocks"),
        ("e_blocks uint8 2x5x3x8; e_scales float32 2x5x3", "error e_blocks"),
        ("m.weight uint8 6x36; m.weight_scale uint8 6x3", "m.weight mxfp4 6x72 / 1x32"),
        ("m.weight uint8 6x36; m.weight_scale uint8 6x5", "error m.weight"),
        (
            "m.weight uint8 6x24; m.weight_scale float8_e4m3fn 6x3; m.weight_scale_2 float32 -",
            "m.weight nvfp4 6x48 / 1x16",
        ),
        (
            "m.weight uint8 6x24; m.weight_scale float8_e4m3fn 6x2; m.weight_scale_2 float32 -",
            "error m.weight",
        ),
        (
            "m.weight uint8 6x24; m.weight_scale float8_e4m3fn 6x3; m.weight_scale_2 float32 6",
            "error m.weight",
        ),
        // MXFP4 and NVFP4 at the same time: its exponents are those of neither.
        (
            "m.weight uint8 6x32; m.weight_scale uint8 6x2; m.weight_scale_2 float32 -",
            "error m.weight_scale_2",
        ),
        ("m.weight_packed int32 4x8; m.weight_scale float16 4x2", "m.weight int4 4x64 / 1x32"),
        ("m.weight_packed int32 4x8; m.weight_scale float16 3x2", "error m.weight"),
        ("m.weight_packed int32 4x8; m.weight_scale float16 4x0", "error m.weight"),
        ("m.weight_packed int32 4x8; m.weight_scale uint8 4x2", "error m.weight_packed"),
    ] {
        assert_entries(stored, None, expected);
    }
}

#[test]
fn scales_in_tiles_belong_to_described_layers() {
    for (stored, expected) in [
        (
            "t.mxfp8.weight float8_e4m3fn 130x160; t.mxfp8.weight_scale uint8 256x8",
            "t.mxfp8.weight fp8 130x160 / 1x32",
        ),
        (
            "t.mxfp8.weight float8_e4m3fn 130x160; t.mxfp8.weight_scale uint8 130x5",
            "error t.mxfp8.weight",
        ),
        ("t.mxfp8.weight float8_e4m3fn 1x32; t.mxfp8.weight_scale uint8 1", "error t.mxfp8.weight"),
        (
            "t.nvfp4.weight uint8 16x40; t.nvfp4.weight_scale float8_e4m3fn 128x8; \
          t.nvfp4.weight_scale_2 float32 -",
            "t.nvfp4.weight nvfp4 16x80 / 1x16",
        ),
        (
            "t.nvfp4.weight uint8 16x40; t.nvfp4.weight_scale float8_e4m3fn 16x5; \
          t.nvfp4.weight_scale_2 float32 -",
            "error t.nvfp4.weight",
        ),
        (
            "t.nvfp4.weight uint8 2x16x40; t.nvfp4.weight_scale float8_e4m3fn 256x8; \
          t.nvfp4.weight_scale_2 float32 -",
            "error t.nvfp4.weight",
        ),
        (
            "t.nvfp4.weight uint8 16x40; t.nvfp4.weight_scale float8_e4m3fn 128x8",
            "error t.nvfp4.weight",
        ),
    ] {
        assert_entries(stored, None, expected);
    }
}

#[test]
fn scales_of_blocks_can_have_dimensions_of_one() {
    let spread =
        |scale: &str| format!("m.weight float8_e4m3fn 130x300; m.weight_scale float32 {scale}");
    for (scale, block, expected) in [
        ("2x1x3x1", Some([128, 128]), "m.weight fp8 130x300 / 128x128"),
        ("2x1x3x1", None, "error m.weight"),
        ("2x3x1x1", Some([128, 128]), "error m.weight"),
        ("1x2x1x3", Some([128, 128]), "error m.weight"),
        ("3x1x2x1", Some([128, 128]), "error m.weight"),
    ] {
        assert_entries(&spread(scale), block, expected);
    }
}

#[test]
fn codes_are_found_by_their_own_scale() {
    // Another scale of the module, the last by name, hid that of the codes.
    let codes = "m.w1 uint8 4x8; m.w1_scale float32 4x1";
    assert_entries(&format!("{codes}; m.z_scale float32 1"), None, "error m.w1");
    assert_entries(&format!("{codes}; m.w1_a.scale float32 1"), None, "error m.w1");
    assert_entries("m.weight_q uint8 4x8; m.scale float32 4x1", None, "error m.weight_q");
    for plain in [
        "m.mask uint8 4x4; m.scale float32 1",
        "pos uint8 4x4; pos_embed.scale float32 4",
        "m.weight bfloat16 4x4; m.scale float32 4",
        "m.weight_mask uint8 4x4; m.weight_orig float32 4x4",
        "m.k_scale float32 1; m.q_scale float32 8x1; m.ids int32 4x4",
    ] {
        let names: Vec<&str> =
            plain.split(';').map(|line| line.split_whitespace().next().unwrap()).collect();
        let mut sorted = names.clone();
        sorted.sort_unstable();
        assert_entries(plain, None, &sorted.join("; "));
    }
}

#[test]
fn one_weight_has_one_form() {
    for stored in [
        "m.weight float8_e4m3fn 4x32; m.weight_packed uint8 4x16; m.weight_scale uint8 4x1",
        "m.weight float8_e4m3fn 4x32; m.weight_scale float32 4x1; m.weight_scale_inv float32 1x1",
        "m.weight bfloat16 4x32; m.weight_packed int32 4x4; m.weight_scale float16 4x1",
    ] {
        assert!(entries(stored, None).starts_with("error m.weight"), "{stored}");
    }
}

/// Parameters of modules that are not quantized were dropped for their names.
#[test]
fn learned_scales_stay_beside_quantized_weights() {
    let weight = "m.weight float8_e4m3fn 4x32; m.weight_scale float32 4x1; m.input_scale float32 -";
    let coded = "m.weight fp8 4x32 / 1x32";
    for (others, kept) in [
        ("n.output_scale float32 8", "n.output_scale; "),
        ("n.output_scale float32 -", "n.output_scale; "),
        ("n.q_scale float32 8x1; n.k_scale float32 8x1", "n.k_scale; n.q_scale; "),
        ("n.k_scale float32 -; n.v_proj.v_scale float32 1", ""),
        ("m.output_scale float32 -; m.input_global_scale float32 1", ""),
        ("m.correct_output_scale float32 8", "m.correct_output_scale; "),
    ] {
        assert_entries(&format!("{weight}; {others}"), None, &format!("{kept}{coded}"));
    }
}

/// Sizes, few of which divide each other.
fn size() -> impl Strategy<Value = u64> {
    prop_oneof![0..4_u64, 30..35_u64, Just(16), Just(64), Just(65)]
}

/// A weight, with a scale of a shape that may be right.
fn stored() -> impl Strategy<Value = String> {
    let lead = prop::option::of(0..3_u64);
    let block = prop_oneof![Just([128, 128]), Just([1, 32]), Just([1, 16]), Just([1, u64::MAX])];
    (lead, size(), size(), block, 0..11_u8, 0..7_u8).prop_map(
        |(lead, rows, columns, [tall, wide], format, form)| {
            let grid = [rows.div_ceil(tall), columns.div_ceil(wide)];
            let lead: Vec<u64> = lead.into_iter().collect();
            let scale = match form {
                0 => vec![],
                1 => [&lead[..], &[rows]].concat(),
                2 => vec![1; 2 + lead.len()],
                3 => [&lead[..], &[1, 1]].concat(),
                4 => [&lead[..], &[grid[0], 1, grid[1], 1]].concat(),
                5 => vec![rows.next_multiple_of(128), grid[1].next_multiple_of(4)],
                _ => [&lead[..], &grid].concat(),
            };
            let sizes = |last: u64| by(&[&lead[..], &[rows, last]].concat());
            let scale = if scale.is_empty() { "-".to_owned() } else { by(&scale) };
            let (whole, half, word) =
                (sizes(columns), sizes(columns.div_ceil(2)), sizes(columns.div_ceil(8)));
            match format {
                0 => format!("m float8_e4m3fn {whole}; m_scale_inv float32 {scale}"),
                1 => format!("m.weight float8_e4m3fn {whole}; m.scale float8_e8m0fnu {scale}"),
                2 => format!("m float8_e4m3fn {whole}; m_scale float16 {scale}"),
                3 => format!("m float8_e4m3fn {whole}; m_scale uint8 {scale}"),
                4 => format!("m uint8 {half}; m_scale uint8 {scale}"),
                5 => format!("m uint8 {half}; m_scale float8_e4m3fn {scale}; m_scale_2 float32 1"),
                6 => format!("m_packed int32 {word}; m_scale bfloat16 {scale}"),
                7 => format!(
                    "t.mxfp8.weight float8_e4m3fn {whole}; t.mxfp8.weight_scale uint8 {scale}"
                ),
                8 => format!(
                    "t.nvfp4.weight uint8 {half}; t.nvfp4.weight_scale float8_e4m3fn {scale}; \
                     t.nvfp4.weight_scale_2 float32 1"
                ),
                9 => format!("m float8_e4m3fn {whole}; m_weight_scale float32 {scale}"),
                _ => format!("m_blocks uint8 {}x16; m_scales uint8 {scale}", sizes(grid[1])),
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 8 } else { 2000 }))]

    /// Whatever is accepted can be decoded: every rectangle has its parts in the stored tensors.
    #[test]
    fn accepted_shapes_can_be_decoded(
        stored in stored(),
        block in prop::option::of(prop_oneof![Just([128, 128]), Just([1, 32]), Just([2, 3])]),
        bounds in prop::collection::vec((0.0..1.0_f64, 0.0..1.0_f64), 3),
    ) {
        let index = index(&stored);
        let found = detect(&index, about(block, &stored), Target::BFloat16);
        let Ok(found) = found else { return Ok(()) };
        for (_, coded) in &found.coded {
            let whole = Region::new(&Dims::from_elem(0, coded.shape.len()), &coded.shape);
            let part = part(&coded.shape, &bounds);
            for region in [whole, part] {
                let parts = coded.parts(&region.offsets, &region.sizes);
                let bytes: Vec<Vec<u8>> = parts
                    .iter()
                    .map(|part| {
                        let of = index.tensor(part.tensor).shape;
                        assert!(part.region.fits(&of), "{stored}: {:?} of {of:?}", part.region);
                        vec![1; usize::try_from(part.length()).unwrap()]
                    })
                    .collect();
                let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
                let count: u64 = region.sizes.iter().product();
                let mut out = vec![0; usize::try_from(2 * count).unwrap()];
                let row = usize::try_from(2 * region.sizes[region.sizes.len() - 1]).unwrap();
                let rows = out.chunks_exact_mut(row.max(1));
                let done: Result<()> =
                    coded.decode(&region.offsets, &region.sizes, &bytes, rows, Stores::Cached);
                done.unwrap();
            }
        }
    }
}

/// Returns the bytes of a region of a tensor, whose bytes are a function of their place.
fn bytes_of(shape: &[u64], region: &Region, itemsize: u64) -> Vec<u8> {
    let strides = row_major(shape);
    let count: u64 = region.sizes.iter().product();
    let at = |mut i: u64| {
        let mut at = 0;
        for d in (0..shape.len()).rev() {
            at += (region.offsets[d] + i % region.sizes[d]) * strides[d];
            i /= region.sizes[d];
        }
        at
    };
    // Scales of two and four bytes are 0.5 and 2.
    (0..count)
        .map(at)
        .flat_map(|at| match itemsize {
            4 => (if at % 2 == 0 { 0.5_f32 } else { 2.0 }).to_le_bytes().to_vec(),
            2 => vec![0, if at % 2 == 0 { 0x38 } else { 0x40 }],
            _ => vec![(at.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()[0]],
        })
        .collect()
}

/// Large rectangles are decoded with tables, single rows by arithmetic.
#[test]
fn a_rectangle_has_the_numbers_of_its_rows() {
    for stored in [
        "m float8_e4m3fn 2x300x640; m_scale_inv float32 2x3x5",
        "m.weight float8_e4m3fn 2x300x640; m.scale float8_e8m0fnu 2x3x5",
        "m float8_e4m3fn 2x300x640; m_scale uint8 2x300x20",
        "m uint8 2x300x320; m_scale uint8 2x300x20",
        "m uint8 2x300x320; m_scale float8_e4m3fn 2x300x40; m_scale_2 float32 1",
        "m_blocks uint8 2x300x20x16; m_scales uint8 2x300x20",
    ] {
        let index = index(stored);
        let found = detect(&index, About::default(), Target::BFloat16).unwrap();
        let [(_, coded)] = &found.coded[..] else { panic!("{stored}") };
        let decode = |offsets: &[u64], sizes: &[u64], ways: &[(usize, Stores)]| {
            let parts: Vec<Vec<u8>> = coded
                .parts(offsets, sizes)
                .iter()
                .map(|part| bytes_of(&index.tensor(part.tensor).shape, &part.region, part.itemsize))
                .collect();
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let size = |x: u64| usize::try_from(x).unwrap();
            let length = size(2 * sizes.iter().product::<u64>());
            let mut out = vec![0; length + 128];
            let lines = out.as_ptr().align_offset(64);
            let each = ways.iter().map(|&(at, stores)| {
                let out = &mut out[lines + at..lines + at + length];
                let rows = out.chunks_exact_mut(2 * size(sizes[2]));
                coded.decode(offsets, sizes, &parts, rows, stores).unwrap();
                fence();
                out.to_vec()
            });
            each.collect::<Vec<_>>()
        };
        for (offsets, sizes) in
            [([0, 0, 0], [2, 300, 640]), ([0, 100, 64], [2, 190, 512]), ([1, 7, 32], [1, 290, 608])]
        {
            let ways = [(0, Stores::Streaming), (0, Stores::Cached), (2, Stores::Streaming)];
            let whole = decode(&offsets, &sizes, &ways);
            let row_bytes = 2 * usize::try_from(sizes[2]).unwrap();
            for i in (0..sizes[0] * sizes[1]).step_by(37) {
                let (outer, row) = (offsets[0] + i / sizes[1], offsets[1] + i % sizes[1]);
                let row = decode(&[outer, row, offsets[2]], &[1, 1, sizes[2]], &[ways[1]]);
                let begin = row_bytes * usize::try_from(i).unwrap();
                for (whole, way) in whole.iter().zip(ways) {
                    let same = whole[begin..begin + row_bytes] == row[0];
                    assert!(same, "{stored}, {offsets:?}, row {i}, {way:?}");
                }
            }
        }
    }
}

/// Cuts a rectangle out, by fractions of each dimension.
#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_sign_loss)]
fn part(shape: &[u64], bounds: &[(f64, f64)]) -> Region {
    let (mut offsets, mut sizes) = (Dims::new(), Dims::new());
    for (&size, &(a, b)) in shape.iter().zip(bounds) {
        let at = |fraction: f64| (fraction * (size + 1) as f64) as u64;
        offsets.push(at(a.min(b)));
        sizes.push(at(a.max(b)) - at(a.min(b)));
    }
    Region { offsets, sizes }
}
