//! The coordinator's part of a save: it checks that the chunks tile their tensors, and assigns
//! every chunk to one rank.

use std::cmp::{Ordering, Reverse};

use super::request::{Requested, decode};
use crate::geometry::tiling::{TilingFault, check_tiling, find_overlap};
use crate::geometry::{Dims, element_count};
use crate::names::ByName;
use crate::{Dtype, Error, Result};

/// Weight of a non-tensor value in bytes, for the balance between ranks: about what `torch.save`
/// writes for a number.
const VALUE_BYTES: u64 = 1024;

/// Assignment of chunks to ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// For each rank, a bit for each item of its request, lowest bit first: set if the rank saves
    /// it.
    pub keep: Vec<Vec<u8>>,
    /// Bytes that each rank saves. A non-tensor value counts as a fixed number of bytes.
    pub bytes: Vec<u64>,
    /// Number of items that all ranks save together.
    pub items: u64,
}

/// Assigns each chunk to one of the ranks that have it.
///
/// A chunk of a single rank stays there. Replicated chunks are assigned by size, the largest first,
/// each to the rank with the fewest bytes so far.
///
/// # Errors
/// - [`Error::TensorPlan`] names the tensor that has a fault: ranks describe it differently, a
///   chunk lies outside of it, chunks overlap, or no chunk holds some element. The last check needs
///   more than one rank, as a single rank may save a part.
/// - [`Error::Plan`] if a request is damaged.
pub fn assign(requests: &[impl AsRef<[u8]>]) -> Result<Assignment> {
    let mut gathered = Gathered::default();
    let mut keep = Vec::with_capacity(requests.len());
    for (rank, request) in (0..).zip(requests) {
        let mut item = 0;
        let count = decode(request.as_ref(), |requested| {
            gathered.add(rank, item, &requested)?;
            item += 1;
            Ok(())
        })?;
        keep.push(vec![0_u8; (count as usize).div_ceil(8)]);
    }
    let mut assignment = Assignment { keep, bytes: vec![0; requests.len()], items: 0 };
    let mut shared = Vec::new();
    let mut order = gathered.by_tensor();
    for group in order.chunk_by_mut(|a, b| a.tensor == b.tensor) {
        let tensor = &gathered.tensors[group[0].tensor as usize];
        // A stable sort keeps equal chunks in the order of ranks. It also merges the runs of the
        // ranks, which are mostly sorted.
        group.sort_by(|a, b| gathered.compare(tensor, a, b));
        let chunks: Vec<&[Held]> =
            group.chunk_by(|a, b| gathered.compare(tensor, a, b) == Ordering::Equal).collect();
        gathered.check(tensor, &chunks, requests.len() > 1)?;
        for holders in chunks {
            let bytes = gathered.length(tensor, &holders[0]);
            if holders.len() == 1 {
                assignment.give(&holders[0], bytes);
            } else {
                shared.push((bytes, holders.to_vec()));
            }
        }
    }
    // A stable sort keeps equal sizes in the order of names, so every run gives the same result.
    shared.sort_by_key(|(bytes, _)| Reverse(*bytes));
    for (bytes, holders) in shared {
        let lightest = holders
            .iter()
            .min_by_key(|held| (assignment.bytes[held.rank as usize], held.rank))
            .expect("a chunk has a holder");
        assignment.give(lightest, bytes);
    }
    Ok(assignment)
}

impl Assignment {
    fn give(&mut self, held: &Held, bytes: u64) {
        let rank = held.rank as usize;
        self.keep[rank][held.item as usize / 8] |= 1 << (held.item % 8);
        self.bytes[rank] = self.bytes[rank].saturating_add(bytes);
        self.items += 1;
    }
}

/// An item of a rank's request.
#[derive(Clone, Copy, Debug)]
struct Held {
    tensor: u32,
    rank: u32,
    item: u32,
    /// Start of its offsets and sizes in the pool; `None` for a whole tensor.
    dims: Option<u32>,
}

