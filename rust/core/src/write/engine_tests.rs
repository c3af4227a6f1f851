//! Written files equal their input, however it is split and whatever the disk does.

use std::path::Path;
use std::process::Command;
use std::{env, fs, io};

use proptest::prelude::*;
use tempfile::tempdir;

use super::super::WriteIo;
use super::super::testing::{
    INFO, Recorder, assert_saved, content, contents, create, create_on, index_in, names_in,
    odd_names, parts, rows, save, saves, value, whole,
};
use super::*;
use crate::format::Index;
use crate::store::Buffer;
use crate::store::disk::{Call, Disk, Hook};
use crate::write::jobs::to_usize;
use crate::write::options::WriteOptions;
use crate::write::{FilePlan, Place, Sums};

const MIB: u64 = 1 << 20;

fn options(io: WriteIo) -> WriteOptions {
    WriteOptions { io, threads: 3, fsync: false, max_inflight_bytes: 3 << 18, local_ranks: 1 }
}

/// Lengths around those of pages and blocks. The aligned ones come first.
fn uneven() -> Vec<SaveItem> {
    [
        8192,
        3 * MIB,
        MIB,
        4096,
        2 * MIB + 64,
        4096 + 512,
        1000,
        2 * MIB + 4,
        MIB - 2,
        4097,
        3 * MIB + 1,
        1,
        0,
        17,
    ]
    .iter()
    .enumerate()
    .map(|(number, &length)| whole(&format!("t{number}"), "uint8", &[length]))
    .chain([value("v", 100)])
    .collect()
}

/// Fewer such items, for tests that save many times.
fn few() -> Vec<SaveItem> {
    let lengths = [8192, MIB + 64, 40_000, 4096, 1000, 4097, 1];
    let tensors = lengths.iter().enumerate();
    tensors.map(|(number, &length)| whole(&format!("t{number}"), "uint8", &[length])).collect()
}

fn finish(save: Save, dir: &Path) -> Index {
    index_in(dir, save.finish(&Control::new()).unwrap())
}

/// Each call writes one block of every item.
fn write_by_blocks(save: &Save, contents: &[Vec<u8>]) -> Result<()> {
    for block in 0..4 {
        let at = block * MIB;
        let parts: Vec<_> = (0..)
            .zip(contents)
            .filter(|(_, data)| data.len() as u64 > at)
            .map(|(item, data)| Part {
                item,
                at,
                data: &data[to_usize(at)..data.len().min(to_usize(at + MIB))],
            })
            .collect();
        save.write(&parts, &Control::new())?;
    }
    Ok(())
}

#[test]
fn uneven_items_in_all_ways() {
    let items = uneven();
    let contents = contents(&items);
    for io in [WriteIo::Direct, WriteIo::Buffered, WriteIo::Auto] {
        for threads in [1, 5] {
            let dir = tempdir().unwrap();
            let options = WriteOptions { threads, ..options(io) };
            assert_saved(&save(dir.path(), &items, INFO, &options), &items);

            let dir = tempdir().unwrap();
            let save = create(dir.path(), items.clone(), INFO, &options).unwrap();
            let control = Control::new();
            write_by_blocks(&save, &contents).unwrap();
            assert_saved(&finish(save, dir.path()), &items);
            assert_eq!(control.done(), 0);
        }
    }
}

