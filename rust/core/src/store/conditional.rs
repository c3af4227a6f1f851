//! Files of a store that one request makes visible, on a condition: where its answer does not say
//! what became of it, what is there does.

use std::path::Path;

use super::remote::{Body, Condition, StoringConnection};
use crate::{Control, Error, Result, StorageFault};

/// Stores a file of which there is none. With `keeps_conditions` the store sees to that itself;
/// else it is looked at right before and after.
///
/// # Errors
/// [`Error::Storage`], of the kind [`StorageFault::Precondition`] where there is another one, which
/// is not touched; [`Error::Interrupted`]: it is not stored then. Not so after
/// [`StorageFault::Unclear`]: it may be, now or in a moment.
pub fn put_new(
    path: &Path,
    bytes: &[u8],
    keeps_conditions: bool,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    // Some stores look at the one condition and not at the other.
    if connection.start(path, 1, true, control)?.is_some() {
        return Err(another(path));
    }
    let condition = if keeps_conditions { Condition::New } else { Condition::Unguarded };
    put_and_look(path, bytes, condition, connection, control)
}

/// Stores a file, and looks what is there where the answer does not say it.
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
        // The store may have looked at nothing.
        Ok(()) => {}
        Err(Error::Storage { kind, .. }) => {
            if !matches!(kind, StorageFault::Precondition | StorageFault::Unclear) {
                // An answer, and no other was lost: it is not stored.
                return put;
            }
        }
        // It was stopped, and what was sent may yet be done.
        Err(_) => return put.map_err(|error| unclear(path, error)),
    }
    match (has(path, bytes, connection, control), put) {
        (Ok(Some(true)), _) => Ok(()),
        // It was taken, and is not shown yet: what is between may remember that there was nothing.
        (Ok(None), Ok(())) => {
            let reason = "the store accepted it, but does not list it";
            Err(Error::storage(StorageFault::Unclear, "write", path, reason))
        }
        // Refused, or done and replaced: nothing of it is on its way any more.
        (Ok(_), Ok(())) => Err(another(path)),
        (Ok(_), Err(error)) if is_refused(&error) => Err(another(path)),
        (Err(error), Ok(())) => Err(unclear(path, error)),
        (Err(error), Err(refused)) if is_refused(&refused) => Err(unclear(path, error)),
        (_, Err(error)) => Err(error),
    }
}

/// Stores a file in place of whatever is there.
///
/// # Errors
/// As for [`put_new`]; another one is none.
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

/// Compares a file with these bytes, as ids may occur twice; `None` if there is no file.
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
        // Another one than a moment ago.
        Err(error) if is_refused(&error) => Ok(Some(false)),
        Err(error) => Err(error),
    }
}

pub(crate) fn is_refused(error: &Error) -> bool {
    error.storage_fault() == Some(StorageFault::Precondition)
}

pub(crate) fn another(path: &Path) -> Error {
    let reason = "another save to this place was committed, or the checkpoint removed, since this save began; nothing was changed";
    Error::storage(StorageFault::Precondition, "replace", path, reason)
}

/// It may be stored, or be yet.
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