struct Tensor {
    name: String,
    dtype: Option<Dtype>,
    shape: Dims,
    zeros: Dims,
    /// The rank that described it first.
    rank: u32,
}

#[derive(Default)]
struct Gathered {
    ids: ByName,
    tensors: Vec<Tensor>,
    held: Vec<Held>,
    /// Offsets and sizes of chunks that are not whole tensors.
    pool: Vec<u64>,
    /// Guess for the next tensor. Requests name tensors in nearly the same order, so it saves most
    /// look-ups.
    next: u32,
}

fn too_many() -> Error {
    Error::Unsupported("a save cannot have more than 4 billion chunks".into())
}

impl Gathered {
    fn add(&mut self, rank: u32, item: u32, requested: &Requested<'_>) -> Result<()> {
        let tensor = self.find(rank, requested)?;
        let known = &self.tensors[tensor as usize];
        if (known.dtype, known.shape.as_slice()) != (requested.dtype, requested.shape) {
            return Err(fault(
                requested.name,
                format!(
                    "it is {} on rank {}, and {} on rank {rank}",
                    describe(known.dtype, &known.shape),
                    known.rank,
                    describe(requested.dtype, requested.shape)
                ),
            ));
        }
        let dims = match requested.chunk {
            None => None,
            Some((offsets, sizes)) => {
                let outside =
                    offsets.iter().zip(sizes).zip(requested.shape).any(|((at, size), whole)| {
                        at.checked_add(*size).is_none_or(|end| end > *whole)
                    });
                if outside {
                    return Err(fault(
                        requested.name,
                        format!(
                            "chunk {sizes:?} at {offsets:?} of rank {rank} lies outside of its \
                            shape {:?}",
                            requested.shape
                        ),
                    ));
                }
                let at = u32::try_from(self.pool.len()).map_err(|_| too_many())?;
                self.pool.extend(offsets);
                self.pool.extend(sizes);
                Some(at)
            }
        };
        self.held.push(Held { tensor, rank, item, dims });
        if u32::try_from(self.held.len()).is_err() {
            return Err(too_many());
        }
        Ok(())
    }

    fn find(&mut self, rank: u32, requested: &Requested<'_>) -> Result<u32> {
        let guess = self.next as usize;
        if self.tensors.get(guess).is_some_and(|tensor| tensor.name == requested.name) {
            self.next += 1;
            return Ok(self.next - 1);
        }
        let next = u32::try_from(self.tensors.len()).map_err(|_| too_many())?;
        let name_of = |id: u32| {
            self.tensors.get(id as usize).map_or(requested.name, |known| known.name.as_str())
        };
        let id = self.ids.get_or_add(requested.name, next, name_of);
        if id == next {
            if let Some(dtype) = requested.dtype
                && element_count(requested.shape)
                    .and_then(|n| n.checked_mul(dtype.size()))
                    .is_none_or(|bytes| i64::try_from(bytes).is_err())
            {
                return Err(fault(
                    requested.name,
                    format!("shape {:?} is too large", requested.shape),
                ));
            }
            self.tensors.push(Tensor {
                name: requested.name.to_owned(),
                dtype: requested.dtype,
                shape: Dims::from_slice(requested.shape),
                zeros: Dims::from_elem(0, requested.shape.len()),
                rank,
            });
        }
        self.next = id + 1;
        Ok(id)
    }

