//! Unchanged items are linked, changed ones are written, and recovery finds both.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::{fs, io};

use tempfile::tempdir;

use super::super::testing::{commit, content, value, whole};
use super::super::{Save, SaveInfo, WriteOptions};
use super::*;
use crate::checkpoint::{self, RecoverOptions, verify};
use crate::format::INDEX_NAME;
use crate::store::disk::{Call, Disk, Hook};

const MIB: u64 = 1 << 20;

fn items() -> Vec<SaveItem> {
    vec![
        whole("large", "uint8", &[3 * MIB + 17]),
        whole("changes", "uint8", &[4096]),
        whole("small", "int32", &[25]),
        value("value", 100),
        whole("empty", "int32", &[0]),
    ]
}

/// Identity of a save of a run with one rank.
fn info(number: u64) -> SaveInfo {
    let id = u8::try_from(number).unwrap();
    SaveInfo { save_id: [id; 16], generation: 1, token: number, rank: 0, world_size: 1 }
}

fn bytes(changed: u64) -> Vec<Vec<u8>> {
    let items = items();
    (0..items.len())
        .map(|number| {
            let salt = if items[number].name == "changes" { changed } else { 0 };
            content(number + usize::try_from(salt).unwrap() * 31, items[number].length)
        })
        .collect()
}

fn parts(contents: &[Vec<u8>], of: impl Fn(usize) -> bool) -> Vec<Part<'_>> {
    (0..)
        .zip(contents)
        .filter(|(item, data)| of(*item as usize) && !data.is_empty())
        .map(|(item, data)| Part { item, at: 0, data })
        .collect()
}

fn open(dir: &Path) -> Arc<Index> {
    Arc::new(checkpoint::open(dir, None, None, 0, &Control::new()).unwrap())
}

struct Done {
    reused: Vec<bool>,
    problems: Vec<String>,
}

fn save_on(
    disk: &Disk,
    dir: &Path,
    number: u64,
    contents: &[Vec<u8>],
    reuse: Reuse,
) -> Result<Done> {
    let control = Control::new();
    reuse.compare(&parts(contents, |item| reuse.wants(item)), &control)?;
    let options = WriteOptions::default();
    let (save, problems) = Save::create_on(
        disk,
        dir,
        items(),
        info(number),
        &options,
        Some(Arc::new(reuse)),
        &control,
    )?;
    let reused = save.is_reused();
    save.write(&parts(contents, |item| !reused[item]), &control)?;
    let index = save.finish(&control)?;
    commit(dir, index)?;
    Ok(Done { reused, problems: problems.iter().map(ToString::to_string).collect() })
}

fn save(dir: &Path, number: u64, contents: &[Vec<u8>], reuse: Reuse) -> Done {
    save_on(&Disk::default(), dir, number, contents, reuse).unwrap()
}

fn first(dir: &Path) {
    save(dir, 1, &bytes(1), Reuse::new(None, &items(), &[], false, &Control::new()).unwrap());
}

fn after(parent: &Path) -> Reuse {
    Reuse::new(Some(open(parent)), &items(), &[], false, &Control::new()).unwrap()
}

#[track_caller]
fn assert_holds(dir: &Path, contents: &[Vec<u8>]) {
    let index = open(dir);
    assert_eq!(verify::verify(&index, false, 1, &Control::new()).unwrap().problems, []);
    for (item, data) in items().iter().zip(contents) {
        let tensor = index.tensor(index.find(&item.name).unwrap());
        let chunk = index.chunk(tensor.chunks.start);
        let file = fs::read(index.file_path(chunk.file)).unwrap();
        assert!(
            file[to_usize(chunk.offset)..][..to_usize(chunk.length)] == **data,
            "{}",
            item.name
        );
    }
}

fn of(index: &Index, name: &str) -> ChunkView {
    index.chunk(index.tensor(index.find(name).unwrap()).chunks.start)
}

#[test]
fn what_did_not_change_is_linked_and_outlives_the_parent() {
    let root = tempdir().unwrap();
    let (one, two, three) = (root.path().join("1"), root.path().join("2"), root.path().join("3"));
    first(&one);
    let done = save(&two, 2, &bytes(2), after(&one));
    assert_eq!(done.reused, [true, false, true, true, false]);
    assert!(done.problems.is_empty());
    let (a, b) = (open(&one), open(&two));
    let inode = |index: &Index, file| fs::metadata(index.file_path(file)).unwrap().ino();
    assert_eq!(inode(&a, of(&a, "large").file), inode(&b, of(&b, "large").file));
    assert!(b.file(of(&b, "large").file).linked && !b.file(of(&b, "changes").file).linked);
    assert_eq!(of(&a, "large").content, of(&b, "large").content);
    assert_ne!(of(&a, "changes").content, of(&b, "changes").content);
    fs::remove_dir_all(&one).unwrap();
    assert_holds(&two, &bytes(2));
    // The third save links what the second linked: there is no chain.
    save(&three, 3, &bytes(3), after(&two));
    fs::remove_dir_all(&two).unwrap();
    assert_holds(&three, &bytes(3));
}

