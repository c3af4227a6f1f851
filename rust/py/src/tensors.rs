//! Plain tensors, read by the list: no Python object is left behind for any of them, or the garbage collector would cost more than all
//! the rest.

use std::collections::HashMap;

use dcp_rs_core::Dtype;
use dcp_rs_core::format::Dims;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::convert::{Extent, dtype};

/// What of torch it takes to recognise a plain tensor: its classes, dtypes and methods.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct Torch {
    types: Vec<Py<PyAny>>,
    strided: Py<PyAny>,
    /// By address: dtypes are singletons, and `dtypes` keeps them alive.
    codes: HashMap<usize, Dtype>,
    #[expect(dead_code, reason = "keeps the dtypes alive")]
    dtypes: Py<PyDict>,
    data_ptr: Py<PyAny>,
    is_contiguous: Py<PyAny>,
    is_neg: Py<PyAny>,
    is_conj: Py<PyAny>,
}

/// A contiguous tensor in host memory, without lazy bits.
pub struct Plain {
    pub dtype: Dtype,
    pub shape: Dims,
    pub requires_grad: bool,
}

#[pymethods]
impl Torch {
    /// `types`: the classes whose instances are plain, `torch.Tensor` first. `dtypes`: the format's name of each dtype.
    #[new]
    fn new(types: Vec<Bound<'_, PyAny>>, strided: Py<PyAny>, dtypes: Bound<'_, PyDict>) -> PyResult<Self> {
        let method = |name: &str| -> PyResult<Py<PyAny>> { Ok(types[0].getattr(name)?.unbind()) };
        let codes = dtypes
            .iter()
            .map(|(object, name)| Ok((object.as_ptr().addr(), dtype(&name.extract::<String>()?)?)))
            .collect::<PyResult<_>>()?;
        Ok(Self {
            data_ptr: method("data_ptr")?,
            is_contiguous: method("is_contiguous")?,
            is_neg: method("is_neg")?,
            is_conj: method("is_conj")?,
            types: types.iter().map(|kind| kind.clone().unbind()).collect(),
            strided,
            codes,
            dtypes: dtypes.unbind(),
        })
    }
}

impl Torch {
    /// What `tensor` is, where it is a plain one. Anything else, and whatever raises when it is looked at, is for others to judge.
    pub fn plain(&self, tensor: &Bound<'_, PyAny>) -> Option<Plain> {
        let kind = tensor.get_type();
        if !self.types.iter().any(|plain| plain.is(&kind)) {
            return None;
        }
        self.read(tensor).ok().flatten()
    }

    fn read(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Plain>> {
        let py = tensor.py();
        let says = |method: &Py<PyAny>| method.bind(py).call1((tensor,))?.is_truthy();
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let Some(&dtype) = self.codes.get(&dtype.as_ptr().addr()) else {
            return Ok(None);
        };
        if !tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?
            || !tensor.getattr(intern!(py, "layout"))?.is(&self.strided)
            || !says(&self.is_contiguous)?
            || says(&self.is_neg)?
            || (dtype.name().contains("complex") && says(&self.is_conj)?)
        {
            return Ok(None);
        }
        let shape = tensor.getattr(intern!(py, "shape"))?;
        let Extent(shape) = shape.cast::<PyTuple>()?.extract()?;
        Ok(Some(Plain {
            dtype,
            shape,
            requires_grad: tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()?,
        }))
    }

    /// Where the memory of a tensor begins, after seeing that it is still contiguous; `None` where it is not.
    pub fn address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        let py = tensor.py();
        if !self.is_contiguous.bind(py).call1((tensor,))?.is_truthy()? {
            return Ok(None);
        }
        Ok(Some(self.data_ptr.bind(py).call1((tensor,))?.extract()?))
    }
}
