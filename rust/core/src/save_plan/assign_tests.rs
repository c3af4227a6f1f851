//! Every chunk goes to one rank. Chunks that do not tile their tensor are refused.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::encode;
use super::*;
use crate::write::SaveItem;
use crate::write::testing::{self, value};

fn whole(name: &str, shape: &[u64]) -> SaveItem {
    testing::whole(name, "float32", shape)
}

fn rows(name: &str, shape: &[u64], at: u64, count: u64) -> SaveItem {
    testing::rows(name, "float32", shape, &[at, 0], &[count, shape[1]])
}

fn run(ranks: &[Vec<SaveItem>]) -> Result<Assignment> {
    let requests: Vec<_> = ranks.iter().map(|items| encode(items)).collect();
    assign(&requests)
}

fn message(ranks: &[Vec<SaveItem>]) -> (String, String) {
    match run(ranks) {
        Err(Error::TensorPlan { tensor, reason, .. }) => (tensor, reason),
        other => panic!("{other:?}"),
    }
}

fn kept(assignment: &Assignment, rank: usize, item: usize) -> bool {
    assignment.keep[rank][item / 8] >> (item % 8) & 1 == 1
}

#[test]
fn replicas_are_spread_by_bytes() {
    // One tensor of 8 rows and eight of one row: one rank saves the large one, the other the rest.
    let mut items = vec![whole("large", &[8, 16])];
    items.extend((0..8).map(|i| whole(&format!("small.{i}"), &[1, 16])));
    let assignment = run(&[items.clone(), items]).unwrap();
    assert_eq!(assignment.bytes, [512, 512]);
    assert_eq!(assignment.items, 9);
}

#[test]
fn shards_count_before_replicas_are_spread() {
    let of = |rank: u64| {
        vec![
            whole("replica", &[4, 4]),
            rows("shard", &[8, 4], 6 * rank, if rank == 0 { 6 } else { 2 }),
        ]
    };
    let assignment = run(&[of(0), of(1)]).unwrap();
    assert_eq!(assignment.bytes, [96, 96]);
}

#[test]
fn a_bad_plan_names_tensor_and_chunk() {
    let shape = [8, 4];
    let (tensor, reason) = message(&[vec![rows("w", &shape, 0, 4)], vec![rows("w", &shape, 6, 4)]]);
    assert_eq!(tensor, "w");
    assert_eq!(reason, "chunk [4, 4] at [6, 0] of rank 1 lies outside of its shape [8, 4]");
    let (_, reason) = message(&[vec![rows("w", &shape, 0, 5)], vec![rows("w", &shape, 4, 4)]]);
    assert_eq!(
        reason,
        "chunk [5, 4] at [0, 0] of rank 0 overlaps chunk [4, 4] at [4, 0] of rank 1"
    );
    let (_, reason) = message(&[vec![rows("w", &shape, 0, 4)], vec![rows("w", &shape, 5, 3)]]);
    assert_eq!(
        reason,
        "no rank holds element [4, 0] of its shape [8, 4] (the chunks hold 28 of 32 elements)"
    );
    let (_, reason) = message(&[vec![whole("w", &shape)], vec![whole("w", &[4, 8])]]);
    assert_eq!(
        reason,
        "it is a tensor of float32 [8, 4] on rank 0, and a tensor of float32 [4, 8] on rank 1"
    );
    let (_, reason) = message(&[vec![whole("w", &shape)], vec![value("w", 0)]]);
    assert!(reason.ends_with("a value that is not a tensor on rank 1"), "{reason}");
}

#[test]
fn one_rank_may_hold_a_part() {
    run(&[vec![rows("w", &[8, 4], 2, 2), rows("w", &[8, 4], 6, 2)]]).unwrap();
    assert!(run(&[vec![rows("w", &[8, 4], 2, 3), rows("w", &[8, 4], 4, 2)]]).is_err());
}

