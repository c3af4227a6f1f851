//! Selection of the blocks that are compared with their digests, and the comparison.

use std::borrow::Cow;

use smallvec::smallvec;

use super::policy::Access;
use super::{Catalog, Destination, Operation, ReadReq, Verify};
use crate::format::{BLOCK_SIZE, Index};
use crate::store::FileRef;
use crate::{Error, Result};

impl Catalog for Index {
    fn tensor_name(&self, tensor: u32) -> String {
        self.tensor(tensor).name.to_owned()
    }

    fn digest(&self, i: u64) -> u64 {
        Index::digest(self, i)
    }

    fn tensor_bytes(&self, tensor: u32) -> Option<u64> {
        let tensor = self.tensor(tensor);
        let size = tensor.dtype?.size();
        Some(tensor.shape.iter().fold(size, |n, &s| n.saturating_mul(s)))
    }
}

/// Returns whether anything is compared, and the requests. Requests that are not compared have no
/// digests.
pub fn chosen<'a>(
    reqs: &'a [ReadReq],
    verify: Verify,
    access: &[Access],
) -> (bool, Cow<'a, [ReadReq]>) {
    let waits = |req: &ReadReq| access.get(req.file as usize).is_some_and(|access| access.waits());
    match verify {
        Verify::Nothing => (false, reqs.into()),
        Verify::All => (true, reqs.into()),
        Verify::Auto if !access.iter().any(|access| access.waits()) => (false, reqs.into()),
        // Checking many requests is faster than copying them.
        Verify::Auto if reqs.iter().all(|req| waits(req) && is_one_chunk(req)) => {
            (true, reqs.into())
        }
        Verify::Auto => {
            let mut chosen = Vec::with_capacity(reqs.len());
            for req in reqs {
                if waits(req) {
                    push_parts(req, &mut chosen);
                } else {
                    chosen.push(ReadReq { digests: None, ..req.clone() });
                }
            }
            (chosen.iter().any(|req| req.digests.is_some()), chosen.into())
        }
    }
}

/// Returns whether a request reads all bytes of a chunk, in one run.
fn is_one_chunk(req: &ReadReq) -> bool {
    req.digests.is_some() && run(req) == Some((0, req.chunk_length))
}

/// Returns the range of the chunk that a request copies unchanged, if it is one run in the file and
/// in memory.
fn run(req: &ReadReq) -> Option<(u64, u64)> {
    let mut bytes = req.itemsize;
    for ((&size, &src), &dst) in req.shape.iter().zip(&req.src_strides).zip(&req.dst_strides).rev()
    {
        if size != 1 && (src, dst) != (bytes, bytes) {
            return None;
        }
        bytes = bytes.checked_mul(size)?;
    }
    let end = req.src_offset.checked_add(bytes)?;
    let is_within = bytes > 0 && end <= req.chunk_length; // otherwise the planner refuses it
    (is_within && req.operation == Operation::Copy).then_some((req.src_offset, end))
}

/// Adds a request in up to three parts. Its whole blocks keep their digests, and the bytes before
/// and after them have none.
fn push_parts(req: &ReadReq, parts: &mut Vec<ReadReq>) {
    let whole = run(req).filter(|_| req.digests.is_some()).map(|(begin, end)| {
        let first = begin.next_multiple_of(BLOCK_SIZE);
        let last = if end == req.chunk_length { end } else { end / BLOCK_SIZE * BLOCK_SIZE };
        [begin, first, last, end]
    });
    let elements = |at: u64| (at.wrapping_sub(req.src_offset)).is_multiple_of(req.itemsize);
    let Some(bounds) = whole.filter(|at| at[1] < at[2] && at.iter().all(|&at| elements(at))) else {
        parts.push(ReadReq { digests: None, ..req.clone() });
        return;
    };
    for (number, part) in bounds.windows(2).enumerate().filter(|(_, part)| part[0] < part[1]) {
        let at = usize::try_from(part[0] - req.src_offset).unwrap_or(usize::MAX);
        parts.push(ReadReq {
            digests: req.digests.filter(|_| number == 1),
            shape: smallvec![(part[1] - part[0]) / req.itemsize],
            src_offset: part[0],
            src_strides: smallvec![req.itemsize],
            dst: Destination(req.dst.0.wrapping_add(at)),
            dst_strides: smallvec![req.itemsize],
            ..req.clone()
        });
    }
}

/// Returns the range in the file of block `block` of the request's chunk.
pub fn block_range(req: &ReadReq, block: u64) -> (u64, u64) {
    let start = block * BLOCK_SIZE;
    let end = (start + BLOCK_SIZE).min(req.chunk_length);
    (req.chunk_offset + start, req.chunk_offset + end)
}

