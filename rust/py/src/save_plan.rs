//! Items of one rank, and the coordinator's part of a save plan.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use dcp_rs_core::Dtype;
use dcp_rs_core::format::{Kind, Value};
use dcp_rs_core::geometry::{Dims, element_count};
use dcp_rs_core::lock;
use dcp_rs_core::save_plan;
use dcp_rs_core::write::{Part, SaveItem};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::convert::{Extent, to_value};
use crate::error::{IntoPy, PlanError};
use crate::index::Index;
use crate::panics::guarded;
use crate::plain::{BLOCK, HostTensor, Plain};
use crate::remote::Store;
use crate::reuse::Reuse;
use crate::save_item::{self, items_of, name_of};
use crate::write::{Save, bytes_at, save_options, to};

const REQUIRES_GRAD: u8 = 1;

/// The items of one rank: plain tensors, which are positions in a list that the caller keeps, then
/// other items.
#[pyclass(frozen, module = "dcp_rs._core")]
pub struct SavePlan {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    items: Vec<SaveItem>,
    /// Position in the list of each plain item. The plain items come first.
    plain: Vec<usize>,
}

/// Items of a plan that are written to the files of a save.
#[derive(Default)]
pub struct Planned {
    /// Plain items to write: number in the save, position in the list, length in bytes.
    pub plain: Vec<(u32, usize, u64)>,
    /// Number of plain items.
    pub count: usize,
    /// The turn in which each item is written; empty if all are written at once.
    pub turns: Vec<u32>,
}

#[guarded]
#[pymethods]
impl SavePlan {
    #[new]
    fn new() -> Self {
        Self { inner: Mutex::default() }
    }

