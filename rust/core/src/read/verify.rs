//! Which blocks are compared with their digests, and the comparison.

use std::borrow::Cow;

use super::plan::fetch_range;
use super::policy::Access;
use super::probe::{bytes_of, span};
use super::{Catalog, ReadReq, Verify};
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

/// [`Verify::Auto`] compares blocks where that reads at most one part in this many more.
const MORE: u64 = 64;

/// Returns true if anything is compared, and the requests. Those that are not have no digests.
pub fn chosen<'a>(
    reqs: &'a [ReadReq],
    verify: Verify,
    access: &[Access],
) -> (bool, Cow<'a, [ReadReq]>) {
    match verify {
        Verify::Nothing => (false, reqs.into()),
        Verify::All => (true, reqs.into()),
        Verify::Auto if !access.iter().any(|access| access.waits()) => (false, reqs.into()),
        Verify::Auto => {
            let is_compared = |req: &ReadReq| {
                let access = access.get(req.file as usize);
                access.is_some_and(|access| access.waits()) && is_of_whole_blocks(req)
            };
            // Copying many requests takes longer than to look at them.
            if reqs.iter().all(is_compared) {
                return (true, reqs.into());
            }
            let mut reqs = reqs.to_vec();
            for req in &mut reqs {
                req.digests = req.digests.filter(|_| is_compared(req));
            }
            (true, reqs.into())
        }
    }
}

/// True if reading all of its blocks is hardly more than reading the requested part of them.
fn is_of_whole_blocks(req: &ReadReq) -> bool {
    let (bytes, (start, end)) = (bytes_of(req), span(req));
    // Saturating: what is out of bounds is refused by the planner.
    if bytes == 0
        || end.saturating_sub(start) != bytes
        || end > req.chunk_offset.saturating_add(req.chunk_length)
    {
        return false;
    }
    let (from, to) = fetch_range(req, start, bytes, true);
    to - from <= bytes + bytes / MORE
}

/// Returns the place in the file of block `block` of the request's chunk.
pub fn block_range(req: &ReadReq, block: u64) -> (u64, u64) {
    let start = block * BLOCK_SIZE;
    let end = (start + BLOCK_SIZE).min(req.chunk_length);
    (req.chunk_offset + start, req.chunk_offset + end)
}

/// The error for a block that hashes to `got`, if that is not what the catalog says.
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
    use smallvec::smallvec;

    use super::super::{Destination, Operation};
    use super::*;
    use crate::copy::SignBits;

    /// `length` bytes from `offset` on of a chunk of three blocks and a bit.
    fn part(file: u32, offset: u64, length: u64) -> ReadReq {
        ReadReq {
            file,
            tensor: 0,
            chunk_offset: 4096,
            chunk_length: 3 * BLOCK_SIZE + 123,
            digests: Some(7),
            itemsize: 1,
            shape: smallvec![length],
            src_offset: offset,
            src_strides: smallvec![1],
            dst: Destination(std::ptr::null_mut()),
            dst_strides: smallvec![1],
            signs: SignBits::default(),
            operation: Operation::Copy,
            coded: None,
        }
    }

    #[test]
    fn whole_blocks_from_storage_are_compared() {
        let direct = Access::Direct { align: 512 };
        let all = 3 * BLOCK_SIZE + 123;
        let columns = ReadReq {
            shape: smallvec![3, 1000],
            src_strides: smallvec![BLOCK_SIZE, 1],
            ..part(0, 0, 0)
        };
        for (access, req, compared) in [
            (direct, part(0, 0, all), true),
            (Access::Remote, part(0, 0, all), true),
            (Access::Shared, part(0, BLOCK_SIZE, 2 * BLOCK_SIZE), true),
            (Access::Buffered, part(0, 3 * BLOCK_SIZE, 123), true),
            // From the page cache.
            (Access::Mapped, part(0, 0, all), false),
            (Access::Cached, part(0, 0, all), false),
            // Blocks would be read for a part of them.
            (direct, part(0, 0, BLOCK_SIZE / 2), false),
            (direct, part(0, BLOCK_SIZE - 1, 2), false),
            (direct, columns, false),
            (direct, part(0, 0, 0), false),
            // Out of bounds: the planner says so.
            (direct, part(0, 0, all + 1), false),
        ] {
            let (any, reqs) = chosen(std::slice::from_ref(&req), Verify::Auto, &[access]);
            assert_eq!(any && reqs[0].digests.is_some(), compared, "{access:?} {:?}", req.shape);
            assert!(chosen(std::slice::from_ref(&req), Verify::All, &[access]).0);
            assert!(!chosen(std::slice::from_ref(&req), Verify::Nothing, &[access]).0);
        }
        let both = [part(0, 0, all), part(1, 0, all)];
        let (any, reqs) = chosen(&both, Verify::Auto, &[direct, Access::Mapped]);
        assert!(any && reqs[0].digests.is_some() && reqs[1].digests.is_none());
    }
}