    /// Groups all items by tensor, and sorts the pool in the same order, so that compared values
    /// are adjacent.
    fn by_tensor(&mut self) -> Vec<Held> {
        let gathered = std::mem::take(&mut self.held);
        let mut starts = vec![0_usize; self.tensors.len() + 1];
        for held in &gathered {
            starts[held.tensor as usize + 1] += 1;
        }
        for i in 1..starts.len() {
            starts[i] += starts[i - 1];
        }
        let mut order = gathered.clone();
        for held in gathered {
            let at = &mut starts[held.tensor as usize];
            order[*at] = held;
            *at += 1;
        }
        let pool = std::mem::take(&mut self.pool);
        self.pool.reserve_exact(pool.len());
        for held in &mut order {
            if let Some(at) = &mut held.dims {
                let from = *at as usize;
                *at = u32::try_from(self.pool.len()).expect("it is as long as it was");
                self.pool
                    .extend(&pool[from..from + 2 * self.tensors[held.tensor as usize].shape.len()]);
            }
        }
        order
    }

    fn chunk<'a>(&'a self, tensor: &'a Tensor, held: &Held) -> (&'a [u64], &'a [u64]) {
        match held.dims {
            None => (&tensor.zeros, &tensor.shape),
            Some(at) => self.pool[at as usize..at as usize + 2 * tensor.shape.len()]
                .split_at(tensor.shape.len()),
        }
    }

    fn compare(&self, tensor: &Tensor, a: &Held, b: &Held) -> Ordering {
        match (a.dims, b.dims) {
            (None, None) => Ordering::Equal,
            _ => self.chunk(tensor, a).cmp(&self.chunk(tensor, b)),
        }
    }

    fn length(&self, tensor: &Tensor, held: &Held) -> u64 {
        match tensor.dtype {
            None => VALUE_BYTES,
            // This cannot overflow: the chunk lies in the tensor, whose size was checked.
            Some(dtype) => self.chunk(tensor, held).1.iter().product::<u64>() * dtype.size(),
        }
    }

    /// Checks the chunks of one tensor. Each chunk comes with its holders.
    fn check(&self, tensor: &Tensor, chunks: &[&[Held]], all_ranks: bool) -> Result<()> {
        if tensor.dtype.is_none() {
            return Ok(());
        }
        let rectangles: Vec<_> =
            chunks.iter().map(|holders| self.chunk(tensor, &holders[0])).collect();
        let chunk = |i: usize| {
            let (offsets, sizes) = rectangles[i];
            format!("chunk {sizes:?} at {offsets:?} of rank {}", chunks[i][0].rank)
        };
        let (i, j) = if all_ranks {
            match check_tiling(&tensor.shape, &rectangles) {
                Ok(()) => return Ok(()),
                Err(TilingFault::Hole(point)) => {
                    let held: u64 =
                        rectangles.iter().map(|(_, sizes)| sizes.iter().product::<u64>()).sum();
                    return Err(fault(
                        &tensor.name,
                        format!(
                            "no rank holds element {:?} of its shape {:?} (the chunks hold \
                            {held} of {} elements)",
                            point.as_slice(),
                            tensor.shape.as_slice(),
                            tensor.shape.iter().product::<u64>()
                        ),
                    ));
                }
                Err(TilingFault::Overlap(point)) => {
                    let mut both = (0..rectangles.len()).filter(|&i| {
                        let (offsets, sizes) = rectangles[i];
                        (0..point.len())
                            .all(|d| offsets[d] <= point[d] && point[d] < offsets[d] + sizes[d])
                    });
                    (both.next().unwrap_or(0), both.next().unwrap_or(0))
                }
            }
        } else {
            match find_overlap(&rectangles) {
                None => return Ok(()),
                Some(both) => both,
            }
        };
        Err(fault(&tensor.name, format!("{} overlaps {}", chunk(i), chunk(j))))
    }
}

fn fault(name: &str, reason: String) -> Error {
    Error::TensorPlan { path: None, tensor: name.to_owned(), reason }
}

fn describe(dtype: Option<Dtype>, shape: &[u64]) -> String {
    match dtype {
        Some(dtype) => format!("a tensor of {} {shape:?}", dtype.name()),
        None => "a value that is not a tensor".into(),
    }
}

#[cfg(test)]
#[path = "assign_tests.rs"]
mod tests;
