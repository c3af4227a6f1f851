//! Checking a checkpoint against its digests, all of it, and adding digests to an index that has none.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::data_files::{check_remote, explain, file_ref};
use crate::foreign::torch_file;
use crate::format::{
    BLOCK_SIZE, FileEntry, FileView, Index, IndexBuilder, Kind, SourceKind, block_count, block_digest,
};
use crate::store::{FileRef, Files, Opened, read_at};
use crate::{Control, Error, Result, parallel};

/// Something that is not as the index says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The data file.
    pub path: PathBuf,
    /// FQN of the tensor concerned; empty where it is the file's header, or the whole file.
    pub tensor: String,
    /// Number of the block in its chunk.
    pub block: u64,
    /// Where in the file the block, or what is wrong, begins.
    pub offset: u64,
    /// What the index says.
    pub expected: String,
    /// What was found.
    pub got: String,
}

/// What [`verify`] did.
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// Everything that is wrong, in the order of files and offsets.
    pub problems: Vec<Problem>,
    /// Bytes that were hashed.
    pub bytes: u64,
    /// Bytes of payload for which the index has no digests.
    pub bytes_without_digest: u64,
}

/// A block of a chunk.
#[derive(Clone, Copy)]
struct Block {
    file: u32,
    offset: u64,
    len: u64,
    chunk: u64,
    number: u64,
}

/// Hashes every block that has a digest, and every header; checks that every file is there and has its length.
///
/// `control` counts the bytes. `threads` may be 0: as many as there are cores.
///
/// # Errors
/// [`Error::Interrupted`], and what keeps a file from being read that is no damage (permissions). Damage is a [`Problem`].
pub fn verify(index: &Index, allow_external: bool, threads: usize, control: &Control) -> Result<Verified> {
    let mut verified = Verified::default();
    let mut files = BTreeMap::new();
    let connection = index.remote().map(|remote| remote.connect(threads)).transpose()?;
    let there = match &connection {
        Some(connection) => Files::Remote(&**connection, control),
        None => Files::Local,
    };
    let count = usize::try_from(index.file_count()).expect("in memory");
    // One after another on a file system: it is no wait.
    let looks = if there.is_remote() { there.threads(threads) } else { 1 };
    let looked_at = parallel::map(count, looks, |number| {
        control.check()?;
        let number = u32::try_from(number).expect("counted by one");
        let file_ref = file_ref(index, number, allow_external)?;
        let problem = match open(there, &file_ref).map_err(|error| explain(index, error, control)) {
            Ok(file) => check_head(index, number, &file, &file_ref)?.map(|problem| (problem, true)),
            Err(Error::CorruptData { path, reason, .. }) => {
                Some((file_problem(there, path, file_ref.size, reason), false))
            }
            Err(other) => return Err(other),
        };
        Ok((number, file_ref, problem))
    })?;
    for (number, file_ref, problem) in looked_at {
        let is_there = problem.as_ref().is_none_or(|(_, is_there)| *is_there);
        verified.problems.extend(problem.map(|(problem, _)| problem));
        if is_there {
            files.insert(number, file_ref);
        }
    }
    let (blocks, without) = blocks(index, |file| files.contains_key(&file));
    verified.bytes_without_digest = without;
    let problems = Mutex::new(Vec::new());
    each_block(index, there, &files, &blocks, threads, control, |block, got| {
        if let Some(problem) = compare(index, &files, block, got) {
            problems
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .push(problem);
        }
    })?;
    verified.bytes = blocks.iter().map(|block| block.len).sum();
    if index.source() == SourceKind::Torch {
        verify_records(index, &files, threads, control, &mut verified)?;
    }
    verified
        .problems
        .extend(problems.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner));
    verified
        .problems
        .sort_by(|a, b| (&a.path, a.offset).cmp(&(&b.path, b.offset)));
    Ok(verified)
}

/// Those of some chunks whose bytes do not match their digests, and the first problem of each.
///
/// # Errors
/// As [`verify`]; and [`Error::CorruptData`] where a file is not there, or ends too early.
pub fn damaged_chunks(index: &Index, chunks: &[u64], threads: usize, control: &Control) -> Result<Vec<(u64, Problem)>> {
    let (mut files, mut blocks) = (BTreeMap::new(), Vec::new());
    for &number in chunks {
        let chunk = index.chunk(number);
        if let Entry::Vacant(entry) = files.entry(chunk.file) {
            entry.insert(file_ref(index, chunk.file, false)?);
        }
        push_blocks(&mut blocks, number, chunk.file, chunk.offset, chunk.length);
    }
    blocks.sort_unstable_by_key(|block| (block.file, block.offset));
    let mut problems = BTreeMap::new();
    for (&number, file_ref) in &files {
        // With a header that is damaged, no chunk of the file is of use.
        if let Some(problem) = check_head(index, number, &open(Files::Local, file_ref)?, file_ref)? {
            let inside = chunks.iter().filter(|&&chunk| index.chunk_file(chunk) == number);
            problems.extend(inside.map(|&chunk| (chunk, problem.clone())));
        }
    }
    let problems = Mutex::new(problems);
    each_block(index, Files::Local, &files, &blocks, threads, control, |block, got| {
        if let Some(problem) = compare(index, &files, block, got) {
            let mut problems = problems.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            problems.entry(block.chunk).or_insert(problem);
        }
    })?;
    let problems = problems.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    Ok(problems.into_iter().collect())
}

