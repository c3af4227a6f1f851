//! Checkpoints that stock torch wrote (`tests/fixtures/make_stock.py`), read from every source and
//! compared byte for byte.

use std::fmt::Write as _;
use std::fs;

use serde_json::Value as Json;

use super::{fixtures, open, refusal};
use crate::format::{Index, Kind, Value};
use crate::{Checkpoint, Error, OpenOptions};

/// The bytes of a tensor, in row-major order.
fn read(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    let mut bytes = vec![0xEE; checkpoint.tensor(name).unwrap().nbytes()];
    checkpoint.read_into(name, &mut bytes).unwrap();
    bytes
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
    let checkpoint = Checkpoint::open(fixtures().join(case)).unwrap();
    let (tensors, values) =
        (expected["tensors"].as_object().unwrap(), expected["values"].as_object().unwrap());
    assert_eq!(index.tensor_count() as usize, tensors.len() + values.len(), "{case}");
    let names: Vec<&str> = checkpoint.names().collect();
    assert!(names.is_sorted() && names.len() == tensors.len(), "{case} {names:?}");
    for (fqn, wanted) in tensors {
        let t = index.find(fqn).unwrap_or_else(|| panic!("{case}: no {fqn}"));
        let tensor = index.tensor(t);
        let shape: Vec<u64> =
            wanted["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!(tensor.kind, Kind::Tensor, "{case} {fqn}");
        assert_eq!(tensor.dtype.unwrap().name(), wanted["dtype"].as_str().unwrap(), "{case} {fqn}");
        assert_eq!(tensor.shape.as_slice(), shape, "{case} {fqn}");
        assert_eq!(hex(&read(&checkpoint, fqn)), wanted["hex"].as_str().unwrap(), "{case} {fqn}");
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
    assert_error!(e, Error::NotFound { .. }, "rank-local");
    for rank in 0..2_u8 {
        let index = open(&folder, Some(rank.into())).unwrap();
        let checkpoint = OpenOptions::new().rank(rank.into()).open(&folder).unwrap();
        let expected = [f32::from(rank), f32::from(rank) + 1.0];
        assert_eq!(
            read(&checkpoint, "mine"),
            expected.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()
        );
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
