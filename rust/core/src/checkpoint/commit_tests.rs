//! A crash at any point leaves a complete checkpoint. The tests assert the order of the calls.

use std::sync::Arc;

use tempfile::tempdir;

use super::*;
use crate::format::{FileEntry, IndexBuilder, SourceKind};
use crate::store::disk::{Call, Hook};
use crate::write::testing::{INFO, Recorder, assert_saved, names_in, save, whole};
use crate::write::{SaveInfo, SaveItem, WriteOptions};

fn commit(dir: &Path, rank: Option<u32>, index: Vec<u8>, fsync: bool) -> Result<Committed> {
    commit_on(&Disk::default(), dir, rank, index, fsync)
}

fn commit_on(
    disk: &Disk,
    dir: &Path,
    rank: Option<u32>,
    index: Vec<u8>,
    fsync: bool,
) -> Result<Committed> {
    let index = Index::from_bytes(index, &dir.join(index_name(rank)))?;
    commit_index_on(disk, dir, rank, &index, true, fsync, &Control::new())
}

fn discard(dir: &Path, rank: Option<u32>, index: Vec<u8>) -> Result<()> {
    super::discard(dir, rank, index, &Control::new())
}

fn items() -> Vec<SaveItem> {
    vec![whole("a", "float32", &[3, 5]), whole("b", "bfloat16", &[2048])]
}

fn saved(dir: &Path, generation: u64) -> Vec<u8> {
    let info = SaveInfo { save_id: [7; 16], generation, token: generation, ..INFO };
    save(dir, &items(), info, &WriteOptions::default()).bytes().to_vec()
}

fn open(dir: &Path) -> Index {
    let path = dir.join(INDEX_NAME);
    Index::from_bytes(fs::read(&path).unwrap(), &path).unwrap()
}

fn data(generation: u64) -> String {
    format!("g{generation:08}-{generation:016x}-r00003-f00000.safetensors")
}

fn hooked(recorder: &Arc<Recorder>) -> Disk {
    let hook: Arc<dyn Hook> = recorder.clone();
    Disk::hooked(hook)
}

#[test]
fn a_second_save_replaces_the_first_and_nothing_else() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    assert_eq!(next_generation(&dir.join("missing")).unwrap(), 1);
    assert_eq!(next_generation(dir).unwrap(), 1);
    let first = commit(dir, None, saved(dir, 1), true).unwrap();
    assert!(first.removed.is_empty() && first.left.is_empty());
    for other in ["notes.txt", "model.safetensors", &data(7)] {
        fs::write(dir.join(other), "theirs").unwrap();
    }
    assert_eq!(next_generation(dir).unwrap(), 8);
    let second = commit(dir, None, saved(dir, 8), false).unwrap();
    assert_eq!(second.removed, [data(1)]);
    assert_eq!(names_in(dir), [&data(7), &data(8), INDEX_NAME, "model.safetensors", "notes.txt"]);
    assert_saved(&open(dir), &items());
}

#[test]
fn the_order_of_a_commit() {
    let dir = tempdir().unwrap();
    commit(dir.path(), None, saved(dir.path(), 1), true).unwrap();
    let recorder = Arc::new(Recorder::default());
    commit_on(&hooked(&recorder), dir.path(), None, saved(dir.path(), 2), true).unwrap();
    let calls = recorder.calls.lock().unwrap();
    let kinds: Vec<_> = calls.iter().map(|(call, _)| *call).collect();
    assert!(
        matches!(
            kinds[..],
            [
                Call::Create,
                Call::Write { offset: 0, .. },
                Call::Sync,
                Call::Rename,
                Call::SyncFolder,
                Call::Remove
            ]
        ),
        "{kinds:?}"
    );
    assert!(calls[0].1.starts_with("index.dcprs.") && calls[0].1.strip_suffix(".tmp").is_some());
    assert_eq!((calls[3].1.as_str(), &calls[5].1), (INDEX_NAME, &data(1)));
}

#[test]
fn a_commit_that_fails_leaves_the_old_checkpoint() {
    for at in 0..5 {
        let dir = tempdir().unwrap();
        commit(dir.path(), None, saved(dir.path(), 1), true).unwrap();
        let bytes = saved(dir.path(), 2);
        let recorder =
            Arc::new(Recorder { fault: Some((at, libc::ENOSPC)), ..Recorder::default() });
        let error =
            commit_on(&hooked(&recorder), dir.path(), None, bytes.clone(), true).unwrap_err();
        assert!(matches!(error, Error::Io { .. }));
        let renamed = at == 4;
        assert_eq!(open(dir.path()).generation(), if renamed { 2 } else { 1 });
        assert_eq!(names_in(dir.path()), [&data(1), &data(2), INDEX_NAME], "call {at}");
        assert_saved(&open(dir.path()), &items());
        if !renamed {
            discard(dir.path(), None, bytes).unwrap();
            assert_eq!(names_in(dir.path()), [&data(1), INDEX_NAME]);
        }
    }
}

