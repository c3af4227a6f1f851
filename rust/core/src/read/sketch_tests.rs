//! Estimates by sketches beside what is true.

use proptest::prelude::*;

use super::sketch::*;
use crate::Error;

const MIB: u64 = 1 << 20;

/// A rank that wants these stretches of file 0.
fn wants(stretches: &[(u64, u64)]) -> Sketch {
    let mut sketch = Sketch::default();
    for &(start, end) in stretches {
        sketch.add(0, file_key("a"), start, 1, &[end - start], &[1]);
    }
    sketch
}

/// The answers for ranks of a machine.
fn meet(sketches: &[Sketch]) -> Vec<Option<Common>> {
    let told: Vec<Vec<u8>> = sketches.iter().map(Sketch::to_bytes).collect();
    let answers = compare(&told.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
    let judged = |(sketch, answer): (&Sketch, Vec<u8>)| sketch.judged(&answer);
    sketches.iter().zip(answers).map(judged).collect()
}

/// How many blocks of a rank's sample others want, and how many they do not, as far as that is known.
fn counts(common: Option<&Common>) -> (usize, usize) {
    let all = common.iter().flat_map(|common| common.blocks.values().flatten());
    let (yes, no): (Vec<&(u64, bool)>, Vec<_>) = all.partition(|&&(_, is_common)| is_common);
    (yes.len(), no.len())
}

#[test]
fn replicas_and_pipelines_are_told_apart() {
    let replicas = meet(&[wants(&[(0, 256 * MIB)]), wants(&[(0, 256 * MIB)])]);
    assert!(replicas.iter().all(|common| counts(common.as_ref()) == (SAMPLES, 0)));
    let stages: Vec<_> = (0..4).map(|i| wants(&[(i * 64 * MIB, (i + 1) * 64 * MIB)])).collect();
    for common in meet(&stages) {
        let (yes, no) = counts(common.as_ref());
        assert!(yes == 0 && no > SAMPLES / 2, "{yes} and {no}");
    }
    let alone = meet(&stages[..1]);
    assert_eq!(counts(alone[0].as_ref()), (0, SAMPLES), "alone on the machine");
}

#[test]
fn columns_are_what_their_rows_lie_in_and_long_rows_are_not() {
    let columns = |rank: u64, row: u64, pitch: u64| {
        let mut sketch = Sketch::default();
        sketch.add(0, 7, rank * row, 2, &[256, row / 2], &[pitch, 2]);
        sketch
    };
    for (row, pitch, is_common) in [(4096, 16384, true), (65536, 1 << 18, false), (4096, 1 << 20, false)] {
        let ranks: Vec<_> = (0..4).map(|rank| columns(rank, row, pitch)).collect();
        for common in meet(&ranks) {
            let (yes, no) = counts(common.as_ref());
            assert!(yes + no > 16, "{row} of {pitch}: {yes} and {no}");
            assert_eq!(
                (yes > 0, no > 0),
                (is_common, !is_common),
                "{row} of {pitch}: {yes} and {no}"
            );
        }
    }
}

#[test]
fn order_and_repetition_change_nothing() {
    let (one, two) = ((0, 5 * MIB), (9 * MIB, 200 * MIB));
    let sketch = wants(&[one, two]);
    assert_eq!(sketch.to_bytes(), wants(&[two, one, one]).to_bytes());
    assert_eq!(sketch.to_bytes().len(), SAMPLES * HASH_BYTES);
    let mut other = Sketch::default();
    other.add(3, file_key("b"), 0, 1, &[200 * MIB], &[1]);
    assert_ne!(sketch.to_bytes(), other.to_bytes(), "of another file");
    let mut same = Sketch::default();
    // Rows in an order of their own, and a dimension that is not there.
    same.add(5, file_key("a"), 0, 4, &[1, 1024, 1280], &[9, 4, 4096]);
    assert_eq!(same.to_bytes(), wants(&[one]).to_bytes());
    assert!(wants(&[(7, 7)]).to_bytes().is_empty());
}

#[test]
fn what_is_replicated_is_told_from_what_is_a_ranks_own_in_one_file() {
    let embedding = (0, 64 * MIB);
    let norm = |rank: u64| (embedding.1 + rank * 64 * MIB, embedding.1 + rank * 64 * MIB + 4096);
    let layer = |rank: u64| (norm(rank).1, embedding.1 + (rank + 1) * 64 * MIB);
    let ranks: Vec<_> = (0..4)
        .map(|rank| wants(&[embedding, norm(rank), layer(rank)]))
        .collect();
    for (rank, common) in (0..).zip(meet(&ranks)) {
        let stretches = [embedding, layer(rank)].map(|(start, end)| (0, start, end));
        assert_eq!(common.unwrap().judge(&stretches), [true, false]);
    }
}

#[test]
fn what_has_no_block_in_the_sample_goes_as_most_of_its_file_do() {
    let mut common = Common::default();
    common.blocks.insert(0, vec![(0, true), (100, false), (200, false)]);
    common.blocks.insert(1, vec![(0, true)]);
    let at = |block: u64| (block * BLOCK, (block + 1) * BLOCK);
    let stretch = |file, (start, end): (u64, u64)| (file, start, end);
    let asked = [
        stretch(0, at(0)),
        stretch(0, at(100)),
        stretch(0, at(200)),
        stretch(0, at(300)),
        stretch(1, at(0)),
        stretch(1, at(9)),
        stretch(2, at(0)),
    ];
    // Of all that is known, as much is common as is not.
    assert_eq!(common.judge(&asked), [true, false, false, false, true, true, false]);
}

#[test]
fn what_is_no_answer_tells_nothing_and_what_is_no_sketch_is_refused() {
    let sketch = wants(&[(0, 3 * BLOCK)]);
    for answer in [&[][..], &[0], &[0, 0], &[4, 0], &[3], &[3, 0, 0]] {
        assert!(sketch.judged(answer).is_none(), "{answer:?}");
    }
    assert!(sketch.judged(&[3, 0]).is_some());
    let ascending: Vec<u8> = (0..=SAMPLES as u64)
        .flat_map(|i| i.to_le_bytes()[..5].to_vec())
        .collect();
    for bad in [&[1, 2, 3][..], &[9; 10], &ascending] {
        assert!(matches!(compare(&[&sketch.to_bytes(), bad]), Err(Error::Plan(_))));
    }
}

#[test]
fn one_that_wants_little_beside_one_that_wants_much_is_told_what_is_known() {
    let (much, little) = (wants(&[(0, 4 << 30)]), wants(&[(0, 4 * BLOCK)]));
    let answers = meet(&[much, little]);
    let (yes, no) = counts(answers[0].as_ref());
    assert!(yes <= 4 && no >= SAMPLES - 4, "{yes} and {no}");
    // Four blocks of 131,072: hardly one is among the 128 that the other tells of.
    assert_eq!(counts(answers[1].as_ref()).1, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Two ranks that want as much, of which a part is the same, and a third one with something of the first's own.
    #[test]
    fn the_estimate_is_near_the_truth(
        blocks in 2_000_u64..200_000, same in 0.0..=1.0_f64, seed: u64, third in 0.0..=1.0_f64
    ) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a part of them")]
        let part = |share: f64| (blocks as f64 * share) as u64;
        let rank = |stretches: &[(u64, u64)]| {
            let mut sketch = Sketch::default();
            for &(from, to) in stretches {
                sketch.add(0, seed, from * BLOCK, 1, &[(to - from) * BLOCK], &[1]);
            }
            sketch
        };
        let shift = blocks - part(same);
        let third = part(third);
        let answers = meet(&[
            rank(&[(0, blocks)]),
            rank(&[(shift, shift + blocks)]),
            rank(&[(0, third), (9 * blocks, 10 * blocks - third)]),
        ]);
        // The second wants what begins at `shift`, the third what ends at `third`.
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let truth = (third.min(shift) + blocks - shift) as f64 / blocks as f64;
        let (yes, no) = counts(answers[0].as_ref());
        prop_assert!(yes + no >= 64, "{yes} and {no} of {SAMPLES} are known");
        #[expect(clippy::cast_precision_loss, reason = "no more than 128")]
        let share = yes as f64 / (yes + no) as f64;
        // Of 64 independent samples, five standard deviations are 0.31.
        prop_assert!((share - truth).abs() < 0.32, "{share}, and not {truth}");
    }
}