/// Returns an error if a block's hash `got` differs from its digest in the catalog.
pub fn compare(
    file: &FileRef,
    req: &ReadReq,
    block: u64,
    got: u64,
    catalog: &dyn Catalog,
) -> Result<()> {
    let Some(first) = req.digests else {
        return Ok(());
    };
    let expected = catalog.digest(first + block);
    if got == expected {
        return Ok(());
    }
    let (start, end) = block_range(req, block);
    Err(Error::corrupt_data(
        &file.path,
        &catalog.tensor_name(req.tensor),
        start,
        format!(
            "block {block} ({} bytes) has digest {got:016x}, expected {expected:016x}",
            end - start
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a request for `length` bytes from `offset` on, of a chunk of a little over three
    /// blocks.
    fn part(file: u32, offset: u64, length: u64) -> ReadReq {
        let nowhere = Destination(std::ptr::null_mut());
        ReadReq {
            digests: Some(7),
            shape: smallvec![length],
            src_offset: offset,
            ..ReadReq::bytes(file, 0, 4096, 3 * BLOCK_SIZE + 123, nowhere)
        }
    }

    /// Returns the start and end of each part, and whether it is compared.
    fn parts_of(req: &ReadReq, access: Access) -> Vec<(u64, u64, bool)> {
        let (any, parts) = chosen(std::slice::from_ref(req), Verify::Auto, &[access]);
        let found: Vec<_> = (parts.iter())
            .map(|part| {
                let bytes = part.shape.iter().product::<u64>();
                assert_eq!(part.dst.0.addr() as u64, part.src_offset - req.src_offset);
                (part.src_offset, part.src_offset + bytes, any && part.digests.is_some())
            })
            .collect();
        assert_eq!(any, found.iter().any(|part| part.2));
        found
    }

    #[test]
    fn whole_blocks_from_storage_are_compared() {
        const B: u64 = BLOCK_SIZE;
        let direct = Access::Direct { align: 512 };
        let all = 3 * B + 123;
        for (access, (offset, length), expected) in [
            (direct, (0, all), vec![(0, all, true)]),
            (Access::Remote, (0, all), vec![(0, all, true)]),
            (Access::Shared, (B, 2 * B), vec![(B, 3 * B, true)]),
            (Access::Buffered, (3 * B, 123), vec![(3 * B, all, true)]),
            // From the page cache.
            (Access::Mapped, (0, all), vec![(0, all, false)]),
            (Access::Cached, (0, all), vec![(0, all, false)]),
            // The rest of a block that is read in part is not read.
            (direct, (0, B / 2), vec![(0, B / 2, false)]),
            (direct, (B - 1, 2), vec![(B - 1, B + 1, false)]),
            (direct, (3 * B, 122), vec![(3 * B, 3 * B + 122, false)]),
            (direct, (0, 2 * B + 5), vec![(0, 2 * B, true), (2 * B, 2 * B + 5, false)]),
            (direct, (5, all - 5), vec![(5, B, false), (B, all, true)]),
            (direct, (5, 2 * B), vec![(5, B, false), (B, 2 * B, true), (2 * B, 2 * B + 5, false)]),
            (direct, (0, 0), vec![(0, 0, false)]),
            // Out of bounds: the planner refuses it.
            (direct, (0, all + 1), vec![(0, all + 1, false)]),
        ] {
            let req = part(0, offset, length);
            assert_eq!(parts_of(&req, access), expected, "{access:?} {offset} {length}");
            assert!(chosen(std::slice::from_ref(&req), Verify::All, &[access]).0);
            assert!(!chosen(std::slice::from_ref(&req), Verify::Nothing, &[access]).0);
        }
        let both = [part(0, 0, all), part(1, 0, all)];
        let (any, reqs) = chosen(&both, Verify::Auto, &[direct, Access::Mapped]);
        assert!(any && reqs[0].digests.is_some() && reqs[1].digests.is_none());
    }

    /// Pieces of rows end inside blocks, so whole blocks would be read for each.
    #[test]
    fn what_is_no_run_is_not_compared() {
        let whole = ReadReq {
            shape: smallvec![3, BLOCK_SIZE],
            src_strides: smallvec![BLOCK_SIZE, 1],
            dst_strides: smallvec![BLOCK_SIZE, 1],
            ..part(0, 0, 0)
        };
        let spread = ReadReq { dst_strides: smallvec![2 * BLOCK_SIZE, 1], ..whole.clone() };
        let columns = ReadReq { shape: smallvec![3, 1000], ..whole.clone() };
        let turned = ReadReq {
            shape: smallvec![BLOCK_SIZE, 3],
            src_strides: smallvec![1, BLOCK_SIZE],
            dst_strides: smallvec![3, 1],
            ..whole.clone()
        };
        for (req, compared) in [(whole, true), (spread, false), (columns, false), (turned, false)] {
            let access = Access::Direct { align: 512 };
            let (any, parts) = chosen(std::slice::from_ref(&req), Verify::Auto, &[access]);
            assert_eq!((any, parts.len()), (compared, 1), "{:?}", req.dst_strides);
        }
    }
}
