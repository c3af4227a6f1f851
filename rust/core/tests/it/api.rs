//! The public interface alone, on checkpoints of every kind, right and damaged.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use dcp_rs_core::{Checkpoint, Control, Error, OpenOptions};
use serde_json::Value as Json;
use twox_hash::XxHash3_64;

/// A path from the root of the repository.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

const NATIVE: &str = "tests/compat/v1/sharded";

/// A copy of a checkpoint, to damage.
fn copy(path: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(path)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

fn read(checkpoint: &Checkpoint, name: &str) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0xEE; checkpoint.tensor(name)?.nbytes()];
    checkpoint.read_into(name, &mut bytes)?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn json(path: &Path) -> Json {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn shape(json: &Json) -> Vec<u64> {
    json.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

#[test]
fn native_checkpoints_give_what_was_saved() {
    for kind in ["plain", "sharded", "cast", "reused"] {
        let folder = fixture("tests/compat/v1").join(kind);
        let checkpoint = OpenOptions::new().check_digests(true).open(&folder).unwrap();
        let saved = json(&folder.with_extension("json"));
        let mut tensors = 0;
        for item in saved["state"]["items"].as_array().unwrap() {
            if let Some(hex_of) = item[1]["hex"].as_str() {
                let name = item[0].as_str().unwrap().trim_matches('\'');
                let info = checkpoint.tensor(name).unwrap();
                assert_eq!(info.dtype.name(), item[1]["tensor"].as_str().unwrap());
                assert_eq!(info.shape, shape(&item[1]["shape"]));
                assert_eq!(hex(&read(&checkpoint, name).unwrap()), hex_of, "{kind} {name}");
                tensors += 1;
            }
        }
        assert_eq!(checkpoint.names().count(), tensors, "values are no tensors");
        let verified = checkpoint.verify(&Control::new()).unwrap();
        assert!(verified.problems.is_empty() && verified.bytes > 0, "{verified:?}");
    }
}

#[test]
fn files_of_torch_save_open_in_place() {
    for file in ["nested-zip", "nested-legacy"] {
        let checkpoint =
            Checkpoint::open(fixture("rust/fuzz/seeds/torch_file").join(file)).unwrap();
        // A transposed view: stored by columns, delivered by rows.
        let wanted: Vec<u8> = [0.0, 4.0, 8.0, 1.0, 5.0, 9.0, 2.0, 6.0, 10.0, 3.0, 7.0, 11.0_f32]
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        assert_eq!(read(&checkpoint, "m.b").unwrap(), wanted, "{file}");
    }
}

#[test]
fn a_rank_local_checkpoint_opens_for_a_rank() {
    let folder = fixture("tests/compat/v1/rank_local");
    assert!(matches!(Checkpoint::open(&folder), Err(Error::NotFound { .. })));
    let checkpoint = OpenOptions::new().rank(1).open(&folder).unwrap();
    assert!(checkpoint.path().ends_with("__1.index.dcprs"));
    let name = checkpoint.names().next().unwrap();
    assert!(!read(&checkpoint, name).unwrap().is_empty());
}

#[test]
fn every_region_is_a_part_of_the_whole() {
    // `rows` has one shard for the first rows and one for the others, `columns` the same of
    // columns.
    let checkpoint = Checkpoint::open(fixture(NATIVE)).unwrap();
    for name in ["rows", "columns"] {
        let whole = read(&checkpoint, name).unwrap();
        let info = checkpoint.tensor(name).unwrap();
        let (height, width) = (info.shape[0], info.shape[1]);
        let size = info.dtype.size();
        let mut regions = Vec::new();
        for (top, left) in (0..height).flat_map(|top| (0..width).map(move |left| (top, left))) {
            for (rows, columns) in
                (0..=height - top).flat_map(|r| (0..=width - left).map(move |c| (r, c)))
            {
                regions.push(([top, left], [rows, columns]));
            }
        }
        let mut buffers: Vec<Vec<u8>> = (regions.iter())
            .map(|(_, sizes)| vec![0; usize::try_from(sizes[0] * sizes[1] * size).unwrap()])
            .collect();
        let mut batch = checkpoint.batch();
        for ((offsets, sizes), buffer) in regions.iter().zip(&mut buffers) {
            batch.add_region(name, offsets, sizes, buffer).unwrap();
        }
        batch.read(&Control::new()).unwrap();
        for ((offsets, sizes), got) in regions.iter().zip(&buffers) {
            let row = |r: u64| {
                let at = usize::try_from((r * width + offsets[1]) * size).unwrap();
                &whole[at..at + usize::try_from(sizes[1] * size).unwrap()]
            };
            let wanted: Vec<u8> =
                (offsets[0]..offsets[0] + sizes[0]).flat_map(row).copied().collect();
            assert_eq!(*got, wanted, "{name} {offsets:?} {sizes:?}");
        }
        let ([top, left], [rows, columns]) = regions[regions.len() / 2];
        let mut one = vec![0; buffers[regions.len() / 2].len()];
        checkpoint.read_region_into(name, &[top, left], &[rows, columns], &mut one).unwrap();
        assert_eq!(one, buffers[regions.len() / 2]);
    }
}

/// The tensor and the reason of a refusal; the path is that of the index.
fn refused(checkpoint: &Checkpoint, result: Result<(), Error>) -> (String, String) {
    match result {
        Err(Error::TensorPlan { path, tensor, reason }) => {
            assert_eq!(path.as_deref(), Some(checkpoint.path()));
            (tensor, reason)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn wrong_names_lengths_and_regions_are_refused() {
    let checkpoint = Checkpoint::open(fixture(NATIVE)).unwrap();
    let mut buffer = [7_u8; 60];
    let (tensor, reason) = refused(&checkpoint, checkpoint.read_into("row", &mut buffer));
    assert!(tensor == "row" && reason.ends_with("holds no tensor of this name"), "{reason}");
    for length in [0, 59] {
        let (tensor, reason) =
            refused(&checkpoint, checkpoint.read_into("rows", &mut buffer[..length]));
        let wanted =
            format!("[5, 3] elements of float32 take 60 bytes, and the buffer has {length}");
        assert_eq!((tensor.as_str(), reason), ("rows", wanted));
    }
    let huge = u64::MAX;
    let wrong: [(&[u64], &[u64]); 7] = [
        (&[0], &[5]),
        (&[0, 0, 0], &[1, 1, 1]),
        (&[3, 0], &[3, 1]),
        (&[6, 0], &[0, 0]),
        (&[0, huge], &[1, 2]),
        (&[0, 0], &[huge, huge]),
        (&[0, 0], &[5]),
    ];
    for (offsets, sizes) in wrong {
        let result = checkpoint.read_region_into("rows", offsets, sizes, &mut buffer);
        let (_, reason) = refused(&checkpoint, result);
        assert!(reason.contains("do not lie within [5, 3]"), "{offsets:?} {sizes:?} {reason}");
    }
    assert_eq!(buffer, [7; 60]);
    let reused = Checkpoint::open(fixture("tests/compat/v1/reused")).unwrap();
    let (_, reason) = refused(&reused, reused.tensor("value").map(drop));
    assert!(reason.ends_with("holds a value of this name, not a tensor"), "{reason}");
}

#[test]
fn a_batch_goes_on_after_a_refusal_and_can_be_stopped() {
    let checkpoint = Checkpoint::open(fixture(NATIVE)).unwrap();
    let (mut rows, mut short) = ([0; 60], [7; 3]);
    let control = Control::new();
    let mut batch = checkpoint.batch();
    batch.add("rows", &mut rows).unwrap();
    batch.add("columns", &mut short).unwrap_err();
    batch.read(&control).unwrap();
    assert_eq!((rows.to_vec(), short), (read(&checkpoint, "rows").unwrap(), [7; 3]));
    assert_eq!(control.done(), 60);

    control.cancel();
    let mut batch = checkpoint.batch();
    batch.add("rows", &mut rows).unwrap();
    assert!(matches!(batch.read(&control), Err(Error::Interrupted)));
    assert!(matches!(checkpoint.verify(&control), Err(Error::Interrupted)));
}

#[test]
fn threads_share_a_checkpoint() {
    let checkpoint = Checkpoint::open(fixture(NATIVE)).unwrap();
    let wanted = read(&checkpoint, "columns").unwrap();
    std::thread::scope(|scope| {
        let reads: Vec<_> =
            (0..4).map(|_| scope.spawn(|| read(&checkpoint, "columns").unwrap())).collect();
        assert!(reads.into_iter().all(|read| read.join().unwrap() == wanted));
    });
}

/// The one data file of a copy that holds the second half of `rows`.
fn data_files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    files
}

#[test]
fn a_damaged_byte_is_named() {
    let dir = copy(NATIVE);
    let file = data_files(dir.path()).remove(1);
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, &bytes).unwrap();

    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let verified = checkpoint.verify(&Control::new()).unwrap();
    let [problem] = verified.problems.as_slice() else { panic!("{verified:?}") };
    assert_eq!((&problem.path, problem.whole_file), (&file, false));
    let text = problem.to_string();
    let parts = [file.to_str().unwrap(), problem.tensor.as_str(), "at byte", "expected", "got"];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");

    // Unchecked reads deliver it, and checked ones do not.
    let checked = OpenOptions::new().check_digests(true).open(dir.path()).unwrap();
    read(&checkpoint, &problem.tensor).unwrap();
    match read(&checked, &problem.tensor) {
        Err(Error::CorruptData { path, tensor, offset, .. }) => {
            assert_eq!(
                (path, tensor, offset),
                (file, problem.tensor.clone(), Some(problem.offset))
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_that_are_cut_short_or_gone_are_named() {
    let dir = copy(NATIVE);
    let file = data_files(dir.path()).remove(0);
    let bytes = fs::read(&file).unwrap();
    for length in [Some(bytes.len() - 1), Some(0), None] {
        match length {
            Some(length) => fs::write(&file, &bytes[..length]).unwrap(),
            None => fs::remove_file(&file).unwrap(),
        }
        // The index is whole.
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        match read(&checkpoint, "rows") {
            Err(Error::CorruptData { path, .. }) => assert_eq!(path, file),
            other => panic!("{other:?}"),
        }
        let verified = checkpoint.verify(&Control::new()).unwrap();
        assert!(
            matches!(verified.problems.as_slice(), [problem] if problem.whole_file && problem.path == file),
            "{verified:?}"
        );
    }
}

#[test]
fn what_is_no_checkpoint_is_said() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path().to_owned(), dir.path().join("none")] {
        let error = Checkpoint::open(&path).unwrap_err();
        assert!(matches!(&error, Error::NotFound { path: at, .. } if *at == path), "{error}");
    }
}

/// The digest of an index is no secret: whoever forges one makes it right.
fn sign(index: &mut [u8]) {
    index[40..48].fill(0);
    let digest = XxHash3_64::oneshot(index);
    index[40..48].copy_from_slice(&digest.to_le_bytes());
}

#[test]
fn a_forged_index_is_refused_or_reads_within_its_files() {
    let dir = copy(NATIVE);
    let path = dir.path().join("index.dcprs");
    let right = fs::read(&path).unwrap();
    let (mut refused, mut opened) = (0, 0);
    let mut attempt = |bytes: &[u8]| {
        // Some file systems write a file to the disk at once that is made shorter and written
        // again.
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        match OpenOptions::new().threads(1).open(dir.path()) {
            Ok(checkpoint) => {
                opened += 1;
                for tensor in checkpoint.tensors().filter(|tensor| tensor.nbytes() < 1 << 20) {
                    let mut bytes = vec![0; tensor.nbytes()];
                    // Right or wrong: there is no memory that it may not write to.
                    let _ = checkpoint.read_into(tensor.name, &mut bytes);
                }
            }
            Err(Error::CorruptIndex { path: at, offset, .. }) => {
                assert_eq!(at, path);
                assert!(offset <= right.len() as u64);
                refused += 1;
            }
            Err(Error::Unsupported(_)) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    };
    for at in 0..right.len() {
        let mut forged = right.clone();
        forged[at] = [0, forged[at] ^ 1, 0x7F, 0xFF][at % 4];
        sign(&mut forged);
        attempt(&forged);
        let mut forged = right.clone();
        forged[at] = [0x7F, 0xFF, 0, forged[at] ^ 1][at % 4];
        sign(&mut forged);
        attempt(&forged);
    }
    for length in (0..right.len()).step_by(7) {
        attempt(&right[..length]);
    }
    assert!(refused > 700 && opened > 100, "{refused} refused, {opened} opened");
}

#[test]
fn an_index_of_other_bytes_than_were_written_is_refused() {
    let dir = copy(NATIVE);
    let path = dir.path().join("index.dcprs");
    let right = fs::read(&path).unwrap();
    for at in (0..right.len()).step_by(13) {
        let mut damaged = right.clone();
        damaged[at] ^= 0x10;
        fs::remove_file(&path).unwrap();
        fs::write(&path, &damaged).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(error.to_string().contains("index.dcprs"), "byte {at}: {error}");
    }
}
