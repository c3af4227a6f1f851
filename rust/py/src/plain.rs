//! Plain tensors: those in host memory that are stored as they lie there. A model has thousands, so what there is to know of them is
//! asked here and not in Python, where every tuple of every tensor would burden the garbage collector.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_rs_core::Dtype;
use dcp_rs_core::checkpoint::gather::{Gather, Source};
use dcp_rs_core::format::Kind;
use dcp_rs_core::geometry::{Dims, Region, row_major};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};

use crate::batch::Batch;
use crate::convert::{Extent, dtype};
use crate::dlpack::Exchange;
use crate::index::Index;
use crate::panics::guarded;
use crate::read;

/// What the planner says is plain: exact types, and the dtypes of the format.
pub struct Plain<'py> {
    types: Vec<Bound<'py, PyType>>,
    dtypes: HashMap<usize, Dtype>,
    strided: Bound<'py, PyAny>,
    /// Where torch has it.
    exchange: Option<Exchange>,
}

/// A tensor in host memory.
pub struct HostTensor {
    pub dtype: Dtype,
    pub shape: Dims,
    pub strides: Dims,
    pub address: usize,
}

/// Where the elements of a strided tensor lie. Strides are in elements; what was freed has the address 0.
pub struct Layout {
    pub shape: Dims,
    pub strides: Dims,
    pub address: usize,
}

impl Layout {
    pub fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let shape = tensor.getattr(intern!(py, "shape"))?.extract::<Extent>()?.0;
        // Most are, and a tuple of strides is a good part of all that is asked of a tensor.
        let is_contiguous = tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?;
        let strides = if is_contiguous {
            row_major(&shape)
        } else {
            tensor.call_method0(intern!(py, "stride"))?.extract::<Extent>()?.0
        };
        let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let layout = Self {
            shape,
            strides,
            address,
        };
        layout.if_there(tensor)
    }

    /// The same, with the address 0 where nothing is behind it.
    fn if_there(mut self, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        if (1..LOWEST).contains(&self.address) && is_freed(tensor)? {
            self.address = 0;
        }
        Ok(self)
    }
}

/// No storage lies below it; what a freed one leaves of the address of a view is the offset.
const LOWEST: usize = 1 << 32;

/// Whether nothing is behind the address of a tensor.
fn is_freed(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    Ok(storage.call_method0(intern!(py, "data_ptr"))?.extract::<usize>()? == 0)
}

impl<'py> Plain<'py> {
    pub fn new(py: Python<'py>, types: &Bound<'py, PyTuple>, dtypes: &Bound<'py, PyDict>) -> PyResult<Self> {
        let torch = py.import(intern!(py, "torch"))?;
        Ok(Self {
            types: types
                .iter()
                .map(|class| Ok(class.cast_into::<PyType>()?))
                .collect::<PyResult<_>>()?,
            // torch has one object for each dtype, so that its address tells which one it is.
            dtypes: dtypes
                .iter()
                .map(|(object, name)| Ok((object.as_ptr() as usize, dtype(name.extract()?)?)))
                .collect::<PyResult<_>>()?,
            strided: torch.getattr(intern!(py, "strided"))?,
            exchange: Exchange::of(&torch.getattr(intern!(py, "Tensor"))?),
        })
    }

    /// The memory of a tensor, if bytes in host memory are all there is to it.
    pub fn look(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<HostTensor>> {
        let py = tensor.py();
        let class = tensor.get_type();
        if !self.types.iter().any(|plain| plain.is(&class)) {
            return Ok(None);
        }
        let holds = |name| tensor.getattr(name)?.is_truthy();
        // A shard of a larger tensor, in torch's `CheckpointableTensor`, is marked by attributes.
        if !holds(intern!(py, "is_cpu"))? || holds(intern!(py, "__dict__"))? {
            return Ok(None);
        }
        let Some(&dtype) = self
            .dtypes
            .get(&(tensor.getattr(intern!(py, "dtype"))?.as_ptr() as usize))
        else {
            return Ok(None);
        };
        let is = |name| tensor.call_method0(name)?.is_truthy();
        if is(intern!(py, "is_neg"))? || (dtype.name().contains("complex") && is(intern!(py, "is_conj"))?) {
            return Ok(None);
        }
        let Some(Layout {
            shape,
            strides,
            address,
        }) = self.layout(tensor)?
        else {
            return Ok(None);
        };
        let freed = address == 0 && !shape.contains(&0);
        Ok((!freed).then_some(HostTensor {
            dtype,
            shape,
            strides,
            address,
        }))
    }

    /// Where the elements lie; `None` of what is not strided.
    fn layout(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<Layout>> {
        if let Some(exchange) = &self.exchange {
            return exchange
                .layout(tensor)
                .map(|layout| layout.if_there(tensor))
                .transpose();
        }
        let layout = tensor.getattr(intern!(tensor.py(), "layout"))?;
        layout.is(&self.strided).then(|| Layout::of(tensor)).transpose()
    }
}

#[guarded]
#[pymethods]
impl Index {
    /// A batch that fills those of the tensors that are plain and fit what is stored under their names, each at its place in the list, and the
    /// places of all others.
    ///
    /// Raises unless the data files of the batch are there and as long as they should be.
    fn plan_plain(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        tensors: &Bound<'_, PyList>,
        types: &Bound<'_, PyTuple>,
        dtypes: &Bound<'_, PyDict>,
    ) -> PyResult<(Batch, Vec<usize>)> {
        let this = slf.get();
        let plain = Plain::new(py, types, dtypes)?;
        let mut gather = Gather::new(Arc::clone(&this.inner), this.allow_external);
        let mut others = Vec::new();
        // State dicts are often in the order of their names, or nearly.
        let mut near = 0;
        for (i, (name, tensor)) in names.iter().zip(tensors.iter()).enumerate() {
            gather.set_place(i as u64);
            match this.add_plain(&mut gather, &plain, (name, near), &tensor)? {
                Some(found) => near = found + 1,
                None => others.push(i),
            }
        }
        this.looking(py, |control| gather.check_files(control))?;
        Ok((Batch::around(slf.clone().unbind(), gather), others))
    }
}

impl Index {
    /// What it is in the index, if the tensor was added. `near`: where the name may be.
    fn add_plain<'py>(
        &self,
        gather: &mut Gather,
        plain: &Plain<'py>,
        (name, near): (&str, u32),
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Option<u32>> {
        let Some(host) = plain.look(tensor)? else {
            return Ok(None);
        };
        let Some(stored) = self.inner.find_near(name, near) else {
            return Ok(None);
        };
        let view = self.inner.tensor(stored);
        if view.kind != Kind::Tensor || view.dtype != Some(host.dtype) || view.shape != host.shape {
            return Ok(None);
        }
        let whole = Region {
            offsets: Dims::from_elem(0, host.shape.len()),
            sizes: host.shape,
        };
        let Ok(to) = read::memory(self, stored, host.address, &whole.sizes, &host.strides) else {
            return Ok(None);
        };
        // What the chunks do not hold, and what cannot be written to, is reported by the planner, which has the words for it.
        let before = gather.len();
        if gather.add(Source::Tensor(stored), &whole, &to).is_err() {
            gather.truncate(before);
            return Ok(None);
        }
        Ok(Some(stored))
    }
}
