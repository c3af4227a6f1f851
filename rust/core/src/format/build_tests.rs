//! Tests of indexes: layout, merging, damage and look-ups.

use proptest::prelude::*;

use super::super::digest::index_digest;
use super::super::layout::{DIGEST_AT, HEADER_LEN};
use super::*;
use crate::Dtype;
use crate::copy::Signs;
use crate::format::Kind;
use crate::geometry::Dims;

fn f32_tensor(name: &str, shape: &[u64]) -> TensorEntry {
    TensorEntry {
        name: name.into(),
        kind: Kind::Tensor,
        dtype: Dtype::from_name("float32"),
        shape: Dims::from_slice(shape),
        flags: 1,
        path: Some(Value::Tuple(vec![Value::Str(name.into()), Value::Int(3)])),
        position: None,
    }
}

fn with_file(size: u64) -> IndexBuilder {
    let mut builder = IndexBuilder::new(SourceKind::Native);
    builder
        .add_file(FileEntry {
            name: "data.safetensors".into(),
            size,
            data_start: 4096,
            external: false,
            linked: false,
            head_digest: Some(7),
            mtime_ns: 0,
        })
        .unwrap();
    builder
}

fn chunk(tensor: u32, offset: u64, offsets: &[u64], sizes: &[u64]) -> ChunkEntry {
    let length = sizes.iter().product::<u64>() * 4;
    ChunkEntry {
        tensor,
        file: 0,
        offset,
        length,
        offsets: Dims::from_slice(offsets),
        sizes: Dims::from_slice(sizes),
        strides: None,
        signs: Signs::default(),
        digests: Some(vec![9; usize::try_from(block_count(length)).unwrap()]),
        content: None,
        frozen: false,
    }
}

fn sample() -> Vec<u8> {
    let mut builder = with_file(4096 + 96 + 5);
    builder.generation = 4;
    builder.save_id = [5; 16];
    builder.root = Value::Dict(vec![]);
    let w = builder.add_tensor(f32_tensor("w", &[4, 4])).unwrap();
    let b = builder.add_tensor(f32_tensor("b", &[])).unwrap();
    let step = builder.add_tensor(TensorEntry::bytes("a.step")).unwrap();
    builder.add_chunk(chunk(w, 4128, &[2, 0], &[2, 4])).unwrap();
    builder.add_chunk(chunk(w, 4096, &[0, 0], &[2, 4])).unwrap();
    builder.add_chunk(chunk(b, 4160, &[], &[])).unwrap();
    builder
        .add_chunk(ChunkEntry {
            digests: None,
            content: None,
            frozen: false,
            length: 5,
            ..chunk(step, 4180, &[], &[])
        })
        .unwrap();
    builder.build().unwrap()
}

#[test]
fn what_is_built_is_found() {
    let index = Index::from_bytes(sample(), Path::new("ckpt/index.dcprs")).unwrap();
    assert_eq!((index.generation(), index.save_id(), index.version()), (4, [5; 16], 1));
    assert_eq!(index.writer(), Some(concat!("dcp-rs ", env!("CARGO_PKG_VERSION"))));
    assert_eq!(index.source(), SourceKind::Native);
    let names: Vec<_> = (0..index.tensor_count()).map(|t| index.name(t)).collect();
    assert_eq!(names, ["a.step", "b", "w"]);
    assert_eq!(index.find("w"), Some(2));
    assert_eq!(index.find("c"), None);
    assert_eq!(index.find("x"), None);
    let w = index.tensor(2);
    assert_eq!((w.shape.as_slice(), w.split_dim, w.chunks.clone()), (&[4, 4][..], Some(0), 2..4));
    let second = index.chunk(3);
    assert_eq!((second.offset, second.offsets.as_slice(), second.length), (4128, &[2, 0][..], 32));
    assert_eq!(index.chunk_extent(3, 0), 2..4);
    assert_eq!(index.digest(second.digests.unwrap().start), 9);
    assert_eq!(index.chunk(0).digests, None);
    assert_eq!(index.planner_path(0), None);
    assert_eq!(
        index.planner_path(2),
        Some(Value::Tuple(vec![Value::Str("w".into()), Value::Int(3)]))
    );
    assert_eq!(index.planner_root(), Value::Dict(vec![]));
    assert_eq!(index.file(0).head_digest, Some(7));
    assert_eq!(index.file_path(0), Path::new("ckpt/data.safetensors"));
}

