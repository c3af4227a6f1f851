//! Rectangles of tensors.

use super::Dims;

/// A rectangle of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Offsets of the region.
    pub offsets: Dims,
    /// Sizes of the region.
    pub sizes: Dims,
}

impl Region {
    /// Makes a region with these offsets and sizes.
    pub fn new(offsets: &[u64], sizes: &[u64]) -> Self {
        Self { offsets: Dims::from_slice(offsets), sizes: Dims::from_slice(sizes) }
    }

    /// Returns whether it is inside `shape`.
    pub fn fits(&self, shape: &[u64]) -> bool {
        self.offsets.len() == shape.len()
            && self.sizes.len() == shape.len()
            && (self.offsets.iter().zip(&self.sizes).zip(shape)).all(|((offset, size), whole)| {
                offset.checked_add(*size).is_some_and(|end| end <= *whole)
            })
    }

    /// Returns the end of the region along a dimension.
    pub(crate) fn end(&self, d: usize) -> u64 {
        self.offsets[d] + self.sizes[d]
    }

    /// Returns the number of elements.
    pub(crate) fn volume(&self) -> u128 {
        self.sizes.iter().map(|&size| u128::from(size)).product()
    }

    /// Returns the elements that are in both, if there are any.
    pub(crate) fn intersection(&self, other: &Self) -> Option<Self> {
        let mut both = Self::new(&[], &[]);
        for d in 0..self.offsets.len() {
            let begin = self.offsets[d].max(other.offsets[d]);
            let end = self.end(d).min(other.end(d));
            if begin >= end {
                return None;
            }
            both.offsets.push(begin);
            both.sizes.push(end - begin);
        }
        Some(both)
    }

    /// Adds `self` without `hole`, which is inside of it, as disjoint rectangles.
    pub(crate) fn without(&self, hole: &Self, out: &mut Vec<Self>) {
        let mut rest = self.clone();
        for d in 0..self.offsets.len() {
            for (begin, end) in [(rest.offsets[d], hole.offsets[d]), (hole.end(d), rest.end(d))] {
                if begin < end {
                    let mut side = rest.clone();
                    side.offsets[d] = begin;
                    side.sizes[d] = end - begin;
                    out.push(side);
                }
            }
            rest.offsets[d] = hole.offsets[d];
            rest.sizes[d] = hole.sizes[d];
        }
    }
}
