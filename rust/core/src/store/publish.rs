//! Publication: a file is not there, or all of it is.

use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::disk::Disk;
use super::random_token;
use crate::{Error, Result};

/// Puts a file into a folder in one step, in the place of any that has its name: a temporary name, a sync, a
/// rename, a sync of the folder. A reader finds the old file or the new one, and a crash leaves one of them.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io). The old file is in its place then, unless it was the last sync that failed.
pub fn publish(dir: &Path, file_name: &str, bytes: &[u8], fsync: bool) -> Result<()> {
    publish_on(&Disk::default(), dir, file_name, bytes, fsync)
}

pub(crate) fn publish_on(disk: &Disk, dir: &Path, file_name: &str, bytes: &[u8], fsync: bool) -> Result<()> {
    let temporary = dir.join(format!("{file_name}.{:016x}.tmp", random_token()?));
    let file = disk.create(&temporary)?;
    let published = (|| {
        disk.write(&file, &temporary, bytes, 0)?;
        if fsync {
            disk.sync(&file, &temporary)?;
        }
        disk.rename(&temporary, &dir.join(file_name))
    })();
    if published.is_err() {
        // What failed before is the error worth reporting.
        let _ = disk.remove(&temporary);
    }
    published?;
    if fsync { disk.sync_folder(dir) } else { Ok(()) }
}

/// Gives a finished file or folder its name, in one step. With `replace`, what had the name before is then at `from`, for the caller
/// to remove; without, a name that is taken is an error.
///
/// # Errors
/// [`Error::Io`].
pub fn put_in_place(from: &Path, to: &Path, replace: bool) -> Result<()> {
    let flags = if replace {
        RenameFlags::EXCHANGE
    } else {
        RenameFlags::NOREPLACE
    };
    match renameat_with(CWD, from, CWD, to, flags) {
        // Some network file systems have plain renames only.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => put_in_place_by_steps(from, to, replace),
        result => result.map_err(|error| Error::io("rename", to, error.into())),
    }?;
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    Disk::default().sync_folder(parent.unwrap_or(Path::new(".")))
}

fn put_in_place_by_steps(from: &Path, to: &Path, replace: bool) -> Result<()> {
    let rename = |from: &Path, to: &Path| std::fs::rename(from, to).map_err(|error| Error::io("rename", to, error));
    if !replace {
        if to.symlink_metadata().is_ok() {
            return Err(Error::io("rename", to, std::io::ErrorKind::AlreadyExists.into()));
        }
        return rename(from, to);
    }
    let aside = from.with_extension("old");
    rename(to, &aside)?;
    if let Err(error) = rename(from, to) {
        rename(&aside, to)?;
        return Err(error);
    }
    rename(&aside, from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_a_free_name_or_changes_places() {
        for rename in [put_in_place, put_in_place_by_steps] {
            let dir = tempfile::tempdir().unwrap();
            let [new, old] = ["new", "old"].map(|name| dir.path().join(name));
            let read = |path: &Path| std::fs::read_to_string(path.join("file")).ok();
            for folder in [&new, &old] {
                std::fs::create_dir(folder).unwrap();
                std::fs::write(folder.join("file"), folder.file_name().unwrap().as_encoded_bytes()).unwrap();
            }
            assert!(matches!(rename(&new, &old, false), Err(Error::Io { .. })));
            assert_eq!(read(&old).as_deref(), Some("old"));
            rename(&new, &old, true).unwrap();
            assert_eq!(
                (read(&old).as_deref(), read(&new).as_deref()),
                (Some("new"), Some("old"))
            );
            let free = dir.path().join("free");
            rename(&old, &free, false).unwrap();
            assert_eq!((read(&free).as_deref(), read(&old)), (Some("new"), None));
        }
    }
}
