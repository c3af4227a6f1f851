//! Plain tensors: those in host memory that are stored as they are there. A model has thousands.
//! Their properties are read here and not in Python, where every tuple of every tensor would burden
//! the garbage collector.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;

use dcp_rs_core::Dtype;
use dcp_rs_core::checkpoint::gather::{Gather, Memory, Source};
use dcp_rs_core::format::{self, Kind};
use dcp_rs_core::geometry::{Dims, Region, row_major};
use dcp_rs_core::read::Destination;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};

use crate::batch::Batch;
use crate::convert::{Extent, dtype};
use crate::dlpack::{ElementType, Exchange, Refused, is_one_dtype};
use crate::index::Index;
use crate::interrupt;
use crate::panics::guarded;

/// The planner's definition of plain tensors: exact types, and the dtypes of the format.
pub struct Plain<'py> {
    types: Vec<Bound<'py, PyType>>,
    dtypes: HashMap<usize, Dtype>,
    strided: Bound<'py, PyAny>,
    /// `DLPack`'s functions, if torch has them.
    exchange: Option<Exchange>,
    /// Dtypes met so far, by element type; `None` if other dtypes share it.
    met: RefCell<Vec<(ElementType, Option<Dtype>)>>,
    /// True if `DLPack` refused a tensor. A refusal takes as long as a thousand tensors, so there
    /// is no second try.
    refused: Cell<bool>,
}

/// A tensor in host memory.
pub struct HostTensor {
    pub dtype: Dtype,
    pub shape: Dims,
    pub strides: Dims,
    pub address: usize,
}

/// Layout of a strided tensor. Strides are in elements; freed memory has the address 0.
pub struct Layout {
    pub shape: Dims,
    pub strides: Dims,
    pub address: usize,
}

impl Layout {
    pub fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        let shape = tensor.getattr(intern!(py, "shape"))?.extract::<Extent>()?.0;
        // Most tensors are contiguous, and a tuple of strides is costly compared with the other
        // properties.
        let is_contiguous = tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?;
        let strides = if is_contiguous {
            row_major(&shape)
        } else {
            tensor.call_method0(intern!(py, "stride"))?.extract::<Extent>()?.0
        };
        let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let layout = Self { shape, strides, address };
        layout.zero_if_freed(tensor)
    }

    /// Sets the address to 0 if the memory was freed.
    fn zero_if_freed(mut self, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        if (1..LOWEST).contains(&self.address) && is_freed(tensor)? {
            self.address = 0;
        }
        Ok(self)
    }
}

/// No storage is below this address. A view of a freed storage has its offset as the address.
const LOWEST: usize = 1 << 32;

/// Returns whether the memory of a tensor was freed.
fn is_freed(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    Ok(storage.call_method0(intern!(py, "data_ptr"))?.extract::<usize>()? == 0)
}

impl<'py> Plain<'py> {
    pub fn new(
        py: Python<'py>,
        types: &Bound<'py, PyTuple>,
        dtypes: &Bound<'py, PyDict>,
    ) -> PyResult<Self> {
        let torch = py.import(intern!(py, "torch"))?;
        Ok(Self {
            types: types
                .iter()
                .map(|class| Ok(class.cast_into::<PyType>()?))
                .collect::<PyResult<_>>()?,
            // torch has one object for each dtype, so its address identifies the dtype.
            dtypes: dtypes
                .iter()
                .map(|(object, name)| Ok((object.as_ptr() as usize, dtype(name.extract()?)?)))
                .collect::<PyResult<_>>()?,
            strided: torch.getattr(intern!(py, "strided"))?,
            exchange: Exchange::of(&torch.getattr(intern!(py, "Tensor"))?),
            met: RefCell::default(),
            refused: Cell::default(),
        })
    }

