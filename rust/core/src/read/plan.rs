//! Planning: from requests to jobs. It is pure, so that tables and properties can test it.
//!
//! A *piece* is the part of the file that one copy reads: a run, or a strided rectangle that is
//! small enough for one job. A *job* is a group of neighbouring pieces in one file, for one thread.
//! Its *segments* are the file ranges to fetch: those of its pieces, joined if reading the gap is
//! cheaper than skipping it.

use super::policy::{Policy, ROWS_OVER_READ};
use super::{Catalog, Operation, ReadReq};
use crate::copy::{Loop, Strided};
use crate::format::BLOCK_SIZE;
use crate::geometry::Dims;
use crate::store::FileRef;
use crate::{Error, Result, parallel};
use smallvec::SmallVec;
use std::ops::Range;

/// Rows that are farther apart are fetched alone, if the bytes between them are not requested.
/// Below this distance, skipping cannot save whole pages.
const MIN_ROW: u64 = 4096;

/// Returns whether a joined segment fetches at most 3/2 of the requested bytes, apart from
/// alignment.
pub fn worth_joining(fetched: u64, wanted: u64) -> bool {
    fetched <= wanted + wanted / 2
}

/// The part of the file that one copy reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The request it belongs to.
    pub req: u32,
    /// Index in [`Plan::loops`], or [`RUN`] if the piece is a single run.
    pub loops: u32,
    /// First byte in the file.
    pub src: u64,
    /// Offset from the request's destination, in bytes of stored elements.
    pub dst: u64,
    /// Length of a run in bytes.
    pub run: u64,
}

/// [`Piece::loops`] of a piece without loops.
pub const RUN: u32 = u32::MAX;

/// The loops of a strided piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceLoops {
    /// Outermost first.
    pub loops: SmallVec<[Loop; 4]>,
    /// Number of outer loops whose steps are fetched separately, because the bytes between the
    /// steps are not worth reading.
    pub sparse: usize,
}

/// Pieces that one thread fetches and copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Index of the file.
    pub file: u32,
    /// Index in [`Plan::pieces`] of the first piece, and of the one after the last.
    pub pieces: (usize, usize),
    /// Requested bytes.
    pub wanted: u64,
    /// Bound on the buffer for its segments, in bytes.
    pub buffer: u64,
    /// Approximate number of separate reads.
    pub seeks: u64,
}

/// All jobs of a call, in the order of files and offsets.
#[derive(Debug, Default)]
pub struct Plan {
    /// All pieces, grouped by job, and sorted by file and offset.
    pub pieces: Vec<Piece>,
    /// The loops of strided pieces.
    pub loops: Vec<PieceLoops>,
    /// The jobs.
    pub jobs: Vec<Job>,
}

/// Fewest requests for each planning thread.
const MANY: usize = 16 << 10;

/// Divides requests into jobs. `policies` has an entry for every file.
pub fn plan(
    files: &[FileRef],
    reqs: &[ReadReq],
    policies: &[Policy],
    verify: bool,
    catalog: &dyn Catalog,
) -> Result<Plan> {
    plan_by(reqs.len() / MANY, files, reqs, policies, verify, catalog)
}

/// Does what [`plan`] does, on up to `threads` threads. Each thread plans whole files, so the
/// result does not depend on their number.
pub fn plan_by(
    threads: usize,
    files: &[FileRef],
    reqs: &[ReadReq],
    policies: &[Policy],
    verify: bool,
    catalog: &dyn Catalog,
) -> Result<Plan> {
    if u32::try_from(reqs.len()).is_err() {
        return Err(Error::Plan("more than 2^32 requests in one read".into()));
    }
    let (order, ends) = by_file(files.len(), reqs);
    // Looking up the number of cores takes longer than a small plan.
    let workers = if threads < 2 { 1 } else { threads.min(parallel::available()) };
    let shares = shares(&ends, workers);
    let parts = parallel::map(shares.len(), workers, |i| {
        Plan::of(&order[shares[i].clone()], files, reqs, policies, verify, catalog)
    });
    // Reports the first fault in the order of the requests, whichever thread found one.
    let first = || reqs.iter().find_map(|req| checked(files, req, catalog).err());
    Plan::joined(parts.map_err(|error| first().unwrap_or(error))?.into_iter())
}

/// Returns the numbers of the requests, grouped by file, and the end of each file's group. The last
/// group has those of no file.
fn by_file(files: usize, reqs: &[ReadReq]) -> (Vec<u32>, Vec<usize>) {
    let file = |req: &ReadReq| (req.file as usize).min(files);
    let mut at = vec![0_usize; files + 1];
    for req in reqs {
        at[file(req)] += 1;
    }
    let mut begin = 0;
    for count in &mut at {
        begin += std::mem::replace(count, begin);
    }
    let mut order = vec![0; reqs.len()];
    for (number, req) in (0..).zip(reqs) {
        let next = &mut at[file(req)];
        order[*next] = number;
        *next += 1;
    }
    (order, at)
}

