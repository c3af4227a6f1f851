//! Foreign checkpoints: whole, damaged and hostile.

/// Asserts that an error is of a kind, and that its message has a part.
macro_rules! assert_error {
    ($error:ident, $kind:pat, $part:expr) => {
        assert!(matches!($error, $kind) && $error.to_string().contains($part), "{}", $error);
    };
}

mod hostile;
mod pickles;
mod safetensors;
mod stock;

use std::fs;
use std::path::{Path, PathBuf};

use crate::checkpoint;
use crate::format::Index;
use crate::{Control, Error};

/// Output of `tests/fixtures/make_stock.py`.
fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/stock")
}

fn open(path: &Path, rank: Option<u32>) -> Result<Index, Error> {
    checkpoint::open(path, rank, None, 2, &Control::new())
}

fn refusal(path: &Path, rank: Option<u32>) -> Error {
    match open(path, rank) {
        Ok(_) => panic!("{} opens", path.display()),
        Err(e) => e,
    }
}

/// A copy of a fixture, to damage.
fn copy(case: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixtures().join(case)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}
