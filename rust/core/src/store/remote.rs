//! Files that no file system has: objects of a store, pages of a server. Their paths are URLs.
//!
//! Implement [`Remote`] and [`Connection`] to add a protocol; the plans, the checks and the engines
//! are those of files.
#![allow(unsafe_code)] // fetched bytes are written to addresses

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use twox_hash::xxhash3_64::Hasher;

use super::files::Files;
use crate::format::block_digest;
use crate::{Control, Error, Result, parallel};

/// Questions that wait for a store at a time.
const QUESTIONS: usize = 32;

/// Destination of bytes: an address that the caller keeps valid for the length of the call.
#[derive(Clone, Copy, Debug)]
pub struct Destination(pub *mut u8);

// SAFETY: an address alone is harmless; the caller of a function that writes to it vouches that its
// memory may be written from any thread.
unsafe impl Send for Destination {}
// SAFETY: as above; nothing is written through a shared `Destination` but what its holder was asked
// to write.
unsafe impl Sync for Destination {}

/// Bytes of a part, and the memory they go to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// First byte in the file.
    pub at: u64,
    /// Bytes; at least one.
    pub len: u64,
    /// Destination of the first byte.
    pub to: Destination,
    /// The digest (XXH3-64) to compare the bytes with as they come, if any.
    pub expected: Option<u64>,
}

/// A run whose bytes have another digest than expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// First byte in the file.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// The digest of the bytes that came.
    pub digest: u64,
}

/// The state of a call to [`fetch`], which its ranges share.
#[derive(Debug, Default)]
struct Call {
    /// False outside of the call that the memory is valid for.
    is_open: RwLock<bool>,
    mismatches: Mutex<Vec<Mismatch>>,
}

/// A range of a file that is fetched by one request, and the memory that it goes to. Bytes that no
/// run has are dropped as they come.
pub struct FetchRange {
    /// First byte.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
    /// Parts to deliver, in the order of the file. Two runs may have the same bytes.
    pub(crate) runs: Vec<Run>,
    /// The first run that may have bytes to come.
    next: usize,
    /// The digests so far of runs that are compared and partly here, by number.
    hashers: HashMap<usize, Hasher>,
    call: Arc<Call>,
}

impl FetchRange {
    pub(crate) fn new(start: u64, end: u64, runs: Vec<Run>) -> Self {
        Self { start, end, runs, next: 0, hashers: HashMap::new(), call: Arc::default() }
    }

    /// Copies the next bytes, which begin at byte `at` of the file, to their destinations. Ranges
    /// that outlive their call to [`Connection::fetch`] write nothing.
    pub fn deliver(&mut self, at: u64, bytes: &[u8]) {
        let is_open = self.call.is_open.read().unwrap_or_else(PoisonError::into_inner);
        let end = at.saturating_add(bytes.len() as u64);
        if !*is_open {
            return;
        }
        while self.runs.get(self.next).is_some_and(|run| run.at + run.len <= at) {
            self.next += 1;
        }
        let runs = self.runs.iter().enumerate().skip(self.next);
        for (number, run) in runs.take_while(|(_, run)| run.at < end) {
            let (from, to) = (run.at.max(at), (run.at + run.len).min(end));
            // A longer run may lie before this one, that ended.
            if from >= to {
                continue;
            }
            let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
            let source = &bytes[index(from - at)..index(to - at)];
            // SAFETY: bytes `from..to` are of the run, whose memory is valid for writes while the
            // range is open, as the caller of `fetch` vouches; `source` is memory of the client.
            unsafe {
                let to = run.to.0.wrapping_add(index(from - run.at));
                std::ptr::copy_nonoverlapping(source.as_ptr(), to, source.len());
            }
            let Some(expected) = run.expected else { continue };
            // The bytes are still in the cache.
            let digest = if source.len() as u64 == run.len {
                block_digest(source)
            } else {
                let hasher = self.hashers.entry(number).or_default();
                hasher.write(source);
                if to < run.at + run.len {
                    continue;
                }
                let digest = hasher.finish();
                self.hashers.remove(&number);
                digest
            };
            if digest != expected {
                let mismatch = Mismatch { at: run.at, len: run.len, digest };
                self.call.mismatches.lock().unwrap_or_else(PoisonError::into_inner).push(mismatch);
            }
        }
    }
}

