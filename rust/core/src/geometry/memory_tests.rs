//! Footprints and passes, compared byte by byte.

use std::collections::BTreeSet;

use proptest::prelude::*;
use smallvec::smallvec;

use super::{Footprint, Write, contested, passes};

fn footprint(start: u64, itemsize: u64, dims: &[(u64, u64)]) -> Footprint {
    let (shape, strides): (Vec<_>, Vec<_>) = dims.iter().copied().unzip();
    Footprint::new(0, start, itemsize, &shape, &strides).unwrap()
}

/// The bytes of every element.
fn bytes(start: u64, itemsize: u64, dims: &[(u64, u64)]) -> Vec<u64> {
    let mut at = vec![start];
    for &(n, stride) in dims {
        at = at.iter().flat_map(|&a| (0..n).map(move |i| a + i * stride)).collect();
    }
    at.iter().flat_map(|&a| a..a + itemsize).collect()
}

fn has_twice(mut bytes: Vec<u64>) -> bool {
    bytes.sort_unstable();
    bytes.windows(2).any(|pair| pair[0] == pair[1])
}

#[test]
fn layouts_of_tensors() {
    // (sizes and strides, whether elements share bytes), of 4-byte elements
    let cases: &[(&[(u64, u64)], bool)] = &[
        (&[], false),
        (&[(3, 4), (3, 4)], true),   // as_strided((3, 3), (1, 1))
        (&[(5, 0)], true),           // expanded
        (&[(1, 0), (4, 4)], false),  // expanded to what it is
        (&[(3, 4), (5, 12)], false), // transposed
        (&[(4, 12), (2, 4)], false), // columns
        (&[(6, 4), (3, 4)], true),   // unfold(0, 3, 1)
        (&[(2, 12), (3, 8)], false), // interleaved, and apart
        (&[(2, 3), (2, 16)], true),  // elements that are not aligned to each other
        (&[(0, 4), (9, 0)], false),  // empty
        (&[(1 << 20, 4), (1 << 20, 1 << 22)], false),
    ];
    for (dims, shared) in cases {
        assert_eq!(footprint(64, 4, dims).overlaps_itself(), *shared, "{dims:?}");
    }
}

#[test]
fn the_same_bytes_are_equal() {
    let one = footprint(64, 4, &[(6, 4)]);
    for dims in [&[(2, 12), (3, 4)][..], &[(3, 4), (2, 12)], &[(1, 999), (6, 4)]] {
        assert_eq!(footprint(64, 4, dims), one);
    }
    assert_eq!(footprint(64, 8, &[(3, 8)]), one);
    assert_eq!(footprint(64, 2, &[(4, 40), (3, 8)]), footprint(64, 2, &[(3, 8), (4, 40)]));
    assert_ne!(footprint(68, 4, &[(6, 4)]), one);
}

#[test]
fn what_ends_beyond_memory_is_refused() {
    assert!(Footprint::new(0, 8, 4, &[2], &[u64::MAX]).is_none());
    assert!(Footprint::new(0, 8, 4, &[1 << 40, 1 << 40], &[1 << 42, 4]).is_none());
    assert!(Footprint::new(0, u64::MAX - 8, 4, &[4], &[4]).is_none());
    assert!(Footprint::new(0, 8, 4, &[2], &[]).is_none());
}

fn one(footprint: Footprint) -> Write {
    Write { footprints: smallvec![footprint], covers: true }
}

#[test]
fn many_columns_and_many_rows_are_apart() {
    // Columns of a matrix, and tiles of one: their address ranges overlap.
    let columns = (0..3000).map(|i| one(footprint(4096 + i * 40, 4, &[(1000, 120_000), (10, 4)])));
    let tiles = (0..60).flat_map(|r| {
        (0..50).map(move |c| {
            one(footprint(1 << 40 | (r * 16 * 8000 + c * 160), 4, &[(16, 8000), (40, 4)]))
        })
    });
    let writes: Vec<_> = columns.chain(tiles).collect();
    assert!(passes(&writes).iter().all(|pass| *pass == Some(0)));
}