#[test]
fn what_cannot_be_removed_is_told() {
    let dir = tempdir().unwrap();
    commit(dir.path(), None, saved(dir.path(), 1), true).unwrap();
    let recorder = Arc::new(Recorder { fault: Some((5, libc::EPERM)), ..Recorder::default() });
    let committed =
        commit_on(&hooked(&recorder), dir.path(), None, saved(dir.path(), 2), true).unwrap();
    assert!(committed.removed.is_empty());
    assert!(committed.left[0].to_string().contains(&data(1)));
}

#[test]
fn an_index_gets_no_file_removed_that_no_save_wrote() {
    let dir = tempdir().unwrap();
    let mut builder = IndexBuilder::new(SourceKind::Native);
    for (name, external) in [("notes.txt", false), (&*data(5), true), ("sub/x.safetensors", false)]
    {
        let name = name.to_owned();
        let file = FileEntry {
            name,
            size: 4096,
            data_start: 4096,
            external,
            linked: false,
            head_digest: None,
            mtime_ns: 0,
        };
        builder.add_file(file).unwrap();
    }
    let bytes = builder.build().unwrap();
    for name in ["notes.txt", &data(5)] {
        fs::write(dir.path().join(name), "theirs").unwrap();
    }
    fs::write(dir.path().join(INDEX_NAME), &bytes).unwrap();
    let committed = commit(dir.path(), None, saved(dir.path(), 6), true).unwrap();
    assert!(committed.removed.is_empty() && committed.left.is_empty());
    discard(dir.path(), None, bytes).unwrap();
    assert_eq!(names_in(dir.path()), [&data(5), &data(6), INDEX_NAME, "notes.txt"]);
}

#[test]
fn a_damaged_index_is_replaced_and_no_index_is_refused() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join(INDEX_NAME), "damaged").unwrap();
    assert_eq!(next_generation(dir.path()).unwrap(), 1);
    assert!(matches!(
        commit(dir.path(), None, vec![1, 2, 3], true),
        Err(Error::CorruptIndex { .. })
    ));
    commit(dir.path(), None, saved(dir.path(), 1), true).unwrap();
    assert_saved(&open(dir.path()), &items());
    // The index counts too, if it is alone.
    fs::remove_file(dir.path().join(data(1))).unwrap();
    assert_eq!(next_generation(dir.path()).unwrap(), 2);
    fs::write(dir.path().join(data(u64::MAX)), "").unwrap();
    assert!(matches!(next_generation(dir.path()), Err(Error::Unsupported(_))));
}

/// A rank-local save replaces what that rank wrote before; a save of all ranks replaces them all.
#[test]
fn indexes_of_single_ranks_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let names = || names_in(dir);
    commit(dir, Some(0), saved(dir, 1), false).unwrap();
    commit(dir, Some(7), saved(dir, 2), false).unwrap();
    assert_eq!(names().len(), 4);
    let again = commit(dir, Some(7), saved(dir, 3), false).unwrap();
    assert_eq!((again.removed.len(), names().len()), (1, 4));
    fs::write(dir.join("__x.index.dcprs"), "not ours").unwrap();
    let whole = commit(dir, None, saved(dir, 4), false).unwrap();
    assert_eq!(whole.removed.len(), 4);
    let left = names();
    assert_eq!((left[0].as_str(), left.len()), ("__x.index.dcprs", 3));
}

#[test]
fn a_save_that_may_replace_nothing_leaves_the_indexes_of_single_ranks() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    commit(dir, Some(7), saved(dir, 1), false).unwrap();
    let bytes = saved(dir, 2);
    let before = names_in(dir);
    let index = Index::from_bytes(bytes, &dir.join(INDEX_NAME)).unwrap();
    let committed = commit_index(dir, None, &index, false, false, &Control::new());
    assert!(matches!(committed, Err(Error::Exists { .. })), "{committed:?}");
    assert_eq!(names_in(dir), before);
}

/// A rank that lost contact considers the save failed, and removes its files, while the coordinator
/// is about to commit.
#[test]
fn what_is_discarded_is_not_committed_and_the_reverse() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    commit(dir, None, saved(dir, 1), true).unwrap();
    let second = saved(dir, 2);
    discard(dir, None, second.clone()).unwrap();
    let error = commit(dir, None, second, true).unwrap_err();
    assert!(error.to_string().contains("it is missing"), "{error}");
    assert_eq!(names_in(dir), [&data(1), INDEX_NAME]);
    assert_saved(&open(dir), &items());

    let third = saved(dir, 3);
    commit(dir, None, third.clone(), true).unwrap();
    discard(dir, None, third).unwrap();
    assert_eq!(names_in(dir), [&data(3), INDEX_NAME]);
    assert_saved(&open(dir), &items());
}

