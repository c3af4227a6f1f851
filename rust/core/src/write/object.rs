//! An object that is uploaded to a store, in one piece or in parts, and the removal of failed ones.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::store::{Body, Condition, Remote, StoringConnection, Upload, unclear};
use crate::{Control, Error, Result};

/// Time limits for a failed save, and for an interrupted one, to remove its objects.
const CLEANING: Duration = Duration::from_secs(10);
const LEAVING: Duration = Duration::from_millis(700);

pub(super) struct Object {
    pub path: PathBuf,
    condition: Condition,
    /// The upload of an object in several parts.
    upload: OnceLock<Upload>,
    /// True if the object may exist.
    stored: AtomicBool,
    /// True if the object is complete.
    complete: AtomicBool,
}

impl Object {
    pub fn new(path: PathBuf, condition: Condition) -> Self {
        Self {
            path,
            condition,
            upload: OnceLock::new(),
            stored: AtomicBool::new(false),
            complete: AtomicBool::new(false),
        }
    }

    /// Begins an upload in parts. Call it at most once.
    pub fn begin(&self, connection: &dyn StoringConnection, control: &Control) -> Result<()> {
        let _ = self.upload.set(connection.begin(&self.path, self.condition, control)?);
        Ok(())
    }

    /// Uploads a part, or the whole object if no upload was begun. Returns the store's answer.
    pub fn send(
        &self,
        number: usize,
        body: &Body,
        connection: &dyn StoringConnection,
        control: &Control,
    ) -> Result<String> {
        if let Some(upload) = self.upload.get() {
            return connection.put_part(upload, number, body, control);
        }
        self.stored.store(true, Ordering::Relaxed);
        let put = connection.put(&self.path, body, self.condition, control);
        put.map(|()| String::new())
    }

    /// Joins the parts to one object of `size` bytes. `answers` are the store's answers for the
    /// parts.
    pub fn complete(
        &self,
        answers: impl Iterator<Item = String>,
        size: u64,
        connection: &dyn StoringConnection,
        control: &Control,
    ) -> Result<()> {
        if let Some(upload) = self.upload.get() {
            self.stored.store(true, Ordering::Relaxed);
            let done = connection.complete(upload, answers.collect(), size, control);
            done.map_err(|error| match error {
                // The store may still carry out the request.
                Error::Interrupted if self.condition != Condition::Always => {
                    unclear(&self.path, error)
                }
                error => error,
            })?;
        }
        self.complete.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the path if the object may exist and no other object can have its name.
    pub fn may_be_at(&self) -> Option<PathBuf> {
        let is_own = self.condition == Condition::Always;
        (is_own && self.stored.load(Ordering::Relaxed)).then(|| self.path.clone())
    }

    /// Returns the upload that was begun and not completed.
    pub fn open_upload(&self) -> Option<Upload> {
        let is_open = !self.complete.load(Ordering::Relaxed);
        self.upload.get().filter(|_| is_open).cloned()
    }
}

/// Removes what a failed save stored. Returns the reasons why something is still there.
pub(super) fn give_up(
    remote: &Arc<dyn Remote>,
    files: &[PathBuf],
    uploads: &[Upload],
    interrupted: bool,
) -> Vec<Error> {
    if files.is_empty() && uploads.is_empty() {
        return Vec::new();
    }
    let within = if interrupted { LEAVING } else { CLEANING };
    // Connects anew, since the failure may have broken the connection.
    match remote.connect_to_store(1) {
        Ok(connection) => connection.remove(files, uploads, within, &Control::new()),
        Err(error) => vec![error],
    }
}

/// Adds to a store's error what the save left on the store.
pub(super) fn with_leftovers(mut error: Error, left: &[Error]) -> Error {
    if let (Error::Storage { reason, .. }, [first, more @ ..]) = (&mut error, left) {
        let and_more = match more.len() {
            0 => String::new(),
            n => format!(", and {n} more"),
        };
        *reason =
            format!("{reason}; the failed save left something on the store: {first}{and_more}");
    }
    error
}