#[test]
fn memory_that_is_aligned_is_written_from_where_it_is_if_nothing_is_hashed() {
    let data = content(0, 3 * MIB + 5);
    let mut buffer = Buffer::default();
    let aligned = &mut buffer.at_least(data.len()).unwrap()[..data.len()];
    aligned.copy_from_slice(&data);
    for (sums, copied) in [(Sums::None, false), (Sums::Crc32, true)] {
        let dir = tempdir().unwrap();
        let file =
            FilePlan { name: "f".into(), header: Vec::new(), size: 3 * MIB + 5, items: Vec::new() };
        let values = vec![("w".into(), Place { file: 0, offset: 0 }, 3 * MIB + 5)];
        let (control, options) = (Control::new(), options(WriteIo::Direct));
        let save =
            Save::create_files(dir.path(), vec![file], values, sums, &options, &control).unwrap();
        let part = Part { item: 0, at: 0, data: &*aligned };
        save.write(&[part], &control).unwrap();
        assert_eq!(control.done(), 3 * MIB + 5);
        assert_eq!(save.buffers() > 0, copied, "{sums:?}");
        if copied {
            assert_eq!(save.crc32s(), [crc32fast::hash(&data)]);
        }
        save.finish_with(Value::None, &control).unwrap().keep();
        assert!(fs::read(dir.path().join("f")).unwrap() == data);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn what_is_saved_is_there(items in saves(10), direct: bool, seed: u64) {
        let dir = tempdir().unwrap();
        let io = if direct { WriteIo::Direct } else { WriteIo::Buffered };
        let save = create(dir.path(), items.clone(), INFO, &options(io)).unwrap();
        let contents = contents(&items);
        // Two calls: the first has the items that a coin toss picks.
        let (first, second): (Vec<_>, Vec<_>) =
            parts(&contents).into_iter().enumerate().partition(|(number, _)| seed >> (number % 64) & 1 == 1);
        for call in [first, second] {
            let parts: Vec<_> = call.into_iter().map(|(_, part)| part).collect();
            save.write(&parts, &Control::new()).unwrap();
        }
        assert_saved(&finish(save, dir.path()), &items);
    }
}

#[test]
fn more_files_than_are_held_open() {
    let items: Vec<_> =
        (0..100).map(|i| rows("w", "int16", &[100, 3000], &[i, 0], &[1, 3000])).collect();
    for io in [WriteIo::Direct, WriteIo::Buffered] {
        let dir = tempdir().unwrap();
        let index = save(
            dir.path(),
            &items,
            INFO,
            &WriteOptions { fsync: io == WriteIo::Direct, ..options(io) },
        );
        assert_eq!(index.file_count(), 100);
        assert_saved(&index, &items);
    }
}

#[test]
fn odd_names_and_nothing_at_all() {
    let dir = tempdir().unwrap();
    let items: Vec<_> = odd_names().iter().map(|name| whole(name, "float32", &[2])).collect();
    assert_saved(&save(dir.path(), &items, INFO, &WriteOptions::default()), &items);
    let index = save(&dir.path().join("new/folder"), &[], INFO, &WriteOptions::default());
    assert_eq!((index.file_count(), index.tensor_count(), index.generation()), (1, 0, 7));
    assert_eq!(index.planner_root(), Value::Dict(vec![]));
}

#[test]
fn many_small_items_take_few_writes() {
    let items: Vec<_> = (0..2000).map(|i| whole(&format!("t{i}"), "uint8", &[4096])).collect();
    let dir = tempdir().unwrap();
    let recorder = Arc::new(Recorder::default());
    let disk = Disk::hooked(recorder.clone());
    let save = create_on(&disk, dir.path(), items.clone(), INFO, &WriteOptions::default()).unwrap();
    save.write(&parts(&contents(&items)), &Control::new()).unwrap();
    assert_saved(&finish(save, dir.path()), &items);
    let calls = recorder.calls.lock().unwrap().len();
    assert!(calls < 32, "{calls} calls");
}

fn recorded(recorder: Recorder, dir: &Path, io: WriteIo) -> (Arc<Recorder>, Result<Vec<u8>>) {
    let recorder = Arc::new(recorder);
    let items = few();
    let options = WriteOptions { fsync: true, ..options(io) };
    let hook: Arc<dyn Hook> = recorder.clone();
    let result =
        create_on(&Disk::hooked(hook), dir, items.clone(), INFO, &options).and_then(|save| {
            write_by_blocks(&save, &contents(&items))?;
            save.finish(&Control::new())
        });
    (recorder, result)
}

#[test]
fn headers_follow_the_payload_to_the_disk() {
    let dir = tempdir().unwrap();
    let (recorder, result) = recorded(Recorder::default(), dir.path(), WriteIo::Direct);
    result.unwrap();
    let mut calls: Vec<_> = recorder.calls.lock().unwrap().iter().map(|(call, _)| *call).collect();
    // Direct I/O, if it is available, is asked for once.
    let opened = calls.iter().filter(|call| **call == Call::OpenDirect).count();
    assert_eq!(opened, usize::from(cfg!(all(target_os = "linux", not(posix_only)))));
    calls.retain(|call| *call != Call::OpenDirect);
    assert_eq!(calls[..2], [Call::Create, Call::Allocate]);
    let is_payload = |call: &Call| matches!(call, Call::Write { offset, .. } if *offset > 0);
    let payload_end = calls.iter().rposition(is_payload).unwrap();
    assert!(calls[2..=payload_end].iter().all(is_payload));
    assert!(matches!(
        calls[payload_end + 1..],
        [
            Call::Sync,
            Call::Write { offset: 0, len: 4096, direct: false },
            Call::Sync,
            Call::SyncFolder
        ]
    ));
}

#[test]
fn new_folders_are_synced_in_theirs() {
    let dir = tempdir().unwrap();
    let (recorder, result) = recorded(Recorder::default(), &dir.path().join("a/b"), WriteIo::Auto);
    result.unwrap();
    let calls = recorder.calls.lock().unwrap();
    let of = |wanted: Call| -> Vec<&str> {
        calls.iter().filter(|(call, _)| *call == wanted).map(|(_, name)| name.as_str()).collect()
    };
    assert_eq!(of(Call::CreateFolder), ["a", "b"]);
    assert_eq!(of(Call::SyncFolder), ["b", "a", dir.path().file_name().unwrap().to_str().unwrap()]);
}

#[test]
fn every_failing_call_is_reported_and_leaves_no_file() {
    for io in [WriteIo::Direct, WriteIo::Buffered] {
        for errno in [libc::ENOSPC, libc::EIO, libc::EFBIG] {
            let mut at = 0;
            loop {
                let dir = tempdir().unwrap();
                let fault = Some((at, errno));
                let (recorder, result) =
                    recorded(Recorder { fault, ..Recorder::default() }, dir.path(), io);
                let Err(error) = result else { break };
                let (call, name) = recorder.calls.lock().unwrap()[at].clone();
                let Error::Io { path, source, .. } = &error else { panic!("{error}") };
                assert_eq!(source.raw_os_error(), Some(errno), "{call:?}");
                assert_eq!(path.file_name().unwrap().to_str().unwrap(), name, "{call:?}");
                assert_eq!(names_in(dir.path()), Vec::<String>::new(), "{call:?}");
                at += 1;
            }
            assert!(at > 12, "only {at} calls");
        }
    }
}

#[test]
fn interrupted_short_and_refused_writes_are_completed() {
    for io in [WriteIo::Direct, WriteIo::Buffered] {
        for most in [4096, 5000, 300_000] {
            let recorder =
                Recorder { most: Some(most), fault: Some((9, libc::EINTR)), ..Recorder::default() };
            let dir = tempdir().unwrap();
            let (_, result) = recorded(recorder, dir.path(), io);
            assert_saved(&index_in(dir.path(), result.unwrap()), &few());
        }
    }
}

#[test]
fn a_file_system_that_refuses_direct_writes_gets_buffered_ones() {
    let dir = tempdir().unwrap();
    let (_, result) = recorded(
        Recorder { refuse_direct: true, ..Recorder::default() },
        dir.path(),
        WriteIo::Direct,
    );
    assert_saved(&index_in(dir.path(), result.unwrap()), &few());
}

#[test]
fn a_dropped_or_unfinished_save_leaves_nothing() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    let items = uneven();
    drop(create(dir.path(), items.clone(), INFO, &WriteOptions::default()).unwrap());
    assert_eq!(names_in(dir.path()), ["notes.txt"]);
    let save = create(dir.path(), items, INFO, &WriteOptions::default()).unwrap();
    assert_eq!(names_in(dir.path()).len(), 2);
    assert!(
        save.finish(&Control::new())
            .unwrap_err()
            .to_string()
            .contains("0 of 8192 bytes were written")
    );
    assert_eq!(names_in(dir.path()), ["notes.txt"]);
}

