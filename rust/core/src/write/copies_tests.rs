//! A copy on a store is the parent's file or does not exist. A name whose copy was refused is never
//! used.

use std::collections::HashSet;
use std::fs;

use tempfile::tempdir;

use super::super::testing::{MemoryStore, Objects, content, index_in, refused, whole};
use super::super::{Part as Piece, Save, SaveItem, WriteOptions};
use super::*;
use crate::checkpoint::{self, RecoverOptions};

const ONE: &str = "s3://bucket/1";
const TWO: &str = "s3://bucket/2";
const LENGTH: u64 = 1 << 16;

/// Makes the store copy like this.
fn copying(
    store: &MemoryStore,
    copier: impl Fn(&Objects, &Path, &Path, usize) -> Result<()> + Send + Sync + 'static,
) {
    *store.0.copier.lock().unwrap() = Some(Box::new(copier));
}

fn names(store: &MemoryStore, dir: &str) -> Vec<PathBuf> {
    let files = store.0.files.lock().unwrap();
    let mut names: Vec<_> = files.keys().filter(|path| path.starts_with(dir)).cloned().collect();
    names.sort();
    names
}

/// Begins a save to the second folder.
fn begin(store: &MemoryStore, token: u64, reuse: Arc<Reuse>) -> Result<(Save, Vec<Error>)> {
    let (to, dir, info) = (Arc::new(store.clone()), Path::new(TWO), SaveInfo { token, ..info(2) });
    let (options, control) = (WriteOptions::default(), Control::new());
    Save::create_remote(to, dir, items(), Vec::new(), info, &options, Some(reuse), &control)
}

/// Compares the items with those of the parent.
fn compared(reuse: Reuse) -> Arc<Reuse> {
    let data = bytes(2);
    reuse.compare(&pieces(&data, |item| reuse.wants(item)), &Control::new()).unwrap();
    Arc::new(reuse)
}

fn reuse(parent: Arc<Index>) -> Reuse {
    Reuse::new(Some(parent), &items(), &[], false, &Control::new()).unwrap()
}

/// Each item gets a file of its own.
fn items() -> Vec<SaveItem> {
    (0..4)
        .map(|number| whole(&format!("t{number}"), "uint8", &[LENGTH + number]))
        .chain([whole("changes", "uint8", &[100])])
        .collect()
}

fn bytes(save: u64) -> Vec<Vec<u8>> {
    let of = |number: usize, item: &SaveItem| content(number, item.length);
    let mut all: Vec<_> =
        items().iter().enumerate().map(|(number, item)| of(number, item)).collect();
    all[4][0] = u8::try_from(save).unwrap();
    all
}

fn info(number: u64) -> SaveInfo {
    SaveInfo {
        save_id: [u8::try_from(number).unwrap(); 16],
        generation: 1,
        token: number,
        rank: 0,
        world_size: 1,
    }
}

fn pieces(data: &[Vec<u8>], of: impl Fn(usize) -> bool) -> Vec<Piece<'_>> {
    let all = (0..).zip(data).filter(|(item, _)| of(*item as usize));
    all.map(|(item, data)| Piece { item, at: 0, data }).collect()
}

/// A parent whose files hold one item each: rows of a local save, which is then uploaded.
fn parent(store: &MemoryStore) -> Arc<Index> {
    let control = Control::new();
    let dir = Path::new(ONE);
    let mut builder = crate::format::IndexBuilder::new(crate::format::SourceKind::Native);
    builder.save_id = [1; 16];
    builder.generation = 1;
    builder.root = crate::format::Value::Dict(vec![]);
    for (number, item) in items().into_iter().enumerate() {
        let info = SaveInfo { token: 1000 + number as u64, ..info(1) };
        let (to, options) = (Arc::new(store.clone()), WriteOptions::default());
        let (save, _) =
            Save::create_remote(to, dir, vec![item], Vec::new(), info, &options, None, &control)
                .unwrap();
        let data = bytes(1);
        save.write(&[Piece { item: 0, at: 0, data: &data[number] }], &control).unwrap();
        let (part, _) = save.finish_with(crate::format::Value::None, &control).unwrap().keep();
        builder.merge(&index_in(dir, part)).unwrap();
    }
    let index = index_in(dir, builder.build().unwrap());
    Arc::new(index.on(Some(Arc::new(store.clone()))))
}