/// Divides groups with these ends into about `count` shares of about the same length.
fn shares(ends: &[usize], count: usize) -> Vec<Range<usize>> {
    let all = ends.last().copied().unwrap_or(0);
    let mut shares = Vec::with_capacity(count);
    let mut begin = 0;
    for &end in ends {
        if end > begin && end >= all * (shares.len() + 1) / count {
            shares.push(begin..end);
            begin = end;
        }
    }
    shares
}

/// Returns the copy of a request, or an error that names the tensor.
fn checked(files: &[FileRef], req: &ReadReq, catalog: &dyn Catalog) -> Result<Strided> {
    check(files, req).map_err(|reason| {
        let reason = format!("it cannot be read: {reason}");
        Error::tensor_plan(None, &catalog.tensor_name(req.tensor), reason)
    })
}

/// Returns the copy of a request, if it is inside its chunk and its file.
fn check(files: &[FileRef], req: &ReadReq) -> std::result::Result<Strided, String> {
    let file =
        files.get(req.file as usize).ok_or_else(|| format!("there is no file {}", req.file))?;
    if req.chunk_offset.checked_add(req.chunk_length).is_none_or(|end| end > file.size) {
        return Err(format!("its chunk ends after the end of {}", file.path.display()));
    }
    let copy = stored_strides(req)
        .and_then(|dst| Strided::new(req.itemsize, &req.shape, &req.src_strides, &dst))
        .ok_or("shape and strides do not fit together")?;
    if req.src_offset.checked_add(copy.src_extent()).is_none_or(|end| end > req.chunk_length)
        && copy.run > 0
    {
        return Err("the rectangle reaches out of its chunk".into());
    }
    Ok(copy)
}

/// Positions at which runs are split.
#[derive(Clone, Copy)]
struct Cuts {
    /// The byte of the file from which multiples count.
    origin: u64,
    /// True if blocks are fetched whole, so that their digests can be checked.
    keep_blocks: bool,
}

impl Cuts {
    fn of(req: &ReadReq, verify: bool) -> Self {
        let keep_blocks = verify && req.digests.is_some();
        // Multiples in the file, so that neighbours do not fetch the same pages twice. They may
        // split an element, which only a copy permits.
        let in_file = !keep_blocks && req.operation == Operation::Copy;
        Self { origin: if in_file { 0 } else { req.chunk_offset }, keep_blocks }
    }
}

/// Returns the strides of the destination, in bytes of stored elements. A plan uses this unit for
/// both sides, and for [`Piece::dst`], whatever the size of elements in the destination.
pub(super) fn stored_strides(req: &ReadReq) -> Option<Dims> {
    let size = req.operation.element_size(req.itemsize);
    if size == req.itemsize {
        return Some(req.dst_strides.clone());
    }
    let stored = |stride: &u64| {
        let elements = stride.is_multiple_of(size).then_some(stride / size)?;
        elements.checked_mul(req.itemsize)
    };
    req.dst_strides.iter().map(stored).collect()
}

impl Plan {
    /// Plans the requests with these numbers.
    fn of(
        numbers: &[u32],
        files: &[FileRef],
        reqs: &[ReadReq],
        policies: &[Policy],
        verify: bool,
        catalog: &dyn Catalog,
    ) -> Result<Self> {
        let mut plan = Self { pieces: Vec::with_capacity(numbers.len()), ..Self::default() };
        for &number in numbers {
            let req = &reqs[number as usize];
            let copy = checked(files, req, catalog)?;
            if copy.run > 0 {
                let cuts = Cuts::of(req, verify);
                let base = Piece {
                    req: number,
                    loops: RUN,
                    src: req.chunk_offset + req.src_offset,
                    dst: 0,
                    run: 0,
                };
                plan.split(base, copy, policies[req.file as usize], cuts)?;
            }
        }
        let order = |piece: &Piece| (reqs[piece.req as usize].file, piece.src);
        if !plan.pieces.is_sorted_by_key(order) {
            plan.pieces.sort_unstable_by_key(order);
        }
        plan.group(reqs, policies, verify);
        plan.measure(reqs, policies, verify);
        Ok(plan)
    }