#[test]
fn ties_are_written_once_or_in_turn() {
    let writes = [
        one(footprint(64, 4, &[(8, 4)])),
        one(footprint(64, 4, &[(2, 16), (4, 4)])),
        one(footprint(80, 4, &[(1, 4)])),
        one(footprint(64, 8, &[(4, 8)])),
        one(footprint(96, 8, &[(4, 8)])),
    ];
    assert_eq!(passes(&writes), [None, None, Some(0), Some(1), Some(0)]);
    // A write that may skip some of its memory does not hide another.
    let some = Write { covers: false, ..writes[0].clone() };
    let writes = [writes[0].clone(), some.clone(), some];
    assert_eq!(passes(&writes), [Some(0), Some(1), Some(2)]);
}

type Dims = Vec<(u64, u64)>;

fn layout() -> impl Strategy<Value = (u64, u64, Dims)> {
    let dims = prop::collection::vec((0_u64..5, 0_u64..24), 0..4);
    (0_u64..80, prop::sample::select(vec![1_u64, 2, 4]), dims)
}

/// Blocks of one matrix, the whole matrix, and its transpose: the destinations of real loads.
fn block() -> impl Strategy<Value = (u64, u64, Dims)> {
    (0_u64..6, 0_u64..8, 1_u64..7, 1_u64..9, any::<bool>()).prop_map(
        |(r, c, rows, columns, transposed)| {
            let mut dims = vec![(rows.min(6 - r), 32), (columns.min(8 - c), 4)];
            if transposed {
                dims.reverse();
            }
            (r * 32 + c * 4, 4, dims)
        },
    )
}

fn either() -> impl Strategy<Value = (u64, u64, Dims)> {
    prop_oneof![layout(), block(), block()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn finds_what_overlaps_itself((start, itemsize, dims) in either()) {
        prop_assert_eq!(
            footprint(start, itemsize, &dims).overlaps_itself(),
            has_twice(bytes(start, itemsize, &dims))
        );
    }

    #[test]
    fn what_meets_is_not_of_one_turn(a in either(), b in either()) {
        let (x, y) = (footprint(a.0, a.1, &a.2), footprint(b.0, b.1, &b.2));
        let (p, q): (BTreeSet<_>, BTreeSet<_>) =
            (bytes(a.0, a.1, &a.2).into_iter().collect(), bytes(b.0, b.1, &b.2).into_iter().collect());
        if !p.is_empty() && !q.is_empty() {
            let writes = [one(x.clone()), one(y.clone())];
            let apart = passes(&writes) == [Some(0), Some(0)];
            prop_assert!(!apart || p.is_disjoint(&q));
            let hidden = passes(&writes)[0].is_none();
            prop_assert!(!hidden || p == q);
            let mut reaches = [x.reach(0), y.reach(1)];
            prop_assert!(p.is_disjoint(&q) || !contested(&mut reaches).is_empty());
        }
    }

    /// With the writes of a pass in any order, passes give the same bytes as writes one after
    /// another. No byte occurs twice in a pass.
    #[test]
    fn turns_are_as_one_after_another(
        layouts in prop::collection::vec((either(), any::<bool>()), 0..12),
        again in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut layouts = layouts;
        for at in again {
            if !layouts.is_empty() {
                layouts.push(at.get(&layouts).clone());
            }
        }
        let touched: Vec<Vec<u64>> = layouts
            .iter()
            .map(|((start, itemsize, dims), _)| bytes(*start, *itemsize, dims))
            .collect();
        let writes: Vec<Write> = layouts
            .iter()
            .filter(|((_, _, dims), _)| dims.iter().all(|dim| dim.0 > 0))
            .map(|((start, itemsize, dims), covers)| Write {
                footprints: smallvec![footprint(*start, *itemsize, dims)],
                covers: *covers,
            })
            .collect();
        let touched: Vec<_> = touched.into_iter().filter(|bytes| !bytes.is_empty()).collect();
        let mut memory = vec![usize::MAX; 400];
        for (i, bytes) in touched.iter().enumerate() {
            for &byte in bytes {
                memory[usize::try_from(byte).unwrap()] = i;
            }
        }
        let passes = passes(&writes);
        let mut in_turns = vec![usize::MAX; 400];
        for pass in 0..=passes.iter().flatten().max().copied().unwrap_or(0) {
            let mut seen = BTreeSet::new();
            for i in (0..writes.len()).rev().filter(|&i| passes[i] == Some(pass)) {
                for byte in touched[i].iter().copied().collect::<BTreeSet<_>>() {
                    prop_assert!(seen.insert(byte), "two writes of one pass");
                    in_turns[usize::try_from(byte).unwrap()] = i;
                }
            }
        }
        prop_assert_eq!(memory, in_turns);
    }
}
