//! The chunks that hold parts of a region of a tensor, and whether they cover it.

use super::Index;
use crate::Error;
use crate::geometry::{Dims, Region};

/// A part of a region that one chunk holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Number of the chunk, for [`Index::chunk`].
    pub chunk: u64,
    /// Offsets of the part in the chunk.
    pub chunk_offsets: Dims,
    /// Offsets of the part in the region.
    pub region_offsets: Dims,
    /// Sizes of the part.
    pub sizes: Dims,
}

/// Returns the parts of `region` and the chunks of `tensor` that hold them. Each element occurs
/// once.
///
/// `region` must be inside the tensor's shape. Takes O(log n) time, plus the overlapping chunks, if
/// the chunks follow each other along one dimension, and O(n) otherwise.
///
/// # Errors
/// A part of the region that no chunk holds.
pub fn cover(index: &Index, tensor: u32, region: &Region) -> Result<Vec<Overlap>, Region> {
    if region.sizes.contains(&0) {
        return Ok(Vec::new());
    }
    let view = index.tensor(tensor);
    // Most tensors have one chunk.
    if view.chunks.end - view.chunks.start == 1
        && index.chunk(view.chunks.start).sizes == view.shape
    {
        return Ok(vec![Overlap {
            chunk: view.chunks.start,
            chunk_offsets: region.offsets.clone(),
            region_offsets: Dims::from_elem(0, region.sizes.len()),
            sizes: region.sizes.clone(),
        }]);
    }
    let parts = intersections(index, tensor, region);
    let held: u128 = parts.iter().map(|(_, part)| part.volume()).sum();
    if view.split_dim.is_some() && held == region.volume() {
        return Ok(overlaps(index, region, &parts));
    }
    // Parts may leave a hole here and overlap there, so equal volumes prove nothing.
    let mut missing = vec![region.clone()];
    let mut fragments = Vec::new();
    for (chunk, part) in &parts {
        let mut left = Vec::new();
        for piece in missing {
            if let Some(both) = piece.intersection(part) {
                piece.without(&both, &mut left);
                fragments.push((*chunk, both));
            } else {
                left.push(piece);
            }
        }
        missing = left;
    }
    match missing.into_iter().next() {
        Some(hole) => Err(hole),
        None if held == region.volume() => Ok(overlaps(index, region, &parts)),
        None => Ok(overlaps(index, region, &fragments)),
    }
}

impl Index {
    /// Does the same as [`cover`].
    ///
    /// # Errors
    /// [`Error::TensorPlan`] for a part of the region that no chunk holds.
    pub fn parts_of(&self, tensor: u32, region: &Region) -> crate::Result<Vec<Overlap>> {
        cover(self, tensor, region).map_err(|hole| {
            let reason = format!(
                "the checkpoint does not hold {:?} elements at {:?}",
                hole.sizes.as_slice(),
                hole.offsets.as_slice()
            );
            Error::tensor_plan(Some(self.path()), self.name(tensor), reason)
        })
    }
}

/// Returns the overlaps of chunks and `region`. They need not cover the region, and may overlap.
pub fn touching(index: &Index, tensor: u32, region: &Region) -> Vec<Overlap> {
    overlaps(index, region, &intersections(index, tensor, region))
}

fn intersections(index: &Index, tensor: u32, region: &Region) -> Vec<(u64, Region)> {
    let view = index.tensor(tensor);
    let mut candidates = view.chunks.clone();
    if let Some(split) = view.split_dim {
        candidates.start = partition_point(view.chunks.clone(), |c| {
            index.chunk_extent(c, split).end <= region.offsets[split]
        });
        candidates.end = partition_point(candidates.start..view.chunks.end, |c| {
            index.chunk_extent(c, split).start < region.end(split)
        });
    }
    candidates
        .filter_map(|c| {
            let chunk = index.chunk(c);
            let whole = Region { offsets: chunk.offsets, sizes: chunk.sizes };
            Some((c, region.intersection(&whole)?))
        })
        .collect()
}