/// Fetches ranges of a file to memory, by [`Connection::fetch`]. Returns the runs that differ from
/// the digest expected of them.
///
/// # Safety
/// The memory of every run is valid for writes from any thread until this returns, and no two runs
/// share any.
pub(crate) unsafe fn fetch(
    connection: &dyn Connection,
    path: &Path,
    size: u64,
    mut ranges: Vec<FetchRange>,
    control: &Control,
) -> Result<Vec<Mismatch>> {
    /// Dropped, also by a panic, it waits for copies under way and refuses later ones.
    struct Open(Arc<Call>);
    impl Drop for Open {
        fn drop(&mut self) {
            *self.0.is_open.write().unwrap_or_else(PoisonError::into_inner) = false;
        }
    }
    let open = Open(Arc::new(Call { is_open: RwLock::new(true), ..Call::default() }));
    for range in &mut ranges {
        range.call = Arc::clone(&open.0);
    }
    connection.fetch(path, size, ranges, control)?;
    let mut mismatches = open.0.mismatches.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(std::mem::take(&mut *mismatches))
}

/// Conditions for storing a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Nothing: no other save uses the name.
    Always,
    /// Nothing, though it matters: the store would not look.
    Unguarded,
    /// There is none of the name.
    New,
    /// The file that is there is the one that was seen.
    Unchanged,
}

/// A file that is stored in parts, and is not there before all of them are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// Its path.
    pub path: PathBuf,
    /// Id that the store gave the upload.
    pub id: String,
    /// Condition for completing it.
    pub condition: Condition,
}

/// A file, as a store lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name in its folder.
    pub name: String,
    /// Its length in bytes.
    pub size: u64,
    /// Since it was stored, by the clocks of the store and of this machine.
    pub age: Duration,
    /// Tag that tells it from other objects of its name, if the store has tags.
    pub tag: Option<String>,
}

/// Direct contents of a folder on a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Folder {
    /// The files.
    pub files: Vec<Listed>,
    /// The names of the folders: each holds something, or there would be none.
    pub folders: Vec<String>,
}

/// A store, and how to speak to it. Nothing is open, and no thread runs, but while there is a
/// [`Connection`].
pub trait Remote: Debug + Send + Sync {
    /// Begins to speak to it; `threads`: that receive, 0 for as many as there are cores.
    fn connect(&self, threads: usize) -> Result<Arc<dyn Connection>>;

    /// The same, to store files there as well.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where that cannot be.
    fn connect_to_store(&self, threads: usize) -> Result<Arc<dyn StoringConnection>>;
}

/// For the length of a call: what answers for the files of a [`Remote`]. Every method may be called
/// from any thread, and waits; a cancelled [`Control`] ends the wait.
///
/// A file that was seen once has to stay the same for as long as its `Remote` lives: another length
/// or another tag is an error.
///
/// # Errors
/// [`Error::Storage`](crate::Error::Storage), after the retries;
/// [`Error::Interrupted`](crate::Error::Interrupted).
pub trait Connection: Send + Sync {
    /// The length of a file, if it is there.
    fn look(&self, path: &Path, control: &Control) -> Result<Option<u64>>;

    /// Lists the direct contents of a folder; `None` if the store cannot list.
    fn list(&self, folder: &Path, control: &Control) -> Result<Option<Folder>>;

    /// The names of the files.
    fn names(&self, folder: &Path, control: &Control) -> Result<Option<Vec<String>>> {
        let listed = self.list(folder, control)?;
        Ok(listed.map(|found| found.files.into_iter().map(|file| file.name).collect()))
    }

    /// The first `most` bytes of a file, or all of a shorter one, and its length; `None` if it is
    /// not there. With `anew` the file may be another one than it was.
    fn start(
        &self,
        path: &Path,
        most: u64,
        anew: bool,
        control: &Control,
    ) -> Result<Option<(Vec<u8>, u64)>>;