#[test]
fn a_name_that_is_taken_is_not_overwritten() {
    let dir = tempdir().unwrap();
    let items = [
        whole("a", "int8", &[1]),
        rows("b", "int8", &[2], &[0], &[1]),
        rows("b", "int8", &[2], &[1], &[1]),
    ];
    let taken = "g00000007-0000000000000abc-r00003-f00001.safetensors";
    fs::write(dir.path().join(taken), "theirs").unwrap();
    let error = create(dir.path(), items.to_vec(), INFO, &WriteOptions::default()).err().unwrap();
    assert!(
        matches!(&error, Error::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists),
        "{error}"
    );
    assert_eq!(names_in(dir.path()), [taken]);
    assert_eq!(fs::read(dir.path().join(taken)).unwrap(), b"theirs");
}

#[test]
fn parts_out_of_order_are_refused() {
    let data = content(0, 3 * MIB);
    let part = |item, at: u64, len: u64| Part { item, at, data: &data[..to_usize(len)] };
    for bad in [
        vec![part(1, 0, 1)],
        vec![part(0, MIB, MIB)],
        vec![part(0, 0, MIB + 1)],
        vec![part(0, 0, 3 * MIB)],
        vec![part(0, 0, MIB), part(0, 0, MIB)],
        vec![part(0, u64::MAX, MIB)],
    ] {
        let dir = tempdir().unwrap();
        let items = vec![whole("w", "uint8", &[2 * MIB + 9])];
        let save = create(dir.path(), items, INFO, &options(WriteIo::Buffered)).unwrap();
        let error = save.write(&bad, &Control::new()).unwrap_err();
        match &error {
            Error::TensorPlan { tensor, .. } => assert_eq!(tensor, "w"),
            Error::Plan(_) => assert_eq!(bad[0].item, 1, "{error}"), // there is no such item
            _ => panic!("{error}"),
        }
        let error = save.write(&[part(0, 0, MIB)], &Control::new()).unwrap_err();
        assert!(error.to_string().contains("earlier write"), "{error}");
        assert!(save.finish(&Control::new()).is_err());
        assert_eq!(names_in(dir.path()), Vec::<String>::new());
    }
}