    /// Joins plans of consecutive files to one plan.
    fn joined(mut parts: impl Iterator<Item = Self>) -> Result<Self> {
        let mut all = parts.next().unwrap_or_default();
        for part in parts {
            let (pieces, loops) =
                (all.pieces.len(), number_of_loops(all.loops.len() + part.loops.len())?);
            let before = loops - number_of_loops(part.loops.len())?;
            all.pieces.extend(part.pieces.into_iter().map(|piece| Piece {
                loops: if piece.loops == RUN { RUN } else { piece.loops + before },
                ..piece
            }));
            all.loops.extend(part.loops);
            all.jobs.extend(
                part.jobs.into_iter().map(|job| Job {
                    pieces: (job.pieces.0 + pieces, job.pieces.1 + pieces),
                    ..job
                }),
            );
        }
        Ok(all)
    }

    /// Splits a copy that begins at `base` into pieces whose fetch is near the policy's target.
    fn split(&mut self, base: Piece, mut copy: Strided, policy: Policy, cuts: Cuts) -> Result<()> {
        if copy.is_contiguous() {
            self.split_run(Piece { run: copy.run, ..base }, policy, cuts);
            return Ok(());
        }
        let sparse = if cuts.keep_blocks { 0 } else { sparse_loops(&copy, policy) };
        if cost(&copy.loops, copy.run, sparse, policy) <= policy.target {
            return self.push(base, copy, sparse);
        }
        // Takes as many steps of the outermost loop as fit in a job. If not even one fits, splits
        // each step further.
        let outer = copy.loops.remove(0);
        let one = cost(&copy.loops, copy.run, sparse.saturating_sub(1), policy);
        let room = policy.target.saturating_sub(one);
        let stride = if sparse > 0 { one } else { outer.src };
        let steps = (room / stride.max(1) + 1).min(outer.n);
        let mut i = 0;
        while i < outer.n {
            let n = steps.min(outer.n - i);
            let base =
                Piece { src: base.src + i * outer.src, dst: base.dst + i * outer.dst, ..base };
            let mut part = copy.clone();
            if n == 1 {
                self.split(base, part, policy, cuts)?;
            } else {
                part.loops.insert(0, Loop { n, ..outer });
                self.push(base, part, sparse)?;
            }
            i += n;
        }
        Ok(())
    }

    fn push(&mut self, base: Piece, copy: Strided, sparse: usize) -> Result<()> {
        let loops = number_of_loops(self.loops.len())?;
        self.loops.push(PieceLoops { loops: copy.loops, sparse });
        self.pieces.push(Piece { loops, run: copy.run, ..base });
        Ok(())
    }

    /// Splits a run at multiples of the target, or of the block.
    fn split_run(&mut self, run: Piece, policy: Policy, cuts: Cuts) {
        let unit = if cuts.keep_blocks { BLOCK_SIZE } else { policy.target };
        let (mut at, end) = (run.src, run.src + run.run);
        while at < end {
            let cut = cuts.origin + ((at - cuts.origin) / unit + 1) * unit;
            let to = cut.min(end);
            self.pieces.push(Piece { src: at, dst: run.dst + (at - run.src), run: to - at, ..run });
            at = to;
        }
    }

    /// Returns the loops of a piece: those whose steps are fetched separately, and those that are
    /// fetched whole.
    pub fn loops_of(&self, piece: &Piece) -> (&[Loop], &[Loop]) {
        let made = self.loops.get(piece.loops as usize);
        made.map_or((&[], &[]), |made| made.loops.split_at(made.sparse))
    }

