//! The one rule about paths that leave the folder of a checkpoint: for names in indexes, in foreign
//! metadata, and for symbolic links.

use std::ffi::OsStr;
use std::io;
use std::path::{Component, Path};
use std::sync::Arc;

/// Target of a name, by its letters, seen from the folder of the index that contains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// To something in the folder, in the one way to write that: parts with `/` between, none of
    /// them empty, `.` or `..`, without `\`.
    Plain,
    /// To something in the folder, in another way: `./x`, `a//b`, `x/`, `a\b`.
    Inside,
    /// Perhaps out of the folder: it is absolute, or has a part `..`.
    Outside,
    /// Nowhere: it is empty, or holds a NUL.
    Nowhere,
}

/// Classifies the target of `name`.
#[must_use]
pub fn reach(name: &str) -> Reach {
    if name.is_empty() || name.contains('\0') {
        Reach::Nowhere
    } else if Path::new(name)
        .components()
        .any(|part| !matches!(part, Component::Normal(_) | Component::CurDir))
    {
        Reach::Outside
    } else if name.contains('\\') || name.split('/').any(|part| matches!(part, "" | ".")) {
        Reach::Inside
    } else {
        Reach::Plain
    }
}

/// Policy for symbolic links to a data file.
#[derive(Clone, Debug)]
pub enum Links {
    /// Any: the caller allows it, or the name was found by looking into the folder and not in a
    /// file that anyone may have made.
    Any,
    /// Links that end in a folder, and those that Hugging Face's cache made of a snapshot to the
    /// files of the same repository: they are the user's own, even if another program wrote the
    /// names.
    Within {
        /// The folder.
        folder: Arc<Path>,
        /// True if the last part of a path may be a link to a file in it. Earlier parts may.
        last: bool,
    },
}

/// Decision about a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may be opened, links followed.
    Follow,
    /// Its last part is a link to something in the folder, which is not followed.
    Link,
    /// It leads out of the folder.
    Outside,
}

impl Links {
    /// Returns whether a path can lead through links before its last part.
    pub(crate) fn may_turn(&self, path: &Path) -> bool {
        matches!(self, Self::Within { folder, .. } if path.parent() != Some(folder))
    }

    /// Judges a path that is there.
    ///
    /// # Errors
    /// What the system says of one that is not.
    pub fn judge(&self, path: &Path) -> io::Result<Verdict> {
        let Self::Within { folder, last } = self else {
            return Ok(Verdict::Follow);
        };
        let is_link = path.symlink_metadata()?.is_symlink();
        if !is_link && !self.may_turn(path) {
            return Ok(Verdict::Follow);
        }
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let (folder, target) = (folder.canonicalize()?, path.canonicalize()?);
        Ok(if is_in_hub_cache(&folder, &target) {
            Verdict::Follow
        } else if !target.starts_with(folder) {
            Verdict::Outside
        } else if is_link && !last {
            Verdict::Link
        } else {
            Verdict::Follow
        })
    }
}

/// Returns whether `folder` lies in a snapshot of a repository in Hugging Face's cache and `target`
/// is a file of the same repository: `models--org--name/snapshots/<revision>/…` and
/// `models--org--name/blobs/<digest>`. Both are without links.
fn is_in_hub_cache(folder: &Path, target: &Path) -> bool {
    let is_repository = |name: &OsStr| {
        let name = name.as_encoded_bytes();
        [&b"models--"[..], b"datasets--", b"spaces--"].iter().any(|kind| name.starts_with(kind))
    };
    let Some(repository) =
        target.parent().filter(|blobs| blobs.ends_with("blobs")).and_then(Path::parent)
    else {
        return false;
    };
    let inner = folder.strip_prefix(repository.join("snapshots"));
    repository.file_name().is_some_and(is_repository)
        && inner.is_ok_and(|inner| inner.components().next().is_some())
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn names_lead_somewhere() {
        for (names, expected) in [
            (&["a.safetensors", "sub/a.safetensors", "..a", "a..b"][..], Reach::Plain),
            (&["./a", "a//b", "a/", "a\\b", "a/./b", "."], Reach::Inside),
            (&["..", "/", "/etc/passwd", "a/../b", "../a", "a/.."], Reach::Outside),
            (&["", "a\0b"], Reach::Nowhere),
        ] {
            for name in names {
                assert_eq!(reach(name), expected, "{name:?}");
            }
        }
    }

    #[test]
    fn links_are_followed_within_the_folder_or_the_repository() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for folder in [
            "models--a--b/blobs",
            "models--a--b/snapshots/1/sub",
            "models--a--c/blobs",
            "mine/blobs",
        ] {
            create_dir_all(at(folder)).unwrap();
        }
        for file in [
            "models--a--b/blobs/x",
            "models--a--b/snapshots/1/plain",
            "models--a--c/blobs/x",
            "mine/blobs/x",
            "secret",
        ] {
            write(at(file), "x").unwrap();
        }
        let snapshot = at("models--a--b/snapshots/1");
        symlink("../../blobs/x", snapshot.join("blob")).unwrap();
        symlink("../../../blobs/x", snapshot.join("sub/blob")).unwrap();
        symlink("plain", snapshot.join("inside")).unwrap();
        symlink("../../../models--a--c/blobs/x", snapshot.join("other")).unwrap();
        symlink("../../../secret", snapshot.join("secret")).unwrap();
        symlink("../../secret", at("models--a--b/blobs/evil")).unwrap();
        symlink("../../blobs/evil", snapshot.join("evil")).unwrap();
        symlink("../../blobs", snapshot.join("folder")).unwrap();
        symlink("../../../models--a--c/blobs", snapshot.join("other folder")).unwrap();
        create_dir_all(at("mine/snapshots/1")).unwrap();
        symlink("../../blobs/x", at("mine/snapshots/1/blob")).unwrap();

        let judge = |last: bool, folder: &str, name: &str| {
            let folder: Arc<Path> = at(folder).into();
            let path = folder.join(name);
            Links::Within { folder, last }.judge(&path).unwrap()
        };
        let folder = "models--a--b/snapshots/1";
        for (name, last, not_last) in [
            ("plain", Verdict::Follow, Verdict::Follow),
            ("blob", Verdict::Follow, Verdict::Follow),
            ("sub/blob", Verdict::Follow, Verdict::Follow),
            ("folder/x", Verdict::Follow, Verdict::Follow),
            ("inside", Verdict::Follow, Verdict::Link),
            ("other", Verdict::Outside, Verdict::Outside),
            ("other folder/x", Verdict::Outside, Verdict::Outside),
            ("secret", Verdict::Outside, Verdict::Outside),
            ("evil", Verdict::Outside, Verdict::Outside),
        ] {
            assert_eq!(
                (judge(true, folder, name), judge(false, folder, name)),
                (last, not_last),
                "{name}"
            );
            assert_eq!(Links::Any.judge(&at(folder).join(name)).unwrap(), Verdict::Follow);
        }
        // The same layout under other names is no cache of a tool that is known, and not all of a
        // repository is a snapshot.
        assert_eq!(judge(true, "mine/snapshots/1", "blob"), Verdict::Outside);
        symlink("blobs/x", at("models--a--b/x")).unwrap();
        assert_eq!(judge(false, "models--a--b", "x"), Verdict::Link);
        assert!(
            Links::Within { folder: at(folder).into(), last: true }.judge(&at("nothing")).is_err()
        );
    }
}
