//! A copy on a store is the parent's file or does not exist. A name whose copy was refused is never
//! used.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tempfile::tempdir;

use super::super::testing::{content, whole};
use super::super::{Part as Piece, Save, SaveItem, WriteOptions};
use super::*;
use crate::StorageFault;
use crate::checkpoint::{self, RecoverOptions};
use crate::format::INDEX_NAME;
use crate::store::{self, Condition, Connection, Upload};

const ONE: &str = "s3://bucket/1";
const TWO: &str = "s3://bucket/2";
const LENGTH: u64 = 1 << 16;

/// Replaces the copy. It gets the source, the target, and the number of copies before.
type Copier = dyn Fn(&Memory, &Path, &Path, usize) -> Result<()> + Send + Sync;

struct Memory {
    files: Mutex<HashMap<PathBuf, Vec<u8>>>,
    asked: Mutex<Vec<PathBuf>>,
    copier: Mutex<Box<Copier>>,
    /// Largest file that can be copied, in bytes.
    most: Mutex<u64>,
    /// Connections that fail before one succeeds.
    unreachable: AtomicUsize,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Memory")
    }
}

#[derive(Clone, Debug)]
struct Store(Arc<Memory>);

impl Store {
    fn new() -> Self {
        Self(Arc::new(Memory {
            files: Mutex::default(),
            asked: Mutex::default(),
            copier: Mutex::new(Box::new(copied)),
            most: Mutex::new(u64::MAX),
            unreachable: AtomicUsize::new(0),
        }))
    }

    fn connected(&self) -> Result<Arc<Self>> {
        let left =
            (self.0.unreachable)
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        match left {
            Ok(_) => Err(Error::io(
                "start threads for",
                Path::new("s3://bucket"),
                std::io::ErrorKind::WouldBlock.into(),
            )),
            Err(_) => Ok(Arc::new(self.clone())),
        }
    }

    fn copying(
        &self,
        copier: impl Fn(&Memory, &Path, &Path, usize) -> Result<()> + Send + Sync + 'static,
    ) {
        *self.0.copier.lock().unwrap() = Box::new(copier);
    }

    fn names(&self, dir: &str) -> Vec<PathBuf> {
        let files = self.0.files.lock().unwrap();
        let mut names: Vec<_> =
            files.keys().filter(|path| path.starts_with(dir)).cloned().collect();
        names.sort();
        names
    }
}

impl Memory {
    fn copy(&self, from: &Path, to: &Path) {
        let mut files = self.files.lock().unwrap();
        let bytes = files[from].clone();
        files.insert(to.to_owned(), bytes);
    }
}

#[expect(clippy::unnecessary_wraps, reason = "other stores fail")]
fn copied(memory: &Memory, from: &Path, to: &Path, _: usize) -> Result<()> {
    memory.copy(from, to);
    Ok(())
}

fn refused(path: &Path) -> Error {
    Error::Storage {
        kind: StorageFault::Denied,
        action: "copy",
        path: path.to_owned(),
        attempts: 1,
        reason: "no".into(),
    }
}

impl Remote for Store {
    fn connect(&self, _: usize) -> Result<Arc<dyn Connection>> {
        Ok(self.connected()?)
    }

    fn connect_to_store(&self, _: usize) -> Result<Arc<dyn StoringConnection>> {
        Ok(self.connected()?)
    }
}

impl Connection for Store {
    fn look(&self, path: &Path, _: &Control) -> Result<Option<u64>> {
        Ok(self.0.files.lock().unwrap().get(path).map(|bytes| bytes.len() as u64))
    }

    fn list(&self, _: &Path, _: &Control) -> Result<Option<store::Folder>> {
        Ok(None)
    }

    fn start(
        &self,
        path: &Path,
        most: u64,
        _: bool,
        _: &Control,
    ) -> Result<Option<(Vec<u8>, u64)>> {
        let files = self.0.files.lock().unwrap();
        let most = usize::try_from(most).unwrap();
        Ok((files.get(path))
            .map(|bytes| (bytes[..most.min(bytes.len())].to_vec(), bytes.len() as u64)))
    }

    fn fetch(&self, _: &Path, _: u64, _: Vec<store::FetchRange>, _: &Control) -> Result<()> {
        Err(Error::Interrupted)
    }
}

impl StoringConnection for Store {
    fn put(&self, path: &Path, body: &store::Body, _: Condition, _: &Control) -> Result<()> {
        let before = self.0.files.lock().unwrap().insert(path.to_owned(), body.to_vec());
        assert!(before.is_none(), "{} was there", path.display());
        let asked = self.0.asked.lock().unwrap();
        assert!(!asked.contains(&path.to_owned()), "{} may yet be a copy", path.display());
        Ok(())
    }