struct Done {
    reused: Vec<bool>,
    problems: Vec<String>,
}

/// Saves with the parent. Checks what is stored, with its index and with a recovered one.
fn save(store: &MemoryStore, parent: Arc<Index>) -> Done {
    let control = Control::new();
    let data = bytes(2);
    let (save, problems) = begin(store, 2, compared(reuse(parent))).unwrap();
    let reused = save.is_reused();
    let written = reused.iter().filter(|reused| !**reused).count();
    save.write(&pieces(&data, |item| !reused[item]), &control).unwrap();
    let requests = reused.len() - written + store_files(written);
    assert_eq!(save.requests(), requests as u64);
    let (index, _) = save.finish_with(crate::format::Value::None, &control).unwrap().keep();
    let folder = tempdir().unwrap();
    for path in names(store, TWO) {
        fs::write(
            folder.path().join(path.file_name().unwrap()),
            &store.0.files.lock().unwrap()[&path],
        )
        .unwrap();
    }
    check(&index_in(folder.path(), index));
    let recovered =
        checkpoint::recover(folder.path(), None, &RecoverOptions::default(), &control).unwrap();
    check(&index_in(folder.path(), recovered));
    Done { reused, problems: problems.iter().map(ToString::to_string).collect() }
}

/// Number of files for this many items. Unchanged and changed items are in different files.
fn store_files(written: usize) -> usize {
    if written > 1 { 2 } else { 1 }
}

fn check(index: &Index) {
    for (item, data) in items().iter().zip(bytes(2)) {
        let chunk = index.chunk(index.tensor(index.find(&item.name).unwrap()).chunks.start);
        let file = fs::read(index.file_path(chunk.file)).unwrap();
        let at = usize::try_from(chunk.offset).unwrap();
        assert!(file[at..at + data.len()] == data, "{}", item.name);
    }
}

#[test]
fn what_did_not_change_is_copied_by_the_store() {
    let store = MemoryStore::default();
    let parent = parent(&store);
    let done = save(&store, parent);
    assert_eq!(done.reused, [true, true, true, true, false]);
    assert!(done.problems.is_empty(), "{:?}", done.problems);
    let before: HashSet<_> = names(&store, ONE).into_iter().collect();
    assert_eq!((before.len(), names(&store, TWO).len()), (5, 5));
}

#[test]
fn what_is_refused_is_written_under_other_names() {
    // Refuse any of the four, or several, or all, also if the store carries out a refused copy
    // later.
    for refuses in [0b0001_u8, 0b0010, 0b1000, 0b0110, 0b1111] {
        for is_late in [false, true] {
            let store = MemoryStore::default();
            let parent = parent(&store);
            copying(&store, move |memory, from, to, _| {
                // The token in the name identifies the round.
                let which =
                    |item: &u64| from.to_str().unwrap().contains(&format!("{:016x}", 1000 + item));
                let which = (0..4).find(which).unwrap();
                if refuses >> which & 1 == 0 {
                    memory.copy(from, to);
                    return Ok(());
                }
                if is_late {
                    memory.files.lock().unwrap().insert(to.to_owned(), b"late".to_vec());
                }
                Err(refused("copy", from))
            });
            let done = save(&store, parent);
            let reused = (0..4).map(|item| refuses >> item & 1 == 0);
            assert_eq!(done.reused[..4], reused.collect::<Vec<_>>());
            assert_eq!(done.problems.len(), refuses.count_ones() as usize);
        }
    }
}