    /// Returns the memory of a tensor, if it consists only of bytes in host memory.
    pub fn look(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<HostTensor>> {
        let py = tensor.py();
        let class = tensor.get_type();
        if !self.types.iter().any(|plain| plain.is(&class)) {
            return Ok(None);
        }
        // torch's `CheckpointableTensor` marks a shard of a larger tensor by attributes.
        if tensor.getattr(intern!(py, "__dict__"))?.is_truthy()? {
            return Ok(None);
        }
        let Some((dtype, layout)) = self.layout(tensor)? else {
            return Ok(None);
        };
        let Layout { shape, strides, address } = layout.zero_if_freed(tensor)?;
        let is = |name| tensor.call_method0(name)?.is_truthy();
        if is(intern!(py, "is_neg"))? || (dtype.is_complex() && is(intern!(py, "is_conj"))?) {
            return Ok(None);
        }
        let freed = address == 0 && !shape.contains(&0);
        Ok((!freed).then_some(HostTensor { dtype, shape, strides, address }))
    }

    /// Returns the dtype and layout of a tensor; `None` if it is not strided, not in host memory,
    /// or of another dtype.
    fn layout(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<(Dtype, Layout)>> {
        if let Some(exchange) = self.exchange.as_ref().filter(|_| !self.refused.get()) {
            match exchange.layout(tensor) {
                Ok(None) => return Ok(None),
                Ok(Some((element, layout))) => {
                    return Ok(self.dtype_called(element, tensor)?.map(|dtype| (dtype, layout)));
                }
                Err(Refused) => self.refused.set(true),
            }
        }
        let py = tensor.py();
        if !tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
            return Ok(None);
        }
        let Some(dtype) = self.dtype(tensor)? else {
            return Ok(None);
        };
        let is_strided = tensor.getattr(intern!(py, "layout"))?.is(&self.strided);
        is_strided.then(|| Ok((dtype, Layout::of(tensor)?))).transpose()
    }

    /// Returns the dtype of a tensor for which the exchange API gave this element type.
    fn dtype_called(
        &self,
        element: ElementType,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Dtype>> {
        let met = self.met.borrow().iter().find(|met| met.0 == element).map(|met| met.1);
        if let Some(dtype) = met {
            return Ok(dtype);
        }
        let dtype = self.dtype(tensor)?;
        if is_one_dtype(element) {
            self.met.borrow_mut().push((element, dtype));
        }
        Ok(dtype)
    }

    fn dtype(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<Dtype>> {
        let object = tensor.getattr(intern!(tensor.py(), "dtype"))?;
        Ok(self.dtypes.get(&(object.as_ptr() as usize)).copied())
    }
}

/// Tensors that are examined before another thread processes them.
pub const BLOCK: usize = 1024;

#[guarded]
#[pymethods]
impl Index {
    /// Plans the tensors that are plain and match the entry of their name. Returns a batch that
    /// fills them, each with its position in the list as its place, and the positions of all
    /// others.
    ///
    /// Raises unless the data files of the batch exist and have the expected length.
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
        let mut matches = Matches::new(this, &names);
        let mut tensors = tensors.iter().take(names.len());
        let look = || -> PyResult<Option<Vec<Option<HostTensor>>>> {
            // If looking at a tensor raises, the planner handles it, since it has the better
            // messages.
            let look = |tensor| plain.look(&tensor).ok().flatten();
            let block: Vec<_> = tensors.by_ref().take(BLOCK).map(look).collect();
            Ok((!block.is_empty()).then_some(block))
        };
        interrupt::run_on(py, None, 0, look, |blocks, _| {
            for block in blocks {
                matches.add(block);
            }
            Ok(())
        })?;
        let Matches { gather, others, .. } = matches;
        this.looking(py, |control| gather.check_files(control))?;
        Ok((Batch::of_plain(slf.clone().unbind(), gather), others))
    }
}

/// Tensors, and the entries of the index with their names.
struct Matches<'a> {
    index: &'a format::Index,
    names: &'a [PyBackedStr],
    gather: Gather,
    /// Positions of the tensors that are not plain or do not match.
    others: Vec<usize>,
    /// Number of tensors that were examined.
    count: usize,
    /// Guess for the next name. State dicts are often nearly in the order of their names.
    near: u32,
}

impl<'a> Matches<'a> {
    fn new(index: &'a Index, names: &'a [PyBackedStr]) -> Self {
        Self {
            index: &index.inner,
            names,
            gather: Gather::new(Arc::clone(&index.inner), index.allow_external),
            others: Vec::new(),
            count: 0,
            near: 0,
        }
    }

    /// Adds the next tensors, if they are plain and match.
    fn add(&mut self, tensors: Vec<Option<HostTensor>>) {
        for tensor in tensors {
            if let Some(stored) = tensor.and_then(|tensor| self.find(tensor)) {
                self.near = stored + 1;
            } else {
                self.others.push(self.count);
            }
            self.count += 1;
        }
    }

    /// Adds the next tensor, and returns its number in the index, if that is possible.
    fn find(&mut self, host: HostTensor) -> Option<u32> {
        let stored = self.index.find_near(&self.names[self.count], self.near)?;
        let view = self.index.tensor(stored);
        if view.kind != Kind::Tensor || view.dtype != Some(host.dtype) || view.shape != host.shape {
            return None;
        }
        let itemsize = host.dtype.size();
        let strides: Option<Dims> =
            host.strides.iter().map(|stride| stride.checked_mul(itemsize)).collect();
        let to = Memory {
            address: Destination(std::ptr::with_exposed_provenance_mut(host.address)),
            strides: strides?,
        };
        let whole = Region { offsets: Dims::from_elem(0, host.shape.len()), sizes: host.shape };
        // If it fails, the planner reports the cause: parts that no chunk holds, or read-only
        // memory.
        let before = self.gather.len();
        self.gather.set_place(self.count as u64);
        if self.gather.add(Source::Tensor(stored), &whole, &to).is_err() {
            self.gather.truncate(before);
            return None;
        }
        Some(stored)
    }
}
