//! Hugging Face folders, whole and broken.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::{open, refusal};
use crate::Error;

/// Name, shape, and offsets if the header has them.
type Tensor<'a> = (&'a str, &'a [u64], Option<&'a [u64]>);

/// Writes a file of `U8` tensors, each with its shape and optional offsets.
fn write(dir: &Path, name: &str, tensors: &[Tensor<'_>]) {
    let (mut header, mut noted, mut at) = (String::new(), String::new(), 0);
    for (fqn, shape, offsets) in tensors {
        let end = at + shape.iter().product::<u64>();
        write!(
            header,
            r#","{fqn}":{{"dtype":"U8","shape":{shape:?},"data_offsets":[{at},{end}]}}"#
        )
        .unwrap();
        if let Some(offsets) = offsets {
            write!(noted, r#",\"{fqn}\":{{\"saved_offsets\":{offsets:?}}}"#).unwrap();
        }
        at = end;
    }
    let texts = match noted.strip_prefix(',') {
        Some(noted) => format!(r#""__metadata__":{{"DCP_SHARDING_INFO":"{{{noted}}}"}}{header}"#),
        None => header.strip_prefix(',').unwrap_or_default().to_owned(),
    };
    let header = format!("{{{texts}}}");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + usize::try_from(at).unwrap(), 1);
    fs::write(dir.join(name), bytes).unwrap();
}

fn refused(dir: &Path, part: &str) -> Error {
    let e = refusal(dir, None);
    assert!(e.to_string().contains(part), "{e}");
    e
}

#[test]
fn one_file_alone_and_in_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    write(
        dir.path(),
        "a.safetensors",
        &[("w", &[2, 3], None), ("b", &[], None), ("none", &[0], None)],
    );
    let index = open(&dir.path().join("a.safetensors"), None).unwrap();
    assert_eq!(index.tensor_count(), 3);
    assert_eq!(index.file_path(0), dir.path().join("a.safetensors"));
    assert_eq!(open(dir.path(), None).unwrap().tensor_count(), 3);
    write(dir.path(), "b.safetensors", &[("v", &[2, 3], None)]);
    let e = refused(dir.path(), "several models in one folder");
    assert!(
        matches!(e, Error::Unsupported(_))
            && e.to_string().contains("a.safetensors, b.safetensors")
    );
}

#[test]
fn an_index_says_which_file_counts() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "one.safetensors", &[("w", &[2], None)]);
    write(dir.path(), "two.safetensors", &[("w", &[3], None), ("v", &[1], None)]);
    write(dir.path(), "consolidated.safetensors", &[("w", &[3], None)]);
    let note = |map: &str| {
        fs::write(
            dir.path().join("model.safetensors.index.json"),
            format!(r#"{{"weight_map":{{{map}}}}}"#),
        )
    };
    note(r#""w":"two.safetensors","v":"two.safetensors""#).unwrap();
    let index = open(dir.path(), None).unwrap();
    assert_eq!(index.tensor(index.find("w").unwrap()).shape.as_slice(), [3]);
    assert_eq!(index.file_count(), 1);
    note(r#""w":"one.safetensors","v":"two.safetensors""#).unwrap();
    let index = open(dir.path(), None).unwrap();
    assert_eq!(index.tensor(index.find("w").unwrap()).shape.as_slice(), [2]);
    note(r#""w":"one.safetensors","x":"two.safetensors""#).unwrap();
    refused(dir.path(), r#"tensor "x""#);
    note(r#""w":"gone.safetensors""#).unwrap();
    assert!(matches!(refused(dir.path(), "gone.safetensors"), Error::CorruptData { .. }));
    note(r#""w":"../one.safetensors""#).unwrap();
    refused(dir.path(), "leads out");
    fs::write(dir.path().join("model.safetensors.index.json"), "[").unwrap();
    assert!(matches!(refused(dir.path(), "line 1"), Error::CorruptIndex { .. }));
}

#[test]
fn shards_tile_or_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(
        dir.path(),
        "shard-00001-model-00001-of-00001.safetensors",
        &[("w", &[2, 4], Some(&[0, 0]))],
    );
    write(
        dir.path(),
        "shard-00002-model-00001-of-00001.safetensors",
        &[("w", &[3, 4], Some(&[2, 0]))],
    );
    let index = open(dir.path(), None).unwrap();
    let w = index.tensor(0);
    assert_eq!((w.shape.as_slice(), w.split_dim, w.chunks.count()), (&[5, 4][..], Some(0), 2));
    // A replica is not an overlap.
    write(
        dir.path(),
        "shard-00003-model-00001-of-00001.safetensors",
        &[("w", &[3, 4], Some(&[2, 0]))],
    );
    assert_eq!(open(dir.path(), None).unwrap().tensor(0).chunks.count(), 2);
    write(
        dir.path(),
        "shard-00003-model-00001-of-00001.safetensors",
        &[("w", &[3, 4], Some(&[1, 0]))],
    );
    refused(dir.path(), "overlap");
    write(
        dir.path(),
        "shard-00003-model-00001-of-00001.safetensors",
        &[("w", &[1, 4], Some(&[7, 0]))],
    );
    refused(dir.path(), "misses shards: none holds the element at");
    write(dir.path(), "shard-00003-model-00001-of-00001.safetensors", &[("w", &[4], Some(&[5]))]);
    refused(dir.path(), "1 dimensions here");
    write(
        dir.path(),
        "shard-00003-model-00001-of-00001.safetensors",
        &[("w", &[4], Some(&[5, 0]))],
    );
    refused(dir.path(), "has shape [4] and offsets [5, 0]");
    write(
        dir.path(),
        "shard-00003-model-00001-of-00001.safetensors",
        &[("w", &[4, 4], Some(&[u64::MAX, 0]))],
    );
    refused(dir.path(), "overflow");
    write(
        dir.path(),
        "shard-00003-model-00001-of-00001.safetensors",
        &[("x", &[1], None), ("w", &[1, 4], Some(&[5, 0]))],
    );
    refused(dir.path(), r#"nothing is noted for tensor "x""#);
}

#[test]
fn a_missing_file_of_a_series_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "model-00001-of-00003.safetensors", &[("a", &[1], None)]);
    write(dir.path(), "model-00003-of-00003.safetensors", &[("c", &[1], None)]);
    assert!(matches!(refused(dir.path(), "model-00002-of-00003"), Error::CorruptData { .. }));
    write(dir.path(), "model-00002-of-00003.safetensors", &[("b", &[1], None)]);
    assert_eq!(open(dir.path(), None).unwrap().tensor_count(), 3);
    write(dir.path(), "model-00003-of-00003.safetensors", &[("a", &[1], None)]);
    let e = refused(dir.path(), r#"tensor "a" is in "model-00001-of-00003.safetensors" too"#);
    assert!(matches!(e, Error::CorruptIndex { .. }));
}

#[test]
fn kinds_are_found_by_looking() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("nothing");
    assert!(refused(&missing, "no such path").to_string().contains("nothing"));
    refused(dir.path(), "the folder is empty");
    fs::write(dir.path().join("model.pt"), "PK").unwrap();
    refused(&dir.path().join("model.pt"), "not a file of torch.save");
    fs::write(dir.path().join("model.txt"), "PK").unwrap();
    refused(&dir.path().join("model.txt"), "a single file must be a .safetensors file");
    fs::write(dir.path().join("__0_0.distcp"), "x").unwrap();
    refused(dir.path(), "the save did not finish");
}

#[test]
fn a_header_larger_than_the_first_read_is_read_whole() {
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..2000).map(|i| format!("layers.{i}.weight")).collect();
    let tensors: Vec<Tensor<'_>> =
        names.iter().map(|name| (name.as_str(), &[1][..], None)).collect();
    write(dir.path(), "a.safetensors", &tensors);
    assert!(fs::metadata(dir.path().join("a.safetensors")).unwrap().len() > 100_000);
    assert_eq!(open(dir.path(), None).unwrap().tensor_count(), 2000);
}
