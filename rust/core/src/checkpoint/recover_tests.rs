//! A recovered checkpoint equals the saved one.

use std::fs;

use proptest::prelude::*;
use tempfile::tempdir;

use super::*;
use crate::format::{INDEX_NAME, Index};
use crate::write::testing::{
    INFO, assert_saved, names_in, plan_files, rows, save, saves, value, whole,
};
use crate::write::{SaveInfo, SaveItem, SaveLayout, WriteIo, WriteOptions};

/// Id of a save in which all ranks have this token.
fn id(token: u64) -> [u8; 16] {
    u128::from(token).to_be_bytes()
}

fn info(generation: u64, token: u64, rank: u32, world_size: u32) -> SaveInfo {
    SaveInfo { save_id: id(token), generation, token, rank, world_size }
}

fn quick() -> WriteOptions {
    WriteOptions { fsync: false, ..WriteOptions::default() }
}

fn recovered(dir: &Path, options: &RecoverOptions) -> Result<Index> {
    Index::from_bytes(recover(dir, None, options, &Control::new())?, &dir.join(INDEX_NAME))
}

/// Merges indexes as the coordinator does, with a `save_id` of zeros.
fn merged(indexes: &[Index]) -> Vec<u8> {
    let mut builder = IndexBuilder::new(SourceKind::Native);
    builder.generation = indexes[0].generation();
    builder.root = indexes[0].planner_root();
    for index in indexes {
        builder.merge(index).unwrap();
    }
    builder.build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn recovered_is_the_original(items in saves(10)) {
        let dir = tempdir().unwrap();
        let original = save(dir.path(), &items, info(7, 1, 0, 1), &quick());
        let recovered = recovered(dir.path(), &RecoverOptions::default()).unwrap();
        prop_assert!(merged(&[recovered]) == merged(&[original]));
    }
}

#[test]
fn the_parts_of_all_ranks_make_one_index() {
    let dir = tempdir().unwrap();
    let length = 2_500_001;
    let items = |rank: u64| {
        vec![
            rows("w", "uint8", &[2, length], &[rank, 0], &[1, length]),
            rows("b", "complex128", &[4], &[rank * 2], &[1]),
            rows("b", "complex128", &[4], &[rank * 2 + 1], &[1]),
            if rank == 0 { value("step", 9) } else { whole("only.here", "bfloat16", &[3]) },
        ]
    };
    // Written with direct I/O, so that they are read with direct I/O too.
    let options = WriteOptions { io: WriteIo::Direct, ..quick() };
    let indexes: Vec<_> = (0..2)
        .map(|rank| {
            save(
                dir.path(),
                &items(rank.into()),
                SaveInfo { save_id: id(10), ..info(3, 10 + u64::from(rank), rank, 2) },
                &options,
            )
        })
        .collect();
    let before = names_in(dir.path());
    let control = Control::new();
    let bytes = recover(dir.path(), None, &RecoverOptions::default(), &control).unwrap();
    assert_eq!(control.done(), 2 * length + 4 * 16 + 9 + 6);
    let index = Index::from_bytes(bytes, &dir.path().join(INDEX_NAME)).unwrap();
    assert!(merged(std::slice::from_ref(&index)) == merged(&indexes));
    assert_eq!((index.file_count(), index.generation()), (4, 3));
    assert_eq!(names_in(dir.path()), before);
}

#[test]
fn the_highest_complete_generation_is_taken() {
    let dir = tempdir().unwrap();
    let items = [whole("w", "float32", &[100])];
    save(dir.path(), &items, info(1, 1, 0, 1), &quick());
    save(dir.path(), &items, info(2, 2, 0, 1), &quick());
    // Generation 3 lacks a rank, 4 has one file of two, and 5 has no header yet.
    save(dir.path(), &items, info(3, 3, 0, 2), &quick());
    let two = [rows("w", "int8", &[2], &[0], &[1]), rows("w", "int8", &[2], &[1], &[1])];
    let halved = save(dir.path(), &two, info(4, 4, 0, 1), &quick());
    fs::remove_file(halved.file_path(1)).unwrap();
    let SaveLayout { files, .. } = plan_files(&items, &info(5, 5, 0, 1)).unwrap();
    fs::write(dir.path().join(&files[0].name), vec![0; usize::try_from(files[0].size).unwrap()])
        .unwrap();

    let index = recovered(dir.path(), &RecoverOptions::default()).unwrap();
    assert_eq!(index.generation(), 2);
    assert_saved(&index, &items);
    let first = RecoverOptions { generation: Some(1), ..RecoverOptions::default() };
    assert_eq!(recovered(dir.path(), &first).unwrap().generation(), 1);
    let third = RecoverOptions { generation: Some(3), ..RecoverOptions::default() };
    assert!(matches!(recovered(dir.path(), &third), Err(Error::NotFound { .. })));
    for generation in [1, 2] {
        fs::remove_file(dir.path().join(info_name(generation))).unwrap();
    }
    let error = recovered(dir.path(), &RecoverOptions::default()).err().unwrap().to_string();
    assert!(
        error.contains("generation 5 is not complete (corrupt ") && error.contains("generation 3"),
        "{error}"
    );
}

