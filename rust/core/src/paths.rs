//! The rule for paths that lead out of the folder of a checkpoint: for names in indexes and in
//! foreign metadata, and for symbolic links.

use std::ffi::OsStr;
use std::io;
use std::path::{Component, Path};
use std::sync::Arc;

/// Target of a name, by its text, relative to the folder of the index with the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// In the folder, and written in the only plain form: parts joined by `/`. No part is empty,
    /// `.` or `..`, or contains `\`.
    Plain,
    /// In the folder, but written in another form: `./x`, `a//b`, `x/`, `a\b`.
    Inside,
    /// Possibly outside of the folder: it is absolute, or has a part `..`.
    Outside,
    /// Invalid: it is empty, or contains a NUL.
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
    /// Follow any link: the caller allows it, or the name comes from a listing of the folder and
    /// not from an untrusted file.
    Any,
    /// Follow links that stay in a folder. Also follow links of a snapshot in Hugging Face's cache
    /// to files of the same repository: the user made those, even if another program wrote the
    /// names.
    Within {
        /// The folder.
        folder: Arc<Path>,
        /// True if the last part of a path may be a link within the folder. Earlier parts always
        /// may.
        last: bool,
    },
}

/// Decision about a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may be opened, and its links followed.
    Follow,
    /// Its last part is a link within the folder, which may not be followed.
    Link,
    /// It leads out of the folder.
    Outside,
}

impl Links {
    /// Returns whether a path can go through links before its last part.
    pub(crate) fn may_turn(&self, path: &Path) -> bool {
        matches!(self, Self::Within { folder, .. } if path.parent() != Some(folder))
    }

    /// Judges an existing path.
    ///
    /// # Errors
    /// The system's error if the path does not exist.
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

/// Returns whether `folder` is in a snapshot of a repository in Hugging Face's cache, and `target`
/// is a file of the same repository: `models--org--name/snapshots/<revision>/…` and
/// `models--org--name/blobs/<digest>`. Both must be free of links.
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
        // The same layout under another name is not that of a known cache, and a repository has
        // more than snapshots.
        assert_eq!(judge(true, "mine/snapshots/1", "blob"), Verdict::Outside);
        symlink("blobs/x", at("models--a--b/x")).unwrap();
        assert_eq!(judge(false, "models--a--b", "x"), Verdict::Link);
        assert!(
            Links::Within { folder: at(folder).into(), last: true }.judge(&at("nothing")).is_err()
        );
    }
}
