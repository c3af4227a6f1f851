//! Publication: a file is either missing or complete.

use std::path::Path;

use super::disk::Disk;
use super::{Fingerprint, random_token};
use crate::{Control, Error, Result};

/// Suffix of a folder that was renamed to make room for its replacement, if that takes two steps. A
/// folder of this name remains after a crash between them.
pub const ASIDE: &str = "replaced";

/// Publishes a file in a folder in one step, and replaces one of the same name. It writes a
/// temporary file, syncs and renames it, and syncs the folder. A reader finds the old file or the
/// new one, and a crash leaves one of them.
///
/// # Errors
/// [`Error::Io`], [`Error::Interrupted`]. Then the old file is still there, unless only the last
/// sync failed.
pub fn publish(
    dir: &Path,
    file_name: &str,
    bytes: &[u8],
    fsync: bool,
    control: &Control,
) -> Result<()> {
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
        // Ignored: the earlier failure is the error worth reporting.
        let _ = disk.remove(&temporary);
    }
    published?;
    if fsync { disk.sync_folder(dir) } else { Ok(()) }
}

/// Returns a temporary name for a file that will get another one.
fn temporary_name(file_name: &str) -> Result<String> {
    Ok(format!("{file_name}.{:016x}.tmp", random_token()?))
}

/// Returns the final name for a [`temporary_name`]; `None` if it is not a temporary name.
pub(crate) fn name_of_temporary(name: &str) -> Option<&str> {
    let (file_name, token) = name.strip_suffix(".tmp")?.rsplit_once('.')?;
    let is_token =
        token.len() == 16 && token.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    is_token.then_some(file_name)
}

/// Creates a folder and its missing parents, durably.
///
/// # Errors
/// [`Error::Io`].
pub fn create_folder(folder: &Path) -> Result<()> {
    let disk = Disk::default();
    let changed = disk.create_folder(folder)?;
    changed.iter().try_for_each(|parent| disk.sync_folder(parent))
}

/// Renames a finished file or folder to its final name in one step. Replaces what has that name
/// only if it is still what it was `before`. What was replaced is then at `from` or beside it, in a
/// folder that the caller removes.
///
/// To replace a folder, the caller must hold [its lock](super::lock_replaced).
///
/// # Errors
/// - [`Error::Exists`] if something else has the name by now.
/// - [`Error::Io`]. Then nothing has changed, unless only the last sync failed.
/// - [`Error::Displaced`] names the place of what was to be replaced.
pub fn put_in_place(from: &Path, to: &Path, before: Option<&Fingerprint>) -> Result<()> {
    put_in_place_on(&Disk::default(), from, to, before)
}

fn put_in_place_on(
    disk: &Disk,
    from: &Path,
    to: &Path,
    before: Option<&Fingerprint>,
) -> Result<()> {
    if from.is_dir() {
        // Make the content durable before the name.
        disk.sync_folder(from)?;
    }
    match Fingerprint::at(to)? {
        None => take_free_name(disk, from, to)?,
        Some(found) if before == Some(&found) => replace(disk, from, to, &found)?,
        Some(_) => return Err(came_meanwhile(to)),
    }
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    disk.sync_folder(parent.unwrap_or(Path::new(".")))
}

fn replace(disk: &Disk, from: &Path, to: &Path, before: &Fingerprint) -> Result<()> {
    if !disk.rename_apart(from, to, true)? {
        return replace_by_steps(disk, from, to, before);
    }
    if is_still(from, before) {
        return Ok(());
    }
    // It was replaced between the check and the exchange.
    match disk.rename_apart(from, to, true) {
        Ok(_) => Err(came_meanwhile(to)),
        Err(error) => Err(displaced(to, from, error)),
    }
}

