//! Fingerprint of a file or folder. It is taken before long work, and compared when the result
//! takes the name.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::LOCK_NAME;
use crate::{Error, Result};

/// The state of a file, a link, or a folder with its content. Two fingerprints are equal if nothing
/// was added, removed or written in between. The content of subfolders does not count, and neither
/// does the lock of the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    own: Entry,
    entries: BTreeMap<OsString, Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    device: u64,
    number: u64,
    is_folder: bool,
    /// Length and modification time (seconds, nanoseconds), because the inode number of a removed
    /// file is used again.
    written: Option<(u64, i64, i64)>,
}

impl Entry {
    fn new(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            number: meta.ino(),
            is_folder: meta.is_dir(),
            written: Some((meta.size(), meta.mtime(), meta.mtime_nsec())),
        }
    }
}

impl Fingerprint {
    /// Returns the fingerprint of `path`, or `None` if nothing is there. It does not follow a link.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn at(path: &Path) -> Result<Option<Self>> {
        Self::look(path).map_err(|error| Error::io("look at", path, error))
    }

    fn look(path: &Path) -> io::Result<Option<Self>> {
        let Some(meta) = unless_gone(fs::symlink_metadata(path))? else {
            return Ok(None);
        };
        let mut own = Entry::new(&meta);
        let mut entries = BTreeMap::new();
        if own.is_folder {
            own.written = None; // the file of its lock may be created
            for entry in fs::read_dir(path)? {
                let entry = entry?;
                if entry.file_name() != LOCK_NAME
                    && let Some(meta) = unless_gone(entry.metadata())?
                {
                    entries.insert(entry.file_name(), Entry::new(&meta));
                }
            }
        }
        Ok(Some(Self { own, entries }))
    }
}

fn unless_gone(meta: io::Result<Metadata>) -> io::Result<Option<Metadata>> {
    match meta {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        meta => meta.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_comes_goes_or_is_written_makes_it_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("folder");
        let look = || Fingerprint::at(&path).unwrap();
        assert_eq!(look(), None);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("a"), "1").unwrap();
        let before = look();
        assert_eq!(look(), before);
        fs::write(path.join(LOCK_NAME), "").unwrap();
        assert_eq!(look(), before);
        fs::write(path.join("b"), "").unwrap();
        assert_ne!(look(), before);
        fs::remove_file(path.join("b")).unwrap();
        assert_eq!(look(), before);
        fs::write(path.join("a"), "22").unwrap();
        assert_ne!(look(), before);
        fs::remove_dir_all(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert_ne!(look(), before);
    }
}