    /// Fetches ranges of a file of `size` bytes, many at a time, and
    /// [delivers](FetchRange::deliver) their bytes in order. A file that is missing, or of another
    /// length, is [`Error::CorruptData`](crate::Error::CorruptData).
    fn fetch(
        &self,
        path: &Path,
        size: u64,
        ranges: Vec<FetchRange>,
        control: &Control,
    ) -> Result<()>;
}

/// The bytes that a request sends. A client may hold them a while longer than the call takes.
pub type Body = Arc<Vec<u8>>;

/// A [`Connection`] by way of which files are stored.
///
/// # Errors
/// As for those.
pub trait StoringConnection: Connection {
    /// Stores a file of these bytes: by one request, so that it is there whole or not at all.
    ///
    /// If a condition does not hold, that is
    /// [`StorageFault::Precondition`](crate::StorageFault::Precondition); but for
    /// [`Condition::Always`], where the file may have been stored although no answer said so,
    /// [`StorageFault::Unclear`](crate::StorageFault::Unclear). A file that was stored by an
    /// attempt whose answer was lost does not meet the condition of the next. In either case the
    /// file may be another one from then on than it was.
    fn put(&self, path: &Path, body: &Body, condition: Condition, control: &Control) -> Result<()>;

    /// Begins to store a file in parts. But for [`Condition::Always`] it is looked at what is there
    /// now: that, when it is completed, is not it.
    ///
    /// # Errors
    /// [`StorageFault::Precondition`](crate::StorageFault::Precondition) where there is one, and
    /// none may be; [`Error::Unsupported`] for [`Condition::Unchanged`].
    fn begin(&self, path: &Path, condition: Condition, control: &Control) -> Result<Upload>;

    /// Stores a part, the one of this number from 0 on. All but the last have the same length,
    /// which is 5 MiB at least. Returns what [`complete`](Self::complete) asks for.
    fn put_part(
        &self,
        upload: &Upload,
        number: usize,
        body: &Body,
        control: &Control,
    ) -> Result<String>;

    /// Makes the parts, whose answers are given in their order, a file of `size` bytes.
    ///
    /// If a condition does not hold, that is
    /// [`StorageFault::Precondition`](crate::StorageFault::Precondition); but for
    /// [`Condition::Always`], where it cannot be told whether the file was stored,
    /// [`StorageFault::Unclear`](crate::StorageFault::Unclear).
    fn complete(
        &self,
        upload: &Upload,
        parts: Vec<String>,
        size: u64,
        control: &Control,
    ) -> Result<()>;

    /// Returns an error if the store cannot copy a file of `size` bytes. It makes no request.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where it does not.
    fn check_copied(&self, _from: &Path, _size: u64) -> Result<()> {
        Ok(())
    }

    /// Makes the store copy the file `from`, of `size` bytes, to another name, without a transfer.
    /// It copies the version that was first seen, as far as the store checks that; the caller has
    /// to verify it. No other save uses the name `to`. After a failure, a file may yet appear
    /// there.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the store does not hold both, or does not copy so much at a
    /// time; [`Error::CorruptData`] for a file of another length.
    fn copy(&self, from: &Path, to: &Path, size: u64, control: &Control) -> Result<()>;

    /// Removes files, and what was begun and not completed. One that is not there is as good as
    /// removed. Returns what could not be removed, and why; what is not done `within` that time is
    /// not done.
    fn remove(
        &self,
        files: &[PathBuf],
        uploads: &[Upload],
        within: Duration,
        control: &Control,
    ) -> Vec<Error>;

    /// Removes a file, which was [looked at](Connection::look) or [read](Connection::start), if it
    /// is the one that was seen then. One that is not there is as good as removed. It is looked at
    /// before each attempt, so that what was not answered is not tried again blindly; and the store
    /// is told of the condition, where it can be.
    ///
    /// # Errors
    /// [`StorageFault::Precondition`](crate::StorageFault::Precondition) where it is another one,
    /// which is left alone.
    fn remove_seen(&self, path: &Path, control: &Control) -> Result<()>;

    /// Returns whether the known tag is enough for [`Condition::Unchanged`]: some stores give no
    /// tag, or a weak one.
    fn tells_apart(&self, _path: &Path) -> bool {
        true
    }

