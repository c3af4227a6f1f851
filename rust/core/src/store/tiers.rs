//! Tiers: folders that may have some of the data files of a checkpoint, nearer than its own place.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

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
                Err(_) => return false,
            };
            self.note(&path, &reason);
            false
        })
    }

    fn links(&self, tier: usize) -> Links {
        Links::Within { folder: Arc::clone(&self.folders[tier]), last: false }
    }

    fn note(&self, path: &Path, reason: &str) {
        let text = format!("{} is passed over: {reason}", path.display());
        self.problems.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }

    /// Returns the place of a file, given its number and name; `None` for its own place.
    pub(crate) fn place(&self, file: u32, name: &str) -> Option<Placed> {
        let tier = self.tier_of(file)?;
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

    /// Takes a file from the next tier, or from its own place, if `path` is where it is read from.
    pub(crate) fn pass_over(&self, file: u32, name: &str, size: u64, path: &Path, reason: &str) {
        let mut found = self.found.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(tier)) = found.get(file as usize).copied()
            && self.folders[tier].join(name) == path
        {
            found[file as usize] = self.find(name, size, tier + 1);
            self.note(path, reason);
        }
    }

    /// Returns what was passed over since the last call, and why.
    pub fn take_problems(&self) -> Vec<String> {
        std::mem::take(&mut self.problems.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the bytes that reads delivered from each folder since the last call.
    pub fn take_delivered(&self) -> Vec<(PathBuf, u64)> {
        let bytes = self.delivered.iter().map(|bytes| bytes.swap(0, Ordering::Relaxed));
        self.folders.iter().map(|folder| folder.to_path_buf()).zip(bytes).collect()
    }
}