/// For file systems that support only plain renames, such as some network file systems.
fn replace_by_steps(disk: &Disk, from: &Path, to: &Path, before: &Fingerprint) -> Result<()> {
    if from.is_file() && to.is_file() {
        return disk.rename(from, to);
    }
    let mut name = from.as_os_str().to_owned();
    name.push(".");
    name.push(ASIDE);
    let aside = Path::new(&name);
    disk.rename(to, aside)?;
    let replaced = if is_still(aside, before) {
        take_free_name(disk, from, to)
    } else {
        Err(came_meanwhile(to))
    };
    match replaced {
        Ok(()) => {
            // Only to avoid a folder that looks as if a checkpoint were missing: the caller removes
            // both.
            let _ = disk.rename(aside, from);
            Ok(())
        }
        Err(error) => match take_free_name(disk, aside, to) {
            Ok(()) => Err(error),
            Err(_) => Err(displaced(to, aside, error)),
        },
    }
}

fn take_free_name(disk: &Disk, from: &Path, to: &Path) -> Result<()> {
    use std::io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotADirectory};
    let refused = |error| match error {
        Error::Io { source, .. }
            if matches!(source.kind(), AlreadyExists | DirectoryNotEmpty | NotADirectory) =>
        {
            came_meanwhile(to)
        }
        error => error,
    };
    if disk.rename_apart(from, to, false).map_err(refused)? {
        return Ok(());
    }
    if from.is_file() && disk.link(from, to).map_err(refused)?.is_ok() {
        // A second name does no harm.
        let _ = disk.remove(from);
        return Ok(());
    }
    if to.symlink_metadata().is_ok() {
        return Err(came_meanwhile(to));
    }
    // A rename of a folder can only replace an empty one.
    disk.rename(from, to).map_err(refused)
}

fn is_still(path: &Path, before: &Fingerprint) -> bool {
    Fingerprint::at(path).is_ok_and(|found| found.as_ref() == Some(before))
}

fn came_meanwhile(path: &Path) -> Error {
    Error::Exists { path: path.to_owned() }
}

