//! One chunk or value of a save, as Python describes it.

use dcp_rs_core::format::{Kind, Value};
use dcp_rs_core::write;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::convert::{Extent, dtype as dtype_of, to_value};
use crate::error::UnsupportedError;
use crate::panics::guarded;

/// A chunk of a tensor, or a value, to save.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct SaveItem {
    pub inner: write::SaveItem,
}

#[guarded]
#[pymethods]
impl SaveItem {
    /// Makes an item. A value has no `dtype`, and only `length` describes it. `path` and `position`
    /// are those in the state dict.
    #[new]
    #[pyo3(signature = (
        name, length, *, dtype=None, shape=None, offsets=None, sizes=None, flags=0, path=None,
        position=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, in Python")]
    fn new(
        name: &Bound<'_, PyAny>,
        length: u64,
        dtype: Option<&str>,
        shape: Option<Extent>,
        offsets: Option<Extent>,
        sizes: Option<Extent>,
        flags: u8,
        path: Option<&Bound<'_, PyTuple>>,
        position: Option<u32>,
    ) -> PyResult<Self> {
        let dims = |extent: Option<Extent>| extent.map(|extent| extent.0).unwrap_or_default();
        Ok(Self {
            inner: write::SaveItem {
                name: name_of(name)?,
                kind: if dtype.is_some() { Kind::Tensor } else { Kind::Bytes },
                dtype: dtype.map(dtype_of).transpose()?,
                shape: dims(shape),
                flags,
                path: path
                    .map(|path| to_value(path.as_any(), 0))
                    .transpose()?
                    .filter(Value::is_path),
                position,
                offsets: dims(offsets),
                sizes: dims(sizes),
                length,
            },
        })
    }
}

/// Converts `items` for the core.
pub fn items_of(items: &[Bound<'_, SaveItem>]) -> Vec<write::SaveItem> {
    items.iter().map(|item| item.get().inner.clone()).collect()
}

/// Returns a name. Raises unless it is valid Unicode text.
pub fn name_of(name: &Bound<'_, PyAny>) -> PyResult<String> {
    match name.extract::<String>() {
        Ok(name) => Ok(name),
        Err(_) => Err(UnsupportedError::new_err(format!(
            "the name {} is not valid Unicode text",
            name.repr()?
        ))),
    }
}
