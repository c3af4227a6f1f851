//! Stored objects equal their input, in parts that a store accepts, and a failed save leaves
//! nothing.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use tempfile::tempdir;

use super::*;
use crate::StorageFault;
use crate::format::{INDEX_NAME, Index, PAYLOAD_ALIGNMENT, Value};
use crate::store::{self, Connection};
use crate::write::testing::{INFO, assert_saved, contents, parts, saves, value, whole};
use crate::write::{Part as Piece, Save};

const MIB: u64 = 1 << 20;
const DIR: &str = "s3://bucket/ckpt";

/// Stored objects, in memory.
#[derive(Debug, Default)]
struct Memory {
    files: Mutex<HashMap<PathBuf, Vec<u8>>>,
    uploads: Mutex<HashMap<String, HashMap<usize, Vec<u8>>>>,
    /// The number of the part that is refused.
    refused: Option<usize>,
    /// True if nothing can be removed.
    stuck: bool,
    /// The number of the part whose upload panics.
    panics: Option<usize>,
}

#[derive(Clone, Debug, Default)]
struct Store(Arc<Memory>);

fn refused(action: &'static str, path: &Path) -> Error {
    Error::Storage {
        kind: StorageFault::Denied,
        action,
        path: path.to_owned(),
        attempts: 1,
        reason: "no".into(),
    }
}

impl Remote for Store {
    fn connect(&self, _: usize) -> Result<Arc<dyn Connection>> {
        Ok(Arc::new(self.clone()))
    }

    fn connect_to_store(&self, _: usize) -> Result<Arc<dyn StoringConnection>> {
        Ok(Arc::new(self.clone()))
    }
}

impl Connection for Store {
    fn look(&self, path: &Path, _: &Control) -> Result<Option<u64>> {
        Ok(self.0.files.lock().unwrap().get(path).map(|bytes| bytes.len() as u64))
    }

    fn list(&self, _: &Path, _: &Control) -> Result<Option<store::Folder>> {
        Ok(None)
    }

    fn start(&self, _: &Path, _: u64, _: bool, _: &Control) -> Result<Option<(Vec<u8>, u64)>> {
        Ok(None)
    }

    fn fetch(&self, _: &Path, _: u64, _: Vec<store::FetchRange>, _: &Control) -> Result<()> {
        Err(Error::Interrupted)
    }
}

impl StoringConnection for Store {
    fn put(&self, path: &Path, body: &Body, _: Condition, _: &Control) -> Result<()> {
        let before = self.0.files.lock().unwrap().insert(path.to_owned(), body.to_vec());
        assert!(before.is_none(), "{} was there", path.display());
        Ok(())
    }

    fn begin(&self, path: &Path, condition: Condition, _: &Control) -> Result<Upload> {
        let id = path.file_name().unwrap().to_str().unwrap().to_owned();
        self.0.uploads.lock().unwrap().insert(id.clone(), HashMap::new());
        let path = path.to_owned();
        Ok(Upload { path, id, condition })
    }

    fn put_part(&self, upload: &Upload, number: usize, body: &Body, _: &Control) -> Result<String> {
        if self.0.refused == Some(number) {
            return Err(refused("write", &upload.path));
        }
        if self.0.panics == Some(number) {
            // By then other threads wait for its memory.
            std::thread::sleep(Duration::from_millis(100));
            panic!("as a defect would");
        }
        let mut uploads = self.0.uploads.lock().unwrap();
        let before = uploads.get_mut(&upload.id).unwrap().insert(number, body.to_vec());
        assert!(before.is_none(), "part {number} was sent before");
        Ok(number.to_string())
    }

    fn complete(&self, upload: &Upload, parts: Vec<String>, size: u64, _: &Control) -> Result<()> {
        let mut there = self.0.uploads.lock().unwrap().remove(&upload.id).unwrap();
        assert_eq!(parts, (0..there.len()).map(|number| number.to_string()).collect::<Vec<_>>());
        let all: Vec<Vec<u8>> =
            (0..parts.len()).map(|number| there.remove(&number).unwrap()).collect();
        let (_, but_last) = all.split_last().unwrap();
        assert!(
            but_last
                .iter()
                .all(|part| part.len() == all[0].len() && part.len() as u64 >= LEAST_PART)
        );
        let bytes = all.concat();
        assert_eq!(bytes.len() as u64, size);
        self.0.files.lock().unwrap().insert(upload.path.clone(), bytes);
        Ok(())
    }