#[test]
fn merging_two_halves_gives_the_whole() {
    let half = |row: u64, name: &str| {
        let mut builder = IndexBuilder::new(SourceKind::Native);
        builder
            .add_file(FileEntry {
                name: name.into(),
                size: 5000,
                data_start: 4096,
                external: false,
                linked: false,
                head_digest: None,
                mtime_ns: 0,
            })
            .unwrap();
        let w = builder.add_tensor(f32_tensor("w", &[4, 4])).unwrap();
        builder.add_chunk(chunk(w, 4096, &[row, 0], &[2, 4])).unwrap();
        Index::from_bytes(builder.build().unwrap(), Path::new("x")).unwrap()
    };
    let mut builder = IndexBuilder::new(SourceKind::Native);
    builder.merge(&half(2, "b")).unwrap();
    builder.merge(&half(0, "a")).unwrap();
    let index = Index::from_bytes(builder.build().unwrap(), Path::new("x")).unwrap();
    let w = index.tensor(0);
    assert_eq!(w.chunks, 0..2);
    assert_eq!(index.file(index.chunk(0).file).name, "a");
    assert_eq!(index.file(index.chunk(1).file).name, "b");
}

#[test]
fn contradictions_are_refused() {
    let mut builder = with_file(5000);
    let w = builder.add_tensor(f32_tensor("w", &[4, 4])).unwrap();
    assert_eq!(builder.add_tensor(f32_tensor("w", &[4, 4])).unwrap(), w);
    assert!(builder.add_tensor(f32_tensor("w", &[4, 5])).is_err());
    builder.add_chunk(chunk(w, 4096, &[3, 0], &[2, 4])).unwrap();
    assert!(builder.build().unwrap_err().to_string().contains("outside the tensor"));
}

#[test]
fn a_path_is_of_strings_and_integers() {
    let text = || Value::Str("w".into());
    for path in [
        Value::Tuple(vec![]),
        Value::List(vec![text()]),
        text(),
        Value::Tuple(vec![text(), Value::Bool(true)]),
        Value::Tuple(vec![Value::Tuple(vec![text()])]),
    ] {
        let mut builder = with_file(5000);
        builder
            .add_tensor(TensorEntry { path: Some(path), position: None, ..f32_tensor("w", &[4]) })
            .unwrap();
        let error = builder.build().unwrap_err();
        assert!(matches!(&error, Error::TensorPlan { tensor, .. } if tensor == "w"), "{error}");
    }
}

#[test]
fn every_flipped_byte_and_every_truncation_is_noticed() {
    let good = sample();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        assert!(Index::from_bytes(bad, Path::new("x")).is_err(), "byte {at}");
        assert!(Index::from_bytes(good[..at].to_vec(), Path::new("x")).is_err());
    }
}

/// Recomputes the digests of changed bytes, as an attacker can.
fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() >= HEADER_LEN {
        let digest = index_digest(&bytes, DIGEST_AT);
        bytes[DIGEST_AT..DIGEST_AT + 8].copy_from_slice(&digest.to_le_bytes());
    }
    bytes
}

/// Makes every possible look-up in an index that passed its checks.
fn look_everywhere(index: &Index) {
    for t in 0..index.tensor_count() {
        let tensor = index.tensor(t);
        assert_eq!(index.find(tensor.name), Some(t));
        for near in 0..index.tensor_count() + 2 {
            assert_eq!(index.find_near(tensor.name, near), Some(t));
            let absent = format!("{}\0", tensor.name);
            assert_eq!(index.find_near(&absent, near), index.find(&absent));
        }
        index.planner_path(t);
        for c in tensor.chunks {
            let chunk = index.chunk(c);
            let file = index.file(chunk.file);
            assert!(chunk.offset + chunk.length <= file.size);
            for d in chunk.digests.into_iter().flatten() {
                index.digest(d);
            }
        }
    }
    index.planner_root();
}

proptest! {
    #[test]
    fn a_resealed_mutation_is_refused_or_safe(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = sample();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(index) = Index::from_bytes(resealed(bytes), Path::new("x")) {
            look_everywhere(&index);
        }
    }
}
