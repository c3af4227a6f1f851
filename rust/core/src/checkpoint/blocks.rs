//! The blocks of chunks, read and hashed in parallel: what verification compares, and what adds digests.

use std::collections::BTreeMap;
use std::ops::Range;

use super::data_files::{check_remote, explain};
use crate::format::{BLOCK_SIZE, Index, block_count, block_digest};
use crate::store::{FileRef, Files, Opened, read_at};
use crate::{Control, Error, Result, parallel};

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

/// Numbers of blocks that are read together: from a store, what lies near each other.
pub(super) fn groups(there: Files<'_>, blocks: &[Block]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::with_capacity(blocks.len());
    // Of the group: blocks of two chunks may overlap, and then the last is not the one that ends last.
    let mut end = 0;
    for (i, block) in blocks.iter().enumerate() {
        if let Some(group) = groups.last_mut().filter(|_| there.is_remote()) {
            let first = &blocks[group.start];
            let near = block.file == first.file && block.offset <= end + REQUEST.0;
            if near && block.offset + block.len <= first.offset + REQUEST.1 {
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

/// What one thread reads with: the file that it read last stays open. (A checkpoint may have more files than a process may open.)
struct Hasher<'a> {
    buffer: Vec<u8>,
    open: Option<(u32, Opened<'a>)>,
}

/// Reads and hashes blocks in parallel, and hands each digest to `found`.
pub(super) fn each_block(
    index: &Index,
    there: Files<'_>,
    files: &BTreeMap<u32, FileRef>,
    blocks: &[Block],
    threads: usize,
    control: &Control,
    found: impl Fn(&Block, u64) + Sync,
) -> Result<()> {
    let workers = if threads == 0 { parallel::available() } else { threads };
    let groups = groups(there, blocks);
    parallel::for_each(
        groups.len(),
        there.threads(workers),
        || Hasher {
            buffer: vec![0; usize::try_from(BLOCK_SIZE).expect("1 MiB")],
            open: None,
        },
        |hasher, job| {
            control.check()?;
            let group = &blocks[groups[job].clone()];
            let block = &group[0];
            let file_ref = &files[&block.file];
            let kept = hasher.open.take().filter(|(number, _)| *number == block.file);
            let file = match kept {
                Some((_, file)) => file,
                None if there.is_remote() => there.open(&file_ref.path)?,
                None => file_ref
                    .open(false)
                    .map(Opened::File)
                    .map_err(|error| explain(index, error, control))?,
            };
            let (_, file) = hasher.open.insert((block.file, file));
            if let Opened::File(file) = file {
                let buffer = &mut hasher.buffer[..usize::try_from(block.len).expect("at most 1 MiB")];
                read_at(file, buffer, block.offset).map_err(|error| {
                    let tensor = index.name(index.chunk(block.chunk).tensor);
                    Error::corrupt_data(&file_ref.path, tensor, block.offset, error.to_string())
                })?;
            } else {
                let fetched = file.fetch(&file_ref.path, file_ref.size, block.offset, length(group));
                hasher.buffer = fetched.map_err(|error| explain(index, error, control))?;
            }
            for each in group {
                let at = usize::try_from(each.offset - block.offset).expect("in memory");
                let len = usize::try_from(each.len).expect("at most 1 MiB");
                found(each, block_digest(&hasher.buffer[at..at + len]));
                control.add(each.len);
            }
            Ok(())
        },
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
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
}