#[test]
fn recovery_takes_of_linked_files_what_was_reused() {
    let root = tempdir().unwrap();
    let (one, two) = (root.path().join("1"), root.path().join("2"));
    first(&one);
    save(&two, 2, &bytes(2), after(&one));
    let before = open(&two);
    let link = before.file_path(of(&before, "large").file);
    fs::remove_file(two.join(INDEX_NAME)).unwrap();
    let recover = || checkpoint::recover(&two, None, &RecoverOptions::default(), &Control::new());
    fs::write(two.join(INDEX_NAME), recover().unwrap()).unwrap();
    assert_holds(&two, &bytes(2));
    let (again, names) = (open(&two), ["large", "changes", "small", "value", "empty"]);
    assert_eq!(again.tensor_count(), 5);
    for name in names {
        let (is, was) = (of(&again, name), of(&before, name));
        assert_eq!(
            (is.offset, is.length, is.content),
            (was.offset, was.length, was.content),
            "{name}"
        );
    }
    // The set is incomplete without the link, and also if another file has its name.
    let other = fs::read(&link).unwrap();
    fs::remove_file(&link).unwrap();
    assert!(matches!(recover(), Err(Error::NotFound { .. })));
    let mut changed = other;
    let at = changed.iter().position(|&byte| byte == b' ').unwrap();
    changed[at] = b'\n';
    fs::write(&link, changed).unwrap();
    assert!(matches!(recover(), Err(Error::NotFound { .. })));
}

#[test]
fn of_what_the_caller_vouches_for_twice_the_first_block_is_compared() {
    let root = tempdir().unwrap();
    let dir = |number: u64| root.path().join(number.to_string());
    let frozen = [true, false, false, false, false];
    let told = |parent: Option<u64>, trusted| {
        Reuse::new(
            parent.map(|parent| open(&dir(parent))),
            &items(),
            &frozen,
            trusted,
            &Control::new(),
        )
        .unwrap()
    };
    save(&dir(1), 1, &bytes(1), told(None, true));
    assert!(of(&open(&dir(1)), "large").frozen);
    // They are in different files.
    assert_ne!(of(&open(&dir(1)), "large").file, of(&open(&dir(1)), "small").file);
    assert!(told(Some(1), true).probes(0) && !told(Some(1), false).probes(0));
    save(&dir(2), 2, &bytes(2), told(Some(1), true));
    assert_holds(&dir(2), &bytes(2));
    // Items that changed after all, or were loaded from elsewhere, are written.
    let mut changed = bytes(2);
    changed[0].iter_mut().for_each(|byte| *byte ^= 1);
    save(&dir(4), 4, &changed, told(Some(1), true));
    assert_holds(&dir(4), &changed);
    // Without its first block, an item is not reused.
    assert_eq!(told(Some(1), true).chunks(), Vec::<u64>::new());
    // `trusted` has no effect on an item that was not frozen in the parent.
    save(&dir(3), 3, &bytes(3), after(&dir(2)));
    assert!(!told(Some(3), true).probes(0));
}

#[test]
fn files_of_which_little_is_reused_are_written_apart_and_linked_the_next_time() {
    let root = tempdir().unwrap();
    let dir = |number: u64| root.path().join(number.to_string());
    let with = |number: u64| {
        let mut contents = bytes(1);
        // The large one changes.
        contents[0] = content(usize::try_from(number).unwrap() * 57, contents[0].len() as u64);
        contents
    };
    save(&dir(1), 1, &with(1), Reuse::new(None, &items(), &[], false, &Control::new()).unwrap());
    let second = save(&dir(2), 2, &with(2), after(&dir(1)));
    assert_eq!(second.reused, [false; 5]);
    let index = open(&dir(2));
    assert_ne!(of(&index, "large").file, of(&index, "changes").file);
    let third = save(&dir(3), 3, &with(3), after(&dir(2)));
    assert_eq!(third.reused, [false, true, true, true, false]);
    assert_holds(&dir(3), &with(3));
}

#[test]
fn other_shapes_flags_and_paths_are_other_items() {
    let root = tempdir().unwrap();
    first(root.path());
    let parent = open(root.path());
    let differs: [fn(&mut Vec<SaveItem>); 4] = [
        |items| items[2] = whole("small", "float32", &[25]),
        |items| items[2] = whole("small", "int32", &[5, 5]),
        |items| items[2].flags = 1,
        |items| items[2].name = "other".into(),
    ];
    for change in differs {
        let mut items = items();
        assert!(
            Reuse::new(Some(Arc::clone(&parent)), &items, &[], false, &Control::new())
                .unwrap()
                .wants(2)
        );
        change(&mut items);
        assert!(
            !Reuse::new(Some(Arc::clone(&parent)), &items, &[], false, &Control::new())
                .unwrap()
                .wants(2)
        );
    }
}

/// Refuses the links of a save.
struct NoLinks(i32);

impl Hook for NoLinks {
    fn before(&self, call: Call, _path: &Path) -> io::Result<usize> {
        if call == Call::Link {
            return Err(io::Error::from_raw_os_error(self.0));
        }
        Ok(usize::MAX)
    }
}

