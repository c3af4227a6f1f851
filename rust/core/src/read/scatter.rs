//! Parts of a job that go from a store directly to their destinations. Pure, like the plan.

use super::batch::Batch;
use super::plan::{Job, Piece, RUN};
use super::segments::{Extent, Segment, each_step};
use super::{Operation, ReadReq};
use crate::format::BLOCK_SIZE;
use crate::store::{Destination, FetchRange, Run};

/// Shorter runs are better gathered in a buffer first.
const MIN_RUN: u64 = 512;

/// Returns whether all of a job goes directly to its destinations. Its runs must be long enough.
/// Blocks that are verified must be read whole, so that they can be hashed as they arrive.
pub fn goes_straight(batch: &Batch, job: &Job) -> bool {
    if batch.visitor.is_some() {
        return false;
    }
    batch.plan.pieces[job.pieces.0..job.pieces.1].iter().all(|piece| {
        let req = &batch.reqs[piece.req as usize];
        let is_run = piece.loops == RUN;
        if req.operation != Operation::Copy {
            return false;
        }
        if batch.verify && req.digests.is_some() {
            return is_run && is_of_whole_blocks(req, piece);
        }
        is_run || piece.run >= MIN_RUN
    })
}

fn is_of_whole_blocks(req: &ReadReq, piece: &Piece) -> bool {
    let from = piece.src - req.chunk_offset;
    let to = from + piece.run;
    from.is_multiple_of(BLOCK_SIZE) && (to.is_multiple_of(BLOCK_SIZE) || to == req.chunk_length)
}

/// Returns the parts to fetch for the extents of a job that [`goes_straight`], one for each
/// segment.
pub fn parts(batch: &Batch, extents: &[Extent], segments: &[Segment]) -> Vec<FetchRange> {
    let mut parts: Vec<FetchRange> = segments
        .iter()
        .map(|segment| FetchRange::new(segment.start, segment.end, Vec::new()))
        .collect();
    for extent in extents {
        let piece = &batch.plan.pieces[extent.piece];
        let req = &batch.reqs[piece.req as usize];
        let base = req.dst.0;
        // A verified piece is one whole block.
        let expected = req.digests.filter(|_| batch.verify).map(|first| {
            let block = (piece.src - req.chunk_offset) / BLOCK_SIZE;
            batch.catalog.digest(first + block)
        });
        let (_, dense) = batch.plan.loops_of(piece);
        let runs = &mut parts[extent.segment].runs;
        each_step(dense, extent.src, extent.dst, &mut |src, dst| {
            runs.push(Run {
                at: src,
                len: piece.run,
                // An offset in memory fits in a `usize`.
                to: Destination(base.wrapping_add(usize::try_from(dst).unwrap_or(usize::MAX))),
                expected,
            });
        });
    }
    for part in &mut parts {
        if !part.runs.is_sorted_by_key(|run| run.at) {
            part.runs.sort_unstable_by_key(|run| run.at);
        }
    }
    parts
}

/// Returns the parts to fetch all segments to their offsets in a buffer.
pub fn whole(segments: &[Segment], buffer: *mut u8) -> Vec<FetchRange> {
    let part = |segment: &Segment| {
        let (at, len) = (segment.start, segment.end - segment.start);
        let to = buffer.wrapping_add(usize::try_from(segment.at).unwrap_or(usize::MAX));
        FetchRange::new(at, segment.end, vec![Run { at, len, to: Destination(to), expected: None }])
    };
    segments.iter().filter(|s| s.end > s.start).map(part).collect()
}