#[test]
fn a_cancelled_write_stops() {
    let dir = tempdir().unwrap();
    let items = uneven();
    let save = create(dir.path(), items.clone(), INFO, &options(WriteIo::Direct)).unwrap();
    let control = Control::new();
    control.cancel();
    assert!(matches!(save.write(&parts(&contents(&items)), &control), Err(Error::Interrupted)));
    assert!(save.finish(&Control::new()).is_err());
}

/// The parent process runs this test again in a shell that limits the size of files.
#[test]
fn a_limit_on_file_sizes_is_an_error() {
    const CHILD: &str = "DCP_RS_TEST_FILE_LIMIT";
    if let Ok(dir) = env::var(CHILD) {
        let items = vec![whole("w", "uint8", &[4 * MIB])];
        for io in [WriteIo::Direct, WriteIo::Buffered] {
            let error = create(Path::new(&dir), items.clone(), INFO, &options(io)).err().unwrap();
            assert!(
                matches!(&error, Error::Io { source, .. } if source.raw_os_error() == Some(libc::EFBIG)),
                "{error}"
            );
            assert_eq!(names_in(Path::new(&dir)), Vec::<String>::new());
        }
        return;
    }
    let dir = tempdir().unwrap();
    let name = "write::engine::tests::a_limit_on_file_sizes_is_an_error";
    let child = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 1024; exec \"$0\" --exact \"$1\""])
        .arg(env::current_exe().unwrap())
        .arg(name)
        .env(CHILD, dir.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
}

