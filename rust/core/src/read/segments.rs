//! The file ranges that a job fetches for its pieces, joined if that is cheaper. Pure, like the
//! plan.

use super::ReadReq;
use super::plan::{Job, Piece, Plan, extent, fetch_range, worth_joining};
use super::policy::Policy;
use crate::copy::Loop;

/// A range of the file that a job needs, for one run or dense rectangle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index in [`Plan::pieces`].
    pub piece: usize,
    /// First byte in the file.
    pub src: u64,
    /// Length in bytes, with the gaps of a dense rectangle.
    pub len: u64,
    /// Offset from the request's destination, in bytes of stored elements.
    pub dst: u64,
    /// The range to fetch: the extent, or with `verify` the blocks that overlap it.
    pub fetch: (u64, u64),
    /// Index of the job's segment that contains `fetch`.
    pub segment: usize,
}

/// An aligned range of the file to fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub start: u64,
    /// The byte after the last that is needed. It need not be aligned, since it may be the end of
    /// the file.
    pub end: u64,
    /// Its aligned offset in a buffer that holds all segments of the job.
    pub at: u64,
}

impl Segment {
    /// Returns the end of its last aligned unit in the buffer.
    pub fn buffer_end(&self, align: u64) -> u64 {
        self.at + (self.end - self.start).next_multiple_of(align)
    }
}

impl Plan {
    /// Computes the extents of a job in the order of the file, and the segments to fetch for them.
    /// Clears both vectors first.
    pub fn extents(
        &self,
        job: &Job,
        reqs: &[ReadReq],
        policy: Policy,
        verify: bool,
        extents: &mut Vec<Extent>,
        segments: &mut Vec<Segment>,
    ) {
        extents.clear();
        segments.clear();
        for piece in job.pieces.0..job.pieces.1 {
            let Piece { req, src, dst, run, .. } = self.pieces[piece];
            let (outer, dense) = self.loops_of(&self.pieces[piece]);
            let len = extent(dense, run);
            each_step(outer, src, dst, &mut |src, dst| {
                extents.push(Extent {
                    piece,
                    src,
                    len,
                    dst,
                    fetch: fetch_range(&reqs[req as usize], src, len, verify),
                    segment: 0,
                });
            });
        }
        if !extents.is_sorted_by_key(|e| e.fetch.0) {
            extents.sort_unstable_by_key(|e| e.fetch.0);
        }
        let mut wanted = 0;
        for extent in extents {
            let (start, end) = (extent.fetch.0 & !(policy.align - 1), extent.fetch.1);
            let new = end - extent.fetch.0;
            if let Some(last) = segments.last_mut() {
                let covered = last.end.next_multiple_of(policy.align);
                let fetched = end.max(last.end) - last.start;
                let near = start.saturating_sub(covered) <= policy.max_gap;
                let read_through = || {
                    !policy.skip_gaps || policy.over_reads || worth_joining(fetched, wanted + new)
                };
                if start <= covered || near && read_through() {
                    wanted += new.min(end.saturating_sub(last.end));
                    last.end = last.end.max(end);
                    extent.segment = segments.len() - 1;
                    continue;
                }
            }
            extent.segment = segments.len();
            let at = segments.last().map_or(0, |s| s.buffer_end(policy.align));
            segments.push(Segment { start, end, at });
            wanted = new;
        }
    }
}

/// Calls `each` with the source and destination offset of every step of the loops, which begin at
/// `(src, dst)`.
pub fn each_step(loops: &[Loop], src: u64, dst: u64, each: &mut impl FnMut(u64, u64)) {
    match loops {
        [] => each(src, dst),
        [outer, rest @ ..] => {
            for i in 0..outer.n {
                each_step(rest, src + i * outer.src, dst + i * outer.dst, each);
            }
        }
    }
}
