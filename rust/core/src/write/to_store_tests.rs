//! Stored objects equal their input, in parts that a store accepts, and a failed save leaves
//! nothing.

use std::fs;

use proptest::prelude::*;
use tempfile::tempdir;

use super::*;
use crate::StorageFault;
use crate::format::{PAYLOAD_ALIGNMENT, Value};
use crate::write::testing::{
    INFO, MemoryStore, Objects, assert_saved, contents, index_in, parts, saves, value, whole,
};
use crate::write::{Part as Piece, Save};

const MIB: u64 = 1 << 20;
const DIR: &str = "s3://bucket/ckpt";

fn begin(store: &MemoryStore, items: &[SaveItem], options: &WriteOptions) -> Save {
    begin_in_turns(store, items, Vec::new(), options)
}

fn begin_in_turns(
    store: &MemoryStore,
    items: &[SaveItem],
    turns: Vec<u32>,
    options: &WriteOptions,
) -> Save {
    let (remote, items, control) = (Arc::new(store.clone()), items.to_vec(), Control::new());
    let dir = Path::new(DIR);
    Save::create_remote(remote, dir, items, turns, INFO, options, None, &control).unwrap().0
}

/// Writes the stored objects as files, and checks them against the index.
fn check(store: &MemoryStore, save: Save, items: &[SaveItem]) {
    let (index, claim) = save.finish_with(Value::None, &Control::new()).unwrap().keep();
    assert!(claim.is_none() && store.0.uploads.lock().unwrap().is_empty());
    let dir = tempdir().unwrap();
    for (path, bytes) in store.0.files.lock().unwrap().iter() {
        fs::write(dir.path().join(path.file_name().unwrap()), bytes).unwrap();
    }
    assert_saved(&index_in(dir.path(), index), items);
}

/// Lengths that share parts, span several, and begin new ones.
fn items() -> Vec<SaveItem> {
    let lengths =
        [20 * MIB, 5, 9 * MIB + 4, 0, 3 * MIB, 4096, 8 * MIB - PAYLOAD_ALIGNMENT, MIB + 1];
    let tensors = lengths.iter().enumerate();
    let small = (0..200).map(|number| whole(&format!("s{number}"), "uint8", &[number * 7]));
    tensors
        .map(|(number, &length)| whole(&format!("t{number}"), "uint8", &[length]))
        .chain(small)
        .chain([value("v", 1000)])
        .collect()
}

#[test]
fn what_is_given_at_a_time_is_stored() {
    let (store, items) = (MemoryStore::default(), items());
    let save = begin(&store, &items, &WriteOptions::default());
    let control = Control::new();
    save.write(&parts(&contents(&items)), &control).unwrap();
    assert_eq!(control.done(), items.iter().map(|item| item.length).sum::<u64>());
    check(&store, save, &items);
}

#[test]
fn what_comes_in_pieces_is_stored() {
    let items = items();
    let contents = contents(&items);
    for step in [MIB, 3 * MIB] {
        let store = MemoryStore::default();
        let options =
            WriteOptions { max_inflight_bytes: 16 << 20, threads: 2, ..WriteOptions::default() };
        let save = begin(&store, &items, &options);
        for (item, data) in (0..).zip(&contents) {
            let mut at = 0;
            while at < data.len() {
                let end = (at + to_usize(step)).min(data.len());
                let piece = Piece { item, at: at as u64, data: &data[at..end] };
                save.write(&[piece], &Control::new()).unwrap();
                at = end;
            }
        }
        check(&store, save, &items);
    }
}

#[test]
fn nothing_is_left_of_what_fails_or_is_given_up() {
    let items = items();
    let data = contents(&items);
    let store = MemoryStore(Arc::new(Objects { refused: Some(2), ..Objects::default() }));
    let save = begin(&store, &items, &WriteOptions::default());
    let refused = save.write(&parts(&data), &Control::new()).unwrap_err();
    assert!(matches!(refused, Error::Storage { kind: StorageFault::Denied, .. }), "{refused}");
    drop(save);
    assert!(store.is_empty());

    for small in [true, false] {
        let store = MemoryStore::default();
        let items = if small { vec![value("v", 10)] } else { items.clone() };
        let save = begin(&store, &items, &WriteOptions::default());
        save.write(&parts(&contents(&items)), &Control::new()).unwrap();
        drop(save.finish_with(Value::None, &Control::new()).unwrap());
        assert!(store.is_empty());
    }
}

