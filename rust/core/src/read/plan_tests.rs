//! Tables and properties of the planner.

use proptest::prelude::*;
use smallvec::smallvec;

use super::plan::*;
use super::policy::{MAX_GAP, Policy};
use super::{Catalog, Destination, FileRef, Operation, ReadReq};
use crate::Dtype;
use crate::copy::Accumulate;
use crate::geometry::Dims;

const MIB: u64 = 1 << 20;
const DISK: Policy = Policy {
    target: 2 * MIB,
    align: 4096,
    skip_gaps: true,
    max_gap: MAX_GAP,
    over_reads: false,
    row_gap: 0,
    seek_cost: 32 << 10,
    max_pieces: 2048,
};
const MAPPED: Policy = Policy { target: 2 * MIB, align: 1, skip_gaps: false, ..DISK };

struct NoNames;

impl Catalog for NoNames {
    fn tensor_name(&self, tensor: u32) -> String {
        format!("t{tensor}")
    }
    fn digest(&self, _: u64) -> u64 {
        0
    }
}

fn file(size: u64) -> FileRef {
    FileRef::new("x", size)
}

fn rect(
    chunk_offset: u64,
    chunk_length: u64,
    src_offset: u64,
    dims: &[(u64, u64, u64)],
    itemsize: u64,
) -> ReadReq {
    ReadReq {
        digests: Some(0),
        itemsize,
        shape: dims.iter().map(|d| d.0).collect(),
        src_offset,
        src_strides: dims.iter().map(|d| d.1).collect(),
        dst_strides: dims.iter().map(|d| d.2).collect(),
        ..ReadReq::bytes(0, 0, chunk_offset, chunk_length, Destination(std::ptr::null_mut()))
    }
}

fn run(offset: u64, length: u64) -> ReadReq {
    rect(offset, length, 0, &[(length, 1, 1)], 1)
}

fn made(reqs: &[ReadReq], policy: Policy, verify: bool) -> (Plan, Vec<Vec<(u64, u64)>>) {
    let files = [file(1 << 40)];
    let made = plan(&files, reqs, &[policy], verify, &NoNames).unwrap();
    let (mut extents, mut segments) = (vec![], vec![]);
    let mut all = vec![];
    for job in &made.jobs {
        made.extents(job, reqs, policy, verify, &mut extents, &mut segments);
        all.push(segments.iter().map(|s| (s.start, s.end)).collect());
    }
    (made, all)
}

fn fetched(segments: &[Vec<(u64, u64)>], align: u64) -> u64 {
    segments.iter().flatten().map(|s| (s.1 - s.0).next_multiple_of(align)).sum()
}

#[test]
fn long_runs_are_cut_at_multiples_of_the_target() {
    let (_, segments) = made(&[run(3 * MIB, 4 * MIB + 7)], DISK, false);
    assert_eq!(
        segments,
        [vec![(3 * MIB, 4 * MIB)], vec![(4 * MIB, 6 * MIB)], vec![(6 * MIB, 7 * MIB + 7)],]
    );
}

#[test]
fn neighbours_are_fetched_together() {
    let reqs: Vec<_> = (0..20_000).map(|i| run(4096 + i * 4096, 4096)).collect();
    for policy in [DISK, MAPPED] {
        let (plan, segments) = made(&reqs, policy, false);
        assert!(plan.jobs.len() <= 20_000 * 4096 / (2 << 20) + 1, "{} jobs", plan.jobs.len());
        assert!(segments.iter().all(|s| s.len() == 1));
        assert_eq!(fetched(&segments, 1), 20_000 * 4096);
    }
}

#[test]
fn requests_may_come_in_any_order() {
    let mut reqs: Vec<_> = (0..1000).map(|i| run(i * 100, 100)).collect();
    reqs.reverse();
    let (plan, segments) = made(&reqs, DISK, false);
    assert_eq!((plan.jobs.len(), segments), (1, vec![vec![(0, 100_000)]]));
}

#[test]
fn gaps_are_read_only_while_that_stays_cheap() {
    // (wanted, gap) -> segments of the first of many
    let cases = [
        (1 << 20, 32 << 10, 1usize), // small against what surrounds it
        (256 << 10, 512 << 10, 8),   // too large to read
        (8 << 10, 64 << 10, 8),      // over-read ninefold
        (100, 300, 1),               // within pages that are read anyway
    ];
    for (wanted, gap, want) in cases {
        let reqs: Vec<_> = (0..8).map(|i| run(i * (wanted + gap), wanted)).collect();
        let big = Policy { target: 1 << 30, ..DISK };
        let (_, segments) = made(&reqs, big, false);
        assert_eq!(segments.iter().map(Vec::len).sum::<usize>(), want, "{wanted} {gap}");
    }
}

