//! The blocks of chunks, read and hashed in parallel: what verification compares, and what adds digests.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;

use super::data_files::{check_remote, explain};
use crate::format::{BLOCK_SIZE, Index, block_count, block_digest};
use crate::read::{DISK_DEPTH, MAX_GAP};
use crate::store::{Buffer, FileRef, Files, Opened, direct_align, is_remote, read_at, read_direct_at, resident_bytes};
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
/// The same for a read of a file.
const READ: (u64, u64) = (MAX_GAP, BLOCK_SIZE);
/// Files that are asked whether they are in the page cache, for all of them.
const SAMPLES: usize = 16;

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

/// What one thread reads with: the file that it read last stays open. (A checkpoint may have more files than a process may open.)
#[derive(Default)]
struct Reader<'a> {
    buffer: Buffer,
    /// What came from a store.
    fetched: Vec<u8>,
    open: Option<Open<'a>>,
}

struct Open<'a> {
    number: u32,
    file: Opened<'a>,
    /// The file for reads past the page cache, and what they are aligned to, once that was asked for; `None` where it takes none.
    direct: OnceCell<Option<(File, u64)>>,
}

impl<'a> Reader<'a> {
    /// The bytes from the first block of a group to its end.
    fn read(
        &mut self,
        index: &Index,
        there: Files<'a>,
        file_ref: &FileRef,
        group: &[Block],
        control: &Control,
    ) -> Result<&[u8]> {
        let Block {
            file: number, offset, ..
        } = group[0];
        let explained = |error| explain(index, error, control);
        let open = match self.open.take().filter(|open| open.number == number) {
            Some(open) => open,
            None => Open {
                number,
                file: if there.is_remote() {
                    there.open(&file_ref.path)?
                } else {
                    file_ref.open(false).map(Opened::File).map_err(explained)?
                },
                direct: OnceCell::new(),
            },
        };
        let open = self.open.insert(open);
        let len = length(group);
        let Opened::File(file) = &open.file else {
            self.fetched = open
                .file
                .fetch(&file_ref.path, file_ref.size, offset, len)
                .map_err(explained)?;
            return Ok(&self.fetched);
        };
        let is_cached = resident_bytes(file, offset, offset + len) == Some(len);
        let direct = if is_cached {
            None
        } else {
            let look = || {
                Some((
                    file_ref.open(true).ok()?,
                    direct_align(file).filter(|_| !is_remote(file))?,
                ))
            };
            open.direct.get_or_init(look).as_ref()
        };
        read(&mut self.buffer, file, direct, offset, len).map_err(|error| {
            let tensor = index.name(index.chunk(group[0].chunk).tensor);
            Error::corrupt_data(&file_ref.path, tensor, offset, error.to_string())
        })
    }
}

/// Reads `len` bytes from `offset`, past the page cache if there is a file for that.
fn read<'b>(
    buffer: &'b mut Buffer,
    file: &File,
    direct: Option<&(File, u64)>,
    offset: u64,
    len: u64,
) -> io::Result<&'b [u8]> {
    let size = |bytes: u64| usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory);
    let align = direct.map_or(1, |(_, align)| *align);
    let start = offset & !(align - 1);
    let (before, need) = (size(offset - start)?, size(offset - start + len)?);
    let memory = buffer.at_least(need.next_multiple_of(size(align)?))?;
    let memory = &mut memory[..need.next_multiple_of(size(align)?)];
    match direct.map(|(direct, _)| read_direct_at(direct, memory, start, need, size(align)?)) {
        // Some file systems refuse single reads.
        Some(Err(error)) if error.raw_os_error() == Some(libc::EINVAL) => {
            read_at(file, &mut memory[before..need], offset)?;
        }
        Some(result) => result?,
        None => read_at(file, &mut memory[before..need], offset)?,
    }
    Ok(&memory[before..need])
}

/// How many threads read where `threads` hash: files that are not in the page cache, as many as keep a disk busy. To judge by some of them.
fn workers(there: Files<'_>, files: &BTreeMap<u32, FileRef>, threads: usize) -> usize {
    let threads = there.threads(if threads == 0 { parallel::available() } else { threads });
    let is_cold = |file: &FileRef| {
        let open = file.open(false).ok();
        open.is_some_and(|open| resident_bytes(&open, 0, file.size).is_some_and(|there| there < file.size / 2))
    };
    let mut some = files.values().step_by(files.len().div_ceil(SAMPLES).max(1));
    if !there.is_remote() && some.any(is_cold) {
        threads.max(DISK_DEPTH)
    } else {
        threads
    }
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
    let groups = groups(there, blocks);
    parallel::for_each(
        groups.len(),
        workers(there, files, threads),
        Reader::default,
        |reader, job| {
            control.check()?;
            let group = &blocks[groups[job].clone()];
            let bytes = reader.read(index, there, &files[&group[0].file], group, control)?;
            for each in group {
                let at = usize::try_from(each.offset - group[0].offset).expect("in memory");
                let len = usize::try_from(each.len).expect("at most 1 MiB");
                found(each, block_digest(&bytes[at..at + len]));
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

    #[test]
    fn past_the_page_cache_any_range_is_as_through_it() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let bytes: Vec<u8> = (0..3_000_017_u32)
            .map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0])
            .collect();
        std::fs::write(&path, &bytes).unwrap();
        let file_ref = FileRef {
            path: path.to_path_buf(),
            size: bytes.len() as u64,
            mtime_ns: 0,
            mend: "",
            links: crate::paths::Links::Any,
            remote: None,
        };
        let plain = file_ref.open(false).unwrap();
        let direct = file_ref.open(true).ok().zip(direct_align(&plain));
        let mut buffer = Buffer::default();
        for (start, end) in [
            (0, 1),
            (5, 1 << 20),
            (4096, 8192),
            (1_000_001, 2_000_003),
            (2_999_000, 3_000_017),
        ] {
            for direct in [direct.as_ref(), None] {
                let got = read(&mut buffer, &plain, direct, start as u64, (end - start) as u64).unwrap();
                assert!(got == &bytes[start..end], "{start}..{end}, {}", direct.is_some());
            }
        }
        let error = read(&mut buffer, &plain, direct.as_ref(), 3_000_000, 18).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