    /// Adds the plain ones of `tensors`, and returns the positions of the others. `paths` and
    /// `positions` are those in the state dict, or `None`.
    ///
    /// `cast` (the name of a dtype) leaves out tensors that are to be cast to it: floating-point
    /// tensors of another dtype and of more than 8 bits. `shapes` leaves out tensors of another
    /// shape.
    #[pyo3(signature = (
        names, paths, tensors, types, dtypes, *, positions=None, cast=None, shapes=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "what torch is, in two of them")]
    fn add_plain<'py>(
        &self,
        py: Python<'py>,
        names: &Bound<'py, PyList>,
        paths: Option<&Bound<'py, PyList>>,
        tensors: &Bound<'py, PyList>,
        types: &Bound<'py, PyTuple>,
        dtypes: &Bound<'py, PyDict>,
        positions: Option<&Bound<'py, PyList>>,
        cast: Option<&str>,
        shapes: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Vec<usize>> {
        let other_len = |list: Option<&Bound<'py, PyList>>| {
            list.is_some_and(|list| list.len() != tensors.len())
        };
        if other_len(Some(names)) || other_len(paths) || other_len(positions) || other_len(shapes) {
            return Err(PlanError::new_err(
                "names, paths, positions and shapes must be as many as tensors",
            ));
        }
        // Does not hold the lock: looking at a tensor may run Python code, which may call this
        // object, or wait for a thread that does.
        let mut found = Inner::default();
        let mut others = Vec::new();
        found.items.reserve(tensors.len());
        let plain = Plain::new(py, types, dtypes)?;
        let is_cast = |dtype: Dtype| {
            cast.is_some_and(|to| {
                dtype.name() != to && dtype.is_floating_point() && dtype.size() > 1
            })
        };
        for (place, tensor) in tensors.iter().enumerate() {
            // If looking at a tensor raises, the planner handles it, since it has the better
            // messages.
            let looked = plain.look(&tensor).ok().flatten().filter(|host| !is_cast(host.dtype));
            let Some((length, plain)) =
                looked.and_then(|host| Some((contiguous_length(&host)?, host)))
            else {
                others.push(place);
                continue;
            };
            if let Some(shapes) = shapes
                && shapes.get_item(place)?.extract::<Extent>()?.0 != plain.shape
            {
                others.push(place);
                continue;
            }
            let path = match paths {
                Some(paths) => path(&paths.get_item(place)?)?,
                None => None,
            };
            found.items.push(SaveItem {
                name: name_of(&names.get_item(place)?)?,
                kind: Kind::Tensor,
                dtype: Some(plain.dtype),
                flags: if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
                    REQUIRES_GRAD
                } else {
                    0
                },
                path,
                position: match positions {
                    Some(positions) => positions.get_item(place)?.extract()?,
                    None => None,
                },
                offsets: Dims::from_elem(0, plain.shape.len()),
                sizes: plain.shape.clone(),
                shape: plain.shape,
                length,
            });
            found.plain.push(place);
        }
        let mut inner = self.lock();
        if inner.plain.len() != inner.items.len() {
            return Err(PlanError::new_err("plain tensors come first"));
        }
        inner.items.append(&mut found.items);
        inner.plain.append(&mut found.plain);
        Ok(others)
    }

    /// Adds items. The length of a value may be given later.
    fn add(&self, items: Vec<Bound<'_, save_item::SaveItem>>) {
        self.lock().items.extend(items_of(&items));
    }

    fn __len__(&self) -> usize {
        self.lock().items.len()
    }

    /// Returns the items in a compact form, for the coordinator.
    fn request<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &save_plan::encode(&self.lock().items))
    }

    /// Returns the items given to `add` that this rank saves, by their positions. `keep` has a bit
    /// for each item; `None` keeps all.
    fn kept_others(&self, keep: Option<PyBackedBytes>) -> PyResult<Vec<usize>> {
        let inner = self.lock();
        let keep = Keep::new(keep, inner.items.len())?;
        let first = inner.plain.len();
        Ok((first..inner.items.len()).filter(|&i| keep.has(i)).map(|i| i - first).collect())
    }

    /// Creates the files for the items that this rank saves: the plain tensors, for
    /// `Save.write_plain`, then the others, in the order of `kept_others`.
    ///
    /// `lengths` has the length of each of the others in bytes. `turns` has the turn, from 1, in
    /// which each is written, if they are not written at once.
    #[pyo3(signature = (folder, keep, lengths, *, turns=None, reuse=None, store=None, **options))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments, in Python")]
    fn create(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        keep: Option<PyBackedBytes>,
        lengths: Vec<u64>,
        turns: Option<Vec<u32>>,
        reuse: Option<&Bound<'_, Reuse>>,
        store: Option<&Bound<'_, Store>>,
        options: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Save> {
        let (items, mut planned) = self.kept(keep, lengths)?;
        if let Some(turns) = turns {
            planned.turns = vec![0; planned.count];
            planned.turns.extend(turns);
            if planned.turns.len() != items.len() {
                return Err(PlanError::new_err("turns must be as many as lengths"));
            }
        }
        let (info, options) = save_options(options.as_ref())?;
        let reuse = reuse.map(|reuse| Arc::clone(&reuse.get().inner));
        Save::begin(py, &to(&folder, store), items, info, &options, planned, reuse)
    }

    /// Compares the items of `create` with `parent`. `frozen` says for each item that it never
    /// changes. `trusted` says that frozen items did not change since the parent was saved.
    fn reuse(
        &self,
        py: Python<'_>,
        keep: Option<PyBackedBytes>,
        lengths: Vec<u64>,
        parent: Option<&Bound<'_, Index>>,
        frozen: Vec<bool>,
        trusted: bool,
    ) -> PyResult<Reuse> {
        let (items, planned) = self.kept(keep, lengths)?;
        let parent = parent.map(|parent| Arc::clone(&parent.get().inner));
        Reuse::new(py, parent, &items, planned, &frozen, trusted)
    }

    /// Returns the names of the items that this rank saves.
    fn kept_names(&self, keep: Option<PyBackedBytes>) -> PyResult<Vec<String>> {
        let inner = self.lock();
        let keep = Keep::new(keep, inner.items.len())?;
        let kept = inner.items.iter().enumerate().filter(|(i, _)| keep.has(*i));
        Ok(kept.map(|(_, item)| item.name.clone()).collect())
    }
}