fn info_name(generation: u64) -> String {
    DataFileName { generation, token: generation, rank: 0, file: 0 }.to_string()
}

#[test]
fn of_two_saves_that_raced_the_caller_chooses() {
    let dir = tempdir().unwrap();
    let items = |name| [whole(name, "float32", &[100])];
    for (token, name) in [(0xa, "a"), (0xb, "b")] {
        save(dir.path(), &items(name), info(1, token, 0, 1), &quick());
    }
    let error = recovered(dir.path(), &RecoverOptions::default()).err().unwrap();
    assert!(
        matches!(error, Error::Plan(_))
            && error.to_string().contains("00000000-0000-0000-0000-00000000000b"),
        "{error}"
    );
    let chosen = RecoverOptions { save_id: Some(id(0xb)), ..RecoverOptions::default() };
    assert_saved(&recovered(dir.path(), &chosen).unwrap(), &items("b"));
    // A save of another number of ranks is another save.
    fs::remove_file(
        dir.path().join(DataFileName { generation: 1, token: 0xa, rank: 0, file: 0 }.to_string()),
    )
    .unwrap();
    for rank in 0..2 {
        save(dir.path(), &items("c"), info(1, 0xc, rank, 2), &quick());
    }
    assert!(matches!(recovered(dir.path(), &RecoverOptions::default()), Err(Error::Plan(_))));
}

#[test]
fn parts_of_different_saves_are_never_joined() {
    let dir = tempdir().unwrap();
    let items = |name| [whole(name, "float32", &[100])];
    save(dir.path(), &items("older"), info(1, 1, 0, 1), &quick());
    // Both saves began at the same time. Rank 0 finished in one, rank 1 in the other.
    for (token, rank, name) in [(0xa, 0, "a"), (0xb, 1, "b")] {
        save(dir.path(), &items(name), info(2, token, rank, 2), &quick());
    }
    let index = recovered(dir.path(), &RecoverOptions::default()).unwrap();
    assert_eq!((index.generation(), index.name(0)), (1, "older"));
    assert_eq!(index.save_id(), id(1));

    // One of them finishes, with a different token on each rank.
    let late = SaveInfo { token: 0xc, ..info(2, 0xa, 1, 2) };
    save(dir.path(), &items("c"), late, &quick());
    let index = recovered(dir.path(), &RecoverOptions::default()).unwrap();
    assert_eq!([index.name(0), index.name(1)], ["a", "c"]);
    assert_eq!(index.save_id(), id(0xa));
    let other = |token| RecoverOptions { save_id: Some(id(token)), ..RecoverOptions::default() };
    assert!(matches!(recovered(dir.path(), &other(0xb)), Err(Error::NotFound { .. })));
    assert_eq!(recovered(dir.path(), &other(1)).unwrap().generation(), 1);

    // No save writes two parts of one rank.
    let twice = SaveInfo { token: 0xd, ..info(2, 0xa, 1, 2) };
    save(dir.path(), &items("d"), twice, &quick());
    assert_eq!(recovered(dir.path(), &RecoverOptions::default()).unwrap().generation(), 1);
}

#[test]
fn names_that_nobody_writes_into_a_header_are_refused() {
    for name in ["__metadata__~x", "__metadata__~é"] {
        let dir = tempdir().unwrap();
        let result = forged(dir.path(), |json| {
            json.replace("\"x\":", &format!("\"{name}\":"))
                .replace("\\\"x\\\":", &format!("\\\"{name}\\\":"))
        });
        let error = result.err().unwrap();
        assert!(error.to_string().contains("a name that no tensor has in a header"), "{error}");
    }
}

#[test]
fn what_a_rank_saved_for_itself_is_no_part_of_a_whole() {
    let dir = tempdir().unwrap();
    let items = [whole("w", "float32", &[100])];
    save(dir.path(), &items, info(1, 1, 0, 1), &quick());
    let names: Vec<String> = (0..2)
        .map(|rank| save(dir.path(), &items, info(2, 2, rank, 0), &quick()))
        .map(|index| index.file(0).name.to_owned())
        .collect();
    assert_eq!(recovered(dir.path(), &RecoverOptions::default()).unwrap().generation(), 1);
    let second = RecoverOptions { generation: Some(2), ..RecoverOptions::default() };
    let error = recovered(dir.path(), &second).err().unwrap();
    assert!(matches!(error, Error::NotFound { .. }));
    assert!(
        error.to_string().contains(&format!("{} is of a rank-local save", names[0])),
        "{error}"
    );
    // The index of a rank is enough for the refusal, whatever the files contain.
    fs::write(dir.path().join("__7.index.dcprs"), []).unwrap();
    let error = recovered(dir.path(), &RecoverOptions::default()).err().unwrap();
    assert!(
        matches!(&error, Error::Unsupported(reason) if reason.contains("__7.index.dcprs")),
        "{error}"
    );
}