/// What is wrong with a block that hashes to `got`, if that is not what the index says.
fn compare(index: &Index, files: &BTreeMap<u32, FileRef>, block: &Block, got: u64) -> Option<Problem> {
    let chunk = index.chunk(block.chunk);
    let expected = index.digest(chunk.digests?.start + block.number);
    (got != expected).then(|| Problem {
        path: files[&block.file].path.clone(),
        tensor: index.name(chunk.tensor).to_owned(),
        block: block.number,
        offset: block.offset,
        expected: format!("{expected:016x}"),
        got: format!("{got:016x}"),
    })
}

/// Compares the records of files of `torch.save` with the checksums in the files.
fn verify_records(
    index: &Index,
    files: &BTreeMap<u32, FileRef>,
    threads: usize,
    control: &Control,
    verified: &mut Verified,
) -> Result<()> {
    let mut chunks: Vec<(u32, u64, u64)> = (0..index.chunk_count())
        .map(|number| (index.chunk(number).file, index.chunk(number).offset, number))
        .collect();
    chunks.sort_unstable();
    for (&number, file_ref) in files {
        let (records, pickle_is_checked) = torch_file::check_records(&file_ref.path, threads, control)?;
        for record in records {
            let first = chunks.partition_point(|&(file, offset, _)| (file, offset) < (number, record.at));
            let within = chunks[first..]
                .iter()
                .take_while(|&&(file, offset, _)| file == number && offset < record.at + record.size)
                .map(|&(.., chunk)| index.chunk(chunk));
            let (Some(expected), Some(got)) = (record.expected, record.got) else {
                continue;
            };
            verified.bytes += record.size;
            let mut tensor = String::new();
            for chunk in within {
                if tensor.is_empty() {
                    index.name(chunk.tensor).clone_into(&mut tensor);
                }
                if chunk.digests.is_none() {
                    verified.bytes_without_digest -= chunk.length;
                }
            }
            if got != expected {
                verified.problems.push(Problem {
                    path: file_ref.path.clone(),
                    tensor,
                    block: 0,
                    offset: record.at,
                    expected: format!("a record of {} bytes with CRC-32 {expected:08x}", record.size),
                    got: format!("{got:08x}"),
                });
            }
        }
        if !pickle_is_checked {
            continue;
        }
        verified.bytes_without_digest -= (0..index.tensor_count())
            .filter(|&tensor| index.tensor(tensor).kind == Kind::Bytes)
            .map(|tensor| index.chunk(index.tensor(tensor).chunks.start))
            .filter(|chunk| chunk.file == number && chunk.digests.is_none())
            .map(|chunk| chunk.length)
            .sum::<u64>();
    }
    Ok(())
}

/// A file that was refused for `reason`: missing, of another length than `size`, or modified.
fn file_problem(there: Files<'_>, path: PathBuf, size: u64, reason: String) -> Problem {
    let file = format!("a file of {size} bytes");
    let (expected, got) = match std::fs::metadata(&path) {
        _ if there.is_remote() => (file, reason),
        Ok(found) if found.is_file() && found.len() != size => (file, format!("one of {} bytes", found.len())),
        Ok(found) if found.is_file() => ("the file that was indexed".into(), format!("another: {reason}")),
        Ok(_) => (file, reason),
        Err(_) => (file, "none".into()),
    };
    Problem {
        path,
        tensor: String::new(),
        block: 0,
        offset: 0,
        expected,
        got,
    }
}

/// The header of a data file against its digest.
fn check_head(index: &Index, number: u32, file: &Opened<'_>, file_ref: &FileRef) -> Result<Option<Problem>> {
    let view = index.file(number);
    let Some(expected) = view.head_digest else {
        return Ok(None);
    };
    // No longer than the file, which was compared with the index.
    let head = file.fetch(&file_ref.path, file_ref.size, 0, view.data_start)?;
    let got = block_digest(&head);
    Ok((got != expected).then(|| Problem {
        path: file_ref.path.clone(),
        tensor: String::new(),
        block: 0,
        offset: 0,
        expected: format!("a header of digest {expected:016x}"),
        got: format!("{got:016x}"),
    }))
}

