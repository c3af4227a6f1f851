//! Saves to stores, for Python: the destination of a save, and what the save replaces.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use dcp_rs_core::checkpoint::{self, Begun, Committed};
use dcp_rs_core::format::Index;
use dcp_rs_core::lock;
use dcp_rs_core::store::{self, Body, Condition, Folder, Listed, Remote, StoringConnection};
use dcp_rs_core::write::{WriteOptions, upload_file, upload_folder};
use dcp_rs_core::{Control, Error, Result};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::clean::{CleanedRows, to_rows};
use crate::error::{IntoPy, StorageUnclearError, to_py};
use crate::interrupt;
use crate::panics::guarded;
use crate::rows::Leftover;

/// Time limit for a removal.
const REMOVING: Duration = Duration::from_secs(60 * 60);

/// Files (name, length, age in seconds, tag), and the names of folders.
type FolderRows = (Vec<(String, u64, f64, Option<String>)>, Vec<String>);

/// A store for one save. Its commit replaces what was there when the save began.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Store {
    pub inner: Arc<dyn Remote>,
    begun: Mutex<Option<Begun>>,
}

#[guarded]
#[pymethods]
impl Store {
    /// Connects to the store of a URL lazily: this sends no request.
    #[new]
    fn new(
        py: Python<'_>,
        url: PathBuf,
        storage_options: HashMap<String, String>,
    ) -> PyResult<Self> {
        let store =
            dcp_rs_remote::Store::new(&url.to_string_lossy(), storage_options).into_py(py)?;
        Ok(Self { inner: Arc::new(store), begun: Mutex::default() })
    }

    /// Looks at what a save to `folder` will replace; with `rank`, a save of that rank alone.
    /// Returns the generation of the save.
    fn begin(&self, py: Python<'_>, folder: PathBuf, rank: Option<u32>) -> PyResult<u64> {
        let begun = self.ask(py, |connection, control| {
            checkpoint::begin_remote(&folder, rank, connection, control)
        })?;
        *self.begun() = Some(begun);
        Ok(begun.generation)
    }

    /// Returns whether a folder has an index; with `rank`, the index of that rank.
    fn has_index(&self, py: Python<'_>, folder: PathBuf, rank: Option<u32>) -> PyResult<bool> {
        self.ask(py, |connection, control| {
            checkpoint::is_there_remote(&folder, rank, connection, control)
        })
    }

    /// Does what the function `discard` does, for the files of several ranks.
    fn discard(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        rank: Option<u32>,
        indexes: Vec<PyBackedBytes>,
    ) -> PyResult<()> {
        self.ask(py, move |connection, control| {
            checkpoint::discard_remote(&folder, rank, indexes, connection, control)
        })
    }

    /// Does what the function `leftovers` does.
    fn leftovers(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        older_than: Option<f64>,
    ) -> PyResult<Vec<Leftover>> {
        let older_than = older_than.map(Duration::from_secs_f64);
        let found = self.ask(py, |connection, control| {
            checkpoint::leftovers_remote(&folder, older_than, connection, control)
        })?;
        Ok(found.into_iter().map(Leftover::from).collect())
    }

    /// Does what the function `clean` does.
    fn clean(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        older_than: Option<f64>,
    ) -> PyResult<CleanedRows> {
        let older_than = older_than.map(Duration::from_secs_f64);
        let cleaned = self.ask(py, |connection, control| {
            checkpoint::clean_remote(&folder, older_than, connection, control)
        })?;
        Ok(to_rows(cleaned))
    }

    /// Returns the files (name, length, age in seconds, tag) and the names of the folders in each
    /// folder.
    fn list(&self, py: Python<'_>, folders: Vec<PathBuf>) -> PyResult<Vec<FolderRows>> {
        let found =
            self.ask(py, |connection, control| store::list_folders(&folders, connection, control))?;
        let row = |file: Listed| (file.name, file.size, file.age.as_secs_f64(), file.tag);
        let rows = |folder: Folder| (folder.files.into_iter().map(row).collect(), folder.folders);
        Ok(found.into_iter().map(rows).collect())
    }

