//! Packing covers every item once, within slabs.

use proptest::prelude::*;

use super::pack::{ALIGN, ItemPart, SlabBatch, SlabItem, pack};
use crate::format::BLOCK_SIZE;
use crate::geometry::Dims;

fn flat(file: u32, offset: u64, length: u64) -> SlabItem {
    SlabItem {
        file,
        offset,
        chunk_begin: 0,
        itemsize: 1,
        sizes: Dims::from_slice(&[length]),
        flat: true,
        group: 0,
    }
}

fn places(batch: &SlabBatch) -> Vec<(usize, u64, u64)> {
    batch.pieces.iter().map(|p| (p.item, p.at, p.length)).collect()
}

#[test]
fn large_items_fill_slabs_to_the_last_byte() {
    let batches = pack(&[flat(0, 4096, 5 << 20)], 2 << 20, false);
    let lengths: Vec<_> = batches.iter().map(|batch| batch.pieces[0].length).collect();
    assert_eq!(lengths, [2 << 20, 2 << 20, 1 << 20]);
}

#[test]
fn pieces_lie_one_after_another() {
    let items = [flat(0, 100, 100), flat(1, 100, 100), flat(2, 100, 100)];
    let batches = pack(&items, 1 << 20, false);
    assert_eq!(places(&batches[0]), [(0, 0, 100), (1, 128, 100), (2, 256, 100)]);
}

#[test]
fn verified_items_are_cut_at_blocks() {
    let batches = pack(&[flat(0, 0, 100), flat(1, 4096, 3 * BLOCK_SIZE)], 2 * BLOCK_SIZE, true);
    let all: Vec<_> = batches.iter().map(places).collect();
    assert_eq!(all, [vec![(0, 0, 100), (1, 128, BLOCK_SIZE)], vec![(1, 0, 2 * BLOCK_SIZE)]]);
}

#[test]
fn groups_take_turns() {
    let item = |group| SlabItem { group, ..flat(0, 0, 3 * ALIGN) };
    let batches = pack(&[item(7), item(7), item(7), item(9)], 4 * ALIGN, false);
    let groups: Vec<_> = batches.iter().map(|batch| batch.group).collect();
    assert_eq!(groups, [7, 9, 7, 7]);
}

fn items() -> impl Strategy<Value = Vec<SlabItem>> {
    let item = (
        0_u32..2,
        0_u64..200_000,
        prop::collection::vec(0_u64..9, 0..4),
        0_u32..5,
        any::<bool>(),
        0_u32..2,
        0_u64..9,
    );
    prop::collection::vec(item, 0..40).prop_map(|items| {
        let mut end = [0_u64; 2];
        items
            .into_iter()
            .map(|(file, gap, sizes, power, flat, group, near)| {
                let itemsize = 1 << power;
                // Mostly neighbours, as in real files.
                let offset = end[file as usize] + if near > 2 { near % 3 * itemsize } else { gap };
                let item = SlabItem {
                    file,
                    offset,
                    chunk_begin: 0,
                    itemsize,
                    sizes: sizes.iter().map(|size| size * size).collect(),
                    flat,
                    group,
                };
                end[file as usize] = offset + item.length();
                item
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn every_byte_has_one_place(items in items(), units in 1_u64..2000, verify in any::<bool>()) {
        let slab = units * ALIGN;
        let batches = pack(&items, slab, verify);
        let mut seen = vec![0; items.len()];
        for batch in &batches {
            prop_assert!(!batch.pieces.is_empty());
            let mut end = 0;
            for piece in &batch.pieces {
                let item = &items[piece.item];
                prop_assert_eq!(item.group, batch.group);
                prop_assert!(piece.length > 0 && piece.at >= end && piece.at + piece.length <= slab);
                prop_assert_eq!(piece.at % item.itemsize, 0);
                prop_assert_eq!(piece.length % item.itemsize, 0);
                end = piece.at + piece.length;
                match &piece.part {
                    ItemPart::Bytes(from) => {
                        prop_assert!(item.flat);
                        prop_assert_eq!(*from, seen[piece.item]);
                    }
                    ItemPart::Rectangle(_, sizes) => {
                        prop_assert_eq!(sizes.iter().product::<u64>() * item.itemsize, piece.length);
                    }
                }
                seen[piece.item] += piece.length;
            }
        }
        for (item, seen) in items.iter().zip(seen) {
            prop_assert_eq!(item.length(), seen);
        }
    }
}
