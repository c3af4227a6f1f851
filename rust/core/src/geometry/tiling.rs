//! Check in linear time that chunks hold every element of a tensor exactly once.
//!
//! Each rectangle is the sum of its corners with alternating signs: `1[a <= x < b]` is `1[x >= a] -
//! 1[x >= b]`, and the product of that over the dimensions. So the rectangles tile the whole
//! exactly when their signed corners cancel against those of the whole. Otherwise the first corner
//! that is left, in lexicographic order, is a point that is held too often or not at all. The
//! reason is that no other corner that is left is at or before it in every dimension.

use std::collections::HashMap;

use smallvec::SmallVec;

use crate::geometry::Dims;

/// Offsets and sizes.
type Rectangle<'a> = (&'a [u64], &'a [u64]);

/// Reason why rectangles are not a tiling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TilingFault {
    /// This element is in more than one rectangle.
    Overlap(Dims),
    /// This element is in no rectangle.
    Hole(Dims),
}

/// With more sharded dimensions there are too many corners: 2 to the power of that number.
const MAX_CORNER_DIMS: usize = 8;

/// Checks that rectangles inside `shape` hold each of its elements exactly once. Empty rectangles
/// do not count.
pub fn check_tiling(shape: &[u64], rectangles: &[Rectangle<'_>]) -> Result<(), TilingFault> {
    if shape.contains(&0) {
        return Ok(());
    }
    let solid: Vec<Rectangle<'_>> =
        rectangles.iter().copied().filter(|(_, sizes)| !sizes.contains(&0)).collect();
    // Dimensions that all rectangles span whole do not matter.
    let split: SmallVec<[usize; 8]> =
        (0..shape.len()).filter(|&d| solid.iter().any(|(_, sizes)| sizes[d] != shape[d])).collect();
    match split.len() {
        0 => one(shape, solid.len()),
        1 => runs(shape, split[0], &solid),
        2..=MAX_CORNER_DIMS => corners(shape, &split, &solid),
        _ => pairs(shape, &solid),
    }
}

fn one(shape: &[u64], count: usize) -> Result<(), TilingFault> {
    let origin = Dims::from_elem(0, shape.len());
    match count {
        0 => Err(TilingFault::Hole(origin)),
        1 => Ok(()),
        _ => Err(TilingFault::Overlap(origin)),
    }
}

fn runs(shape: &[u64], d: usize, solid: &[Rectangle<'_>]) -> Result<(), TilingFault> {
    let mut ranges: Vec<(u64, u64)> =
        solid.iter().map(|(at, sizes)| (at[d], at[d] + sizes[d])).collect();
    ranges.sort_unstable();
    let point = |x: u64| (0..shape.len()).map(|i| if i == d { x } else { 0 }).collect();
    let mut end = 0;
    for (begin, next) in ranges {
        if begin > end {
            return Err(TilingFault::Hole(point(end)));
        }
        if begin < end {
            return Err(TilingFault::Overlap(point(begin)));
        }
        end = next;
    }
    if end < shape[d] {
        return Err(TilingFault::Hole(point(end)));
    }
    Ok(())
}

type Point = SmallVec<[u64; MAX_CORNER_DIMS]>;

fn corners(shape: &[u64], split: &[usize], solid: &[Rectangle<'_>]) -> Result<(), TilingFault> {
    let mut net: HashMap<Point, i64> = HashMap::with_capacity(solid.len() * 2);
    let mut add = |at: &dyn Fn(usize) -> u64, end: &dyn Fn(usize) -> u64, sign: i64| {
        for corner in 0_u32..1 << split.len() {
            let point = (0..split.len())
                .map(|i| if corner >> i & 1 == 0 { at(split[i]) } else { end(split[i]) })
                .collect();
            let sign = if corner.count_ones() % 2 == 0 { sign } else { -sign };
            *net.entry(point).or_insert(0) += sign;
        }
    };
    for (at, sizes) in solid {
        add(&|d| at[d], &|d| at[d] + sizes[d], 1);
    }
    add(&|_| 0, &|d| shape[d], -1);
    let first = net.into_iter().filter(|(_, count)| *count != 0).min();
    let Some((point, count)) = first else {
        return Ok(());
    };
    let mut whole = Dims::from_elem(0, shape.len());
    for (&d, &x) in split.iter().zip(&point) {
        whole[d] = x;
    }
    Err(if count > 0 { TilingFault::Overlap(whole) } else { TilingFault::Hole(whole) })
}

/// Does the check in quadratic time.
fn pairs(shape: &[u64], solid: &[Rectangle<'_>]) -> Result<(), TilingFault> {
    if let Some((i, j)) = find_overlap(solid) {
        let point = solid[i].0.iter().zip(solid[j].0).map(|(a, b)| *a.max(b)).collect();
        return Err(TilingFault::Overlap(point));
    }
    let volume =
        |sizes: &[u64]| sizes.iter().map(|&size| u128::from(size)).fold(1, u128::saturating_mul);
    if solid.iter().map(|(_, sizes)| volume(sizes)).sum::<u128>() == volume(shape) {
        return Ok(());
    }
    // In each dimension, a corner of the hole is at 0 or at the end of some rectangle. Searching
    // for it would take too long.
    Err(TilingFault::Hole(Dims::from_elem(0, shape.len())))
}

/// Returns two rectangles with a common element, by their positions in the slice.
pub fn find_overlap(rectangles: &[Rectangle<'_>]) -> Option<(usize, usize)> {
    let ndim = rectangles.first()?.0.len();
    let solid: Vec<usize> =
        (0..rectangles.len()).filter(|&i| !rectangles[i].1.contains(&0)).collect();
    // Sweep along the dimension with the fewest rectangles side by side.
    let distinct = |d: usize| {
        let mut begins: Vec<u64> = solid.iter().map(|&i| rectangles[i].0[d]).collect();
        begins.sort_unstable();
        begins.dedup();
        begins.len()
    };
    let Some(sweep) = (0..ndim).max_by_key(|&d| distinct(d)) else {
        return (solid.len() > 1).then(|| (solid[0], solid[1]));
    };
    let mut order = solid;
    order.sort_by_key(|&i| rectangles[i].0[sweep]);
    let end = |i: usize, d: usize| rectangles[i].0[d] + rectangles[i].1[d];
    let mut active: Vec<usize> = Vec::new();
    for i in order {
        active.retain(|&j| end(j, sweep) > rectangles[i].0[sweep]);
        let meets = |&j: &usize| {
            (0..ndim).all(|d| rectangles[i].0[d] < end(j, d) && rectangles[j].0[d] < end(i, d))
        };
        if let Some(&j) = active.iter().find(|j| meets(j)) {
            return Some((i.min(j), i.max(j)));
        }
        active.push(i);
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Offsets and sizes.
    type Owned = (Vec<u64>, Vec<u64>);

    fn rectangle(shape: &[u64]) -> impl Strategy<Value = Owned> + use<> {
        shape
            .iter()
            .map(|&size| (0..=size).prop_flat_map(move |at| (Just(at), 0..=size - at)))
            .collect::<Vec<_>>()
            .prop_map(|sides| sides.into_iter().unzip())
    }

    /// Parts that tile a whole, perhaps with one more or one less rectangle.
    fn case() -> impl Strategy<Value = (Vec<u64>, Vec<Owned>)> {
        let shape = prop::collection::vec(1_u64..6, 0..4);
        (
            shape,
            prop::collection::vec((any::<prop::sample::Index>(), 0..3_usize, 0..5_u64), 0..6),
            any::<bool>(),
            any::<bool>(),
        )
            .prop_flat_map(|(shape, cuts, more, less)| {
                let mut parts = vec![(vec![0; shape.len()], shape.clone())];
                for (which, d, at) in cuts {
                    let part = which.index(parts.len());
                    if d < shape.len() && at <= parts[part].1[d] {
                        let mut rest = parts[part].clone();
                        parts[part].1[d] = at;
                        rest.0[d] += at;
                        rest.1[d] -= at;
                        parts.push(rest);
                    }
                }
                if less {
                    parts.swap_remove(parts.len() / 2);
                }
                let extra = prop::collection::vec(rectangle(&shape), usize::from(more));
                (Just(shape), Just(parts), extra, any::<prop::sample::Index>())
            })
            .prop_map(|(shape, mut parts, extra, shift)| {
                parts.extend(extra);
                if !parts.is_empty() {
                    let by = shift.index(parts.len());
                    parts.rotate_left(by);
                }
                (shape, parts)
            })
    }

    fn cells(shape: &[u64]) -> Vec<Vec<u64>> {
        shape.iter().fold(vec![vec![]], |cells, &size| {
            let longer = |cell: &Vec<u64>| {
                (0..size).map(|x| [cell.as_slice(), &[x]].concat()).collect::<Vec<_>>()
            };
            cells.iter().flat_map(longer).collect()
        })
    }

    fn times_held(cell: &[u64], parts: &[Owned]) -> usize {
        let within = |(at, sizes): &&Owned| {
            (0..cell.len()).all(|d| at[d] <= cell[d] && cell[d] < at[d] + sizes[d])
        };
        parts.iter().filter(within).count()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Comparison with the definition: it counts how often each element is held.
        #[test]
        fn is_what_the_definition_says((shape, parts) in case()) {
            let rectangles: Vec<Rectangle<'_>> =
                parts.iter().map(|(at, sizes)| (at.as_slice(), sizes.as_slice())).collect();
            let held: Vec<usize> =
                cells(&shape).iter().map(|cell| times_held(cell, &parts)).collect();
            for result in [check_tiling(&shape, &rectangles), pairs_of(&shape, &rectangles)] {
                match result {
                    Ok(()) => prop_assert!(held.iter().all(|&n| n == 1)),
                    Err(TilingFault::Overlap(cell)) => prop_assert!(times_held(&cell, &parts) > 1),
                    Err(TilingFault::Hole(_)) => prop_assert!(held.contains(&0)),
                }
            }
            if let Err(TilingFault::Hole(cell)) = check_tiling(&shape, &rectangles) {
                prop_assert_eq!(times_held(&cell, &parts), 0);
            }
            match find_overlap(&rectangles) {
                Some((i, j)) => {
                    let both = [parts[i].clone(), parts[j].clone()];
                    let overlap = cells(&shape).iter().any(|cell| times_held(cell, &both) == 2);
                    prop_assert!(i != j && overlap);
                }
                None => prop_assert!(held.iter().all(|&n| n < 2)),
            }
        }
    }

    fn pairs_of(shape: &[u64], rectangles: &[Rectangle<'_>]) -> Result<(), TilingFault> {
        let solid: Vec<_> =
            rectangles.iter().copied().filter(|(_, sizes)| !sizes.contains(&0)).collect();
        pairs(shape, &solid)
    }
}