/// The blocks that have digests, in the order of the disk, and the bytes that have none.
fn blocks(index: &Index, there: impl Fn(u32) -> bool) -> (Vec<Block>, u64) {
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

fn push_blocks(blocks: &mut Vec<Block>, chunk: u64, file: u32, offset: u64, length: u64) {
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
fn open<'a>(there: Files<'a>, file: &FileRef) -> Result<Opened<'a>> {
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
fn groups(there: Files<'_>, blocks: &[Block]) -> Vec<Range<usize>> {
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
fn length(group: &[Block]) -> u64 {
    let end = group.iter().map(|block| block.offset + block.len).max();
    end.zip(group.first()).map_or(0, |(end, first)| end - first.offset)
}

/// What one thread reads with: the file that it read last stays open. (A checkpoint may have more files than a process may open.)
struct Hasher<'a> {
    buffer: Vec<u8>,
    open: Option<(u32, Opened<'a>)>,
}

/// Reads and hashes blocks in parallel, and hands each digest to `found`.
fn each_block(
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

/// How an index is to be copied.
#[derive(Clone, Debug, Default)]
pub struct CopyOptions {
    /// Put this folder before every relative file name, for an index that is to lie elsewhere than its data.
    pub prefix: Option<PathBuf>,
    /// Hash the payload of chunks that have no digests.
    pub digests: bool,
    /// 16 random bytes that identify the new index.
    pub save_id: [u8; 16],
    /// Threads that hash. 0: as many as there are cores.
    pub threads: usize,
}

/// The bytes of an index like this one: of the same tensors in the same files, but as `options` say.
pub fn copy_index(index: &Index, options: &CopyOptions, control: &Control) -> Result<Vec<u8>> {
    let mut builder = IndexBuilder::new(index.source());
    builder.save_id = options.save_id;
    builder.generation = index.generation();
    builder.root = index.planner_root();
    builder.nesting = index.nesting();
    let digests = if options.digests {
        hash_all(index, options.threads, control)?
    } else {
        BTreeMap::new()
    };
    let file = |file: FileView<'_>| -> Result<FileEntry> {
        let Some(folder) = &options.prefix else {
            return Ok(file.into());
        };
        let path = folder.join(file.name);
        let Some(name) = path.to_str() else {
            return Err(Error::Unsupported(format!(
                "{}: a path that is not UTF-8",
                path.display()
            )));
        };
        Ok(FileEntry {
            name: name.to_owned(),
            external: true,
            linked: false,
            ..file.into()
        })
    };
    builder.merge_with(index, file, |chunk| digests.get(&chunk).cloned())?;
    builder.build()
}

/// The digests of every chunk that has none.
fn hash_all(index: &Index, threads: usize, control: &Control) -> Result<BTreeMap<u64, Vec<u64>>> {
    if index.remote().is_some() {
        return Err(Error::Unsupported(format!(
            "{}: digests are added to checkpoints on a file system",
            index.path().display()
        )));
    }
    let mut files = BTreeMap::new();
    for number in 0..index.file_count() {
        let file_ref = file_ref(index, number, true)?;
        file_ref.open(false)?;
        files.insert(number, file_ref);
    }
    let mut blocks = Vec::new();
    let mut digests: BTreeMap<u64, Vec<AtomicU64>> = BTreeMap::new();
    for number in 0..index.chunk_count() {
        let chunk = index.chunk(number);
        if chunk.digests.is_none() {
            push_blocks(&mut blocks, number, chunk.file, chunk.offset, chunk.length);
            digests.insert(
                number,
                (0..block_count(chunk.length)).map(|_| AtomicU64::new(0)).collect(),
            );
        }
    }
    blocks.sort_unstable_by_key(|block| (block.file, block.offset));
    each_block(
        index,
        Files::Local,
        &files,
        &blocks,
        threads,
        control,
        |block, digest| {
            let number = usize::try_from(block.number).expect("as many as fit memory");
            digests[&block.chunk][number].store(digest, Ordering::Relaxed);
        },
    )?;
    Ok(digests
        .into_iter()
        .map(|(chunk, digests)| (chunk, digests.into_iter().map(AtomicU64::into_inner).collect()))
        .collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::store::{Connection, Part};

    /// A store of which nothing is asked.
    struct Unasked;

    impl Connection for Unasked {
        fn look(&self, _: &Path, _: &Control) -> Result<Option<u64>> {
            Ok(None)
        }

        fn names(&self, _: &Path, _: &Control) -> Result<Option<Vec<String>>> {
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