/// Returns the first number of `range` for which `pred` is false. `pred` must be true for a prefix.
fn partition_point(range: std::ops::Range<u64>, pred: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (range.start, range.end);
    while low < high {
        let middle = low + (high - low) / 2;
        if pred(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

fn overlaps(index: &Index, region: &Region, parts: &[(u64, Region)]) -> Vec<Overlap> {
    let minus = |a: &Dims, b: &Dims| a.iter().zip(b).map(|(a, b)| a - b).collect();
    parts
        .iter()
        .map(|(c, part)| Overlap {
            chunk: *c,
            chunk_offsets: minus(&part.offsets, &index.chunk(*c).offsets),
            region_offsets: minus(&part.offsets, &region.offsets),
            sizes: part.sizes.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::Dtype;
    use crate::format::{ChunkEntry, FileEntry, IndexBuilder, SourceKind, TensorEntry};

    fn index(shape: &[u64], chunks: &[Region]) -> Index {
        let mut builder = IndexBuilder::new(SourceKind::Native);
        let file = builder
            .add_file(FileEntry {
                name: "f".into(),
                size: 1 << 20,
                data_start: 0,
                external: false,
                ..FileEntry::default()
            })
            .unwrap();
        let tensor = builder
            .add_tensor(TensorEntry::tensor("w", Dtype::UINT8, Dims::from_slice(shape)))
            .unwrap();
        let mut offset = 0;
        for chunk in chunks {
            let length = chunk.sizes.iter().product();
            builder
                .add_chunk(ChunkEntry {
                    tensor,
                    file,
                    offset,
                    length,
                    offsets: chunk.offsets.clone(),
                    sizes: chunk.sizes.clone(),
                    ..ChunkEntry::default()
                })
                .unwrap();
            offset += length;
        }
        Index::from_bytes(builder.build().unwrap(), Path::new("x")).unwrap()
    }

    #[test]
    fn rows_are_found_by_search() {
        let chunks: Vec<_> = (0..100).map(|i| Region::new(&[i * 3, 0], &[3, 4])).collect();
        let index = index(&[300, 4], &chunks);
        let found = cover(&index, 0, &Region::new(&[4, 1], &[5, 2])).unwrap();
        let rows: Vec<_> =
            found.iter().map(|o| (o.chunk, o.chunk_offsets[0], o.sizes[0])).collect();
        assert_eq!(rows, [(1, 1, 2), (2, 0, 3)]);
        assert!(cover(&index, 0, &Region::new(&[4, 1], &[0, 2])).unwrap().is_empty());
    }

    #[test]
    fn a_scalar_is_covered_by_its_chunk() {
        let index = index(&[], &[Region::new(&[], &[])]);
        assert_eq!(cover(&index, 0, &Region::new(&[], &[])).unwrap().len(), 1);
    }

    #[test]
    fn a_missing_chunk_is_named() {
        let index = index(&[8], &[Region::new(&[0], &[4])]);
        assert_eq!(cover(&index, 0, &Region::new(&[2], &[6])), Err(Region::new(&[4], &[4])));
        assert_eq!(touching(&index, 0, &Region::new(&[2], &[6])).len(), 1);
    }

    fn rectangle(rows: u64, columns: u64) -> impl Strategy<Value = Region> {
        (0..rows, 0..columns).prop_flat_map(move |(r, c)| {
            (0..=rows - r, 0..=columns - c).prop_map(move |(h, w)| Region::new(&[r, c], &[h, w]))
        })
    }

    proptest! {
        /// Comparison with the definition: it marks every element, with overlapping chunks and
        /// holes.
        #[test]
        fn each_element_comes_once(
            chunks in prop::collection::vec(rectangle(6, 5), 0..7),
            region in rectangle(6, 5),
        ) {
            let index = index(&[6, 5], &chunks);
            let held = |r: u64, c: u64| chunks.iter().any(|k| {
                k.offsets[0] <= r && r < k.end(0) && k.offsets[1] <= c && c < k.end(1)
            });
            let cells = || (region.offsets[0]..region.end(0))
                .flat_map(|r| (region.offsets[1]..region.end(1)).map(move |c| (r, c)));
            match cover(&index, 0, &region) {
                Ok(parts) => {
                    let mut painted = std::collections::BTreeMap::new();
                    for part in &parts {
                        let chunk = index.chunk(part.chunk);
                        for r in 0..part.sizes[0] {
                            for c in 0..part.sizes[1] {
                                let here = (
                                    chunk.offsets[0] + part.chunk_offsets[0] + r,
                                    chunk.offsets[1] + part.chunk_offsets[1] + c,
                                );
                                let in_region = (
                                    region.offsets[0] + part.region_offsets[0] + r,
                                    region.offsets[1] + part.region_offsets[1] + c,
                                );
                                prop_assert_eq!(here, in_region);
                                *painted.entry(here).or_insert(0) += 1;
                            }
                        }
                    }
                    prop_assert_eq!(painted.len(), cells().count());
                    prop_assert!(painted.values().all(|&n| n == 1));
                    prop_assert!(cells().all(|(r, c)| held(r, c)));
                }
                Err(hole) => {
                    prop_assert!(hole.volume() > 0);
                    prop_assert!(region.intersection(&hole).as_ref() == Some(&hole));
                    prop_assert!(!held(hole.offsets[0], hole.offsets[1]));
                }
            }
        }
    }
}
