//! Publication: a file is not there, or all of it is.

use std::path::Path;

use super::disk::Disk;
use super::{FolderLock, Mode, random_token};
use crate::{Control, Error, Result};

/// What the name of a folder ends in that makes room for the one that replaces it, where that takes two steps. After a crash between them,
/// there is this one.
pub const ASIDE: &str = "replaced";

/// Puts a file into a folder in one step, in the place of any that has its name: a temporary name, a sync, a
/// rename, a sync of the folder. A reader finds the old file or the new one, and a crash leaves one of them.
///
/// # Errors
/// [`Error::Io`], [`Error::Interrupted`]. The old file is in its place then, unless it was the last sync that failed.
pub fn publish(dir: &Path, file_name: &str, bytes: &[u8], fsync: bool, control: &Control) -> Result<()> {
    publish_on(&Disk::default(), dir, file_name, bytes, fsync, control)
}

pub(crate) fn publish_on(
    disk: &Disk,
    dir: &Path,
    file_name: &str,
    bytes: &[u8],
    fsync: bool,
    control: &Control,
) -> Result<()> {
    let temporary = dir.join(temporary_name(file_name)?);
    let file = disk.create(&temporary)?;
    let published = (|| {
        disk.write(&file, &temporary, bytes, 0)?;
        if fsync {
            disk.sync(&file, &temporary, control)?;
        }
        control.check()?;
        disk.rename(&temporary, &dir.join(file_name))
    })();
    if published.is_err() {
        // What failed before is the error worth reporting.
        let _ = disk.remove(&temporary);
    }
    published?;
    if fsync { disk.sync_folder(dir) } else { Ok(()) }
}

/// The name under which a file is written that will have another.
fn temporary_name(file_name: &str) -> Result<String> {
    Ok(format!("{file_name}.{:016x}.tmp", random_token()?))
}

/// The name that the file of a [`temporary_name`] would have got; `None` where it is none.
pub(crate) fn name_of_temporary(name: &str) -> Option<&str> {
    let (file_name, token) = name.strip_suffix(".tmp")?.rsplit_once('.')?;
    let is_token = token.len() == 16 && token.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    is_token.then_some(file_name)
}

/// Creates a folder and those it is in, where they are missing, to be found after a loss of power.
///
/// # Errors
/// [`Error::Io`].
pub fn create_folder(folder: &Path) -> Result<()> {
    let disk = Disk::default();
    let changed = disk.create_folder(folder)?;
    changed.iter().try_for_each(|parent| disk.sync_folder(parent))
}

/// Gives a finished file or folder its name, in one step. With `replace`, a folder that had the name before is then at `from`, for the caller
/// to remove; without, a name that is taken is an error.
///
/// # Errors
/// [`Error::Io`]; [`Error::Interrupted`], [`Error::Busy`] while waiting for those who commit to the folder that is replaced.
pub fn put_in_place(from: &Path, to: &Path, replace: bool, control: &Control) -> Result<()> {
    let disk = Disk::default();
    if from.is_dir() {
        // What it holds is durable before its name is.
        disk.sync_folder(from)?;
    }
    if replace && from.is_file() && to.is_file() {
        disk.rename(from, to)?;
    } else {
        let is_checkpoint = replace && to.is_dir();
        let _lock = is_checkpoint
            .then(|| FolderLock::take(to, Mode::Exclusive, control))
            .transpose()?;
        if !disk.rename_apart(from, to, replace)? {
            // Some network file systems have plain renames only.
            put_in_place_by_steps(&disk, from, to, replace)?;
        }
    }
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    disk.sync_folder(parent.unwrap_or(Path::new(".")))
}

fn put_in_place_by_steps(disk: &Disk, from: &Path, to: &Path, replace: bool) -> Result<()> {
    if !replace {
        if to.symlink_metadata().is_ok() {
            return Err(Error::io("rename to", to, std::io::ErrorKind::AlreadyExists.into()));
        }
        return disk.rename(from, to);
    }
    let aside = from.with_extension(ASIDE);
    disk.rename(to, &aside)?;
    if let Err(error) = disk.rename(from, to) {
        disk.rename(&aside, to)?;
        return Err(error);
    }
    disk.rename(&aside, from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_place(from: &Path, to: &Path, replace: bool) -> Result<()> {
        put_in_place(from, to, replace, &Control::new())
    }

    fn by_steps(from: &Path, to: &Path, replace: bool) -> Result<()> {
        put_in_place_by_steps(&Disk::default(), from, to, replace)
    }

    #[test]
    fn takes_a_free_name_or_changes_places() {
        for rename in [in_place, by_steps] {
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

    #[test]
    fn a_file_takes_the_place_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let [new, old] = ["new", "old"].map(|name| dir.path().join(name));
        for file in [&new, &old] {
            std::fs::write(file, file.file_name().unwrap().as_encoded_bytes()).unwrap();
        }
        in_place(&new, &old, true).unwrap();
        assert_eq!(std::fs::read(&old).unwrap(), b"new");
        assert!(!new.exists());
    }

    #[test]
    fn temporary_names_say_what_they_are_for() {
        let name = temporary_name("index.dcprs").unwrap();
        assert_eq!(name_of_temporary(&name), Some("index.dcprs"));
        for other in [
            "index.dcprs",
            "index.dcprs.tmp",
            "a.0123456789ABCDEF.tmp",
            "a.0123456789abcdef",
        ] {
            assert_eq!(name_of_temporary(other), None, "{other}");
        }
    }
}
