//! Splitting of a region that is larger than a slab.

use crate::geometry::Dims;

/// Calls `each` with (offsets, sizes) of rectangles of at most `limit` bytes that make up a
/// rectangle of `sizes`, in row-major order. A single element is never split.
pub fn split(sizes: &[u64], itemsize: u64, limit: u64, each: &mut impl FnMut(&[u64], &[u64])) {
    if sizes.contains(&0) {
        return;
    }
    let total = sizes.iter().fold(itemsize, |n, size| n.saturating_mul(*size));
    if total <= limit || sizes.is_empty() {
        each(&Dims::from_elem(0, sizes.len()), sizes);
        return;
    }
    // Split along the outermost dimension of which a whole step fits. Walk the dimensions before it
    // one by one.
    let (mut dim, mut inner) = (0, total / sizes[0]);
    while inner > limit && dim + 1 < sizes.len() {
        dim += 1;
        inner /= sizes[dim];
    }
    let step = (limit / inner.max(1)).max(1);
    let mut offsets = Dims::from_elem(0, sizes.len());
    let mut part = Dims::from_slice(sizes);
    part[..dim].fill(1);
    loop {
        let mut begin = 0;
        while begin < sizes[dim] {
            offsets[dim] = begin;
            part[dim] = step.min(sizes[dim] - begin);
            each(&offsets, &part);
            begin += step;
        }
        let Some(d) = (0..dim).rev().find(|&d| offsets[d] + 1 < sizes[d]) else {
            return;
        };
        offsets[d] += 1;
        offsets[d + 1..dim].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The parts have every element once, in order. A part is larger than the limit only if it
        /// is one element.
        #[test]
        fn parts_make_up_the_whole(
            sizes in prop::collection::vec(0_u64..6, 0..4),
            itemsize in prop::sample::select(vec![1_u64, 2, 4, 16]),
            limit in 1_u64..200,
        ) {
            let mut last = None;
            let mut count = 0;
            split(&sizes, itemsize, limit, &mut |offsets, part| {
                let elements: u64 = part.iter().product();
                assert!(elements * itemsize <= limit || elements == 1);
                assert!(offsets.iter().zip(part).zip(&sizes).all(|((o, p), s)| *p > 0 && o + p <= *s));
                assert!(last.as_deref().is_none_or(|last: &[u64]| last < offsets));
                last = Some(offsets.to_vec());
                count += elements;
            });
            prop_assert_eq!(count, sizes.iter().product::<u64>());
        }
    }
}
