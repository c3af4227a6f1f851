//! Files that no file system has: objects of a store, pages of a server. Their paths are URLs.
//!
//! Implement [`Remote`] and [`Connection`] to add a protocol; the plans, the checks and the engines
//! are those of files.
#![allow(unsafe_code)] // `Connection::fetch` writes to addresses that it is given.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::files::Files;
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
pub struct Run {
    /// First byte in the file.
    pub at: u64,
    /// Bytes; at least one.
    pub len: u64,
    /// Destination of the first byte.
    pub to: Destination,
}

/// A range of a file that is fetched by one request. What no run wants is dropped as it comes.
#[derive(Clone, Debug)]
pub struct FetchRange {
    /// First byte.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
    /// Parts to deliver, in the order of the file. Two runs may have the same bytes.
    pub runs: Vec<Run>,
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

    /// Fetches parts of a file of `size` bytes, many at a time. A file that is missing, or of
    /// another length, is [`Error::CorruptData`](crate::Error::CorruptData). When this returns,
    /// nothing is written any more.
    ///
    /// # Safety
    /// The memory of every run is valid for writes from any thread until this returns, and no two
    /// runs share any. Runs lie in their part, and parts in the file.
    unsafe fn fetch(
        &self,
        path: &Path,
        size: u64,
        parts: Vec<FetchRange>,
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
    /// Where a condition does not hold, that is
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
    /// Where a condition does not hold, that is
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
