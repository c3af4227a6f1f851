//! A batch: all destinations of one load, whoever fills them.

use std::sync::Arc;

use dcp_rs_core::checkpoint::gather::{Gather, Memory, Turns};
use dcp_rs_core::geometry::memory::Footprint;
use dcp_rs_core::geometry::overlap::Region;
use pyo3::exceptions::PyIndexError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::convert::Extent;
use crate::error::IntoPy;
use crate::index::Index;
use crate::panics::guarded;
use crate::plain::Layout;
use crate::read::{self, Options, Stats, read_options};

/// `dcp_rs.transfer.load.Target`: a region of a tensor, to a tensor in host memory that holds what is stored.
#[derive(FromPyObject)]
struct Target<'py> {
    place: u64,
    index: u32,
    offsets: Extent,
    tensor: Bound<'py, PyAny>,
}

/// `dcp_rs.transfer.load.Fill`: the same, of a chunk.
#[derive(FromPyObject)]
struct Fill<'py> {
    place: u64,
    chunk: u64,
    offsets: Extent,
    tensor: Bound<'py, PyAny>,
}

/// `dcp_rs.tensors.memory.Part`: a tensor, and the number of the device whose memory it is.
#[derive(FromPyObject)]
pub struct Part<'py> {
    space: u32,
    tensor: Bound<'py, PyAny>,
}

/// Reads that are planned, and checked as far as they can be without reading. Destinations that share memory are filled in turns.
#[pyclass(module = "dcp_rs._core")]
pub struct Batch {
    index: Py<Index>,
    gather: Gather,
    turns: Turns,
}

impl Batch {
    pub fn around(index: Py<Index>, gather: Gather) -> Self {
        Self {
            index,
            gather,
            turns: Turns::default(),
        }
    }

    fn memory(&self, tensor: u32, layout: &Layout) -> PyResult<Memory> {
        read::memory(self.index.get(), tensor, layout.address, &layout.shape, &layout.strides)
    }

    fn check_turn(&self, turn: usize) -> PyResult<()> {
        if turn < self.turns.len() {
            return Ok(());
        }
        Err(PyIndexError::new_err(format!("turn {turn} of {}", self.turns.len())))
    }
}

#[guarded]
#[pymethods]
impl Batch {
    #[new]
    fn new(index: Py<Index>) -> Self {
        let found = index.get();
        let gather = Gather::new(Arc::clone(&found.inner), found.allow_external);
        Self::around(index, gather)
    }

    fn __len__(&self) -> usize {
        self.gather.len()
    }

    /// Adds regions of tensors, from whichever chunks hold them.
    fn add_targets(&mut self, py: Python<'_>, targets: Vec<Target<'_>>) -> PyResult<()> {
        for target in targets {
            self.index.get().check_tensor(target.index)?;
            let layout = Layout::of(&target.tensor)?;
            let to = self.memory(target.index, &layout)?;
            let region = Region {
                offsets: target.offsets.0,
                sizes: layout.shape,
            };
            self.gather.set_place(target.place);
            self.gather.add_region(target.index, &region, &to).into_py(py)?;
        }
        Ok(())
    }

    /// Adds rectangles of chunks.
    fn add_fills(&mut self, py: Python<'_>, fills: Vec<Fill<'_>>) -> PyResult<()> {
        for fill in fills {
            self.index.get().check_chunk(fill.chunk)?;
            let layout = Layout::of(&fill.tensor)?;
            let to = self.memory(self.index.get().inner.chunk(fill.chunk).tensor, &layout)?;
            self.gather.set_place(fill.place);
            let added = self.gather.add_chunk(fill.chunk, &fill.offsets.0, &layout.shape, to);
            added.into_py(py)?;
        }
        Ok(())
    }

    /// Gives a turn to what the caller fills. `parts` is the memory of it; `covers`: all of that is written. Returns its number.
    fn add_elsewhere(&mut self, py: Python<'_>, fill: Fill<'_>, parts: Vec<Part<'_>>, covers: bool) -> PyResult<usize> {
        self.index.get().check_chunk(fill.chunk)?;
        let footprints = parts
            .iter()
            .map(|part| {
                let layout = Layout::of(&part.tensor)?;
                let itemsize: u64 = part.tensor.call_method0(intern!(py, "element_size"))?.extract()?;
                let strides: Option<Vec<u64>> = layout.strides.iter().map(|s| s.checked_mul(itemsize)).collect();
                Ok(strides.and_then(|strides| {
                    Footprint::new(part.space, layout.address as u64, itemsize, &layout.shape, &strides)
                }))
            })
            .collect::<PyResult<_>>()?;
        self.gather.set_place(fill.place);
        self.gather.add_elsewhere(fill.chunk, footprints, covers).into_py(py)
    }

    /// Finds the turns, once all is added; returns how many there are. What a later destination hides has none, unless `every` one is to
    /// be filled.
    #[pyo3(signature = (*, every = false))]
    fn arrange(&mut self, py: Python<'_>, every: bool) -> usize {
        self.turns = py.detach(|| self.gather.arrange(every));
        self.turns.len()
    }

    /// Numbers of what the caller fills in a turn.
    fn elsewhere(&self, turn: usize) -> PyResult<Vec<usize>> {
        self.check_turn(turn)?;
        Ok(self.gather.elsewhere(&self.turns, turn))
    }

    /// The places of all that is filled in a turn.
    fn places(&self, turn: usize) -> PyResult<Vec<u64>> {
        self.check_turn(turn)?;
        Ok(self.gather.places(&self.turns, turn))
    }

    /// The places of which all is filled in the first turn.
    fn at_once(&self) -> Vec<u64> {
        self.gather.at_once(&self.turns)
    }

    /// Takes all of these places out of the turns.
    fn leave_out(&mut self, places: Vec<u64>) {
        self.gather.leave_out(&mut self.turns, &places);
    }

    /// Fills what has this turn and is not elsewhere.
    #[pyo3(signature = (turn, **options))]
    fn read(&self, py: Python<'_>, turn: usize, options: Option<Options>) -> PyResult<Stats> {
        self.check_turn(turn)?;
        let options = read_options(options)?;
        let stats = read::run_turn(py, &self.gather, &self.turns, turn, &options)?;
        Ok((stats.bytes_wanted, stats.bytes_read))
    }
}