    /// Returns whether the store refuses a file in `folder` whose condition does not hold. Some
    /// stores ignore conditions silently.
    fn keeps_conditions(&self, folder: &Path, control: &Control) -> Result<bool>;
}

/// Lists the direct contents of several folders of a store.
///
/// # Errors
/// [`Error::Unsupported`] of a store that cannot list; those of [`Connection`].
pub fn list_folders(
    folders: &[PathBuf],
    connection: &dyn Connection,
    control: &Control,
) -> Result<Vec<Folder>> {
    parallel::map(folders.len(), QUESTIONS, |number| {
        let folder = &folders[number];
        let found = connection.list(folder, control)?;
        found.ok_or_else(|| Error::Unsupported(format!("{} cannot be listed", folder.display())))
    })
}

/// All bytes of each of several files of a store; `None` of those that are not there.
///
/// # Errors
/// Those of [`Connection`].
pub fn read_files(
    paths: &[PathBuf],
    connection: &dyn Connection,
    control: &Control,
) -> Result<Vec<Option<Vec<u8>>>> {
    let files = Files::Remote(connection, control);
    parallel::map(paths.len(), QUESTIONS, |number| files.read(&paths[number]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file whose bytes are their offsets. It delivers ranges in pieces of `step` bytes and keeps
    /// them.
    struct Counting {
        step: u64,
        kept: Mutex<Vec<FetchRange>>,
    }

    impl Connection for Counting {
        fn look(&self, _: &Path, _: &Control) -> Result<Option<u64>> {
            Ok(None)
        }

        fn list(&self, _: &Path, _: &Control) -> Result<Option<Folder>> {
            Ok(None)
        }

        fn start(&self, _: &Path, _: u64, _: bool, _: &Control) -> Result<Option<(Vec<u8>, u64)>> {
            Ok(None)
        }

        fn fetch(&self, _: &Path, _: u64, ranges: Vec<FetchRange>, _: &Control) -> Result<()> {
            for mut range in ranges {
                let (mut at, end) = (range.start, range.end);
                while at < end {
                    let next = (at + self.step).min(end);
                    let bytes: Vec<u8> = (at..next).map(|byte| byte.to_le_bytes()[0]).collect();
                    range.deliver(at, &bytes);
                    at = next;
                }
                self.kept.lock().unwrap().push(range);
            }
            Ok(())
        }
    }

    #[test]
    fn pieces_of_any_size_go_to_their_destinations_until_the_call_ends() {
        // (at, len): with gaps, and two that have the same bytes, one within the other.
        let wanted = [(3_u64, 10_u64), (13, 1), (20, 60), (25, 5), (70, 20), (200, 56)];
        let bytes = |at, len| (at..at + len).map(|b: u64| b.to_le_bytes()[0]).collect::<Vec<u8>>();
        for step in [1, 2, 7, 64, 256] {
            let mut buffers: Vec<Vec<u8>> =
                wanted.iter().map(|&(_, len)| vec![0; usize::try_from(len).unwrap()]).collect();
            let runs: Vec<Run> = buffers
                .iter_mut()
                .zip(wanted)
                .map(|(buffer, (at, len))| Run {
                    at,
                    len,
                    to: Destination(buffer.as_mut_ptr()),
                    // That of the fifth is another one, and the last has none.
                    expected: (at < 200)
                        .then(|| block_digest(&bytes(at, len)) ^ u64::from(at == 70)),
                })
                .collect();
            let store = Counting { step, kept: Mutex::default() };
            let ranges = vec![FetchRange::new(0, 256, runs)];
            // SAFETY: each run has a buffer of its length.
            let mismatches =
                unsafe { fetch(&store, Path::new("x"), 256, ranges, &Control::new()).unwrap() };
            let mismatch = Mismatch { at: 70, len: 20, digest: block_digest(&bytes(70, 20)) };
            assert_eq!(mismatches, [mismatch], "step {step}");
            for mut kept in store.kept.into_inner().unwrap() {
                kept.next = 0;
                kept.deliver(0, &[255; 256]);
            }
            for (buffer, (at, len)) in buffers.iter().zip(wanted) {
                assert_eq!(buffer, &bytes(at, len), "step {step}");
            }
        }
    }
}