#[test]
fn over_read_of_shards_is_bounded() {
    let (rows, row) = (4096, 8192);
    let length = rows * row;
    for align in [512, 4096] {
        let policy = Policy { align, ..DISK };
        // Row shards: nothing but the alignment.
        let shard =
            rect(4096 + 512, length, 3 * length / 8, &[(rows / 8, row, row), (row / 2, 2, 2)], 2);
        let (_, segments) = made(&[shard], policy, false);
        assert!(fetched(&segments, align) * 100 <= (length / 8) * 105);
        // Column shards of a quarter and a half.
        for (parts, column) in [(4, 0), (4, 1), (4, 3), (2, 1)] {
            let width = row / parts;
            let shard =
                rect(4096, length, column * width, &[(rows, row, width), (width / 2, 2, 2)], 2);
            let (plan, segments) = made(&[shard], policy, false);
            assert_eq!(plan.jobs.iter().map(|j| j.wanted).sum::<u64>(), length / parts);
            let ratio = fetched(&segments, align) * 100 / (length / parts);
            let bound = if align == 512 { 150 } else { 200 };
            assert!(ratio <= bound, "{parts} {column} {align}: {ratio}%");
        }
    }
}

#[test]
fn verified_reads_fetch_whole_blocks() {
    let mut req = run(4096, 3 * MIB + 5);
    req.shape = smallvec![10];
    req.src_offset = MIB - 3;
    let (_, segments) = made(&[req.clone()], DISK, true);
    assert_eq!(segments, [vec![(4096, 4096 + 2 * MIB)]]);
    req.src_offset = 3 * MIB - 1;
    req.shape = smallvec![6];
    let (_, segments) = made(&[req.clone()], MAPPED, true);
    assert_eq!(segments, [vec![(4096 + 2 * MIB, 4096 + 3 * MIB + 5)]]);
    // Without digests there is no reason to fetch a whole block.
    req.digests = None;
    let (_, segments) = made(&[req], MAPPED, true);
    assert_eq!(segments, [vec![(4096 + 3 * MIB - 1, 4096 + 3 * MIB + 5)]]);
}

#[test]
fn refuses_what_lies_outside() {
    let files = [file(1000)];
    let refused = |req: ReadReq| {
        let error = plan(&files, &[req], &[DISK], false, &NoNames).unwrap_err();
        assert!(error.to_string().contains("t0"), "{error}");
    };
    refused(run(500, 501));
    refused(run(u64::MAX, 2));
    refused(rect(0, 100, 90, &[(11, 1, 1)], 1));
    refused(rect(0, 100, u64::MAX, &[(1, 1, 1)], 1));
    refused(rect(0, 100, 0, &[(2, u64::MAX, 1)], 1));
    refused(ReadReq { file: 1, ..run(0, 1) });
    let mut odd = run(0, 10);
    odd.src_strides = Dims::new();
    refused(odd);
    // Nothing is requested, so nothing can be out of bounds.
    assert!(
        plan(&files, &[rect(0, 0, 0, &[(0, 1, 1)], 1)], &[DISK], false, &NoNames)
            .unwrap()
            .jobs
            .is_empty()
    );
}

#[test]
fn of_several_bad_requests_the_first_is_named() {
    let files: Vec<FileRef> = (0..4).map(|_| file(1000)).collect();
    let bad = |tensor, file| ReadReq { file, tensor, ..run(900, 101) };
    let reqs = [run(0, 1), bad(1, 3), bad(2, 0), bad(3, 1)];
    for threads in 1..5 {
        let error = plan_by(threads, &files, &reqs, &[DISK; 4], false, &NoNames).unwrap_err();
        assert!(error.to_string().contains("t1"), "{error}");
    }
}

/// Returns every (file byte, destination byte) pair of the requests, by plain loops.
fn pairs(reqs: &[ReadReq]) -> Vec<(usize, u64, u64)> {
    fn walk(req: &ReadReq, d: usize, src: u64, dst: u64, each: &mut impl FnMut(u64, u64)) {
        if d == req.shape.len() {
            (0..req.itemsize).for_each(|b| each(src + b, dst + b));
        } else {
            (0..req.shape[d]).for_each(|i| {
                walk(req, d + 1, src + i * req.src_strides[d], dst + i * req.dst_strides[d], each);
            });
        }
    }
    let mut all = vec![];
    for (i, req) in reqs.iter().enumerate() {
        walk(req, 0, req.chunk_offset + req.src_offset, 0, &mut |s, d| {
            all.push((i, s, d));
        });
    }
    all.sort_unstable();
    all
}

