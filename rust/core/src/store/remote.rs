//! Files outside of a file system: objects of a store, pages of a server. Their paths are URLs.
//!
//! Implement [`Remote`] and [`Connection`] to add a protocol. Plans, checks and engines are the
//! same as for files.
#![allow(unsafe_code)] // fetched bytes are written to addresses

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use twox_hash::xxhash3_64::Hasher;

use crate::format::block_digest;
use crate::{Control, Error, Result, parallel};

/// Concurrent requests to a store.
const QUESTIONS: usize = 32;

/// Destination of bytes: an address that the caller keeps valid during the call.
#[derive(Clone, Copy, Debug)]
pub struct Destination(pub *mut u8);

// SAFETY: an address alone is harmless. The caller of a function that writes to it guarantees that
// its memory may be written from any thread.
unsafe impl Send for Destination {}
// SAFETY: as above. A shared `Destination` is only used for the writes that its holder was asked
// for.
unsafe impl Sync for Destination {}

/// Bytes of a part, and their destination in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// First byte in the file.
    pub at: u64,
    /// Length in bytes; at least one.
    pub len: u64,
    /// Destination of the first byte.
    pub to: Destination,
    /// The digest (XXH3-64) to compare the bytes with when they arrive, if any.
    pub expected: Option<u64>,
}

/// A run whose bytes do not match the expected digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// First byte in the file.
    pub at: u64,
    /// Length in bytes.
    pub len: u64,
    /// The digest of the bytes that arrived.
    pub digest: u64,
}

/// The state of a call to [`fetch`], shared by its ranges.
#[derive(Debug, Default)]
struct Call {
    /// True during the call, while the memory is valid.
    is_open: RwLock<bool>,
    mismatches: Mutex<Vec<Mismatch>>,
}

/// A range of a file that one request fetches, and its destinations in memory. Bytes of no run are
/// dropped when they arrive.
pub struct FetchRange {
    /// First byte.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
    /// Parts to deliver, in the order of the file. Two runs may have the same bytes.
    pub(crate) runs: Vec<Run>,
    /// The first run that may still get bytes.
    next: usize,
    /// State of the digests of runs that have arrived in part, by number.
    hashers: HashMap<usize, Hasher>,
    call: Arc<Call>,
}

impl FetchRange {
    pub(crate) fn new(start: u64, end: u64, runs: Vec<Run>) -> Self {
        Self { start, end, runs, next: 0, hashers: HashMap::new(), call: Arc::default() }
    }

    /// Copies the next bytes, which begin at byte `at` of the file, to their destinations. Does
    /// nothing after the call to [`Connection::fetch`] has ended.
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
            // This run has ended, but a longer one before it has not.
            if from >= to {
                continue;
            }
            let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
            let source = &bytes[index(from - at)..index(to - at)];
            // SAFETY: bytes `from..to` belong to the run. The caller of `fetch` guarantees that its
            // memory is valid for writes while the range is open. `source` is memory of the client.
            unsafe {
                let to = run.to.0.wrapping_add(index(from - run.at));
                std::ptr::copy_nonoverlapping(source.as_ptr(), to, source.len());
            }
            let Some(expected) = run.expected else { continue };
            // Hash the bytes while they are in the cache.
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
                parallel::lock(&self.call.mismatches).push(mismatch);
            }
        }
    }
}

/// Fetches ranges of a file into memory with [`Connection::fetch`]. Returns the runs that do not
/// match their expected digests.
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
    /// On drop, even by a panic, it waits for current copies and refuses later ones.
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
    let mut mismatches = parallel::lock(&open.0.mismatches);
    Ok(std::mem::take(&mut *mismatches))
}

/// Condition for storing a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// None, because no other save uses the name.
    Always,
    /// None, although another save may use the name: any file may be replaced, or the store would
    /// ignore a condition.
    Unguarded,
    /// No file has the name.
    New,
    /// The file is still the one that was seen.
    Unchanged,
}

/// A file that is stored in parts. It does not exist before all of them are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// Its path.
    pub path: PathBuf,
    /// Id of the upload on the store.
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
    /// Time since it was stored, by the clocks of the store and of this machine.
    pub age: Duration,
    /// Tag that distinguishes it from other objects of the same name, if the store has tags.
    pub tag: Option<String>,
}

/// Direct contents of a folder on a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Folder {
    /// The files.
    pub files: Vec<Listed>,
    /// The names of the folders. None is empty, because a store has no empty folders.
    pub folders: Vec<String>,
}

/// A store, and how to reach it. Without a [`Connection`] it has no open sockets and no threads.
pub trait Remote: Debug + Send + Sync {
    /// Connects with `threads` receiving threads; 0 means as many as cores.
    fn connect(&self, threads: usize) -> Result<Arc<dyn Connection>>;

    /// Does the same as [`connect`](Self::connect), for a connection that can also store files.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the store is read-only.
    fn connect_to_store(&self, threads: usize) -> Result<Arc<dyn StoringConnection>>;
}

/// A connection to the files of a [`Remote`], for one call. Every method may be called from any
/// thread, and blocks. A cancelled [`Control`] ends the wait.
///
/// A file that was seen must not change as long as its `Remote` lives: another length or another
/// tag is an error.
///
/// # Errors
/// [`Error::Storage`](crate::Error::Storage) after the retries;
/// [`Error::Interrupted`](crate::Error::Interrupted).
pub trait Connection: Send + Sync {
    /// Returns the length of a file; `None` if it does not exist.
    fn look(&self, path: &Path, control: &Control) -> Result<Option<u64>>;

