//! Leftovers, files that only look like leftovers, and their removal.

use super::super::discard;
use super::*;
use crate::format::INDEX_NAME;
use crate::format::Value;
use crate::store::Mode;
use crate::write::testing::{
    INFO, assert_saved, commit, contents, create, names_in, parts, save, whole,
};
use crate::write::{Save, SaveInfo, SaveItem, WriteOptions};

fn items() -> Vec<SaveItem> {
    vec![whole("a", "float32", &[3, 5]), whole("b", "bfloat16", &[2048])]
}

fn info(generation: u64) -> SaveInfo {
    let mut info = INFO;
    (info.generation, info.token, info.rank, info.world_size) = (generation, generation, 0, 1);
    info
}

/// The data of a save that ended before its commit.
fn killed(dir: &Path, generation: u64) -> Vec<u8> {
    save(dir, &items(), info(generation), &WriteOptions::default()).bytes().to_vec()
}

/// A save that is still running.
fn begun(dir: &Path, generation: u64) -> Save {
    let options = WriteOptions::default();
    create(dir, items(), info(generation), &options).unwrap()
}

fn committed(dir: &Path, generation: u64) {
    let index = killed(dir, generation);
    commit(dir, index).unwrap();
}

fn data(generation: u64) -> String {
    format!("g{generation:08}-{generation:016x}-r00000-f00000.safetensors")
}

fn cleaned(path: &Path) -> Cleaned {
    let cleaned = clean(path, None, &Control::new()).unwrap();
    assert!(cleaned.failed.is_empty());
    cleaned
}

fn names(leftovers: &[Leftover]) -> Vec<&str> {
    leftovers.iter().map(|l| l.path.file_name().unwrap().to_str().unwrap()).collect()
}

#[test]
fn what_a_killed_save_left_goes_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    committed(dir, 1);
    killed(dir, 2);
    let temporary = format!("{INDEX_NAME}.0123456789abcdef.tmp");
    for name in [
        &temporary,
        "notes.txt",
        "model.safetensors",
        "model.safetensors.index.json.0123456789abcdef.tmp",
    ] {
        fs::write(dir.join(name), "text").unwrap();
    }
    fs::create_dir(dir.join(data(3))).unwrap();
    let found = leftovers(dir, None).unwrap();
    assert_eq!(names(&found), [&data(2), &temporary]);
    assert_eq!([found[0].kind, found[1].kind], [LeftoverKind::Data, LeftoverKind::TemporaryIndex]);
    assert_eq!(found[0].bytes, fs::metadata(dir.join(data(2))).unwrap().len());
    assert!(found.iter().all(|left| left.verdict == Verdict::Left));

    let cleaned = cleaned(dir);
    assert_eq!(names(&cleaned.removed), [&data(2), &temporary]);
    assert!(cleaned.kept.is_empty());
    assert!(leftovers(dir, None).unwrap().is_empty());
    let index =
        Index::from_bytes(fs::read(dir.join(INDEX_NAME)).unwrap(), &dir.join(INDEX_NAME)).unwrap();
    assert_saved(&index, &items());
    assert!(dir.join("notes.txt").exists() && dir.join(data(3)).is_dir());
}

#[test]
fn a_save_that_goes_on_is_left_alone_until_its_claim_ends() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    committed(dir, 1);
    let save = begun(dir, 2);
    let verdict = || leftovers(dir, None).unwrap()[0].verdict;
    assert_eq!(verdict(), Verdict::InUse);
    // At any given age.
    let kept = clean(dir, Some(Duration::ZERO), &Control::new()).unwrap();
    assert_eq!((kept.removed.len(), names(&kept.kept)), (0, vec![&*data(2)]));

    save.write(&parts(&contents(&items())), &Control::new()).unwrap();
    let (index, claim) = save.finish_with(Value::None, &Control::new()).unwrap().keep();
    assert_eq!(verdict(), Verdict::InUse, "it waits for its commit");
    assert!(cleaned(dir).removed.is_empty());
    commit(dir, index).unwrap();
    drop(claim);
    assert!(leftovers(dir, None).unwrap().is_empty());
    assert_eq!(names_in(dir), [&data(2), INDEX_NAME]);

    drop(begun(dir, 3));
    assert_eq!(names_in(dir), [&data(2), INDEX_NAME], "it removes its files itself");
}