proptest! {
    #[test]
    fn the_plan_is_the_same_on_any_number_of_threads(
        reqs in requests(),
        of in prop::collection::vec(0u32..5, 12),
        threads in 2usize..6,
        verify: bool,
        direct: bool,
    ) {
        let files: Vec<FileRef> = (0..5).map(|_| file(1 << 40)).collect();
        let reqs: Vec<ReadReq> =
            reqs.into_iter().zip(of).map(|(req, file)| ReadReq { file, ..req }).collect();
        let policies = [if direct { DISK } else { MAPPED }; 5];
        let one = plan_by(1, &files, &reqs, &policies, verify, &NoNames).unwrap();
        let many = plan_by(threads, &files, &reqs, &policies, verify, &NoNames).unwrap();
        prop_assert_eq!(one.jobs, many.jobs);
        prop_assert_eq!(one.pieces, many.pieces);
        prop_assert_eq!(one.loops, many.loops);
    }
}

fn requests() -> impl Strategy<Value = Vec<ReadReq>> {
    let dims = prop::collection::vec((0u64..7, 0u64..3000, 0u64..300), 0..4);
    let one =
        (0u64..20_000, dims, 1u64..5, 0u64..100).prop_map(|(offset, dims, itemsize, lead)| {
            let extent: u64 =
                dims.iter().map(|d| d.0.saturating_sub(1) * d.1).sum::<u64>() + itemsize;
            rect(offset, lead + extent + 9, lead, &dims, itemsize)
        });
    prop::collection::vec(one, 0..12)
}

/// From a store, gaps between columns are fetched too, since a request for each row would take
/// longer. Gaps that cost more than a request are skipped.
#[test]
fn a_store_reads_through_what_a_request_would_cost() {
    let policy = super::policy::Access::Remote.policy(u64::from(u32::MAX));
    let columns = |pitch: u64| rect(0, 16 * pitch, 0, &[(16, pitch, 1024), (1024, 1, 1)], 1);
    for (pitch, requests) in [(4096, 1), (512 << 10, 1), (4 * MIB, 16)] {
        let reqs = [columns(pitch)];
        let plan = plan(&[file(1 << 40)], &reqs, &[policy], false, &NoNames).unwrap();
        let (mut extents, mut segments, mut all) = (vec![], vec![], 0);
        for job in &plan.jobs {
            plan.extents(job, &reqs, policy, false, &mut extents, &mut segments);
            all += segments.len();
        }
        assert_eq!(all, requests, "rows {pitch} bytes apart");
    }
}

/// A column of a wide matrix is read together with the gaps between its rows, unless the rows are
/// far apart.
#[test]
fn thin_rows_are_read_through() {
    let policy = Policy { row_gap: MAX_GAP, ..DISK };
    let columns =
        |rows: u64, pitch: u64| rect(0, rows * pitch, 0, &[(rows, pitch, 4096), (4096, 1, 1)], 1);
    let (_, segments) = made(&[columns(1000, 16 << 10)], policy, false);
    assert!(segments.iter().all(|segments| segments.len() == 1));
    // Everything but the gap after the last row of each job.
    let jobs = segments.len() as u64;
    assert_eq!(fetched(&segments, 4096), 1000 * (16 << 10) - jobs * (12 << 10));

    // Five times the requested bytes; and a gap of more than 64 KiB.
    for (pitch, width) in [(20 << 10, 4096), (128 << 10, 60 << 10)] {
        let rows = rect(0, 100 * pitch, 0, &[(100, pitch, width), (width, 1, 1)], 1);
        let (_, segments) = made(&[rows], policy, false);
        assert_eq!(fetched(&segments, 4096), 100 * width, "rows of {width} bytes every {pitch}");
    }
    // Two planes of columns, far apart: the gap between the planes is never read.
    let planes =
        rect(0, 8 * MIB, 0, &[(2, 4 * MIB, 64 << 10), (16, 16 << 10, 4096), (4096, 1, 1)], 1);
    let (_, segments) = made(&[planes], policy, false);
    assert_eq!(fetched(&segments, 4096), 2 * (15 * (16 << 10) + 4096));
}