#[test]
fn where_links_cannot_be_all_is_written() {
    for code in [
        libc::EXDEV,
        libc::EPERM,
        libc::EMLINK,
        libc::EOPNOTSUPP,
        libc::ENOENT,
        libc::ESTALE,
        libc::EIO,
    ] {
        let root = tempdir().unwrap();
        let (one, two) = (root.path().join("1"), root.path().join("2"));
        first(&one);
        let disk = Disk::hooked(Arc::new(NoLinks(code)));
        let done = save_on(&disk, &two, 2, &bytes(2), after(&one)).unwrap();
        assert_eq!(done.reused, [false; 5]);
        assert_eq!(done.problems.len(), 1);
        fs::remove_dir_all(&one).unwrap();
        assert_holds(&two, &bytes(2));
    }
    let root = tempdir().unwrap();
    let (one, two) = (root.path().join("1"), root.path().join("2"));
    first(&one);
    let disk = Disk::hooked(Arc::new(NoLinks(libc::EEXIST))); // the name is another file's
    assert!(save_on(&disk, &two, 2, &bytes(2), after(&one)).is_err());
    let left: Vec<_> =
        fs::read_dir(&two).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [crate::store::LOCK_NAME]);
}

#[test]
fn a_parent_that_lost_a_file_or_is_cut_short_is_named_before_anything_is_written() {
    for cut in [None, Some(100)] {
        let root = tempdir().unwrap();
        let (one, two) = (root.path().join("1"), root.path().join("2"));
        first(&one);
        let parent = open(&one);
        let file = parent.file_path(0);
        match cut {
            None => fs::remove_file(&file).unwrap(),
            Some(length) => {
                fs::File::options().write(true).open(&file).unwrap().set_len(length).unwrap();
            }
        }
        let reuse = after(&one);
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(matches!(reuse.problems(), [problem] if problem.to_string().contains(&name)));
        save(&two, 2, &bytes(1), reuse);
        assert_holds(&two, &bytes(1));
    }
}

#[test]
fn a_file_that_goes_between_the_look_and_the_link_is_written_again() {
    let root = tempdir().unwrap();
    let (one, two) = (root.path().join("1"), root.path().join("2"));
    first(&one);
    let reuse = after(&one);
    fs::remove_dir_all(&one).unwrap();
    let done = save(&two, 2, &bytes(1), reuse);
    assert_eq!((done.reused, done.problems.len()), (vec![false; 5], 1));
    assert_holds(&two, &bytes(1));
}

#[test]
fn a_save_over_its_own_parent_keeps_what_it_links() {
    let root = tempdir().unwrap();
    first(root.path());
    let next = SaveInfo { generation: 2, ..info(2) };
    let control = Control::new();
    let (contents, reuse) = (bytes(2), after(root.path()));
    reuse.compare(&parts(&contents, |item| reuse.wants(item)), &control).unwrap();
    let (save, _) = Save::create(
        root.path(),
        items(),
        next,
        &WriteOptions::default(),
        Some(Arc::new(reuse)),
        &control,
    )
    .unwrap();
    let reused = save.is_reused();
    save.write(&parts(&contents, |item| !reused[item]), &control).unwrap();
    commit(root.path(), save.finish(&control).unwrap()).unwrap();
    assert_holds(root.path(), &contents);
    let names: Vec<_> =
        fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(
        names.iter().all(|name| !name.to_str().unwrap().starts_with("g00000001-")),
        "{names:?}"
    );
}

#[test]
fn what_is_damaged_is_found_and_refused() {
    let root = tempdir().unwrap();
    first(root.path());
    let parent = open(root.path());
    let chunk = of(&parent, "large");
    let path = parent.file_path(chunk.file);
    let mut file = fs::read(&path).unwrap();
    file[to_usize(chunk.offset + 2 * MIB)] ^= 1;
    fs::write(&path, file).unwrap();
    let reuse = after(root.path());
    let contents = bytes(1);
    reuse.compare(&parts(&contents, |item| reuse.wants(item)), &Control::new()).unwrap();
    let chunks = reuse.chunks();
    assert_eq!(chunks.len(), 4);
    let damaged = verify::damaged_chunks(&parent, &chunks, 1, &Control::new()).unwrap();
    let [(number, problem)] = damaged.as_slice() else { panic!("{damaged:?}") };
    assert_eq!((problem.tensor.as_str(), problem.block), ("large", 2));
    reuse.refuse(&[*number]);
    assert_eq!(reuse.chunks().len(), 3);
}

#[test]
fn parts_out_of_order_are_refused() {
    let root = tempdir().unwrap();
    first(root.path());
    let contents = bytes(1);
    let data = contents[0].as_slice();
    for (item, at, data) in
        [(0, MIB, &data[..to_usize(MIB)]), (0, 0, &data[..100]), (4, 0, data), (9, 0, data)]
    {
        let part = Part { item, at, data };
        assert!(matches!(
            after(root.path()).compare(&[part], &Control::new()),
            Err(Error::Plan(_))
        ));
    }
}