#[test]
fn a_folder_without_data_files_is_no_checkpoint() {
    let dir = tempdir().unwrap();
    assert!(matches!(
        recovered(dir.path(), &RecoverOptions::default()),
        Err(Error::NotFound { .. })
    ));
    assert!(matches!(
        recovered(&dir.path().join("x"), &RecoverOptions::default()),
        Err(Error::Io { .. })
    ));
}

/// A file with a forged header.
fn forged(dir: &Path, edit: impl Fn(&str) -> String) -> Result<Index> {
    let items: Vec<SaveItem> = vec![
        rows("w", "complex128", &[4, 2], &[1, 0], &[2, 2]),
        SaveItem { flags: 1, ..whole("x", "float32", &[3]) },
    ];
    let SaveLayout { files, .. } =
        plan_files(&items, &SaveInfo { rank: 0, world_size: 1, ..INFO }).unwrap();
    let json = edit(std::str::from_utf8(&files[0].header[8..]).unwrap().trim_end());
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.extend(vec![0; usize::try_from(files[0].size).unwrap() - files[0].header.len()]);
    fs::write(dir.join(&files[0].name), bytes).unwrap();
    recovered(dir, &RecoverOptions::default())
}

#[test]
fn headers_that_contradict_themselves_are_refused() {
    let dir = tempdir().unwrap();
    assert_eq!(forged(dir.path(), str::to_owned).unwrap().tensor_count(), 2);
    for (from, to) in [
        (r#"\"version\":1"#, r#"\"version\":2"#),
        (r#"\"save_id\":\"07070707-"#, r#"\"save_id\":\"7070707-"#),
        (r#"\"rank\":0"#, r#"\"rank\":1"#),
        (r#"\"world_size\":1"#, r#"\"world_size\":0"#),
        (r#"\"files\":1"#, r#"\"files\":0"#),
        (r#"\"files\":1"#, r#"\"files\":4294967295"#),
        (r#"\"world_size\":1"#, r#"\"world_size\":4294967295"#),
        (r#"\"file\":0"#, r#"\"file\":7"#),
        (r#"\"generation\":7"#, r#"\"generation\":8"#),
        ("DCPRS", "DCPRT"),
        ("DCP_SHARDING_INFO", "DCP_SHARDED_INFO"),
        (r#"saved_offsets\":[1,0,0]"#, r#"saved_offsets\":[1,0,1]"#),
        (r#"saved_offsets\":[1,0,0]"#, r#"saved_offsets\":[1,0]"#),
        (r#"saved_offsets\":[1,0,0]"#, r#"saved_offsets\":[4,0,0]"#),
        (r#"saved_offsets\":[1,0,0]"#, r#"saved_offsets\":[18446744073709551615,0,0]"#),
        (r#"saved_offsets\":[0]"#, r#"saved_offsets\":[]"#),
        (r#"\"complex128\""#, r#"\"complex64\""#),
        (r#"\"complex128\""#, r#"\"complex256\""#),
        (r#"\"shape\":[4,2]"#, r#"\"shape\":[4,1]"#),
        (r#"\"kind\":\"tensor\""#, r#"\"kind\":\"other\""#),
        (r#"{\"w\":{\"kind\""#, r#"{\"v\":{\"kind\""#),
    ] {
        let result = forged(dir.path(), |json| {
            assert!(json.contains(from), "{from} is not in {json}");
            json.replacen(from, to, 1)
        });
        assert!(
            matches!(result, Err(Error::NotFound { .. } | Error::CorruptIndex { .. })),
            "{to}: {:?}",
            result.err()
        );
    }
}

#[test]
fn a_tensor_is_one_thing_on_all_ranks() {
    let dir = tempdir().unwrap();
    for (rank, dtype) in [(0, "int8"), (1, "uint8")] {
        save(dir.path(), &[whole("w", dtype, &[3])], info(1, 1, rank, 2), &quick());
    }
    let error = recovered(dir.path(), &RecoverOptions::default()).err().unwrap();
    assert!(matches!(&error, Error::TensorPlan { tensor, .. } if tensor == "w"), "{error}");
}
