//! Commits, for Python: merges and publishes an index, and handles the files before and after.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_rs_core::format::{INDEX_NAME, Index, IndexBuilder, SourceKind, Value, rank_index_name};
use dcp_rs_core::{Error, checkpoint, store};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyDict, PyTuple};

use crate::convert::to_value;
use crate::error::{IntoPy, plan_error};
use crate::panics::guarded;
use crate::remote::{Store, with_cause};
use crate::save_item::name_of;
use crate::{index, interrupt};

/// Merges the indexes of all ranks, and commits the result as the index of `folder`, or of one rank
/// in it. Returns that index, and the reasons why files of the replaced checkpoint are still there.
///
/// - `planner_data` is that of DCP's `Metadata`. A mapping of FQN to path is spread over the
///   tensors. Entries for other names, and any other value, go to the root.
/// - Without `overwrite`, nothing in a folder of the file system is replaced. On a store, this
///   applies to the index of one rank; `Store.begin` decided about the index of all ranks.
/// - `items` is the expected number of chunks and values, if it is known.
/// - `names` are tensors that the indexes must have.
/// - Without `publish`, the index is merged and checked, and nothing is written.
#[guarded]
#[pyfunction]
#[pyo3(signature = (
    folder, rank, indexes, *, save_id, generation, planner_data, items, names, fsync,
    overwrite=true, store=None, publish=true
))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments, in Python")]
pub fn commit_indexes(
    py: Python<'_>,
    folder: PathBuf,
    rank: Option<u32>,
    indexes: Vec<PyBackedBytes>,
    save_id: [u8; 16],
    generation: u64,
    planner_data: &Bound<'_, PyAny>,
    items: Option<u64>,
    names: &Bound<'_, PyAny>,
    fsync: bool,
    overwrite: bool,
    store: Option<&Bound<'_, Store>>,
    publish: bool,
) -> PyResult<(index::Index, Vec<String>)> {
    let to = match store {
        _ if !publish => To::Nothing,
        Some(store) => To::Store(store.get()),
        None => To::Disk { fsync },
    };
    let path = folder.join(rank.map_or(INDEX_NAME.to_owned(), rank_index_name));
    if let [index] = indexes.as_slice()
        && planner_data.cast::<PyDict>().is_ok_and(pyo3::types::PyDictMethods::is_empty)
        && names.len()? == 0
    {
        // Nothing to merge: the index of the one rank is complete.
        let bytes = index.to_vec();
        let index = move || Index::from_bytes(bytes, &path);
        return commit_one(py, &folder, rank, index, items, overwrite, &to);
    }
    let mut builder = py
        .detach(|| {
            let mut builder = IndexBuilder::new(SourceKind::Native);
            builder.save_id = save_id;
            builder.generation = generation;
            for (rank, bytes) in indexes.into_iter().enumerate() {
                let part = Index::from_bytes(bytes, Path::new(&format!("(index of rank {rank})")))?;
                builder.merge(&part)?;
            }
            Ok(builder)
        })
        .into_py(py)?;
    for fqn in names.try_iter()? {
        let fqn = name_of(&fqn?)?;
        if !builder.has_tensor(&fqn) {
            return Err(plan_error(&path, Some(&fqn), format!("no rank wrote {fqn:?}")));
        }
    }
    builder.root = spread(&mut builder, planner_data)?;
    commit_one(
        py,
        &folder,
        rank,
        || Index::from_bytes(builder.build()?, &path),
        items,
        overwrite,
        &to,
    )
}

/// Destination of a commit, and its options.
enum To<'a> {
    Disk { fsync: bool },
    Store(&'a Store),
    Nothing,
}

fn commit_one(
    py: Python<'_>,
    folder: &Path,
    rank: Option<u32>,
    index: impl FnOnce() -> dcp_rs_core::Result<Index> + Send,
    items: Option<u64>,
    replace: bool,
    to: &To<'_>,
) -> PyResult<(index::Index, Vec<String>)> {
    let path = folder.join(rank.map_or(INDEX_NAME.to_owned(), rank_index_name));
    let mut stored = None;
    let committed = interrupt::run(py, |control| {
        let index = index()?;
        if items.is_some_and(|items| items != index.chunk_count()) {
            return Err(Error::Plan(format!(
                "ranks wrote {} chunks and values, of {} that were planned",
                index.chunk_count(),
                items.unwrap_or_default()
            )));
        }
        let committed = match *to {
            To::Nothing => checkpoint::Committed::default(),
            To::Store(store) => {
                let committed = store.commit(folder, rank, &index, replace, control);
                stored = checkpoint::may_be_stored(&path, &committed);
                committed?
            }
            To::Disk { fsync } => {
                checkpoint::commit_index(folder, rank, &index, replace, fsync, control)?
            }
        };
        Ok((index, committed.left))
    });
    let (index, left) = committed.map_err(|raised| with_cause(py, raised, stored))?;
    let index = index::Index::new(Arc::new(index), false);
    Ok((index, left.iter().map(ToString::to_string).collect()))
}

fn spread(builder: &mut IndexBuilder, planner_data: &Bound<'_, PyAny>) -> PyResult<Value> {
    let Ok(mapping) = planner_data.cast::<PyDict>() else {
        return to_value(planner_data, 0);
    };
    let mut rest = Vec::new();
    for (key, value) in mapping {
        let tensor = key.extract::<String>().ok();
        let tensor =
            tensor.filter(|fqn| value.is_instance_of::<PyTuple>() && builder.has_tensor(fqn));
        if tensor.as_deref().is_some_and(|fqn| builder.has_path(fqn)) {
            continue;
        }
        let value = to_value(&value, 1)?;
        match tensor {
            Some(fqn) if value.is_path() => {
                builder.set_path(&fqn, value);
            }
            _ => rest.push((to_value(&key, 1)?, value)),
        }
    }
    Ok(Value::Dict(rest))
}

/// Returns the generation of the next save into `folder`.
#[guarded]
#[pyfunction]
pub fn next_generation(py: Python<'_>, folder: PathBuf) -> PyResult<u64> {
    py.detach(|| checkpoint::next_generation(&folder)).into_py(py)
}

/// Creates a folder and its missing parents, durably.
#[guarded]
#[pyfunction]
pub fn create_folder(py: Python<'_>, folder: PathBuf) -> PyResult<()> {
    py.detach(|| store::create_folder(&folder)).into_py(py)
}

/// Publishes `data` as `name` in `folder`, atomically.
#[guarded]
#[pyfunction]
pub fn publish(
    py: Python<'_>,
    folder: PathBuf,
    name: &str,
    data: Vec<u8>,
    fsync: bool,
) -> PyResult<()> {
    interrupt::run(py, |control| store::publish(&folder, name, &data, fsync, control))
}

/// Removes the data files of a save that was not committed: those that `index` names and the
/// published index does not. With `rank`, the published index is that of the rank.
#[guarded]
#[pyfunction]
pub fn discard(
    py: Python<'_>,
    folder: PathBuf,
    rank: Option<u32>,
    index: PyBackedBytes,
) -> PyResult<()> {
    interrupt::run(py, |control| checkpoint::discard(&folder, rank, index, control))
}