    fn copy(&self, _: &Path, _: &Path, _: u64, _: &Control) -> Result<()> {
        Err(Error::Unsupported("not here".into()))
    }

    fn remove(
        &self,
        files: &[PathBuf],
        uploads: &[Upload],
        _: Duration,
        _: &Control,
    ) -> Vec<Error> {
        if self.0.stuck {
            let left = files.iter().chain(uploads.iter().map(|upload| &upload.path));
            return left.map(|path| refused("remove", path)).collect();
        }
        for path in files {
            self.0.files.lock().unwrap().remove(path);
        }
        for upload in uploads {
            self.0.uploads.lock().unwrap().remove(&upload.id);
        }
        Vec::new()
    }

    fn remove_seen(&self, path: &Path, control: &Control) -> Result<()> {
        let left = self.remove(&[path.to_owned()], &[], Duration::ZERO, control);
        left.into_iter().next().map_or(Ok(()), Err)
    }

    fn keeps_conditions(&self, _: &Path, _: &Control) -> Result<bool> {
        Ok(true)
    }
}

fn begin(store: &Store, items: &[SaveItem], options: &WriteOptions) -> Save {
    let remote = Arc::new(store.clone());
    Save::create_remote(
        remote,
        Path::new(DIR),
        items.to_vec(),
        Vec::new(),
        INFO,
        options,
        None,
        &Control::new(),
    )
    .unwrap()
    .0
}

/// Writes the stored objects as files, and checks them against the index.
fn check(store: &Store, save: Save, items: &[SaveItem]) {
    let (index, claim) = save.finish_with(Value::None, &Control::new()).unwrap().keep();
    assert!(claim.is_none() && store.0.uploads.lock().unwrap().is_empty());
    let dir = tempdir().unwrap();
    for (path, bytes) in store.0.files.lock().unwrap().iter() {
        fs::write(dir.path().join(path.file_name().unwrap()), bytes).unwrap();
    }
    assert_saved(&Index::from_bytes(index, &dir.path().join(INDEX_NAME)).unwrap(), items);
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
    let (store, items) = (Store::default(), items());
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
        let store = Store::default();
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
    let store = Store(Arc::new(Memory { refused: Some(2), ..Memory::default() }));
    let save = begin(&store, &items, &WriteOptions::default());
    let refused = save.write(&parts(&data), &Control::new()).unwrap_err();
    assert!(matches!(refused, Error::Storage { kind: StorageFault::Denied, .. }), "{refused}");
    drop(save);
    assert!(store.0.uploads.lock().unwrap().is_empty() && store.0.files.lock().unwrap().is_empty());

    for small in [true, false] {
        let store = Store::default();
        let items = if small { vec![value("v", 10)] } else { items.clone() };
        let save = begin(&store, &items, &WriteOptions::default());
        save.write(&parts(&contents(&items)), &Control::new()).unwrap();
        drop(save.finish_with(Value::None, &Control::new()).unwrap());
        assert!(
            store.0.uploads.lock().unwrap().is_empty() && store.0.files.lock().unwrap().is_empty()
        );
    }
}

/// Parts of an upload cost money and appear in no listing. The error of the save once did not
/// mention those that it left.
#[test]
fn what_could_not_be_removed_is_named() {
    let items = items();
    let stuck = |refused| Store(Arc::new(Memory { refused, stuck: true, ..Memory::default() }));
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
    let store = Store(Arc::new(Memory { panics: Some(2), ..Memory::default() }));
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
    let (store, options, control) = (Store::default(), WriteOptions::default(), Control::new());
    let remote = Arc::new(store.clone());
    let dir = Path::new(DIR);
    let (save, _) =
        Save::create_remote(remote, dir, items.clone(), turns, INFO, &options, None, &control)
            .unwrap();
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
        let store = Store::default();
        let save = begin(&store, &items, &WriteOptions::default());
        save.write(&parts(&contents(&items)), &Control::new()).unwrap();
        check(&store, save, &items);
    }
}
