//! A batch: all destinations of one load.

use std::sync::Arc;

use dcp_rs_core::checkpoint::gather::{
    DeviceTensor, Gather, Passes, SharedSections, SlabRegion, Source,
};
use dcp_rs_core::geometry::Region;
use dcp_rs_core::geometry::memory::Footprint;
use pyo3::exceptions::PyIndexError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::convert::Extent;
use crate::error::IntoPy;
use crate::index::Index;
use crate::panics::guarded;
use crate::plain::Layout;
use crate::read::{self, Options, read_options};
use crate::rows::ReadStats;
use crate::sample;

/// `dcp_rs.transfer.target.Target`: a region of a stored tensor or of a chunk, and the tensor that
/// it goes to.
#[derive(FromPyObject)]
struct Target<'py> {
    place: u64,
    index: u64,
    of_chunk: bool,
    offsets: Extent,
    tensor: Bound<'py, PyAny>,
}

/// `dcp_rs.tensors.memory.DeviceMemory`: a tensor, and the number of the device whose memory it is.
#[derive(FromPyObject)]
pub struct DeviceMemory<'py> {
    space: u32,
    tensor: Bound<'py, PyAny>,
}

/// Reads that are planned, and checked as far as they can be without reading. Destinations that
/// share memory are filled in passes.
#[pyclass(module = "dcp_rs._core")]
pub struct Batch {
    index: Py<Index>,
    gather: Gather,
    passes: Passes,
    common: Option<Arc<SharedSections>>,
}

impl Batch {
    /// A batch of plain tensors, each at its place.
    pub fn of_plain(index: Py<Index>, gather: Gather) -> Self {
        Self { index, gather, passes: Passes::default(), common: None }
    }

    /// Returns the source of a target's region, and the tensor that it belongs to.
    fn source(&self, target: &Target<'_>) -> PyResult<(Source, u32)> {
        let index = self.index.get();
        if target.of_chunk {
            index.check_chunk(target.index)?;
            return Ok((Source::Chunk(target.index), index.inner.chunk(target.index).tensor));
        }
        let tensor = u32::try_from(target.index).unwrap_or(u32::MAX);
        index.check_tensor(tensor)?;
        Ok((Source::Tensor(tensor), tensor))
    }

    pub fn checked_wants(&self, numbers: &[usize]) -> PyResult<Vec<SlabRegion>> {
        let want = |&number: &usize| {
            let found = self.gather.want(number).cloned();
            found
                .ok_or_else(|| PyIndexError::new_err(format!("{number} does not go through slabs")))
        };
        numbers.iter().map(want).collect()
    }

    pub fn index(&self) -> &Index {
        self.index.get()
    }

    pub fn gather(&self) -> &Gather {
        &self.gather
    }

    /// Returns the sections that other ranks read too, if they are known.
    pub fn common(&self) -> Option<&SharedSections> {
        self.common.as_deref()
    }

    fn check_pass(&self, number: usize) -> PyResult<()> {
        if number < self.passes.len() {
            return Ok(());
        }
        Err(PyIndexError::new_err(format!("pass {number} of {}", self.passes.len())))
    }
}

#[guarded]
#[pymethods]
impl Batch {
    #[new]
    fn new(index: Py<Index>) -> Self {
        let found = index.get();
        let gather = Gather::new(Arc::clone(&found.inner), found.allow_external);
        Self::of_plain(index, gather)
    }

    fn __len__(&self) -> usize {
        self.gather.len()
    }

    /// Adds targets in host memory that hold what is stored, to be filled in place.
    fn add(&mut self, py: Python<'_>, targets: Vec<Target<'_>>) -> PyResult<()> {
        for target in targets {
            let (source, tensor) = self.source(&target)?;
            let layout = Layout::of(&target.tensor)?;
            let to = read::memory(
                self.index.get(),
                tensor,
                layout.address,
                &layout.shape,
                &layout.strides,
            )?;
            let region = Region { offsets: target.offsets.0, sizes: layout.shape };
            self.gather.set_place(target.place);
            self.gather.add(source, &region, &to).into_py(py)?;
        }
        Ok(())
    }