/// Rows of two shards, each fetched row by row, are so close that everything between them is
/// fetched. A buffer has to hold that.
#[test]
fn a_buffer_holds_what_lies_between_the_rows_of_two_shards() {
    let policy = super::policy::Access::Remote.policy(u64::from(u32::MAX));
    let pitch = 3 * MIB / 2;
    let shard = |at: u64| rect(0, 4 * pitch, at, &[(4, pitch, 64), (64, 1, 1)], 1);
    let reqs = [shard(0), shard(600_000)];
    let (plan, segments) = made(&reqs, policy, false);
    assert_eq!((plan.jobs.len(), segments[0].len()), (1, 1));
    assert_eq!(plan.jobs[0].buffer, 3 * pitch + 600_064);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// The jobs copy exactly the requested bytes, each once, from fetched segments.
    #[test]
    fn jobs_cover_requests(
        reqs in requests(),
        target in prop::sample::select(vec![64u64, 1000, 4096, 65536]),
        align in prop::sample::select(vec![1u64, 512]),
        skip_gaps: bool,
        over_reads: bool,
        row_gap in prop::sample::select(vec![0u64, 500, 65536]),
        verify: bool,
    ) {
        let row_gap = if skip_gaps && !over_reads { row_gap } else { 0 };
        let policy = Policy { target, align, skip_gaps, over_reads, row_gap, ..DISK };
        let files = [file(1 << 40)];
        let plan = plan(&files, &reqs, &[policy], verify, &NoNames).unwrap();
        let (mut extents, mut segments, mut got) = (vec![], vec![], vec![]);
        let mut next = 0;
        for job in &plan.jobs {
            prop_assert_eq!(job.pieces.0, next);
            next = job.pieces.1;
            plan.extents(job, &reqs, policy, verify, &mut extents, &mut segments);
            for pair in segments.windows(2) {
                prop_assert!(pair[0].end <= pair[1].start);
                prop_assert!(pair[0].buffer_end(align) <= pair[1].at);
            }
            for s in &segments {
                prop_assert!(s.start % align == 0 && s.at % align == 0 && s.start < s.end);
            }
            prop_assert!(segments.last().is_none_or(|s| s.buffer_end(align) <= job.buffer));
            let before = got.len();
            for e in &extents {
                let segment = segments[e.segment];
                prop_assert!(segment.start <= e.fetch.0 && e.fetch.1 <= segment.end);
                prop_assert!(e.fetch.0 <= e.src && e.src + e.len <= e.fetch.1);
                let piece = plan.pieces[e.piece];
                let (_, dense) = plan.loops_of(&piece);
                let dims: Vec<_> = dense.iter().map(|l| (l.n, l.src, l.dst)).collect();
                let mut part = rect(e.src, 0, 0, &dims, 1);
                part.itemsize = piece.run;
                for (_, s, d) in pairs(&[part]) {
                    prop_assert!(s < e.src + e.len);
                    got.push((piece.req as usize, s, d + e.dst));
                }
            }
            prop_assert_eq!((got.len() - before) as u64, job.wanted);
        }
        prop_assert_eq!(next, plan.pieces.len());
        got.sort_unstable();
        prop_assert_eq!(got, pairs(&reqs));
    }
}

#[test]
fn elements_that_are_added_are_not_cut_apart() {
    // A chunk at an odd byte of the file: multiples of the target in the file split elements.
    let sink = Accumulate::new(Dtype::from_name("bfloat16").unwrap(), 0.5, false).unwrap();
    let reqs = [ReadReq {
        operation: Operation::Accumulate(sink),
        ..rect(3 * MIB + 13, 5 * MIB, 0, &[(5 * MIB / 2, 2, 4)], 2)
    }];
    for (policy, verify) in [(DISK, false), (DISK, true)] {
        let (plan, _) = made(&reqs, policy, verify);
        assert!(plan.pieces.len() > 1);
        for piece in &plan.pieces {
            assert_eq!(piece.run % 2, 0);
            assert_eq!(piece.dst, piece.src - reqs[0].chunk_offset, "in bytes of stored elements");
        }
    }
    let bad = ReadReq { dst_strides: smallvec![3], ..reqs[0].clone() };
    let files = [file(1 << 40)];
    let refused = plan(&files, &[bad], &[DISK], false, &NoNames).unwrap_err();
    assert!(refused.to_string().contains("do not fit together"), "{refused}");
}