#[test]
fn a_save_can_be_stopped_while_it_is_synced() {
    /// Simulates Ctrl-C between two syncs.
    struct Stopping {
        control: Arc<Control>,
        syncs: std::sync::atomic::AtomicUsize,
        at: usize,
    }

    impl Hook for Stopping {
        fn before(&self, call: Call, _: &Path) -> std::io::Result<usize> {
            if call == Call::Sync
                && self.syncs.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == self.at
            {
                self.control.cancel();
            }
            Ok(usize::MAX)
        }
    }

    let items = vec![
        rows("a", "float32", &[4, 2], &[0, 0], &[2, 2]),
        rows("a", "float32", &[4, 2], &[2, 0], &[2, 2]),
    ];
    let options = WriteOptions { threads: 1, ..WriteOptions::default() };
    for at in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let control = Arc::new(Control::new());
        let hook = Arc::new(Stopping { control: control.clone(), syncs: 0.into(), at });
        let disk = Disk::hooked(hook.clone());
        let save = create_on(&disk, dir.path(), items.clone(), INFO, &options).unwrap();
        save.write(&parts(&contents(&items)), &Control::new()).unwrap();
        let stopped = save.finish(&control);
        assert!(matches!(stopped, Err(Error::Interrupted)), "{at}");
        let syncs = hook.syncs.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(syncs, at + 1, "two files, each before its header and after");
        assert!(names_in(dir.path()).is_empty());
    }
}

#[test]
fn files_of_a_foreign_layout_have_their_checksums() {
    let dir = tempdir().unwrap();
    let data: Vec<u8> = (0..4 * MIB + 99).map(|i| (i * 31 % 251).to_le_bytes()[0]).collect();
    let lengths = [3 * MIB + 5, 0, 17, MIB];
    for (sums, name) in [(Sums::Crc32, "a"), (Sums::None, "b")] {
        let mut values = Vec::new();
        let mut offset = 7;
        for length in lengths {
            values.push((format!("v{offset}"), Place { file: 0, offset }, length));
            offset += length + 3;
        }
        let files =
            vec![FilePlan { name: name.into(), header: vec![], size: offset, items: vec![] }];
        let control = Control::default();
        let save =
            Save::create_files(dir.path(), files, values, sums, &options(WriteIo::Auto), &control)
                .unwrap();
        // The first item comes in two calls.
        let part = |item, at: u64, length: u64| Part {
            item,
            at,
            data: &data[to_usize(at)..to_usize(at + length)],
        };
        save.write(&[part(0, 0, 2 * MIB), part(2, 0, 17)], &control).unwrap();
        save.write(&[part(0, 2 * MIB, MIB + 5), part(3, 0, MIB)], &control).unwrap();
        if sums == Sums::Crc32 {
            let expected = lengths.map(|length| crc32fast::hash(&data[..to_usize(length)]));
            assert_eq!(save.crc32s(), expected);
        }
        save.finish(&control).unwrap();
        let written = fs::read(dir.path().join(name)).unwrap();
        assert_eq!(written.len() as u64, offset);
        assert!(written[7..].starts_with(&data[..to_usize(lengths[0])]));
    }
}

/// A file system that takes writes at the end of a file only.
struct AtEndsOnly;

impl Hook for AtEndsOnly {
    fn before(&self, call: Call, path: &Path) -> io::Result<usize> {
        match call {
            Call::Write { offset, .. }
                if fs::metadata(path).is_ok_and(|at| at.is_file() && at.len() != offset) =>
            {
                Err(io::Error::from_raw_os_error(libc::ENOTSUP))
            }
            _ => Ok(50_007), // short writes, so that some are refused half way
        }
    }
}

#[test]
fn file_system_that_takes_writes_at_ends_only() {
    let items = uneven();
    let contents = contents(&items);
    for io in [WriteIo::Direct, WriteIo::Buffered] {
        let dir = tempdir().unwrap();
        let disk = Disk::hooked(Arc::new(AtEndsOnly));
        let save = create_on(&disk, dir.path(), items.clone(), INFO, &options(io)).unwrap();
        write_by_blocks(&save, &contents).unwrap();
        assert_saved(&finish(save, dir.path()), &items);
    }
}
