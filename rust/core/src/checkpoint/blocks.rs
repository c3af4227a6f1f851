//! Parallel reads of the blocks of chunks, for verification, added digests and the recovery of an
//! index.

use std::collections::BTreeMap;

use super::data_files::check_remote;
use crate::format::{BLOCK_SIZE, Index, block_count};
use crate::read::{self, FileRange};
use crate::store::{FileRef, Files, Opened};
use crate::{Control, Result};

/// A block of a chunk.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub file: u32,
    pub offset: u64,
    pub len: u64,
    pub chunk: u64,
    pub number: u64,
}

/// Returns the blocks that have digests, in the order of the disk, and the number of bytes without
/// digests. Skips blocks of files for which `there` is false.
pub(super) fn blocks(index: &Index, there: impl Fn(u32) -> bool) -> (Vec<Block>, u64) {
    let mut blocks = Vec::new();
    let mut without = 0;
    for number in 0..index.chunk_count() {
        let chunk = index.chunk(number);
        if chunk.digests.is_none() {
            without += chunk.length;
        } else if there(chunk.file) {
            push_blocks(&mut blocks, number, chunk.file, chunk.offset, chunk.length);
        }
    }
    blocks.sort_unstable_by_key(|block| (block.file, block.offset));
    (blocks, without)
}

pub(super) fn push_blocks(
    blocks: &mut Vec<Block>,
    chunk: u64,
    file: u32,
    offset: u64,
    length: u64,
) {
    blocks.extend((0..block_count(length)).map(|number| {
        let from = number * BLOCK_SIZE;
        Block { file, offset: offset + from, len: BLOCK_SIZE.min(length - from), chunk, number }
    }));
}

/// Opens a data file, after a check of its length.
pub(super) fn open<'a>(there: Files<'a>, file: &FileRef) -> Result<Opened<'a>> {
    if there.is_remote() && file.remote.is_some() {
        check_remote(there, file)?;
        there.open(&file.path)
    } else {
        file.open(false).map(Opened::File)
    }
}

/// Blocks that one call of the engine reads. Each is a request.
const AT_A_TIME: usize = 1 << 16;

/// Reads blocks in parallel, and passes the bytes of each to `visitor`. Stops at its first error.
pub(super) fn each_block(
    files: &BTreeMap<u32, FileRef>,
    blocks: &[Block],
    threads: usize,
    control: &Control,
    visitor: impl Fn(&Block, &[u8]) -> Result<()> + Sync,
) -> Result<()> {
    let numbers: Vec<u32> = files.keys().copied().collect();
    let file_refs: Vec<FileRef> = files.values().cloned().collect();
    let range = |block: &Block| FileRange {
        file: u32::try_from(numbers.partition_point(|&number| number < block.file))
            .expect("no more than there are"),
        offset: block.offset,
        length: block.len,
    };
    for blocks in blocks.chunks(AT_A_TIME) {
        let ranges: Vec<FileRange> = blocks.iter().map(range).collect();
        let visitor = |number: u32, bytes: &[u8]| visitor(&blocks[number as usize], bytes);
        read::visit(&file_refs, &ranges, threads, &visitor, control)?;
    }
    Ok(())
}