    /// Lists the direct contents of a folder; returns `None` if the store cannot list.
    fn list(&self, folder: &Path, control: &Control) -> Result<Option<Folder>>;

    /// Returns the names of the files in a folder; `None` if the store cannot list.
    fn names(&self, folder: &Path, control: &Control) -> Result<Option<Vec<String>>> {
        let listed = self.list(folder, control)?;
        Ok(listed.map(|found| found.files.into_iter().map(|file| file.name).collect()))
    }

    /// Returns the first `most` bytes of a file, or all of a shorter one, and its length. Returns
    /// `None` if it does not exist. With `anew`, the file may have changed since it was seen.
    fn start(
        &self,
        path: &Path,
        most: u64,
        anew: bool,
        control: &Control,
    ) -> Result<Option<(Vec<u8>, u64)>>;

    /// Fetches ranges of a file of `size` bytes, many at a time, and
    /// [delivers](FetchRange::deliver) their bytes in order.
    ///
    /// # Errors
    /// [`Error::CorruptData`](crate::Error::CorruptData) for a missing file;
    /// [`StorageFault::Precondition`](crate::StorageFault::Precondition) for one that has changed
    /// or has another length.
    fn fetch(
        &self,
        path: &Path,
        size: u64,
        ranges: Vec<FetchRange>,
        control: &Control,
    ) -> Result<()>;
}

/// The body of a request. A client may keep it a while longer than the call.
pub type Body = Arc<Vec<u8>>;

/// A [`Connection`] that can store files.
///
/// # Errors
/// Those of a [`Connection`].
pub trait StoringConnection: Connection {
    /// Stores a file with these bytes in one request, so that it is complete or missing.
    ///
    /// If the condition does not hold, the error has the kind
    /// [`StorageFault::Precondition`](crate::StorageFault::Precondition). If the file may have been
    /// stored although no answer said so, and the condition is not [`Condition::Always`], the kind
    /// is [`StorageFault::Unclear`](crate::StorageFault::Unclear). An attempt whose answer was lost
    /// may have stored the file, which then breaks the condition of the next attempt. After either
    /// error, the file may differ from the one seen before.
    fn put(&self, path: &Path, body: &Body, condition: Condition, control: &Control) -> Result<()>;

    /// Begins to store a file in parts. Unless the condition is [`Condition::Always`], it looks at
    /// the existing file, to tell it from the new one later.
    ///
    /// # Errors
    /// [`StorageFault::Precondition`](crate::StorageFault::Precondition) if there is a file and the
    /// condition forbids it; [`Error::Unsupported`] for [`Condition::Unchanged`].
    fn begin(&self, path: &Path, condition: Condition, control: &Control) -> Result<Upload>;

    /// Stores the part with this number, from 0 on. All but the last have the same length of at
    /// least 5 MiB. Returns the answer that [`complete`](Self::complete) needs.
    fn put_part(
        &self,
        upload: &Upload,
        number: usize,
        body: &Body,
        control: &Control,
    ) -> Result<String>;

    /// Joins the parts to a file of `size` bytes. `parts` are the answers for the parts, in order.
    ///
    /// If the condition does not hold, the error has the kind
    /// [`StorageFault::Precondition`](crate::StorageFault::Precondition). If it is unknown whether
    /// the file was stored, and the condition is not [`Condition::Always`], the kind is
    /// [`StorageFault::Unclear`](crate::StorageFault::Unclear).
    fn complete(
        &self,
        upload: &Upload,
        parts: Vec<String>,
        size: u64,
        control: &Control,
    ) -> Result<()>;

    /// Returns an error if the store can never copy a file of `size` bytes. It makes no request.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    fn check_copied(&self, _from: &Path, _size: u64) -> Result<()> {
        Ok(())
    }

    /// Makes the store copy the file `from`, of `size` bytes, to another name, without a transfer.
    /// It copies the version that was first seen, as far as the store checks that. The caller has
    /// to verify the copy. No other save uses the name `to`. After a failure, a file may still
    /// appear there.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the store does not have both names, or does not copy so many bytes
    /// at once; [`Error::CorruptData`] for a file of another length.
    fn copy(&self, from: &Path, to: &Path, size: u64, control: &Control) -> Result<()>;

    /// Removes files and incomplete uploads, if they exist. Stops after the time `within`. Returns
    /// an error for each that could not be removed.
    fn remove(
        &self,
        files: &[PathBuf],
        uploads: &[Upload],
        within: Duration,
        control: &Control,
    ) -> Vec<Error>;

    /// Removes a file if it is still the one that was [looked at](Connection::look) or
    /// [read](Connection::start). A missing file is no error. Each attempt looks at the file first,
    /// so that an attempt without an answer is not repeated blindly. If the store supports a
    /// condition on removal, the request has one.
    ///
    /// # Errors
    /// [`StorageFault::Precondition`](crate::StorageFault::Precondition) if another file has
    /// replaced it, which stays.
    fn remove_seen(&self, path: &Path, control: &Control) -> Result<()>;

    /// Returns whether the known tag is good enough for [`Condition::Unchanged`]. Some stores
    /// return no tag, or a weak one.
    fn tells_apart(&self, _path: &Path) -> bool {
        true
    }

    /// Returns whether the store refuses a write to `folder` whose condition does not hold. Some
    /// stores silently ignore conditions.
    fn keeps_conditions(&self, folder: &Path, control: &Control) -> Result<bool>;
}

/// Lists the direct contents of several folders of a store.
///
/// # Errors
/// [`Error::Unsupported`] if the store cannot list; those of [`Connection`].
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
        // (at, len): with gaps, and two that share bytes, one inside the other.
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
                    // The fifth expects another digest, and the last expects none.
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