#[test]
fn empty_tensors_scalars_and_values_are_saved_once() {
    let items = vec![whole("empty", &[0, 3]), whole("scalar", &[]), value("value", 0)];
    let assignment = run(&[items.clone(), items.clone(), items]).unwrap();
    assert_eq!(assignment.items, 3);
    let end = || testing::rows("w", "int8", &[4], &[4], &[0]);
    let part = |at: u64| testing::rows("w", "int8", &[4], &[at], &[2]);
    assert_eq!(run(&[vec![part(0)], vec![part(2)], vec![end()], vec![end()]]).unwrap().items, 3);
}

/// A model of a few tensors. Each is cut into rows, and some ranks hold each part.
fn job() -> impl Strategy<Value = Vec<Vec<SaveItem>>> {
    (1..6_usize).prop_flat_map(|ranks| {
        let part = (1..5_u64, prop::collection::btree_set(0..ranks, 1..=ranks));
        prop::collection::vec(prop::collection::vec(part, 1..4), 0..8).prop_map(move |tensors| {
            let mut job = vec![Vec::new(); ranks];
            for (number, parts) in tensors.iter().enumerate() {
                let shape = [parts.iter().map(|(rows, _)| rows).sum(), 3];
                let mut at = 0;
                for (count, holders) in parts {
                    for &rank in holders {
                        job[rank].push(rows(&format!("t{number}"), &shape, at, *count));
                    }
                    at += count;
                }
            }
            // The order may differ between ranks.
            for items in job.iter_mut().skip(1) {
                items.reverse();
            }
            job
        })
    })
}

proptest! {
    /// Exactly one of its holders saves each chunk.
    #[test]
    fn each_chunk_is_saved_once(job in job()) {
        let assignment = run(&job).unwrap();
        let mut holders: BTreeMap<(&str, &[u64]), BTreeSet<usize>> = BTreeMap::new();
        let mut savers: BTreeMap<(&str, &[u64]), Vec<usize>> = BTreeMap::new();
        let mut loads = vec![0; job.len()];
        for (rank, items) in job.iter().enumerate() {
            for (i, item) in items.iter().enumerate() {
                let key = (item.name.as_str(), item.offsets.as_slice());
                holders.entry(key).or_default().insert(rank);
                if kept(&assignment, rank, i) {
                    savers.entry(key).or_default().push(rank);
                    loads[rank] += item.sizes.iter().product::<u64>() * 4;
                }
            }
        }
        prop_assert_eq!(&loads, &assignment.bytes);
        prop_assert_eq!(savers.len(), holders.len());
        prop_assert_eq!(assignment.items, holders.len() as u64);
        for (key, by) in &savers {
            prop_assert_eq!(by.len(), 1);
            prop_assert!(holders[key].contains(&by[0]));
        }
    }

    /// Items that all ranks hold are spread as evenly as their sizes allow.
    #[test]
    fn replicas_balance(lengths in prop::collection::vec(1..100_u64, 0..30), ranks in 1..6_usize) {
        let named = lengths.iter().enumerate();
        let items: Vec<_> = named.map(|(i, &n)| whole(&format!("t{i}"), &[n])).collect();
        let assignment = run(&vec![items; ranks]).unwrap();
        let bytes = || assignment.bytes.iter();
        let (most, least) = (bytes().max().unwrap(), bytes().min().unwrap());
        prop_assert!(most - least <= 4 * lengths.iter().max().unwrap_or(&0));
        prop_assert_eq!(assignment.bytes.iter().sum::<u64>(), 4 * lengths.iter().sum::<u64>());
    }

    #[test]
    fn a_lost_part_is_noticed(job in job(), at in any::<prop::sample::Index>()) {
        let names: BTreeSet<(String, Dims)> =
            job.iter().flatten().map(|i| (i.name.clone(), i.offsets.clone())).collect();
        prop_assume!(job.len() > 1 && !names.is_empty());
        let (name, offsets) = names.iter().nth(at.index(names.len())).unwrap().clone();
        prop_assume!(names.iter().filter(|(n, _)| *n == name).count() > 1);
        let poorer: Vec<Vec<SaveItem>> = job
            .iter()
            .map(|items| {
                let kept = items.iter().filter(|i| i.name != name || i.offsets != offsets);
                kept.cloned().collect()
            })
            .collect();
        let (tensor, reason) = message(&poorer);
        prop_assert_eq!(tensor, name);
        prop_assert!(reason.starts_with("no rank holds"));
    }
}