    /// Groups neighbouring pieces into jobs of about the target size.
    fn group(&mut self, reqs: &[ReadReq], policies: &[Policy], verify: bool) {
        let mut jobs: Vec<Job> = Vec::new();
        // For the last job: its fetch cost, compared with the target, and the range that it fetches
        // whole.
        let (mut fetched, mut covered) = (0_u64, None::<(u64, u64)>);
        for (i, piece) in self.pieces.iter().enumerate() {
            let req = &reqs[piece.req as usize];
            let policy = policies[req.file as usize];
            let (sparse, dense) = self.loops_of(piece);
            let reach = extent(dense, piece.run) + extent(sparse, 0);
            let (start, end) = fetch_range(req, piece.src, reach, verify);
            let wanted = sparse.iter().chain(dense).fold(piece.run, |n, l| n * l.n);
            let open = jobs
                .last_mut()
                .filter(|job| job.file == req.file && i - job.pieces.0 < policy.max_pieces);
            let near =
                covered.filter(|c| open.is_some() && start <= c.1.saturating_add(policy.max_gap));
            // The cost of the piece alone in a job, and its addition to the last job: bytes to
            // fetch, and room in a buffer. Joined segments fetch up to half as much again as is
            // requested.
            let ends = 2 * policy.align;
            let alone = || {
                let step = extent(dense, piece.run) + ends;
                let steps = sparse.iter().fold(1, |n, l| n * l.n);
                let bytes = (step - ends).next_multiple_of(policy.align).max(policy.seek_cost);
                let bytes = bytes.saturating_mul(steps);
                (bytes, steps * (step + step / 2), bytes / policy.seek_cost)
            };
            let (bytes, buffer, seeks) = if sparse.is_empty() {
                let bytes = end - start;
                (bytes, bytes + bytes / 2 + ends, 1)
            } else {
                alone()
            };
            let (more, more_buffer, more_seeks) = match near {
                Some((first, last)) if sparse.is_empty() => {
                    let more = end.saturating_sub(last) + first.saturating_sub(start);
                    (more, more + if start > last { ends } else { 0 }, 0)
                }
                _ if policy.skip_gaps => (bytes.max(policy.seek_cost), buffer, seeks),
                _ => (bytes, buffer, seeks),
            };
            if let Some(job) = open.filter(|_| fetched + more <= policy.target) {
                job.pieces.1 = i + 1;
                job.wanted += wanted;
                job.buffer += more_buffer;
                job.seeks += more_seeks;
                fetched += more;
            } else {
                jobs.push(Job { file: req.file, pieces: (i, i + 1), wanted, buffer, seeks });
                fetched = bytes;
                covered = None;
            }
            covered = match covered.filter(|_| near.is_some()) {
                _ if !sparse.is_empty() => None,
                Some((first, last)) => Some((first.min(start), last.max(end))),
                None => Some((start, end)),
            };
        }
        self.jobs = jobs;
    }

    /// Sets the buffer size of jobs that read through their gaps without a bound, from their actual
    /// segments.
    fn measure(&mut self, reqs: &[ReadReq], policies: &[Policy], verify: bool) {
        let (mut extents, mut segments) = (Vec::new(), Vec::new());
        for i in 0..self.jobs.len() {
            let job = self.jobs[i].clone();
            let policy = policies[job.file as usize];
            if policy.over_reads {
                self.extents(&job, reqs, policy, verify, &mut extents, &mut segments);
                self.jobs[i].buffer =
                    segments.last().map_or(0, |segment| segment.buffer_end(policy.align));
            }
        }
    }
}

fn number_of_loops(count: usize) -> Result<u32> {
    let number = u32::try_from(count).ok().filter(|&n| n != RUN);
    number.ok_or_else(|| Error::Plan("more than 2^32 strided pieces in one read".into()))
}

pub fn extent(loops: &[Loop], run: u64) -> u64 {
    loops.iter().fold(run, |sum, l| sum + (l.n - 1) * l.src)
}

/// Returns the range to fetch for `[src, src + len)`.
pub fn fetch_range(req: &ReadReq, src: u64, len: u64, verify: bool) -> (u64, u64) {
    if !verify || req.digests.is_none() {
        return (src, src + len);
    }
    let first = (src - req.chunk_offset) / BLOCK_SIZE;
    let end = (src + len - req.chunk_offset).next_multiple_of(BLOCK_SIZE);
    (req.chunk_offset + first * BLOCK_SIZE, req.chunk_offset + end.min(req.chunk_length))
}

/// Counts the outer loops whose steps are better fetched separately.
fn sparse_loops(copy: &Strided, policy: Policy) -> usize {
    if !policy.skip_gaps {
        return 0;
    }
    // `alone`: bytes to read if each run is read separately.
    let (mut dense, mut wanted, mut alone) =
        (copy.run, copy.run, copy.run.next_multiple_of(policy.align));
    for (i, l) in copy.loops.iter().enumerate().rev() {
        let joined = dense + (l.n - 1) * l.src;
        wanted *= l.n;
        alone = alone.saturating_mul(l.n);
        let gap = l.src.saturating_sub(dense);
        let touching = l.src <= dense.next_multiple_of(policy.align).max(MIN_ROW)
            || policy.over_reads && gap <= policy.max_gap
            || gap <= policy.row_gap && joined <= alone.saturating_mul(ROWS_OVER_READ);
        if !touching && !worth_joining(joined, wanted) {
            return i + 1;
        }
        dense = joined;
    }
    0
}

/// Returns the bytes to fetch for a piece.
fn cost(loops: &[Loop], run: u64, sparse: usize, policy: Policy) -> u64 {
    let (outer, dense) = loops.split_at(sparse);
    let one = extent(dense, run);
    if outer.is_empty() {
        return one;
    }
    let steps = outer.iter().fold(1u64, |n, l| n.saturating_mul(l.n));
    steps.saturating_mul(one.next_multiple_of(policy.align).max(policy.seek_cost))
}