    /// Adds a target that the caller fills through slabs, and calls `number`. `device` is the
    /// number of its device; `there`: its memory is there already.
    fn add_device_target(
        &mut self,
        py: Python<'_>,
        number: usize,
        target: Target<'_>,
        device: u32,
        there: bool,
    ) -> PyResult<()> {
        let (source, _) = self.source(&target)?;
        let layout = Layout::of(&target.tensor)?;
        let to = DeviceTensor {
            device,
            address: there.then_some(layout.address as u64),
            itemsize: itemsize(&target.tensor)?,
            strides: layout.strides,
        };
        let region = Region { offsets: target.offsets.0, sizes: layout.shape };
        self.gather.set_place(target.place);
        self.gather.add_device_target(number, source, &region, &to).into_py(py)
    }

    /// The same for a target that only its own class can fill. `parts` is the memory that it may
    /// write to.
    fn add_opaque(
        &mut self,
        py: Python<'_>,
        number: usize,
        target: Target<'_>,
        parts: Vec<DeviceMemory<'_>>,
    ) -> PyResult<()> {
        let (source, _) = self.source(&target)?;
        let footprints: Vec<_> = parts.iter().map(footprint).collect::<PyResult<_>>()?;
        let region = Region {
            offsets: target.offsets.0,
            sizes: target.tensor.getattr(intern!(py, "shape"))?.extract::<Extent>()?.0,
        };
        self.gather.set_place(target.place);
        let added =
            self.gather.add_opaque(number, source, &region, footprints.into_iter().flatten());
        added.into_py(py)
    }

    /// Finds the passes, once all is added; returns how many there are. What a later destination
    /// hides has none.
    fn arrange(&mut self, py: Python<'_>) -> usize {
        self.passes = py.detach(|| self.gather.arrange());
        self.passes.len()
    }

    /// Splits the reads by the sections that other ranks read too. Call it after `arrange`.
    fn divide(&mut self, py: Python<'_>, common: &Bound<'_, sample::SharedSections>) {
        let common = Arc::clone(&common.get().inner);
        py.detach(|| self.gather.divide(&common));
        self.common = Some(common);
    }

    /// Returns the numbers of a pass for `SlabReader.create`.
    fn wants(&self, number: usize) -> PyResult<Vec<usize>> {
        self.check_pass(number)?;
        Ok(self.gather.wants(&self.passes, number))
    }

    /// Numbers of the targets that their own class fills in a pass.
    fn opaque(&self, number: usize) -> PyResult<Vec<usize>> {
        self.check_pass(number)?;
        Ok(self.gather.opaque(&self.passes, number))
    }

    /// The places of all that is filled in a pass.
    fn places(&self, number: usize) -> PyResult<Vec<u64>> {
        self.check_pass(number)?;
        Ok(self.gather.places(&self.passes, number))
    }

    /// The places of which all is filled in the first pass.
    fn at_once(&self) -> Vec<u64> {
        self.gather.at_once(&self.passes)
    }

    /// Takes all of these places out of the passes.
    fn leave_out(&mut self, places: Vec<u64>) {
        self.gather.leave_out(&mut self.passes, &places);
    }

    /// Fills what has this pass and is not elsewhere. `progress` is called now and then with the
    /// bytes of it that are there.
    #[pyo3(signature = (number, *, progress = None, **options))]
    #[expect(unsafe_code, reason = "tensors are handed over by address")]
    fn read(
        &self,
        py: Python<'_>,
        number: usize,
        progress: Option<Py<PyAny>>,
        options: Option<Options>,
    ) -> PyResult<ReadStats> {
        self.check_pass(number)?;
        let options = read_options(options)?;
        // SAFETY: the contract of what added tensors: the caller holds them, and their memory,
        // until this returns.
        let stats = unsafe {
            read::run_pass(py, &self.gather, &self.passes, number, &options, progress.as_ref())?
        };
        Ok(stats.into())
    }
}

fn itemsize(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    tensor.call_method0(intern!(tensor.py(), "element_size"))?.extract()
}

/// The memory of a part; None where it ends beyond all memory.
fn footprint(part: &DeviceMemory<'_>) -> PyResult<Option<Footprint>> {
    let layout = Layout::of(&part.tensor)?;
    let itemsize = itemsize(&part.tensor)?;
    let strides: Option<Vec<u64>> =
        layout.strides.iter().map(|s| s.checked_mul(itemsize)).collect();
    Ok(strides.and_then(|strides| {
        Footprint::new(part.space, layout.address as u64, itemsize, &layout.shape, &strides)
    }))
}