#[test]
fn what_is_too_large_to_be_copied_is_not_tried_and_hinders_no_other() {
    for (most, asked) in [(LENGTH + 2, 3), (LENGTH, 1), (0, 0)] {
        let store = MemoryStore::default();
        let parent = parent(&store);
        *store.0.most_copied.lock().unwrap() = Some(most + 4096); // with a header
        let done = save(&store, parent);
        let reused = (0..4).map(|item| item < asked);
        assert_eq!(done.reused[..4], reused.collect::<Vec<_>>());
        assert_eq!((store.0.copies.lock().unwrap().len(), done.problems.len()), (asked, 4 - asked));
    }
}

#[test]
fn nothing_is_copied_more_than_twice() {
    let store = MemoryStore::default();
    let parent = parent(&store);
    // Refuse one file in the first round, and another in the second.
    copying(&store, |memory, from, to, before| match before {
        0 | 4 => Err(refused("copy", from)),
        _ => {
            memory.copy(from, to);
            Ok(())
        }
    });
    let done = save(&store, parent);
    assert_eq!(done.reused, [false; 5]);
    assert_eq!(store.0.copies.lock().unwrap().len(), 4 + 3);
    assert_eq!(done.problems.len(), 3);
    assert!(done.problems[2].contains("refused 2 times"), "{}", done.problems[2]);
}

#[test]
fn a_store_that_cannot_be_reached_for_a_while_is_a_reason_to_write() {
    // The store fails when the parent is examined, or when its files are copied.
    for (refuses, looked) in [(1, false), (2, false), (1, true)] {
        let store = MemoryStore::default();
        let parent = parent(&store);
        let unreachable = |count| store.0.unreachable.store(count, Ordering::Relaxed);
        if !looked {
            unreachable(refuses);
        }
        let reuse = reuse(parent);
        assert_eq!(reuse.problems().len(), usize::from(!looked));
        let reuse = compared(reuse);
        if looked {
            unreachable(refuses);
        }
        let begun = begin(&store, 2, reuse);
        // The save itself has to reach the store.
        assert_eq!(begun.is_ok(), refuses == 1);
        if let Ok((save, problems)) = begun {
            assert_eq!(save.is_reused(), [false; 5]);
            assert_eq!(problems.len(), usize::from(looked));
        }
    }
}

#[test]
fn a_copy_of_something_else_is_not_taken() {
    type Harm = fn(&mut Vec<u8>);
    let harms: [Harm; 3] =
        [|bytes| bytes.truncate(bytes.len() - 1), |bytes| bytes[20] ^= 1, Vec::clear];
    for harm in harms {
        let store = MemoryStore::default();
        let parent = parent(&store);
        copying(&store, move |memory, from, to, _| {
            memory.copy(from, to);
            harm(memory.files.lock().unwrap().get_mut(to).unwrap());
            Ok(())
        });
        let done = save(&store, parent);
        assert_eq!(done.reused, [false; 5]);
        assert_eq!(done.problems.len(), 4);
        assert!(done.problems[0].contains("the store's copy of"), "{}", done.problems[0]);
    }
}

#[test]
fn nothing_is_left_of_what_is_stopped() {
    let store = MemoryStore::default();
    let parent = parent(&store);
    let reuse = compared(reuse(parent));
    copying(&store, |memory, from, to, before| {
        memory.copy(from, to);
        if before == 2 { Err(Error::Interrupted) } else { Ok(()) }
    });
    assert!(matches!(begin(&store, 2, Arc::clone(&reuse)), Err(Error::Interrupted)));
    assert_eq!(names(&store, TWO), Vec::<PathBuf>::new());
    // A save that is given up afterwards removes its copies too.
    *store.0.copier.lock().unwrap() = None;
    let (save, _) = begin(&store, 3, reuse).unwrap();
    assert_eq!(names(&store, TWO).len(), 4);
    drop(save);
    assert_eq!(names(&store, TWO), Vec::<PathBuf>::new());
    assert_eq!(names(&store, ONE).len(), 5);
}
