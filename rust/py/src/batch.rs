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

/// A `dcp_rs.transfer.target.Target`: a region of a stored tensor or of a chunk, and the tensor to
/// fill from it.
#[derive(FromPyObject)]
struct Target<'py> {
    place: u64,
    index: u64,
    of_chunk: bool,
    offsets: Extent,
    tensor: Bound<'py, PyAny>,
}

/// A `dcp_rs.tensors.memory.DeviceMemory`: a tensor, and the number of the device that has its
/// memory.
#[derive(FromPyObject)]
pub struct DeviceMemory<'py> {
    space: u32,
    tensor: Bound<'py, PyAny>,
}

/// Planned reads, checked as far as is possible without reading. Destinations that share memory are
/// filled in several passes.
#[pyclass(module = "dcp_rs._core")]
pub struct Batch {
    index: Py<Index>,
    gather: Gather,
    passes: Passes,
    common: Option<Arc<SharedSections>>,
}

impl Batch {
    /// Makes a batch of plain tensors, each with its place set.
    pub fn of_plain(index: Py<Index>, gather: Gather) -> Self {
        Self { index, gather, passes: Passes::default(), common: None }
    }

    /// Returns the source of a target's region, and the tensor that it belongs to.
    fn source(&self, target: &Target<'_>) -> PyResult<(Source, u32)> {
        self.index.get().source_of(target.index, target.of_chunk)
    }

    pub fn checked_regions(&self, numbers: &[usize]) -> PyResult<Vec<SlabRegion>> {
        let region = |&number: &usize| {
            let found = self.gather.slab_region(number).cloned();
            found
                .ok_or_else(|| PyIndexError::new_err(format!("{number} does not go through slabs")))
        };
        numbers.iter().map(region).collect()
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

    /// Adds targets in host memory and in the stored dtype, to fill in place.
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

    /// Adds a target, with the caller's `number`, that the caller fills through slabs. `device` is
    /// the number of its device. `there` says that its memory exists already.
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

    /// Adds a target that only its own class can fill. `parts` is the memory that it may write to.
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

    /// Finds the passes after the last target was added, and returns their number. A destination
    /// that a later one overwrites has no pass.
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

    /// Returns the parts of a pass that go through slabs: numbers for `SlabReader.create`.
    fn slab_regions(&self, number: usize) -> PyResult<Vec<usize>> {
        self.check_pass(number)?;
        Ok(self.gather.slab_regions(&self.passes, number))
    }

    /// Returns the numbers of the targets that their own class fills in a pass.
    fn opaque(&self, number: usize) -> PyResult<Vec<usize>> {
        self.check_pass(number)?;
        Ok(self.gather.opaque(&self.passes, number))
    }

    /// Returns the places that are filled entirely in the first pass.
    fn at_once(&self) -> Vec<u64> {
        self.gather.at_once(&self.passes)
    }

    /// Takes these places out of the passes.
    fn leave_out(&mut self, places: Vec<u64>) {
        self.gather.leave_out(&mut self.passes, &places);
    }

    /// Fills the targets of a pass that are filled in place. Calls `progress` from time to time
    /// with the bytes filled so far.
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
        // SAFETY: the contract of the methods that add targets: the caller keeps the tensors, and
        // their memory, until this returns.
        let stats = unsafe {
            read::run_pass(py, &self.gather, &self.passes, number, &options, progress.as_ref())?
        };
        self.index.get().warn(py)?;
        Ok(stats.into())
    }
}

fn itemsize(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    tensor.call_method0(intern!(tensor.py(), "element_size"))?.extract()
}

/// Returns the memory of a part; `None` if its end is beyond the address space.
fn footprint(part: &DeviceMemory<'_>) -> PyResult<Option<Footprint>> {
    let layout = Layout::of(&part.tensor)?;
    let itemsize = itemsize(&part.tensor)?;
    let strides: Option<Vec<u64>> =
        layout.strides.iter().map(|s| s.checked_mul(itemsize)).collect();
    Ok(strides.and_then(|strides| {
        Footprint::new(part.space, layout.address as u64, itemsize, &layout.shape, &strides)
    }))
}
