//! Translation of the core's errors to the exceptions of `dcp_rs.errors`. Those are defined in
//! Python so that they can be pickled.

use std::io;
use std::path::Path;

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
    match error {
        Error::NotFound { path, .. } => {
            with_place(py, CheckpointNotFoundError::new_err(message), Some(path), None, None)
        }
        Error::CorruptIndex { path, offset, .. } => {
            with_place(py, CorruptIndexError::new_err(message), Some(path), None, Some(*offset))
        }
        Error::CorruptData { path, tensor, offset, .. } => with_place(
            py,
            CorruptDataError::new_err(message),
            Some(path),
            (!tensor.is_empty()).then_some(tensor.as_str()),
            *offset,
        ),
        Error::Replaced { path } => {
            with_place(py, CheckpointReplacedError::new_err(message), Some(path), None, None)
        }
        Error::Exists { path } => {
            with_place(py, CheckpointExistsError::new_err(message), Some(path), None, None)
        }
        // Like a failed rename: an `OSError` with two file names.
        Error::Displaced { path, at, source } => {
            let name = |path| FsPath::text(py, path).map_or_else(|_| py.None(), Bound::unbind);
            let number = match &**source {
                Error::Io { source, .. } => source.raw_os_error().unwrap_or(EIO),
                _ => EIO,
            };
            PyOSError::new_err((number, message, name(path), py.None(), name(at)))
        }
        Error::UnsafePickle { path, .. } => {
            with_place(py, UnsafePickleError::new_err(message), Some(path), None, None)
        }
        Error::Quantization { path, tensor, .. } => with_place(
            py,
            QuantizationError::new_err(message),
            Some(path),
            (!tensor.is_empty()).then_some(tensor.as_str()),
            None,
        ),
        Error::Unsupported(_) => UnsupportedError::new_err(message),
        Error::TensorPlan { path, tensor, .. } => with_place(
            py,
            PlanError::new_err(message),
            path.as_deref(),
            Some(tensor.as_str()),
            None,
        ),
        // The standard class, so that callers can look at errno. `OSError` picks a subclass, such
        // as `FileNotFoundError`, by errno.
        Error::Io { action, path, source } => PyOSError::new_err((
            source.raw_os_error().unwrap_or(EIO),
            format!("cannot {action}: {}", words(source)),
            FsPath::text(py, path).map_or_else(|_| py.None(), Bound::unbind),
        )),
        Error::Storage { kind, action, path, attempts, .. } => {
            let error = match kind {
                StorageFault::NotFound => StorageNotFoundError::new_err(message),
                StorageFault::Denied => StoragePermissionError::new_err(message),
                StorageFault::Precondition => StoragePreconditionError::new_err(message),
                StorageFault::Unclear => StorageUnclearError::new_err(message),
                _ => StorageError::new_err(message),
            };
            let told = error.value(py).setattr("operation", *action);
            let told = told.and_then(|()| error.value(py).setattr("attempts", *attempts));
            match told {
                Ok(()) => with_place(py, error, Some(path), None, None),
                Err(other) => other,
            }
        }
        Error::Busy { path, .. } => {
            with_place(py, SaveInProgressError::new_err(message), Some(path), None, None)
        }
        Error::Internal(what) => internal_error(what, None),
        Error::Interrupted => PyKeyboardInterrupt::new_err(()),
        // `Plan`, and variants that a later core adds.
        _ => PlanError::new_err(message),
    }
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