/// Parts of an upload cost money and appear in no listing. The error of the save once did not
/// mention those that it left.
#[test]
fn what_could_not_be_removed_is_named() {
    let items = items();
    let stuck =
        |refused| MemoryStore(Arc::new(Objects { refused, stuck: true, ..Objects::default() }));
    let save = begin(&stuck(Some(2)), &items, &WriteOptions::default());
    let error = save.write(&parts(&contents(&items)), &Control::new()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("left something on the store: remove s3://bucket/ckpt/"), "{text}");
    assert!(save.abort().is_empty(), "it was told already");

    let save = begin(&stuck(None), &items, &WriteOptions::default());
    assert!(!save.abort().is_empty(), "an upload is open");
}

#[test]
fn memory_of_what_panics_is_given_back() {
    // Each part has so many pieces that it needs a buffer, and there is memory for one.
    let items: Vec<SaveItem> =
        (0..1600).map(|number| whole(&format!("t{number}"), "uint8", &[MIB / 20])).collect();
    let store = MemoryStore(Arc::new(Objects { panics: Some(2), ..Objects::default() }));
    let options =
        WriteOptions { max_inflight_bytes: LEAST_PART, threads: 8, ..WriteOptions::default() };
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let save = begin(&store, &items, &options);
        let data = contents(&items);
        let write = || save.write(&parts(&data), &Control::new());
        let _ = done.send(std::panic::catch_unwind(std::panic::AssertUnwindSafe(write)).is_err());
    });
    let panicked = is_done.recv_timeout(Duration::from_secs(60));
    assert_eq!(panicked, Ok(true), "threads wait for memory that nobody gives back");
}

#[test]
fn what_comes_in_turns_shares_few_parts() {
    // Every second item is written in the second turn. In the order of items, each part would have
    // items of both turns, and wait for the second.
    let lengths = [3 * MIB, 3 * MIB + 512, 700, 2 * MIB];
    let items: Vec<SaveItem> = (0..60)
        .map(|number| whole(&format!("t{number}"), "uint8", &[lengths[number / 2 % 4]]))
        .collect();
    let turn_of = |item: usize| u32::try_from(item % 2).unwrap();
    let turns: Vec<u32> = (0..items.len()).map(turn_of).collect();
    let (store, options, control) =
        (MemoryStore::default(), WriteOptions::default(), Control::new());
    let save = begin_in_turns(&store, &items, turns, &options);
    let data = contents(&items);
    for turn in [0, 1] {
        let all = parts(&data);
        let now: Vec<_> =
            all.into_iter().filter(|part| turn_of(part.item as usize) == turn).collect();
        save.write(&now, &control).unwrap();
        // For each of the three alignments (4096, 512 and 4): the start of the second turn, and the
        // start of the next alignment.
        let most = if turn == 0 { 5 } else { 0 };
        assert!(save.buffers() <= most, "{} buffers after turn {turn}", save.buffers());
    }
    check(&store, save, &items);
}

#[test]
fn parts_are_few_enough() {
    assert_eq!(part_bytes(1, 64 << 20), PART);
    assert_eq!(part_bytes(1, 1 << 20), LEAST_PART);
    for largest in [1 << 30, 100 << 30, 5 << 40] {
        let part = part_bytes(largest, 64 << 20);
        assert!(largest.div_ceil(part) <= MOST_PARTS && part.is_multiple_of(MIB));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    #[test]
    fn whatever_is_saved(items in saves(12)) {
        let store = MemoryStore::default();
        let save = begin(&store, &items, &WriteOptions::default());
        save.write(&parts(&contents(&items)), &Control::new()).unwrap();
        check(&store, save, &items);
    }
}
