//! The `safetensors` crate reads every planned file as intended.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{Value as Json, json};

use super::super::header::in_header;
use super::super::testing::{INFO, content, odd_names, plan_files, rows, saves, value, whole};
use super::*;
use crate::Dtype;
use crate::format::{Value, to_header_name};
use crate::geometry::Dims;

/// The files as they would be written.
fn files(layout: &SaveLayout, items: &[SaveItem]) -> Vec<Vec<u8>> {
    let mut files: Vec<_> = layout.files.iter().map(|file| file.header.clone()).collect();
    for (bytes, plan) in files.iter_mut().zip(&layout.files) {
        for &item in &plan.items {
            assert_eq!(layout.places[item as usize].offset, bytes.len() as u64);
            bytes.extend(content(item as usize, items[item as usize].length));
        }
        assert_eq!(plan.size, bytes.len() as u64);
    }
    files
}

fn metadata(file: &[u8]) -> HashMap<String, String> {
    SafeTensors::read_metadata(file).unwrap().1.metadata().clone().unwrap()
}

/// Checks everything that section 2 of the format requires.
fn assert_well_formed(items: &[SaveItem], layout: &SaveLayout, limit: u64) {
    let mut placed = 0;
    for (number, (plan, bytes)) in layout.files.iter().zip(files(layout, items)).enumerate() {
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let data_start = plan.header.len() as u64;
        assert!(data_start.is_multiple_of(4096) && data_start <= limit);
        assert_eq!(file.len(), plan.items.len());
        placed += plan.items.len();

        let metadata = metadata(&bytes);
        assert_eq!((metadata["format"].as_str(), metadata["DCP_VERSION"].as_str()), ("pt", "1.0"));
        let sharding: HashMap<String, Json> =
            serde_json::from_str(&metadata["DCP_SHARDING_INFO"]).unwrap();
        assert_eq!(sharding.len(), plan.items.len());
        let about: Json = serde_json::from_str(&metadata["DCPRS"]).unwrap();
        assert_eq!(about["file"], number);
        assert_eq!(about["files"], layout.files.len());
        assert_eq!(
            (&about["version"], &about["generation"], &about["rank"], &about["world_size"]),
            (&json!(1), &json!(7), &json!(3), &json!(5))
        );

        let mut last_alignment = u64::MAX;
        for &id in &plan.items {
            let (item, place) = (&items[id as usize], layout.places[id as usize]);
            assert_eq!(place.file as usize, number);
            let alignment = alignment(item.length);
            assert!(place.offset.is_multiple_of(alignment) && alignment <= last_alignment);
            assert!(alignment >= item.dtype.map_or(1, Dtype::size));
            last_alignment = alignment;

            let name = to_header_name(&item.name);
            let view = file.tensor(&name).unwrap();
            assert_eq!(view.data(), content(id as usize, item.length));
            let (dtype, extra) = in_header(item);
            assert_eq!(view.dtype().to_string(), dtype);
            let shape: Vec<_> = item.sizes.iter().copied().chain(extra).collect();
            assert_eq!(view.shape().iter().map(|&n| n as u64).collect::<Vec<_>>(), shape);
            let offsets: Vec<_> = item.offsets.iter().copied().chain(extra.map(|_| 0)).collect();
            assert_eq!(sharding[&name], json!({"saved_offsets": offsets}));

            match about["tensors"].get(&name) {
                None => {
                    assert!(item.dtype.is_some_and(Dtype::is_native_to_safetensors));
                    assert_eq!((item.flags, &item.path, &item.sizes), (0, &None, &item.shape));
                }
                Some(entry) => {
                    let path = item.path.as_ref().map(|path| match path {
                        Value::Tuple(parts) => parts.iter().map(|part| match part {
                            Value::Str(text) => json!(text),
                            Value::Int(number) => json!(number),
                            other => panic!("{other:?}"),
                        }),
                        other => panic!("{other:?}"),
                    });
                    assert_eq!(
                        entry.get("path").cloned(),
                        path.map(|parts| Json::Array(parts.collect()))
                    );
                    match item.dtype {
                        None => assert_eq!(entry["kind"], "bytes"),
                        Some(dtype) => {
                            assert_eq!(
                                (&entry["kind"], &entry["dtype"]),
                                (&json!("tensor"), &json!(dtype.name()))
                            );
                            assert_eq!(entry["shape"], json!(item.shape.as_slice()));
                            assert_eq!(entry["flags"], item.flags);
                        }
                    }
                }
            }
        }
    }
    assert_eq!(placed, items.len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_file_is_a_safetensors_file(
        items in saves(12),
        limit in prop::sample::select(vec![40 << 10, 70_000, HEADER_LIMIT]),
    ) {
        let constraints = LayoutConstraints::default();
        let layout = plan_files_within(&items, &INFO, &constraints, limit).unwrap();
        assert_well_formed(&items, &layout, limit);
    }
}

#[test]
fn every_dtype_and_its_edge_shapes() {
    let mut items = Vec::new();
    for dtype in Dtype::all() {
        for shape in [&[][..], &[0], &[3, 0, 2], &[1], &[2, 3], &[4096]] {
            items.push(whole(&format!("{}.{shape:?}", dtype.name()), dtype.name(), shape));
        }
    }
    let layout = plan_files(&items, &INFO).unwrap();
    assert_eq!(layout.files.len(), 1);
    assert_well_formed(&items, &layout, HEADER_LIMIT);
}

#[test]
fn odd_names_are_kept() {
    let items: Vec<_> = odd_names().iter().map(|name| whole(name, "float32", &[2])).collect();
    assert_well_formed(&items, &plan_files(&items, &INFO).unwrap(), HEADER_LIMIT);
}

#[test]
fn nothing_to_save_is_still_a_file() {
    let layout = plan_files(&[], &INFO).unwrap();
    assert_eq!(layout.files.len(), 1);
    assert_eq!((layout.files[0].size, layout.files[0].header.len()), (4096, 4096));
    assert_eq!(layout.files[0].name, "g00000007-0000000000000abc-r00003-f00000.safetensors");
    assert_well_formed(&[], &layout, HEADER_LIMIT);
}

#[test]
fn chunks_of_one_tensor_go_to_files_of_their_own() {
    let mut items: Vec<_> =
        (0..3).map(|i| rows("w", "int8", &[6, 2], &[i * 2, 0], &[2, 2])).collect();
    items.push(whole("b", "int8", &[2]));
    let layout = plan_files(&items, &INFO).unwrap();
    let used: Vec<_> = layout.places.iter().map(|place| place.file).collect();
    assert_eq!(used, [0, 1, 2, 0]);
    assert_well_formed(&items, &layout, HEADER_LIMIT);
}

#[test]
fn a_file_may_have_a_bound() {
    let sizes = [700_u64, 200, 5000, 100, 900, 1];
    let items: Vec<SaveItem> = (0..)
        .zip(sizes)
        .map(|(number, size)| whole(&format!("t{number}"), "uint8", &[size]))
        .collect();
    let bound = |most_bytes| {
        let constraints = LayoutConstraints { most_bytes, ..LayoutConstraints::default() };
        plan_files_within(&items, &INFO, &constraints, HEADER_LIMIT).unwrap()
    };
    assert_eq!(bound(None).files.len(), 1);
    let layout = bound(Some(1000));
    assert_well_formed(&items, &layout, HEADER_LIMIT);
    // A larger item is alone.
    let lengths: Vec<u64> =
        (layout.files.iter()).map(|file| file.size - file.header.len() as u64).collect();
    assert_eq!(lengths, [900, 5000, 100 + 900, 1]);
}

#[test]
fn a_full_header_starts_the_next_file() {
    let items: Vec<_> =
        (0..200).map(|i| whole(&format!("layers.{i}.weight"), "bfloat16", &[i + 1])).collect();
    let layout = plan_files_within(&items, &INFO, &LayoutConstraints::default(), 8192).unwrap();
    assert!((4..12).contains(&layout.files.len()), "{} files", layout.files.len());
    assert!(layout.files.iter().rev().skip(1).all(|file| file.header.len() == 8192));
    assert_well_formed(&items, &layout, 8192);
    let error = plan_files_within(
        &[whole(&"n".repeat(3000), "int8", &[1])],
        &INFO,
        &LayoutConstraints::default(),
        4096,
    )
    .unwrap_err()
    .to_string();
    assert!(error.contains("nnn") && error.contains("header") && error.len() < 400, "{error}");
}

#[test]
fn large_and_aligned_comes_first() {
    let items = [
        whole("a", "uint8", &[3]),
        whole("b", "uint8", &[4096]),
        whole("c", "uint8", &[8192]),
        whole("d", "int16", &[0]),
    ];
    let layout = plan_files(&items, &INFO).unwrap();
    assert_eq!(layout.files[0].items, [1, 2, 3, 0]);
    assert_eq!(layout.places[0].offset, 4096 + 12288);
}

#[test]
fn a_whole_plain_tensor_costs_no_second_entry() {
    let layout = plan_files(&[whole("w", "bfloat16", &[2, 2])], &INFO).unwrap();
    let about: Json = serde_json::from_str(
        &metadata(&files(&layout, &[whole("w", "bfloat16", &[2, 2])])[0])["DCPRS"],
    )
    .unwrap();
    assert_eq!(about["tensors"], json!({}));
}

#[test]
fn what_cannot_be_saved_is_refused_by_name() {
    let good = whole("bad.w", "int32", &[2, 3]);
    let cases = [
        SaveItem { length: 23, ..good.clone() },
        SaveItem { dtype: None, ..good.clone() },
        SaveItem { flags: 0x10, ..good.clone() },
        SaveItem { flags: 0b1100, ..good.clone() },
        SaveItem { offsets: Dims::from_slice(&[1, 0]), ..good.clone() },
        SaveItem { offsets: Dims::from_slice(&[u64::MAX, 0]), ..good.clone() },
        SaveItem { offsets: Dims::from_slice(&[0]), ..good.clone() },
        SaveItem {
            shape: Dims::from_elem(1, 65),
            offsets: Dims::from_elem(0, 65),
            sizes: Dims::from_elem(1, 65),
            length: 4,
            ..good.clone()
        },
        SaveItem { dtype: good.dtype, ..value("bad.w", 3) },
        SaveItem { shape: Dims::from_slice(&[1]), ..value("bad.w", 3) },
    ];
    for item in cases {
        let error = plan_files(std::slice::from_ref(&item), &INFO).unwrap_err();
        assert!(
            matches!(&error, Error::TensorPlan { tensor, .. } if tensor == "bad.w"),
            "{error}: {item:?}"
        );
    }
    let huge = SaveItem {
        length: 0,
        ..rows("bad.w", "int32", &[1 << 40, 1 << 40, 0], &[0; 3], &[0, 0, 0])
    };
    let huge = SaveItem { sizes: huge.shape.clone(), ..huge };
    assert!(plan_files(&[huge], &INFO).unwrap_err().to_string().contains("overflow"));
    let giants: Vec<_> = (0..3).map(|i| whole(&format!("g{i}"), "uint8", &[1 << 60])).collect();
    assert!(plan_files(&giants, &INFO).is_ok());
    let giants: Vec<_> = (0..8).map(|i| whole(&format!("g{i}"), "uint8", &[1 << 60])).collect();
    assert!(plan_files(&giants, &INFO).unwrap_err().to_string().contains("exceed"));
    for pair in [
        [whole("w", "int8", &[2]), whole("w", "int16", &[2])],
        [whole("w", "int8", &[2]), whole("w", "int8", &[3])],
        [value("w", 1), value("w", 1)],
        [whole("w", "int8", &[2]), value("w", 1)],
    ] {
        assert!(plan_files(&pair, &INFO).unwrap_err().to_string().contains("\"w\""));
    }
}

#[test]
fn names_of_files_differ() {
    let items: Vec<_> = (0..4).map(|i| rows("w", "int8", &[4], &[i], &[1])).collect();
    let layout = plan_files(&items, &INFO).unwrap();
    assert_eq!(layout.files.iter().map(|file| &file.name).collect::<HashSet<_>>().len(), 4);
}