#[test]
fn of_a_commit_and_a_discard_at_once_one_counts() {
    for round in 0..40 {
        let dir = tempdir().unwrap();
        let dir = dir.path();
        commit(dir, None, saved(dir, 1), false).unwrap();
        let second = saved(dir, 2);
        let committed = std::thread::scope(|scope| {
            let other = second.clone();
            let discarding = scope.spawn(move || {
                std::thread::sleep(std::time::Duration::from_micros(round * 20));
                discard(dir, None, other).unwrap();
            });
            let committed = commit(dir, None, second, false).is_ok();
            discarding.join().unwrap();
            committed
        });
        let left = if committed { 2 } else { 1 };
        assert_eq!(names_in(dir), [&data(left), INDEX_NAME]);
        assert_saved(&open(dir), &items());
    }
}

/// If the lock does not exclude every process, a rank that considers the save failed may remove its
/// files at any time.
#[test]
fn where_there_are_no_locks_a_commit_looks_once_more() {
    /// Another machine.
    struct Other {
        lock: i32,
        remove: std::path::PathBuf,
    }

    impl Hook for Other {
        fn before(&self, call: Call, path: &Path) -> std::io::Result<usize> {
            match call {
                Call::Lock(_) if self.lock != 0 => {
                    return Err(std::io::Error::from_raw_os_error(self.lock));
                }
                Call::Rename if path.ends_with(INDEX_NAME) && self.remove.exists() => {
                    fs::remove_file(&self.remove)?;
                }
                _ => {}
            }
            Ok(usize::MAX)
        }
    }

    for replaces in [true, false] {
        let dir = tempdir().unwrap();
        let dir = dir.path();
        if replaces {
            commit(dir, None, saved(dir, 1), true).unwrap();
        }
        let remove = dir.join(data(2));
        let hook: Arc<dyn Hook> = Arc::new(Other { lock: libc::ENOLCK, remove });
        let error = commit_on(&Disk::hooked(hook), dir, None, saved(dir, 2), true).unwrap_err();
        assert!(
            matches!(&error, Error::CorruptData { path, .. } if path.ends_with(data(2))),
            "{error}"
        );
        if replaces {
            assert_eq!(names_in(dir), [&data(1), INDEX_NAME]);
            assert_saved(&open(dir), &items());
        } else {
            assert!(names_in(dir).is_empty());
        }
    }
}

#[test]
fn a_commit_can_be_stopped_until_its_rename() {
    /// Simulates Ctrl-C at some call.
    struct Stopping {
        control: Arc<Control>,
        at: Call,
    }

    impl Hook for Stopping {
        fn before(&self, call: Call, _: &Path) -> std::io::Result<usize> {
            if std::mem::discriminant(&call) == std::mem::discriminant(&self.at) {
                self.control.cancel();
            }
            Ok(usize::MAX)
        }
    }

    let write = Call::Write { offset: 0, len: 0, direct: false };
    for (at, committed) in [
        (Call::OpenLock, false),
        (Call::Create, false),
        (write, false),
        (Call::Sync, false),
        (Call::Rename, true),
        (Call::SyncFolder, true),
    ] {
        let dir = tempdir().unwrap();
        let dir = dir.path();
        commit(dir, None, saved(dir, 1), true).unwrap();
        let control = Arc::new(Control::new());
        let hook: Arc<dyn Hook> = Arc::new(Stopping { control: control.clone(), at });
        let index = Index::from_bytes(saved(dir, 2), &dir.join(INDEX_NAME)).unwrap();
        let result = commit_index_on(&Disk::hooked(hook), dir, None, &index, true, true, &control);
        assert_eq!(result.is_ok(), committed, "{at:?}: {result:?}");
        assert!(committed || matches!(result, Err(Error::Interrupted)));
        assert_eq!(open(dir).generation(), if committed { 2 } else { 1 });
        assert!(!names_in(dir).iter().any(|name| name.contains(".tmp")));
    }
}

#[test]
fn a_verification_can_be_stopped_before_it_has_hashed_anything() {
    let dir = tempdir().unwrap();
    let empty = [whole("a", "float32", &[0])];
    let index = save(dir.path(), &empty, INFO, &WriteOptions::default());
    let control = Control::new();
    assert!(super::super::verify::verify(&index, false, 1, &control).unwrap().problems.is_empty());
    control.cancel();
    let stopped = super::super::verify::verify(&index, false, 1, &control);
    assert!(matches!(stopped, Err(Error::Interrupted)));
}
