//! Checkpoints that stock torch wrote (`tests/fixtures/make_stock.py`), read from every source and
//! compared byte for byte.
#![allow(unsafe_code)] // changes signs of memory that it has

use std::fmt::Write as _;
use std::fs;

use serde_json::Value as Json;

use super::{fixtures, open, refusal};
use crate::Error;
use crate::format::{Index, Kind, Value};
use crate::geometry::{Dims, element_count};

/// Assembles the bytes of a tensor in row-major order from its chunks.
fn assemble(index: &Index, t: u32) -> Vec<u8> {
    let tensor = index.tensor(t);
    let width = usize::try_from(tensor.dtype.unwrap().size()).unwrap();
    let count = usize::try_from(element_count(&tensor.shape).unwrap()).unwrap();
    let mut whole = vec![0; count * width];
    let mut covered = vec![false; count];
    for c in tensor.chunks {
        let chunk = index.chunk(c);
        let file = fs::read(index.file_path(chunk.file)).unwrap();
        let from = usize::try_from(chunk.offset).unwrap();
        let data = &file[from..from + usize::try_from(chunk.length).unwrap()];
        let bits = chunk.signs.bits(tensor.dtype.unwrap()).unwrap();
        let strides = chunk.strides.unwrap_or_else(|| contiguous(&chunk.sizes));
        let mut at = Dims::from_elem(0, chunk.sizes.len());
        for _ in 0..element_count(&chunk.sizes).unwrap() {
            let source: u64 = at.iter().zip(&strides).map(|(i, stride)| i * stride).sum();
            let source = usize::try_from(source).unwrap() * width;
            let target =
                (0..at.len()).fold(0, |n, d| n * tensor.shape[d] + chunk.offsets[d] + at[d]);
            let target = usize::try_from(target).unwrap();
            let element = &mut whole[target * width..][..width];
            element.copy_from_slice(&data[source..source + width]);
            // SAFETY: one element.
            unsafe { bits.change(element.as_mut_ptr(), &[], &[]) };
            covered[target] = true;
            for d in (0..at.len()).rev() {
                at[d] += 1;
                if at[d] < chunk.sizes[d] {
                    break;
                }
                at[d] = 0;
            }
        }
    }
    assert!(covered.iter().all(|&covered| covered));
    whole
}

fn contiguous(sizes: &[u64]) -> Dims {
    let mut strides = Dims::from_elem(1, sizes.len());
    for d in (1..sizes.len()).rev() {
        strides[d - 1] = strides[d] * sizes[d];
    }
    strides
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn path_of(json: &Json) -> Option<Value> {
    let parts = json.as_array()?.iter().map(|part| match part {
        Json::String(s) => Value::Str(s.clone()),
        number => Value::Int(number.as_i64().unwrap()),
    });
    Some(Value::Tuple(parts.collect()))
}

/// Compares an index with the expectations of `make_stock.py`.
fn check(case: &str, index: &Index, expected: &Json) {
    let (tensors, values) =
        (expected["tensors"].as_object().unwrap(), expected["values"].as_object().unwrap());
    assert_eq!(index.tensor_count() as usize, tensors.len() + values.len(), "{case}");
    for (fqn, wanted) in tensors {
        let t = index.find(fqn).unwrap_or_else(|| panic!("{case}: no {fqn}"));
        let tensor = index.tensor(t);
        let shape: Vec<u64> =
            wanted["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!(tensor.kind, Kind::Tensor, "{case} {fqn}");
        assert_eq!(tensor.dtype.unwrap().name(), wanted["dtype"].as_str().unwrap(), "{case} {fqn}");
        assert_eq!(tensor.shape.as_slice(), shape, "{case} {fqn}");
        assert_eq!(hex(&assemble(index, t)), wanted["hex"].as_str().unwrap(), "{case} {fqn}");
        if let Some(path) = path_of(&wanted["path"]) {
            assert_eq!(index.planner_path(t), Some(path), "{case} {fqn}");
        }
    }
    for (fqn, path) in values {
        let t = index.find(fqn).unwrap_or_else(|| panic!("{case}: no {fqn}"));
        let value = index.tensor(t);
        assert_eq!(value.kind, Kind::Bytes, "{case} {fqn}");
        let chunk = index.chunk(value.chunks.start);
        let file = fs::read(index.file_path(chunk.file)).unwrap();
        let from = usize::try_from(chunk.offset).unwrap();
        let data = &file[from..from + usize::try_from(chunk.length).unwrap()];
        assert!(data.starts_with(b"PK\x03\x04"), "{case} {fqn}");
        assert_eq!(&data[data.len() - 22..][..4], b"PK\x05\x06", "{case} {fqn}");
        if let Some(path) = path_of(path) {
            assert_eq!(index.planner_path(t), Some(path), "{case} {fqn}");
        }
    }
}

#[test]
fn stock_checkpoints_of_all_releases_read_the_same_bytes() {
    let mut cases = 0;
    for release in fs::read_dir(fixtures()).unwrap() {
        let release = release.unwrap().path();
        for entry in fs::read_dir(&release).unwrap() {
            let noted = entry.unwrap().path();
            if noted.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let folder = noted.with_extension("");
            let case = folder.strip_prefix(fixtures()).unwrap().display().to_string();
            let expected: Json = serde_json::from_slice(&fs::read(&noted).unwrap()).unwrap();
            cases += 1;
            if case.ends_with("rank_local") {
                continue; // below
            }
            match (open(&folder, None), expected["error"].as_str()) {
                (Ok(index), None) => check(&case, &index, &expected),
                (Err(e @ Error::Unsupported(_)), Some(part)) => {
                    assert!(e.to_string().contains(part), "{case}: {e}");
                }
                (Ok(_), Some(part)) => panic!("{case}: expected an error with {part}"),
                (Err(e), _) => panic!("{case}: {e}"),
            }
        }
    }
    assert!(cases >= 18, "{cases}");
}

#[test]
fn a_rank_local_checkpoint_opens_for_a_rank() {
    let folder = fixtures().join("torch-2.15.0/rank_local");
    let e = refusal(&folder, None);
    assert!(matches!(&e, Error::NotFound { .. }) && e.to_string().contains("rank-local"), "{e}");
    for rank in 0..2_u8 {
        let index = open(&folder, Some(rank.into())).unwrap();
        let mine = assemble(&index, index.find("mine").unwrap());
        let expected = [f32::from(rank), f32::from(rank) + 1.0];
        assert_eq!(mine, expected.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
        let rows = index.tensor(index.find("rows").unwrap());
        assert_eq!((rows.shape.as_slice(), rows.chunks.count()), (&[5, 3][..], 1));
    }
    let e = refusal(&folder, Some(2));
    assert!(matches!(&e, Error::NotFound { .. }), "{e}");
}

#[test]
fn layouts_are_kept_and_not_copied() {
    let index = open(&fixtures().join("torch-2.15.0/plain"), None).unwrap();
    let strides =
        |fqn: &str| index.chunk(index.tensor(index.find(fqn).unwrap()).chunks.start).strides;
    assert_eq!(strides("transposed").as_deref(), Some(&[1, 3][..]));
    assert_eq!(strides("channels_last").as_deref(), Some(&[8, 1, 4, 2][..]));
    assert_eq!(strides("float32"), None);
    assert_eq!(index.planner_root(), Value::Dict(vec![]));
    let index = open(&fixtures().join("torch-2.15.0/sharded"), None).unwrap();
    assert_eq!(index.tensor(index.find("rows").unwrap()).split_dim, Some(0));
    assert_eq!(index.tensor(index.find("columns").unwrap()).split_dim, Some(1));
}
