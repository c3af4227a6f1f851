//! Blocks that were read, compared with their digests.

use super::{Catalog, ReadReq};
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
}

/// Where block `block` of the request's chunk lies in the file.
pub fn block_range(req: &ReadReq, block: u64) -> (u64, u64) {
    let start = block * BLOCK_SIZE;
    let end = (start + BLOCK_SIZE).min(req.chunk_length);
    (req.chunk_offset + start, req.chunk_offset + end)
}

/// The error for a block that hashes to `got`, if that is not what the catalog says.
pub fn compare(file: &FileRef, req: &ReadReq, block: u64, got: u64, catalog: &dyn Catalog) -> Result<()> {
    let Some(first) = req.digests else { return Ok(()) };
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
