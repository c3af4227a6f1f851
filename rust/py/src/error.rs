//! Translation of the core's errors to the exceptions of `dcp_rs.errors`. Those are defined in
//! Python so that they can be pickled.

use std::io;
use std::path::{Path, PathBuf};

use dcp_rs_core::{Error, StorageFault};
use pyo3::exceptions::{PyKeyboardInterrupt, PyOSError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::FsPath;
use crate::panics::internal_error;

pyo3::import_exception!(dcp_rs.errors, CheckpointExistsError);
pyo3::import_exception!(dcp_rs.errors, CheckpointNotFoundError);
pyo3::import_exception!(dcp_rs.errors, CheckpointReplacedError);
pyo3::import_exception!(dcp_rs.errors, CorruptDataError);
pyo3::import_exception!(dcp_rs.errors, CorruptIndexError);
pyo3::import_exception!(dcp_rs.errors, InternalError);
pyo3::import_exception!(dcp_rs.errors, PlanError);
pyo3::import_exception!(dcp_rs.errors, QuantizationError);
pyo3::import_exception!(dcp_rs.errors, SaveInProgressError);
pyo3::import_exception!(dcp_rs.errors, StorageError);
pyo3::import_exception!(dcp_rs.errors, StorageNotFoundError);
pyo3::import_exception!(dcp_rs.errors, StoragePermissionError);
pyo3::import_exception!(dcp_rs.errors, StoragePreconditionError);
pyo3::import_exception!(dcp_rs.errors, StorageUnclearError);
pyo3::import_exception!(dcp_rs.errors, UnsafePickleError);
pyo3::import_exception!(dcp_rs.errors, UnsupportedError);

/// Returns the exception for an error of the core.
pub fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let message = error.to_string();
    let name = |path| FsPath::text(py, path).map_or_else(|_| py.None(), Bound::unbind);
    let (exception, path, tensor, offset) = match error {
        Error::NotFound { path, .. } => {
            (CheckpointNotFoundError::new_err(message), Some(path), "", None)
        }
        Error::CorruptIndex { path, offset, .. } => {
            (CorruptIndexError::new_err(message), Some(path), "", Some(*offset))
        }
        Error::CorruptData { path, tensor, offset, .. } => {
            (CorruptDataError::new_err(message), Some(path), &**tensor, *offset)
        }
        Error::Replaced { path } => {
            (CheckpointReplacedError::new_err(message), Some(path), "", None)
        }
        Error::Exists { path } => (CheckpointExistsError::new_err(message), Some(path), "", None),
        Error::UnsafePickle { path, .. } => {
            (UnsafePickleError::new_err(message), Some(path), "", None)
        }
        Error::Quantization { path, tensor, .. } => {
            (QuantizationError::new_err(message), Some(path), &**tensor, None)
        }
        Error::TensorPlan { path, tensor, .. } => {
            return with_place(
                py,
                PlanError::new_err(message),
                path.as_deref(),
                Some(tensor),
                None,
            );
        }
        Error::Storage { kind, action, path, attempts, .. } => {
            let error = match kind {
                StorageFault::NotFound => StorageNotFoundError::new_err(message),
                StorageFault::Denied => StoragePermissionError::new_err(message),
                StorageFault::Precondition => StoragePreconditionError::new_err(message),
                StorageFault::Unclear => StorageUnclearError::new_err(message),
                _ => StorageError::new_err(message),
            };
            let told = error.value(py).setattr("operation", *action);
            match told.and_then(|()| error.value(py).setattr("attempts", *attempts)) {
                Ok(()) => (error, Some(path), "", None),
                Err(other) => return other,
            }
        }
        Error::Busy { path, .. } => (SaveInProgressError::new_err(message), Some(path), "", None),
        // Like a failed rename: an `OSError` with two file names.
        Error::Displaced { path, at, source } => {
            let number = match &**source {
                Error::Io { source, .. } => source.raw_os_error().unwrap_or(EIO),
                _ => EIO,
            };
            return PyOSError::new_err((number, message, name(path), py.None(), name(at)));
        }
        // The standard class, so that callers can look at errno. `OSError` picks a subclass, such
        // as `FileNotFoundError`, by errno.
        Error::Io { action, path, source } => {
            let number = source.raw_os_error().unwrap_or(EIO);
            let message = format!("cannot {action}: {}", words(source));
            return PyOSError::new_err((number, message, name(path)));
        }
        Error::Unsupported(_) => return UnsupportedError::new_err(message),
        Error::Internal(what) => return internal_error(what, None),
        Error::Interrupted => return PyKeyboardInterrupt::new_err(()),
        // `Plan`, and variants that a later core adds.
        _ => return PlanError::new_err(message),
    };
    let tensor = (!tensor.is_empty()).then_some(tensor);
    with_place(py, exception, path.map(PathBuf::as_path), tensor, offset)
}

/// Returns the system's message. Rust appends the error number, which Python shows in front.
fn words(source: &io::Error) -> String {
    let text = source.to_string();
    let number = source.raw_os_error().map(|number| format!(" (os error {number})"));
    number.and_then(|number| text.strip_suffix(&number)).unwrap_or(&text).to_owned()
}

/// Stands for an error without a number.
const EIO: i32 = 5;

/// Sets `path`, `tensor` and `offset`, which every class of `dcp_rs.errors` has.
fn with_place(
    py: Python<'_>,
    error: PyErr,
    path: Option<&Path>,
    tensor: Option<&str>,
    offset: Option<u64>,
) -> PyErr {
    let place = PyDict::new(py);
    let set = || -> PyResult<()> {
        place.set_item("path", path.map(|path| FsPath::text(py, path)).transpose()?)?;
        place.set_item("tensor", tensor)?;
        place.set_item("offset", offset)?;
        error.value(py).getattr("__dict__")?.call_method1("update", (&place,))?;
        Ok(())
    };
    match set() {
        Ok(()) => error,
        Err(other) => other,
    }
}

/// Returns a `PlanError` about an index, and about one of its tensors if `tensor` is given.
pub fn plan_error(index: &Path, tensor: Option<&str>, message: String) -> PyErr {
    Python::attach(|py| with_place(py, PlanError::new_err(message), Some(index), tensor, None))
}

/// `Result<T, Error>` as a Python result.
pub trait IntoPy<T> {
    /// Translates the error.
    fn into_py(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> IntoPy<T> for dcp_rs_core::Result<T> {
    fn into_py(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| to_py(py, &error))
    }
}
