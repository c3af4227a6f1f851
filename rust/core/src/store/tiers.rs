//! Tiers: folders that may have some of the data files of a checkpoint, nearer than its own place.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::parallel::lock;
use crate::paths::{Links, Reach, Verdict, reach};

/// The folders, and which of them has each data file.
///
/// A data file has a name of its own and never changes, so a file of the same name and length is
/// the same file. One that is damaged nevertheless is passed over once a read finds that out.
#[derive(Debug)]
pub struct Tiers {
    folders: Vec<Arc<Path>>,
    delivered: Vec<Arc<AtomicU64>>,
    /// For each file, its folder; `None` if it is read from its own place.
    found: RwLock<Vec<Option<usize>>>,
    problems: Mutex<Vec<String>>,
    /// Files that were asked for, and that no folder has.
    lacking: Mutex<BTreeSet<u32>>,
}

/// A data file in a tier.
pub(crate) struct Placed {
    pub path: PathBuf,
    pub links: Links,
    /// Counts the bytes that reads deliver from this tier.
    pub delivered: Arc<AtomicU64>,
}

impl Tiers {
    /// Looks for files (name, length) in folders. The first folder that has a file counts.
    pub fn new<'a>(folders: Vec<PathBuf>, files: impl IntoIterator<Item = (&'a str, u64)>) -> Self {
        let folders: Vec<Arc<Path>> = folders.into_iter().map(Arc::from).collect();
        let new = Self {
            delivered: folders.iter().map(|_| Arc::default()).collect(),
            folders,
            found: RwLock::default(),
            problems: Mutex::default(),
            lacking: Mutex::default(),
        };
        let found = files.into_iter().map(|(name, size)| new.find(name, size, 0)).collect();
        *new.found.write().unwrap_or_else(PoisonError::into_inner) = found;
        new
    }

    /// Returns the first folder from number `from` on that has a file.
    fn find(&self, name: &str, size: u64, from: usize) -> Option<usize> {
        if reach(name) == Reach::Outside {
            return None;
        }
        (from..self.folders.len()).find(|&tier| {
            let path = self.folders[tier].join(name);
            let reason = match std::fs::metadata(&path) {
                Ok(found) if !found.is_file() => "it is not a file".to_owned(),
                Ok(found) if found.len() != size => {
                    format!("it has {} bytes, and {size} are expected", found.len())
                }
                Ok(_) if !matches!(self.links(tier).judge(&path), Ok(Verdict::Follow)) => {
                    "it is a symbolic link".to_owned()
                }
                Ok(_) => return true,
                Err(error) if error.kind() == ErrorKind::NotFound => return false,
                Err(error) => error.to_string(),
            };
            self.note(&path, &reason);
            false
        })
    }

    fn links(&self, tier: usize) -> Links {
        Links::Within { folder: Arc::clone(&self.folders[tier]), last: false }
    }

    /// Notes that a file is passed over.
    pub(crate) fn note(&self, path: &Path, reason: &str) {
        let text = format!("{} is passed over: {reason}", path.display());
        lock(&self.problems).push(text);
    }

    /// Returns the place of a file, given its number and name; `None` for its own place.
    pub(crate) fn place(&self, file: u32, name: &str) -> Option<Placed> {
        let Some(tier) = self.tier_of(file) else {
            lock(&self.lacking).insert(file);
            return None;
        };
        Some(Placed {
            path: self.folders[tier].join(name),
            links: self.links(tier),
            delivered: Arc::clone(&self.delivered[tier]),
        })
    }

    fn tier_of(&self, file: u32) -> Option<usize> {
        let found = self.found.read().unwrap_or_else(PoisonError::into_inner);
        found.get(file as usize).copied().flatten()
    }

    /// Returns the folder that a file is read from; `None` for its own place.
    pub(crate) fn folder_of(&self, file: u32) -> Option<&Path> {
        self.tier_of(file).map(|tier| &*self.folders[tier])
    }

    /// Returns whether a path is in a tier.
    pub fn has(&self, path: &Path) -> bool {
        self.folders.iter().any(|folder| path.starts_with(folder))
    }

    /// Reads a file from the next tier, or from its own place, if a tier has it at `path`. Returns
    /// whether one has.
    pub(crate) fn pass_over(
        &self,
        file: u32,
        name: &str,
        size: u64,
        path: &Path,
        reason: &str,
    ) -> bool {
        let is_at = |tier: usize| self.folders[tier].join(name) == path;
        let has = (0..self.folders.len()).any(is_at);
        let mut found = self.found.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(now) = found.get_mut(file as usize)
            && now.is_some_and(is_at)
        {
            self.note(path, reason);
            // A folder may be there twice.
            while let Some(tier) = now.filter(|&tier| is_at(tier)) {
                *now = self.find(name, size, tier + 1);
            }
            if now.is_none() {
                lock(&self.lacking).insert(file);
            }
        }
        has
    }

    /// Returns the files that were asked for so far, and that no folder had.
    pub fn lacking(&self) -> Vec<u32> {
        lock(&self.lacking).iter().copied().collect()
    }

    /// Returns what was passed over since the last call, and why.
    pub fn take_problems(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.problems))
    }

    /// Returns the bytes that reads delivered from each folder since the last call.
    pub fn take_delivered(&self) -> Vec<(PathBuf, u64)> {
        let bytes = self.delivered.iter().map(|bytes| bytes.swap(0, Ordering::Relaxed));
        self.folders.iter().map(|folder| folder.to_path_buf()).zip(bytes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_passed_over_in_each_folder_that_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        for folder in [&first, &second] {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join("data"), "abc").unwrap();
        }
        let folders = vec![first.clone(), first.clone(), second.clone()];
        let tiers = Tiers::new(folders, [("data", 3), ("other", 3)]);
        let (at_first, at_second) = (first.join("data"), second.join("data"));
        let pass_over = |path: &Path| tiers.pass_over(0, "data", 3, path, "torn");
        assert_eq!((tiers.folder_of(0), tiers.folder_of(1)), (Some(&*first), None));
        // Errors of other files, such as the index, are no reason.
        assert!(!pass_over(&first.join("index.dcprs")));
        assert!(!pass_over(&first));
        assert!(pass_over(&at_first));
        assert_eq!(tiers.folder_of(0), Some(&*second));
        // Another thread met the same damage, and reads again as well.
        assert!(pass_over(&at_first));
        assert_eq!(tiers.folder_of(0), Some(&*second));
        assert!(tiers.lacking().is_empty());
        assert!(pass_over(&at_second));
        assert_eq!((tiers.folder_of(0), tiers.lacking()), (None, vec![0]));
        let problems: Vec<String> = [&at_first, &at_second]
            .map(|path| format!("{} is passed over: torn", path.display()))
            .into();
        assert_eq!(tiers.take_problems(), problems);
    }
}