    fn begin(&self, path: &Path, _: Condition, _: &Control) -> Result<Upload> {
        Err(refused(path))
    }

    fn put_part(&self, upload: &Upload, _: usize, _: &store::Body, _: &Control) -> Result<String> {
        Err(refused(&upload.path))
    }

    fn complete(&self, upload: &Upload, _: Vec<String>, _: u64, _: &Control) -> Result<()> {
        Err(refused(&upload.path))
    }

    fn check_copied(&self, from: &Path, size: u64) -> Result<()> {
        if size > *self.0.most.lock().unwrap() {
            return Err(Error::Unsupported(format!("{} is too large", from.display())));
        }
        Ok(())
    }

    fn copy(&self, from: &Path, to: &Path, size: u64, control: &Control) -> Result<()> {
        control.check()?;
        let before = {
            let mut asked = self.0.asked.lock().unwrap();
            assert!(!asked.contains(&to.to_owned()), "{} is used twice", to.display());
            asked.push(to.to_owned());
            asked.len() - 1
        };
        assert_eq!(self.0.files.lock().unwrap()[from].len() as u64, size);
        self.0.copier.lock().unwrap()(&self.0, from, to, before)
    }

    fn remove(&self, files: &[PathBuf], _: &[Upload], _: Duration, _: &Control) -> Vec<Error> {
        for path in files {
            self.0.files.lock().unwrap().remove(path);
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
fn parent(store: &Store) -> Arc<Index> {
    let control = Control::new();
    let dir = Path::new(ONE);
    let mut builder = crate::format::IndexBuilder::new(crate::format::SourceKind::Native);
    builder.save_id = [1; 16];
    builder.generation = 1;
    builder.root = crate::format::Value::Dict(vec![]);
    for (number, item) in items().into_iter().enumerate() {
        let info = SaveInfo { token: 1000 + number as u64, ..info(1) };
        let (save, _) = Save::create_remote(
            Arc::new(store.clone()),
            dir,
            vec![item],
            Vec::new(),
            info,
            &WriteOptions::default(),
            None,
            &control,
        )
        .unwrap();
        let data = bytes(1);
        save.write(&[Piece { item: 0, at: 0, data: &data[number] }], &control).unwrap();
        let (part, _) = save.finish_with(crate::format::Value::None, &control).unwrap().keep();
        builder.merge(&Index::from_bytes(part, &dir.join(INDEX_NAME)).unwrap()).unwrap();
    }
    let index = Index::from_bytes(builder.build().unwrap(), &dir.join(INDEX_NAME)).unwrap();
    Arc::new(index.on(Some(Arc::new(store.clone()))))
}

struct Done {
    reused: Vec<bool>,
    problems: Vec<String>,
}

/// Saves with the parent. Checks what is stored, with its index and with a recovered one.
fn save(store: &Store, parent: Arc<Index>) -> Done {
    let control = Control::new();
    let data = bytes(2);
    let reuse = Reuse::new(Some(parent), &items(), &[], false, &control).unwrap();
    reuse.compare(&pieces(&data, |item| reuse.wants(item)), &control).unwrap();
    let to = Arc::new(store.clone());
    let dir = Path::new(TWO);
    let options = WriteOptions::default();
    let (save, problems) = Save::create_remote(
        to,
        dir,
        items(),
        Vec::new(),
        info(2),
        &options,
        Some(Arc::new(reuse)),
        &control,
    )
    .unwrap();
    let reused = save.is_reused();
    let written = reused.iter().filter(|reused| !**reused).count();
    save.write(&pieces(&data, |item| !reused[item]), &control).unwrap();
    let requests = reused.len() - written + store_files(written);
    assert_eq!(save.requests(), requests as u64);
    let (index, _) = save.finish_with(crate::format::Value::None, &control).unwrap().keep();
    let folder = tempdir().unwrap();
    for path in store.names(TWO) {
        fs::write(
            folder.path().join(path.file_name().unwrap()),
            &store.0.files.lock().unwrap()[&path],
        )
        .unwrap();
    }
    check(&Index::from_bytes(index, &folder.path().join(INDEX_NAME)).unwrap());
    let recovered =
        checkpoint::recover(folder.path(), None, &RecoverOptions::default(), &control).unwrap();
    check(&Index::from_bytes(recovered, &folder.path().join(INDEX_NAME)).unwrap());
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
    let store = Store::new();
    let parent = parent(&store);
    let done = save(&store, parent);
    assert_eq!(done.reused, [true, true, true, true, false]);
    assert!(done.problems.is_empty(), "{:?}", done.problems);
    let before: HashSet<_> = store.names(ONE).into_iter().collect();
    assert_eq!((before.len(), store.names(TWO).len()), (5, 5));
}

#[test]
fn what_is_refused_is_written_under_other_names() {
    // Refuse any of the four, or several, or all, also if the store carries out a refused copy
    // later.
    for refuses in [0b0001_u8, 0b0010, 0b1000, 0b0110, 0b1111] {
        for is_late in [false, true] {
            let store = Store::new();
            let parent = parent(&store);
            store.copying(move |memory, from, to, _| {
                // The token in the name identifies the round.
                let which =
                    |item: &u64| from.to_str().unwrap().contains(&format!("{:016x}", 1000 + item));
                let which = (0..4).find(which).unwrap();
                if refuses >> which & 1 == 0 {
                    return copied(memory, from, to, 0);
                }
                if is_late {
                    memory.files.lock().unwrap().insert(to.to_owned(), b"late".to_vec());
                }
                Err(refused(from))
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
        let store = Store::new();
        let parent = parent(&store);
        *store.0.most.lock().unwrap() = most + 4096; // with a header
        let done = save(&store, parent);
        let reused = (0..4).map(|item| item < asked);
        assert_eq!(done.reused[..4], reused.collect::<Vec<_>>());
        assert_eq!((store.0.asked.lock().unwrap().len(), done.problems.len()), (asked, 4 - asked));
    }
}

#[test]
fn nothing_is_copied_more_than_twice() {
    let store = Store::new();
    let parent = parent(&store);
    // Refuse one file in the first round, and another in the second.
    store.copying(|memory, from, to, before| match before {
        0 | 4 => Err(refused(from)),
        _ => copied(memory, from, to, before),
    });
    let done = save(&store, parent);
    assert_eq!(done.reused, [false; 5]);
    assert_eq!(store.0.asked.lock().unwrap().len(), 4 + 3);
    assert_eq!(done.problems.len(), 3);
    assert!(done.problems[2].contains("refused 2 times"), "{}", done.problems[2]);
}

#[test]
fn a_store_that_cannot_be_reached_for_a_while_is_a_reason_to_write() {
    // The store fails when the parent is examined, or when its files are copied.
    for (refuses, looked) in [(1, false), (2, false), (1, true)] {
        let store = Store::new();
        let parent = parent(&store);
        let control = Control::new();
        let unreachable = |count| store.0.unreachable.store(count, Ordering::Relaxed);
        if !looked {
            unreachable(refuses);
        }
        let data = bytes(2);
        let reuse = Reuse::new(Some(parent), &items(), &[], false, &control).unwrap();
        assert_eq!(reuse.problems().len(), usize::from(!looked));
        reuse.compare(&pieces(&data, |item| reuse.wants(item)), &control).unwrap();
        if looked {
            unreachable(refuses);
        }
        let begun = Save::create_remote(
            Arc::new(store.clone()),
            Path::new(TWO),
            items(),
            Vec::new(),
            info(2),
            &WriteOptions::default(),
            Some(Arc::new(reuse)),
            &control,
        );
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
        let store = Store::new();
        let parent = parent(&store);
        store.copying(move |memory, from, to, _| {
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
    let store = Store::new();
    let parent = parent(&store);
    let control = Control::new();
    let data = bytes(2);
    let reuse = Reuse::new(Some(parent), &items(), &[], false, &control).unwrap();
    reuse.compare(&pieces(&data, |item| reuse.wants(item)), &control).unwrap();
    store.copying(|memory, from, to, before| {
        memory.copy(from, to);
        if before == 2 { Err(Error::Interrupted) } else { Ok(()) }
    });
    let to = Arc::new(store.clone());
    let options = WriteOptions::default();
    let reuse = Some(Arc::new(reuse));
    let stopped = Save::create_remote(
        to,
        Path::new(TWO),
        items(),
        Vec::new(),
        info(2),
        &options,
        reuse.clone(),
        &control,
    );
    assert!(matches!(stopped, Err(Error::Interrupted)));
    assert_eq!(store.names(TWO), Vec::<PathBuf>::new());
    // A save that is given up afterwards removes its copies too.
    store.copying(copied);
    let again = SaveInfo { token: 3, ..info(2) };
    let to = Arc::new(store.clone());
    let (save, _) = Save::create_remote(
        to,
        Path::new(TWO),
        items(),
        Vec::new(),
        again,
        &options,
        reuse,
        &control,
    )
    .unwrap();
    assert_eq!(store.names(TWO).len(), 4);
    drop(save);
    assert_eq!(store.names(TWO), Vec::<PathBuf>::new());
    assert_eq!(store.names(ONE).len(), 5);
}