impl SavePlan {
    /// Returns the items that this rank saves. `lengths` has the lengths of those that are not
    /// plain.
    fn kept(
        &self,
        keep: Option<PyBackedBytes>,
        lengths: Vec<u64>,
    ) -> PyResult<(Vec<SaveItem>, Planned)> {
        let inner = self.lock();
        let keep = Keep::new(keep, inner.items.len())?;
        let mut items = Vec::new();
        let mut planned = Planned::default();
        let mut lengths = lengths.into_iter();
        for (i, item) in inner.items.iter().enumerate().filter(|(i, _)| keep.has(*i)) {
            let mut item = item.clone();
            if let Some(&place) = inner.plain.get(i) {
                let number = u32::try_from(items.len())
                    .map_err(|_| PlanError::new_err("more than 4 billion items"))?;
                planned.plain.push((number, place, item.length));
            } else {
                item.length =
                    lengths.next().ok_or_else(|| PlanError::new_err("fewer lengths than items"))?;
            }
            items.push(item);
        }
        planned.count = planned.plain.len();
        Ok((items, planned))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

/// Converts a path; returns `None` if the format cannot store it.
fn path(object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    match object.cast::<PyTuple>() {
        Ok(tuple) => Ok(Some(to_value(tuple.as_any(), 0)?).filter(Value::is_path)),
        Err(_) => Ok(None),
    }
}

struct Keep(Option<PyBackedBytes>);

impl Keep {
    fn new(bits: Option<PyBackedBytes>, items: usize) -> PyResult<Self> {
        if bits.as_ref().is_some_and(|bits| bits.len() != items.div_ceil(8)) {
            return Err(PlanError::new_err(
                "the coordinator answered with a plan that is not this rank's",
            ));
        }
        Ok(Self(bits))
    }

    fn has(&self, item: usize) -> bool {
        self.0.as_ref().is_none_or(|bits| bits[item / 8] >> (item % 8) & 1 == 1)
    }
}

impl Planned {
    /// Keeps only the plain items whose number passes.
    pub fn only(mut self, passes: impl Fn(u32) -> bool) -> Self {
        self.plain.retain(|&(number, ..)| passes(number));
        self
    }

    /// Returns an iterator over the memory of the plain tensors of `tensors`: one block a call,
    /// then `None`.
    pub fn parts<'a>(
        &'a self,
        plain: &'a Plain<'_>,
        tensors: &'a Bound<'_, PyList>,
    ) -> impl FnMut() -> PyResult<Option<Vec<Part<'a>>>> + 'a {
        let written = self.plain.iter().filter(|(.., length)| *length > 0);
        // Keeps the tensors alive if another thread changes the list meanwhile.
        let mut held = Vec::new();
        let mut parts = written.map(move |&(item, place, length)| {
            let tensor = tensors.get_item(place)?;
            // SAFETY: torch has just reported where the tensor is, and `held` keeps it until the
            // write is over.
            #[expect(unsafe_code, reason = "tensors are handed over by address")]
            let part = unsafe { part(item, plain.look(&tensor)?, length)? };
            held.push(tensor);
            Ok(part)
        });
        move || {
            let block: Vec<_> = parts.by_ref().take(BLOCK).collect::<PyResult<_>>()?;
            Ok((!block.is_empty()).then_some(block))
        }
    }
}

/// Returns all bytes of an item of `length` bytes, from its tensor as it is now. The tensor may
/// have been replaced since it was planned (`tensor.data = ...`), so the planned address must not
/// be read.
///
/// # Safety
/// The tensor stays where it was found for `'a`.
#[expect(unsafe_code, reason = "tensors are handed over by address")]
unsafe fn part<'a>(item: u32, found: Option<HostTensor>, length: u64) -> PyResult<Part<'a>> {
    let host = found
        .filter(|host| host.address != 0 && contiguous_length(host) == Some(length))
        .ok_or_else(|| {
            PlanError::new_err("a tensor changed its shape or place while it was being saved")
        })?;
    let length = usize::try_from(length).expect("the length of something in memory");
    Ok(Part {
        item,
        at: 0,
        // SAFETY: the caller guarantees it. The tensor is contiguous, in host memory, and `length`
        // bytes long.
        data: unsafe { bytes_at(host.address, length)? },
    })
}

/// Returns the length of a tensor in bytes, if it is contiguous.
fn contiguous_length(host: &HostTensor) -> Option<u64> {
    let count = element_count(&host.shape)?;
    let mut stride = 1;
    for (&size, &is) in host.shape.iter().zip(&host.strides).rev() {
        // torch ignores the strides of an empty tensor, and of a dimension of one element.
        if count > 0 && size != 1 && is != stride {
            return None;
        }
        stride *= size;
    }
    count.checked_mul(host.dtype.size())
}

/// Assigns items to ranks, by the ranks' requests. Returns for each rank the bits of the items that
/// it saves, then the number of items in all, and the bytes of each rank.
#[guarded]
#[pyfunction]
pub fn assign_saves(
    py: Python<'_>,
    requests: Vec<PyBackedBytes>,
) -> PyResult<(Vec<Bound<'_, PyBytes>>, u64, Vec<u64>)> {
    let assignment = py.detach(|| save_plan::assign(&requests)).into_py(py)?;
    let keep = assignment.keep.iter().map(|bits| PyBytes::new(py, bits)).collect();
    Ok((keep, assignment.items, assignment.bytes))
}