fn displaced(path: &Path, at: &Path, error: Error) -> Error {
    Error::Displaced { path: path.to_owned(), at: at.to_owned(), source: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::disk::{Call, Hook};

    /// A disk that lacks or refuses some calls: the answers to them, in order.
    struct Answers(std::sync::Mutex<std::collections::VecDeque<i32>>);

    impl Hook for Answers {
        fn before(&self, call: Call, _: &Path) -> std::io::Result<usize> {
            let answer = match call {
                Call::RenameApart => libc::ENOSYS,
                Call::Rename => self.0.lock().unwrap().pop_front().unwrap_or(0),
                _ => 0,
            };
            if answer == 0 {
                return Ok(usize::MAX);
            }
            Err(std::io::Error::from_raw_os_error(answer))
        }
    }

    /// Returns a disk with plain renames only. `answers` are their errors in order; 0 is success.
    fn plain(answers: &[i32]) -> Disk {
        Disk::hooked(std::sync::Arc::new(Answers(std::sync::Mutex::new(
            answers.iter().copied().collect(),
        ))))
    }

    fn put(disk: &Disk, from: &Path, to: &Path, before: Option<&Fingerprint>) -> Result<()> {
        put_in_place_on(disk, from, to, before)
    }

    /// Creates folders `new` and `old`, each with a file that identifies it.
    fn two_folders(dir: &Path) -> [std::path::PathBuf; 2] {
        ["new", "old"].map(|name| {
            std::fs::create_dir(dir.join(name)).unwrap();
            std::fs::write(dir.join(name).join("file"), name).unwrap();
            dir.join(name)
        })
    }

    fn read(path: &Path) -> Option<String> {
        std::fs::read_to_string(path.join("file")).ok()
    }

    #[test]
    fn takes_a_free_name_or_that_of_what_was_there_before() {
        for disk in [Disk::default(), plain(&[])] {
            let dir = tempfile::tempdir().unwrap();
            let [new, old] = two_folders(dir.path());
            assert!(matches!(put(&disk, &new, &old, None), Err(Error::Exists { .. })));
            let before = Fingerprint::at(&old).unwrap();
            std::fs::write(old.join("notes"), "").unwrap();
            assert!(matches!(put(&disk, &new, &old, before.as_ref()), Err(Error::Exists { .. })));
            assert_eq!((read(&old).as_deref(), read(&new).as_deref()), (Some("old"), Some("new")));
            let before = Fingerprint::at(&old).unwrap();
            put(&disk, &new, &old, before.as_ref()).unwrap();
            assert_eq!((read(&old).as_deref(), read(&new).as_deref()), (Some("new"), Some("old")));
            let free = dir.path().join("free");
            put(&disk, &old, &free, None).unwrap();
            assert_eq!((read(&free).as_deref(), read(&old)), (Some("new"), None));
            // A removed folder leaves a free name.
            let before = Fingerprint::at(&free).unwrap();
            std::fs::remove_dir_all(&free).unwrap();
            put(&disk, &new, &free, before.as_ref()).unwrap();
            assert_eq!(read(&free).as_deref(), Some("old"));
        }
    }

    #[test]
    fn a_file_takes_the_place_of_a_file_that_was_there_before_and_of_no_other() {
        for disk in [Disk::default(), plain(&[])] {
            let dir = tempfile::tempdir().unwrap();
            let [new, old] = ["new", "old"].map(|name| dir.path().join(name));
            for file in [&new, &old] {
                std::fs::write(file, file.file_name().unwrap().as_encoded_bytes()).unwrap();
            }
            assert!(matches!(put(&disk, &new, &old, None), Err(Error::Exists { .. })));
            assert_eq!(std::fs::read(&old).unwrap(), b"old");
            let before = Fingerprint::at(&old).unwrap();
            put(&disk, &new, &old, before.as_ref()).unwrap();
            assert_eq!(std::fs::read(&old).unwrap(), b"new");
            let free = dir.path().join("free");
            put(&disk, &old, &free, None).unwrap();
            assert_eq!((std::fs::read(&free).unwrap(), old.exists()), (b"new".to_vec(), false));
        }
    }

    #[test]
    fn a_folder_takes_the_place_of_a_file() {
        for disk in [Disk::default(), plain(&[])] {
            let dir = tempfile::tempdir().unwrap();
            let [new, _] = two_folders(dir.path());
            let file = dir.path().join("file");
            std::fs::write(&file, "").unwrap();
            let before = Fingerprint::at(&file).unwrap();
            put(&disk, &new, &file, before.as_ref()).unwrap();
            assert_eq!((read(&file).as_deref(), new.is_dir()), (Some("new"), false));
        }
    }

    #[test]
    fn what_cannot_be_replaced_is_put_back_or_named() {
        let dir = tempfile::tempdir().unwrap();
        let [new, old] = two_folders(dir.path());
        let before = Fingerprint::at(&old).unwrap();
        // The first answer is for the rename out of the way, the second for the one into its place.
        for answers in [&[libc::EIO][..], &[0, libc::EIO]] {
            let error = put(&plain(answers), &new, &old, before.as_ref()).unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{error}");
            assert_eq!((read(&old).as_deref(), read(&new).as_deref()), (Some("old"), Some("new")));
        }
        let error =
            put(&plain(&[0, libc::EIO, libc::EIO]), &new, &old, before.as_ref()).unwrap_err();
        let Error::Displaced { path, at, .. } = &error else { panic!("{error}") };
        assert_eq!((path, read(at).as_deref()), (&old, Some("old")));
        assert!(error.to_string().contains(at.to_str().unwrap()));
        assert!(!old.exists());
        assert_eq!(at.extension(), Some(ASIDE.as_ref()));
    }

    #[test]
    fn temporary_names_say_what_they_are_for() {
        let name = temporary_name("index.dcprs").unwrap();
        assert_eq!(name_of_temporary(&name), Some("index.dcprs"));
        for other in
            ["index.dcprs", "index.dcprs.tmp", "a.0123456789ABCDEF.tmp", "a.0123456789abcdef"]
        {
            assert_eq!(name_of_temporary(other), None, "{other}");
        }
    }
}
