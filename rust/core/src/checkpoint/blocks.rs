//! The blocks of chunks, read and hashed in parallel: what verification compares, and what adds digests.

use std::collections::BTreeMap;
use std::ops::Range;

use super::data_files::{check_remote, explain};
use super::gather::Names;
use crate::copy::SignBits;
use crate::format::{BLOCK_SIZE, Index, block_count};
use crate::read::{self, Destination, MAX_GAP, ReadReq};
use crate::store::{FileRef, Files, Opened};
use crate::{Control, Result};
use smallvec::smallvec;

/// A block of a chunk.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub file: u32,
    pub offset: u64,
    pub len: u64,
    pub chunk: u64,
    pub number: u64,
}

/// The blocks that have digests, in the order of the disk, and the bytes that have none.
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

pub(super) fn push_blocks(blocks: &mut Vec<Block>, chunk: u64, file: u32, offset: u64, length: u64) {
    blocks.extend((0..block_count(length)).map(|number| {
        let from = number * BLOCK_SIZE;
        Block {
            file,
            offset: offset + from,
            len: BLOCK_SIZE.min(length - from),
            chunk,
            number,
        }
    }));
}

/// Opens a data file, after its length was checked.
pub(super) fn open<'a>(there: Files<'a>, file: &FileRef) -> Result<Opened<'a>> {
    if there.is_remote() {
        check_remote(there, file)?;
        there.open(&file.path)
    } else {
        file.open(false).map(Opened::File)
    }
}

/// Gaps up to this, and as many bytes, are read by one request to a store.
const REQUEST: (u64, u64) = (BLOCK_SIZE, 8 * BLOCK_SIZE);
/// The same for a read of a file.
const READ: (u64, u64) = (MAX_GAP, BLOCK_SIZE);
/// Numbers of blocks that are read together: what lies near each other.
pub(super) fn groups(there: Files<'_>, blocks: &[Block]) -> Vec<Range<usize>> {
    let (gap, most) = if there.is_remote() { REQUEST } else { READ };
    let mut groups: Vec<Range<usize>> = Vec::with_capacity(blocks.len());
    // Of the group: blocks of two chunks may overlap, and then the last is not the one that ends last.
    let mut end = 0;
    for (i, block) in blocks.iter().enumerate() {
        if let Some(group) = groups.last_mut() {
            let first = &blocks[group.start];
            let near = block.file == first.file && block.offset <= end + gap;
            if near && block.offset + block.len <= first.offset + most {
                group.end = i + 1;
                end = end.max(block.offset + block.len);
                continue;
            }
        }
        groups.push(i..i + 1);
        end = block.offset + block.len;
    }
    groups
}

/// Bytes from the first block of a group to the end of whichever ends last.
pub(super) fn length(group: &[Block]) -> u64 {
    let end = group.iter().map(|block| block.offset + block.len).max();
    end.zip(group.first()).map_or(0, |(end, first)| end - first.offset)
}

/// Blocks that are hashed by one call of the engine, of which each is a request.
const AT_A_TIME: usize = 1 << 16;

/// Reads and hashes blocks in parallel, and hands each digest to `found`.
pub(super) fn each_block(
    index: &Index,
    files: &BTreeMap<u32, FileRef>,
    blocks: &[Block],
    threads: usize,
    control: &Control,
    found: impl Fn(&Block, u64) + Sync,
) -> Result<()> {
    let numbers: Vec<u32> = files.keys().copied().collect();
    let file_refs: Vec<FileRef> = files.values().cloned().collect();
    for blocks in blocks.chunks(AT_A_TIME) {
        let requests: Vec<ReadReq> = blocks.iter().map(|block| request(index, &numbers, block)).collect();
        let found = |number: u32, digest| found(&blocks[number as usize], digest);
        let hashed = read::hash(&file_refs, &requests, &Names(index), threads, &found, control);
        hashed.map_err(|error| explain(index, error, control))?;
    }
    Ok(())
}

/// All of a block; `numbers` are those of the files, in order.
fn request(index: &Index, numbers: &[u32], block: &Block) -> ReadReq {
    let place = numbers.partition_point(|&number| number < block.file);
    ReadReq {
        file: u32::try_from(place).expect("no more than the index has"),
        tensor: index.chunk(block.chunk).tensor,
        chunk_offset: block.offset,
        chunk_length: block.len,
        digests: Some(0),
        itemsize: 1,
        shape: smallvec![block.len],
        src_offset: 0,
        src_strides: smallvec![1],
        dst: Destination(std::ptr::null_mut()),
        dst_strides: smallvec![1],
        signs: SignBits::default(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Error;
    use crate::store::{Connection, Folder, Part};

    /// A store of which nothing is asked.
    struct Unasked;

    impl Connection for Unasked {
        fn look(&self, _: &Path, _: &Control) -> Result<Option<u64>> {
            Ok(None)
        }

        fn list(&self, _: &Path, _: &Control) -> Result<Option<Folder>> {
            Ok(None)
        }

        fn start(&self, _: &Path, _: u64, _: bool, _: &Control) -> Result<Option<(Vec<u8>, u64)>> {
            Ok(None)
        }

        #[allow(unsafe_code)] // the trait has it so
        unsafe fn fetch(&self, _: &Path, _: u64, _: Vec<Part>, _: &Control) -> Result<()> {
            Err(Error::Interrupted)
        }
    }

    #[test]
    fn a_group_is_as_long_as_its_blocks_reach() {
        let block = |offset, len| Block {
            file: 0,
            offset,
            len,
            chunk: 0,
            number: 0,
        };
        // The second lies in the first, which an index may say.
        let near = BLOCK_SIZE + REQUEST.0;
        let blocks = [
            block(0, BLOCK_SIZE),
            block(10, 5),
            block(near, 7),
            block(near + 8 * BLOCK_SIZE, 1),
        ];
        let control = Control::new();
        let groups = groups(Files::Remote(&Unasked, &control), &blocks);
        assert_eq!(groups, [0..3, 3..4]);
        assert_eq!(length(&blocks[..2]), BLOCK_SIZE);
        assert_eq!(length(&blocks[..3]), near + 7);
    }
    #[test]
    fn blocks_of_a_file_are_read_together_up_to_one_of_the_largest() {
        let block = |file, offset, len| Block {
            file,
            offset,
            len,
            chunk: 0,
            number: 0,
        };
        let small = BLOCK_SIZE / 4;
        let mut blocks: Vec<Block> = (0..5).map(|i| block(0, i * small, small)).collect();
        blocks.extend([
            block(0, 3 * BLOCK_SIZE, BLOCK_SIZE),
            block(0, 4 * BLOCK_SIZE, 5),
            block(0, 4 * BLOCK_SIZE + MAX_GAP + 6, 5),
            block(1, 4 * BLOCK_SIZE + MAX_GAP + 11, 5),
        ]);
        assert_eq!(groups(Files::Local, &blocks), [0..4, 4..5, 5..6, 6..7, 7..8, 8..9]);
        assert_eq!(groups(Files::Local, &[]), []);
    }
}