#[test]
fn young_ones_stay_where_that_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    committed(dir, 1);
    killed(dir, 2);
    let day = Some(LONG_AGO);
    assert_eq!(leftovers(dir, day).unwrap()[0].verdict, Verdict::Young);
    assert!(clean(dir, day, &Control::new()).unwrap().removed.is_empty());
    // Nothing shows whether a process uses it.
    assert_eq!(judge(Claimed::Unknown, LONG_AGO / 2, None), Verdict::Young);
    assert_eq!(judge(Claimed::Unknown, LONG_AGO, None), Verdict::Left);
    assert_eq!(judge(Claimed::Unknown, Duration::ZERO, Some(Duration::ZERO)), Verdict::Left);
    assert_eq!(judge(Claimed::Yes, LONG_AGO, Some(Duration::ZERO)), Verdict::InUse);
}

#[test]
fn without_an_index_a_whole_save_stays() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    killed(dir, 1);
    let going_on = begun(dir, 2);
    let half = fs::read(dir.join(data(2))).unwrap();
    drop(going_on);
    fs::write(dir.join(data(2)), half).unwrap();
    let verdicts: Vec<_> = leftovers(dir, None).unwrap().iter().map(|left| left.verdict).collect();
    assert_eq!(verdicts, [Verdict::Whole, Verdict::Left]);
    assert_eq!(names(&cleaned(dir).removed), [data(2)]);
    assert_eq!(names_in(dir), [data(1)]);
}

#[test]
fn an_index_that_cannot_be_read_names_everything() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    committed(dir, 1);
    killed(dir, 2);
    fs::write(dir.join(INDEX_NAME), "damaged").unwrap();
    assert!(matches!(leftovers(dir, None), Err(Error::CorruptIndex { .. })));
    assert!(matches!(clean(dir, None, &Control::new()), Err(Error::CorruptIndex { .. })));
    assert_eq!(names_in(dir), [&data(1), &data(2), INDEX_NAME]);
}

#[test]
fn indexes_of_single_ranks_count_until_there_is_one_of_all() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let of_rank = "__0.index.dcprs";
    let old = killed(dir, 1);
    fs::write(dir.join(of_rank), &old).unwrap();
    killed(dir, 2);
    assert_eq!(names(&leftovers(dir, None).unwrap()), [data(2)]);
    // A crash between the commit and the removal of the replaced files.
    committed(dir, 3);
    fs::write(dir.join(of_rank), &old).unwrap();
    killed(dir, 1);
    let found = leftovers(dir, None).unwrap();
    assert_eq!(names(&found), [of_rank, &*data(1), &*data(2)]);
    assert_eq!(found[0].kind, LeftoverKind::RankIndex);
    cleaned(dir);
    assert_eq!(names_in(dir), [&data(3), INDEX_NAME]);
}

#[test]
fn a_commit_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    committed(dir, 1);
    let index = killed(dir, 2);
    let lock = FolderLock::take(dir, Mode::Exclusive, &Control::new()).unwrap();
    let control = Control::new();
    std::thread::scope(|scope| {
        let cleaning = scope.spawn(|| clean(dir, None, &control));
        std::thread::sleep(Duration::from_millis(20));
        assert!(dir.join(data(2)).exists());
        control.cancel();
        assert!(matches!(cleaning.join().unwrap(), Err(Error::Interrupted)));
    });
    drop(lock);
    discard(dir, None, index, &Control::new()).unwrap();
}

#[test]
fn what_a_killed_conversion_left_beside() {
    let parent = tempfile::tempdir().unwrap();
    let parent = parent.path();
    let to = parent.join("out");
    assert!(matches!(leftovers(&to, None), Err(Error::NotFound { .. })));
    let place = parent.join(".out.0123456789abcdef.tmp");
    for folder in [&place, &parent.join(".other.0123456789abcdef.tmp"), &parent.join(".out.tmp")] {
        fs::create_dir_all(folder.join("out")).unwrap();
        fs::write(folder.join("out/data"), [0; 1000]).unwrap();
    }
    // The conversion was killed before it took its lock, so only its age counts.
    assert_eq!(leftovers(&to, None).unwrap()[0].verdict, Verdict::Young);
    let lock = FolderLock::take(&place, Mode::Exclusive, &Control::new()).unwrap();
    assert_eq!(leftovers(&to, None).unwrap()[0].verdict, Verdict::InUse);
    drop(lock);
    let found = leftovers(&to, None).unwrap();
    assert_eq!((found.len(), &found[0].path, found[0].bytes), (1, &place, 1000));
    assert_eq!((found[0].kind, found[0].verdict), (LeftoverKind::Conversion, Verdict::Left));

    // Killed between the two steps of a replacement.
    fs::create_dir(place.join("out.replaced")).unwrap();
    assert_eq!(leftovers(&to, None).unwrap()[0].verdict, Verdict::Whole);
    fs::create_dir(&to).unwrap();
    assert_eq!(cleaned(&to).removed[0].path, place);
    assert!(!place.exists() && parent.join(".other.0123456789abcdef.tmp").exists());
}