    /// Returns all bytes of each file; `None` for a file that does not exist.
    fn read<'py>(
        &self,
        py: Python<'py>,
        paths: Vec<PathBuf>,
    ) -> PyResult<Vec<Option<Bound<'py, PyBytes>>>> {
        let found =
            self.ask(py, |connection, control| store::read_files(&paths, connection, control))?;
        let bytes = |bytes: Option<Vec<u8>>| bytes.map(|bytes| PyBytes::new(py, &bytes));
        Ok(found.into_iter().map(bytes).collect())
    }

    /// Stores a file, and replaces one of the same name.
    fn put(&self, py: Python<'_>, path: PathBuf, data: Vec<u8>) -> PyResult<()> {
        self.ask(py, |connection, control| {
            connection.put(&path, &Body::new(data), Condition::Always, control)
        })
    }

    /// Returns whether the store refuses a write to `folder` whose condition does not hold.
    fn asks_conditions(&self, py: Python<'_>, folder: PathBuf) -> PyResult<bool> {
        self.ask(py, |connection, control| connection.keeps_conditions(&folder, control))
    }

    /// Stores a new file. It is an error if there is another one of this name.
    fn put_new(&self, py: Python<'_>, path: PathBuf, data: Vec<u8>) -> PyResult<()> {
        self.ask(py, |connection, control| {
            let folder = path.parent().unwrap_or(&path);
            let keeps_conditions = connection.keeps_conditions(folder, control)?;
            store::put_new(&path, &data, keeps_conditions, connection, control)
        })
    }

    /// Returns whether a file has these bytes, and is the version seen before, if one was seen.
    fn has(&self, py: Python<'_>, path: PathBuf, data: Vec<u8>) -> PyResult<bool> {
        let found =
            self.ask(py, |connection, control| store::has(&path, &data, connection, control))?;
        Ok(found == Some(true))
    }

    /// Uploads a local file. Without `overwrite`, the target must not exist.
    #[pyo3(signature = (path, to, *, overwrite, threads, max_inflight_bytes))]
    fn upload_file(
        &self,
        py: Python<'_>,
        path: PathBuf,
        to: PathBuf,
        overwrite: bool,
        threads: usize,
        max_inflight_bytes: u64,
    ) -> PyResult<()> {
        let options = sending(threads, max_inflight_bytes);
        told_with(py, &to, |control| {
            upload_file(&self.inner, &path, &to, overwrite, &options, control)
        })
    }

    /// Uploads local files (from, to) to a folder that `claim`, a file and its content, reserves.
    /// Then uploads the last file, which makes the others visible.
    #[pyo3(signature = (files, last, *, claim, threads, max_inflight_bytes))]
    fn upload_folder(
        &self,
        py: Python<'_>,
        files: Vec<(PathBuf, PathBuf)>,
        last: Option<(PathBuf, PathBuf)>,
        claim: (PathBuf, Vec<u8>),
        threads: usize,
        max_inflight_bytes: u64,
    ) -> PyResult<()> {
        let options = sending(threads, max_inflight_bytes);
        let shows = last.as_ref().or(files.last()).map_or(&claim.0, |(_, to)| to);
        let last = last.as_ref().map(|(from, to)| (&**from, &**to));
        told_with(py, shows, |control| {
            upload_folder(&self.inner, &files, last, (&claim.0, &claim.1), &options, control)
        })
    }

    /// Removes files, and ignores those that do not exist. Tries all, then returns the first error.
    fn remove(&self, py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<()> {
        self.ask(py, |connection, control| {
            let left = connection.remove(&paths, &[], REMOVING, control);
            left.into_iter().next().map_or(Ok(()), Err)
        })
    }

    /// Removes a file that was read. It is an error if another file has replaced it.
    fn remove_seen(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.ask(py, |connection, control| connection.remove_seen(&path, control))
    }

    /// Stores an index over existing data, in place of the index seen at `begin`. Removes nothing.
    fn replace_index(&self, py: Python<'_>, folder: PathBuf, index: Vec<u8>) -> PyResult<()> {
        let begun = self.has_begun().into_py(py)?;
        self.ask(py, |connection, control| {
            checkpoint::replace_index_remote(&folder, &index, begun, connection, control)
        })
    }

    /// Returns whether the store refuses to replace an object that changed meanwhile; true until
    /// that is known.
    #[getter]
    fn keeps_conditions(&self) -> bool {
        self.begun().is_none_or(|begun| begun.keeps_conditions)
    }

    /// Returns whether there was an index when the save began. The save replaces it.
    #[getter]
    fn replaces(&self) -> bool {
        self.begun().is_some_and(|begun| begun.replaces)
    }

    /// Returns whether single ranks had indexes when the save of all ranks began. The save replaces
    /// them.
    #[getter]
    fn replaces_ranks(&self) -> bool {
        self.begun().is_some_and(|begun| begun.replaces_ranks)
    }
}

impl Store {
    fn begun(&self) -> MutexGuard<'_, Option<Begun>> {
        lock(&self.begun)
    }

    fn has_begun(&self) -> Result<Begun> {
        let begun = *self.begun();
        begun.ok_or_else(|| Error::Plan("this save was not begun".into()))
    }

    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        question: impl FnOnce(&dyn StoringConnection, &Control) -> Result<T> + Send,
    ) -> PyResult<T> {
        interrupt::run(py, |control| question(&*self.inner.connect_to_store(0)?, control))
    }

    /// Commits, and replaces what was there when the save began.
    pub fn commit(
        &self,
        folder: &Path,
        rank: Option<u32>,
        index: &Index,
        replace: bool,
        control: &Control,
    ) -> Result<Committed> {
        let begun = self.has_begun()?;
        checkpoint::commit_remote(
            folder,
            rank,
            index,
            begun,
            replace,
            &*self.inner.connect_to_store(0)?,
            control,
        )
    }
}

fn sending(threads: usize, max_inflight_bytes: u64) -> WriteOptions {
    WriteOptions { threads, max_inflight_bytes, ..WriteOptions::default() }
}

/// Runs `work`, which stores something that becomes visible as `path`. If a signal raises
/// meanwhile, the cause of its exception says that the object is, or may be, stored.
fn told_with(
    py: Python<'_>,
    path: &Path,
    work: impl FnOnce(&Control) -> Result<()> + Send,
) -> PyResult<()> {
    let mut stored = None;
    let done = interrupt::run(py, |control| {
        let done = work(control);
        stored = checkpoint::may_be_stored(path, &done);
        done
    });
    done.map_err(|raised| with_cause(py, raised, stored))
}

/// Sets `stored`, the outcome of a request, as the cause of the exception that a signal raised.
pub fn with_cause(py: Python<'_>, raised: PyErr, stored: Option<Error>) -> PyErr {
    if let Some(stored) = stored
        && !raised.is_instance_of::<StorageUnclearError>(py)
    {
        let unclear = to_py(py, &stored);
        unclear.set_cause(py, raised.cause(py));
        raised.set_cause(py, Some(unclear));
    }
    raised
}
