//! Files that one request makes visible on a store, on a condition. If the answer does not show the
//! outcome, the content of the store does.

use std::path::Path;

use super::remote::{Body, Condition, StoringConnection};
use crate::{Control, Error, Result, StorageFault};

/// Stores a new file. With `keeps_conditions`, the store checks that there is no other one.
/// Otherwise we look right before and after.
///
/// # Errors
/// - [`Error::Storage`] of the kind [`StorageFault::Precondition`] if there is another file, which
///   stays.
/// - [`Error::Interrupted`].
///
/// After these errors the file is not stored. After [`StorageFault::Unclear`] it may be, or may
/// still appear.
pub fn put_new(
    path: &Path,
    bytes: &[u8],
    keeps_conditions: bool,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    // Some stores check one kind of condition and not the other.
    if connection.start(path, 1, true, control)?.is_some() {
        return Err(another(path));
    }
    let condition = if keeps_conditions { Condition::New } else { Condition::Unguarded };
    put_and_look(path, bytes, condition, connection, control)
}

/// Stores a file, and looks at the store if the answer does not show the outcome.
pub(crate) fn put_and_look(
    path: &Path,
    bytes: &[u8],
    condition: Condition,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    let put = connection.put(path, &Body::new(bytes.to_vec()), condition, control);
    match &put {
        Ok(()) if condition == Condition::Unchanged => return Ok(()),
        // The store may have ignored the condition.
        Ok(()) => {}
        Err(Error::Storage { kind, .. }) => {
            if !matches!(kind, StorageFault::Precondition | StorageFault::Unclear) {
                // Every attempt was answered, so the file is not stored.
                return put;
            }
        }
        // Interrupted: the store may still carry out the request.
        Err(_) => return put.map_err(|error| unclear(path, error)),
    }
    match (has(path, bytes, connection, control), put) {
        (Ok(Some(true)), _) => Ok(()),
        // Accepted, but not visible yet: a cache in between may remember that there was no file.
        (Ok(None), Ok(())) => {
            let reason = "the store accepted it, but does not list it";
            Err(Error::storage(StorageFault::Unclear, "write", path, reason))
        }
        // Refused, or stored and then replaced. No request is pending any more.
        (Ok(_), Ok(())) => Err(another(path)),
        (Ok(_), Err(error)) if is_refused(&error) => Err(another(path)),
        (Err(error), Ok(())) => Err(unclear(path, error)),
        (Err(error), Err(refused)) if is_refused(&refused) => Err(unclear(path, error)),
        (_, Err(error)) => Err(error),
    }
}

/// Stores a file, and replaces one that is there.
///
/// # Errors
/// Those of [`put_new`], except that another file is not an error.
pub(crate) fn put_over(
    path: &Path,
    bytes: &[u8],
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    match connection.put(path, &Body::new(bytes.to_vec()), Condition::Unguarded, control) {
        Err(error) if error.storage_fault() == Some(StorageFault::Unclear) => {
            match has(path, bytes, connection, control) {
                Ok(Some(true)) => Ok(()),
                _ => Err(error),
            }
        }
        Err(Error::Interrupted) => Err(unclear(path, Error::Interrupted)),
        put => put,
    }
}

/// Compares a file with these bytes, because ids may occur twice. Returns `None` if there is no
/// file.
///
/// # Errors
/// Those of [`Connection`](super::Connection).
pub fn has(
    path: &Path,
    bytes: &[u8],
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<Option<bool>> {
    match connection.start(path, bytes.len() as u64 + 1, false, control) {
        Ok(found) => Ok(found.map(|(found, _)| found == bytes)),
        // It has changed a moment ago.
        Err(error) if is_refused(&error) => Ok(Some(false)),
        Err(error) => Err(error),
    }
}

pub(crate) fn is_refused(error: &Error) -> bool {
    error.storage_fault() == Some(StorageFault::Precondition)
}

pub(crate) fn another(path: &Path) -> Error {
    let reason = "another save to this place was committed, or the checkpoint removed, since \
        this save began; nothing was changed";
    Error::storage(StorageFault::Precondition, "replace", path, reason)
}

/// Returns the error for a file that may be stored, or may still appear.
pub(crate) fn unclear(path: &Path, mut error: Error) -> Error {
    let reason = match &mut error {
        Error::Storage { kind, .. } => {
            *kind = StorageFault::Unclear;
            return error;
        }
        Error::Interrupted => "it was interrupted before the store answered".into(),
        error => error.to_string(),
    };
    Error::storage(StorageFault::Unclear, "write", path, reason)
}
