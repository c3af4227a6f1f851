//! Planner data and small values, to and from Python.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use dcp_rs_core::Dtype;
use dcp_rs_core::format::Value;
use dcp_rs_core::geometry::Dims;
use pyo3::IntoPyObjectExt as _;
use pyo3::exceptions::PyUnicodeEncodeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::error::UnsupportedError;

/// Sizes, offsets or strides, from a tuple (`torch.Size` is one) or a list of integers.
pub struct Extent(pub Dims);

impl<'py> FromPyObject<'_, 'py> for Extent {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let dims: PyResult<Dims> = match object.cast::<PyTuple>() {
            Ok(tuple) => tuple.iter_borrowed().map(Borrowed::extract::<u64>).collect(),
            Err(_) => object.cast::<PyList>()?.iter().map(|size| size.extract::<u64>()).collect(),
        };
        dims.map(Self)
    }
}

/// A path as Python represents file names, so that Python can open it whatever its bytes and the
/// locale are.
pub struct FsPath(pub PathBuf);

impl FsPath {
    /// Returns the path as a Python `str`.
    pub fn text<'py>(py: Python<'py>, path: &Path) -> PyResult<Bound<'py, PyAny>> {
        let bytes = PyBytes::new(py, path.as_os_str().as_bytes());
        py.import(intern!(py, "os"))?.call_method1(intern!(py, "fsdecode"), (bytes,))
    }
}

impl<'py> IntoPyObject<'py> for FsPath {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        let text = Self::text(py, &self.0)?;
        if self.0.as_os_str().as_bytes().windows(3).any(|three| three == b"://") {
            let url = py.import(intern!(py, "dcp_rs._url"))?;
            return url.call_method1(intern!(py, "Url"), (text,));
        }
        py.import(intern!(py, "pathlib"))?.call_method1(intern!(py, "Path"), (text,))
    }
}

/// Returns a tuple of integers.
pub fn extent_to_py<'py>(py: Python<'py>, dims: &[u64]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, dims)
}

/// Returns the dtype with this name in torch.
pub fn dtype(name: &str) -> PyResult<Dtype> {
    Dtype::from_name(name)
        .ok_or_else(|| UnsupportedError::new_err(format!("no dtype {name:?} in the format")))
}

/// Converts a Python object to planner data: None, bool, int, float, str, bytes, and tuples, lists
/// and dicts of these.
pub fn to_value(object: &Bound<'_, PyAny>, depth: u32) -> PyResult<Value> {
    let unsupported = |what: String| {
        UnsupportedError::new_err(format!(
            "planner data holds {what}, which the format cannot store"
        ))
    };
    if depth > 64 {
        return Err(unsupported("values nested more than 64 deep".into()));
    }
    let sequence = |items: Vec<Bound<'_, PyAny>>| -> PyResult<Vec<Value>> {
        items.iter().map(|item| to_value(item, depth + 1)).collect()
    };
    Ok(if object.is_none() {
        Value::None
    } else if object.is_exact_instance_of::<PyBool>() {
        Value::Bool(object.extract()?)
    } else if object.is_exact_instance_of::<PyInt>() {
        Value::Int(
            object
                .extract()
                .map_err(|_| unsupported(format!("the integer {object}, over 64 bits")))?,
        )
    } else if object.is_exact_instance_of::<PyFloat>() {
        Value::Float(object.extract()?)
    } else if object.is_instance_of::<PyString>() {
        Value::Str(object.extract().map_err(|error: PyErr| {
            if error.is_instance_of::<PyUnicodeEncodeError>(object.py()) {
                unsupported("text with lone surrogates".into())
            } else {
                error
            }
        })?)
    } else if let Ok(bytes) = object.cast_exact::<PyBytes>() {
        Value::Bytes(bytes.as_bytes().to_vec())
    } else if let Ok(tuple) = object.cast::<PyTuple>() {
        Value::Tuple(sequence(tuple.iter().collect())?)
    } else if let Ok(list) = object.cast::<PyList>() {
        Value::List(sequence(list.iter().collect())?)
    } else if let Ok(dict) = object.cast::<PyDict>() {
        let pair = |(key, value)| Ok((to_value(&key, depth + 1)?, to_value(&value, depth + 1)?));
        Value::Dict(dict.iter().map(pair).collect::<PyResult<_>>()?)
    } else {
        return Err(unsupported(format!("a {}", object.get_type().qualname()?)));
    })
}

/// Converts planner data to a Python object.
pub fn from_value<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    let items =
        |values: &[Value]| values.iter().map(|v| from_value(py, v)).collect::<PyResult<Vec<_>>>();
    Ok(match value {
        Value::None => py.None().into_bound(py),
        Value::Bool(b) => b.into_bound_py_any(py)?,
        Value::Int(i) => i.into_bound_py_any(py)?,
        Value::Float(f) => f.into_bound_py_any(py)?,
        Value::Str(s) => s.into_bound_py_any(py)?,
        Value::Bytes(b) => PyBytes::new(py, b).into_any(),
        Value::Tuple(values) => PyTuple::new(py, items(values)?)?.into_any(),
        Value::List(values) => PyList::new(py, items(values)?)?.into_any(),
        Value::Dict(pairs) => {
            let dict = PyDict::new(py);
            for (key, value) in pairs {
                dict.set_item(from_value(py, key)?, from_value(py, value)?)?;
            }
            dict.into_any()
        }
    })
}
