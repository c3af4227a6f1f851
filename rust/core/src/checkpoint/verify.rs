//! Verification of a checkpoint, or of some chunks, against its digests.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::blocks::{Block, blocks, each_block, open, push_blocks};
use super::data_files::{explain, file_ref, passing_over};
use crate::foreign::torch_file;
use crate::format::{Index, Kind, SourceKind, block_digest, cover};
use crate::geometry::{Dims, Region};
use crate::store::{FileRef, Files, Opened, Storage};
use crate::{Control, Error, Result, parallel};

/// A difference between the data and the index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problem {
    /// The data file.
    pub path: PathBuf,
    /// FQN of the tensor or value; empty for a whole file, or for bytes of no tensor.
    pub tensor: String,
    /// True if the whole file does not match.
    pub whole_file: bool,
    /// Number of the block in its chunk.
    pub block: u64,
    /// Offset in the file of the block or the damage.
    pub offset: u64,
    /// Value in the index.
    pub expected: String,
    /// Value that was found.
    pub got: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if !self.tensor.is_empty() {
            write!(f, ", tensor {:?}", self.tensor)?;
        }
        if !self.whole_file {
            write!(f, ", block {} at byte {}", self.block, self.offset)?;
        }
        write!(f, ": expected {}, got {}", self.expected, self.got)
    }
}

/// Result of [`verify`].
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// All problems, in the order of files and offsets.
    pub problems: Vec<Problem>,
    /// Bytes that were hashed.
    pub bytes: u64,
    /// Bytes of payload for which the index has no digests.
    pub bytes_without_digest: u64,
}

/// Hashes every block that has a digest, and every header. Checks that every file exists and has
/// its length, and that the chunks hold all elements of every tensor.
///
/// `control` counts the bytes. If `threads` is 0, it uses all cores.
///
/// # Errors
/// [`Error::Interrupted`], and errors other than damage that prevent a file from being read
/// (permissions). Damage is a [`Problem`].
pub fn verify(
    index: &Index,
    allow_external: bool,
    threads: usize,
    control: &Control,
) -> Result<Verified> {
    let mut verified = Verified::default();
    let mut files = BTreeMap::new();
    let storage = Storage::new(index.remote(), threads, control)?;
    let there = storage.files();
    let count = usize::try_from(index.file_count()).expect("in memory");
    // On a file system there is little to wait for, so one after another.
    let looks = if there.is_remote() { there.threads(threads) } else { 1 };
    let looked_at = parallel::map(count, looks, |number| {
        control.check()?;
        let number = u32::try_from(number).expect("counted by one");
        let mut file_ref = file_ref(index, number, allow_external)?;
        if index.source() == SourceKind::Native {
            file_ref.mend = ""; // the advice would be to verify
        }
        let problem = match open(there, &file_ref).map_err(|error| explain(index, error, control)) {
            Ok(file) => check_head(index, number, &file, &file_ref)?.map(|problem| (problem, true)),
            Err(Error::CorruptData { path, reason, .. }) => {
                Some((file_problem(there, path, &file_ref, reason), false))
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
    let problems = compare_all(index, &files, &blocks, threads, control)?;
    verified.bytes = blocks.iter().map(|block| block.len).sum();
    if index.source() == SourceKind::Torch {
        verify_records(index, there, &files, threads, control, &mut verified)?;
    }
    verified.problems.extend(problems.into_iter().map(|(_, problem)| problem));
    for tensor in 0..index.tensor_count() {
        verified.problems.extend(hole(index, tensor));
    }
    verified.problems.sort_by(|a, b| (&a.path, a.offset).cmp(&(&b.path, b.offset)));
    Ok(verified)
}

/// Returns a problem if no chunk holds some elements of a tensor.
fn hole(index: &Index, tensor: u32) -> Option<Problem> {
    let entry = index.tensor(tensor);
    entry.dtype?;
    let origin = Dims::from_elem(0, entry.shape.len());
    let whole = Region::new(&origin, &entry.shape);
    let Region { offsets, sizes } = cover(index, tensor, &whole).err()?;
    Some(Problem {
        path: index.path().to_owned(),
        tensor: index.name(tensor).to_owned(),
        expected: format!("all elements of shape {:?}", entry.shape),
        got: format!("no chunk with the elements {sizes:?} at {offsets:?}"),
        ..Problem::default()
    })
}

/// Returns those of some chunks that do not match their digests, with the first problem of each.
///
/// # Errors
/// Those of [`verify`], and [`Error::CorruptData`] if a file is missing or too short.
pub fn damaged_chunks(
    index: &Index,
    chunks: &[u64],
    threads: usize,
    control: &Control,
) -> Result<Vec<(u64, Problem)>> {
    let (mut files, mut blocks) = (BTreeMap::new(), Vec::new());
    let storage = Storage::new(index.remote(), threads, control)?;
    let there = storage.files();
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
        // If the header is damaged, no chunk of the file can be used.
        if let Some(problem) = check_head(index, number, &open(there, file_ref)?, file_ref)? {
            let inside = chunks.iter().filter(|&&chunk| index.chunk_file(chunk) == number);
            problems.extend(inside.map(|&chunk| (chunk, problem.clone())));
        }
    }
    for (block, problem) in compare_all(index, &files, &blocks, threads, control)? {
        problems.entry(block.chunk).or_insert(problem);
    }
    Ok(problems.into_iter().collect())
}

/// Returns an error for a block of these chunks that does not match its digest.
///
/// # Errors
/// [`Error::CorruptData`], and those of [`damaged_chunks`].
pub fn verify_chunks(
    index: &Index,
    chunks: &[u64],
    allow_external: bool,
    threads: usize,
    control: &Control,
) -> Result<()> {
    passing_over(index, || {
        let (mut files, mut blocks) = (BTreeMap::new(), Vec::new());
        for &number in chunks {
            let chunk = index.chunk(number);
            if chunk.digests.is_some() {
                files.insert(chunk.file, file_ref(index, chunk.file, allow_external)?);
                push_blocks(&mut blocks, number, chunk.file, chunk.offset, chunk.length);
            }
        }
        let check = |block: &Block, bytes: &[u8]| {
            compare(index, &files, block, block_digest(bytes))
                .map_or(Ok(()), |problem| Err(problem.into()))
        };
        each_block(&files, &blocks, threads, control, check)
            .map_err(|error| explain(index, error, control))
    })
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        let Problem { block, expected, got, .. } = &problem;
        let reason = format!("block {block} has digest {got}, expected {expected}");
        Self::corrupt_data(&problem.path, &problem.tensor, problem.offset, reason)
    }
}

/// Hashes blocks, and returns those that do not match their digests.
fn compare_all(
    index: &Index,
    files: &BTreeMap<u32, FileRef>,
    blocks: &[Block],
    threads: usize,
    control: &Control,
) -> Result<Vec<(Block, Problem)>> {
    let problems = Mutex::new(Vec::new());
    each_block(files, blocks, threads, control, |block, bytes| {
        if let Some(problem) = compare(index, files, block, block_digest(bytes)) {
            parallel::lock(&problems).push((*block, problem));
        }
        Ok(())
    })
    .map_err(|error| explain(index, error, control))?;
    Ok(problems.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Returns the problem of a block that hashes to `got`, if the index says otherwise.
fn compare(
    index: &Index,
    files: &BTreeMap<u32, FileRef>,
    block: &Block,
    got: u64,
) -> Option<Problem> {
    let chunk = index.chunk(block.chunk);
    let expected = index.digest(chunk.digests?.start + block.number);
    (got != expected).then(|| Problem {
        path: files[&block.file].path.clone(),
        tensor: index.name(chunk.tensor).to_owned(),
        whole_file: false,
        block: block.number,
        offset: block.offset,
        expected: format!("{expected:016x}"),
        got: format!("{got:016x}"),
    })
}

/// Compares the records of files that `torch.save` wrote with the checksums in these files.
fn verify_records(
    index: &Index,
    there: Files<'_>,
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
        let (records, pickle_is_checked) =
            match torch_file::check_records(there, file_ref, threads, control) {
                Ok(checked) => checked,
                // The file could be indexed before.
                Err(Error::CorruptData { offset, reason, .. }) => {
                    verified.problems.push(Problem {
                        path: file_ref.path.clone(),
                        whole_file: true,
                        offset: offset.unwrap_or(0),
                        expected: "a file that opens".into(),
                        got: reason,
                        ..Problem::default()
                    });
                    continue;
                }
                Err(other) => return Err(other),
            };
        for record in records {
            let first =
                chunks.partition_point(|&(file, offset, _)| (file, offset) < (number, record.at));
            let within = chunks[first..]
                .iter()
                .take_while(|&&(file, offset, _)| {
                    file == number && offset < record.at + record.size
                })
                .map(|&(.., chunk)| index.chunk(chunk));
            let (Some(expected), Some(got)) = (record.expected, record.got) else {
                continue;
            };
            verified.bytes += record.size;
            // The entry of this name may be in another file.
            let is_here =
                |tensor: &u32| index.chunk_file(index.tensor(*tensor).chunks.start) == number;
            let values = record.values.iter().filter_map(|name| index.find(name)).filter(is_here);
            let mut parts: Vec<u32> = values.collect();
            for chunk in within {
                // Values are counted below: they are in the pickle, even if a forged index says
                // otherwise.
                if chunk.digests.is_none() && index.tensor(chunk.tensor).kind == Kind::Tensor {
                    verified.bytes_without_digest -= chunk.length;
                }
                if chunk.length > 0 {
                    parts.push(chunk.tensor);
                }
            }
            if got != expected {
                let problem = |tensor: &str| Problem {
                    path: file_ref.path.clone(),
                    tensor: tensor.to_owned(),
                    offset: record.at,
                    expected: format!(
                        "a record of {} bytes with CRC-32 {expected:08x}",
                        record.size
                    ),
                    got: format!("{got:08x}"),
                    ..Problem::default()
                };
                // Reports every tensor and every value in the record: the checksum does not show
                // which of them is damaged.
                parts.sort_unstable();
                parts.dedup();
                if parts.is_empty() {
                    verified.problems.push(problem(""));
                }
                let names = parts.iter().map(|&tensor| index.name(tensor));
                verified.problems.extend(names.map(problem));
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

/// Returns the problem of a file that was refused for `reason`: it is missing, modified, or has
/// another length.
fn file_problem(there: Files<'_>, path: PathBuf, file_ref: &FileRef, reason: String) -> Problem {
    let size = file_ref.size;
    let file = format!("a file of {size} bytes");
    let (expected, got) = match std::fs::metadata(&path) {
        _ if there.is_remote() => (file, reason),
        Ok(found) if found.is_file() && found.len() != size => {
            (file, file_ref.with_mend(&format!("one of {} bytes", found.len())))
        }
        Ok(found) if found.is_file() => {
            ("the file that was indexed".into(), format!("another: {reason}"))
        }
        Ok(_) => (file, reason),
        Err(_) => (file, file_ref.with_mend("none")),
    };
    Problem { path, whole_file: true, expected, got, ..Problem::default() }
}

/// Compares the header of a data file with its digest.
fn check_head(
    index: &Index,
    number: u32,
    file: &Opened<'_>,
    file_ref: &FileRef,
) -> Result<Option<Problem>> {
    let view = index.file(number);
    let Some(expected) = view.head_digest else {
        return Ok(None);
    };
    // At most the length of the file, which was compared with the index.
    let head = file.fetch(&file_ref.path, file_ref.size, 0, view.data_start)?;
    let got = block_digest(&head);
    Ok((got != expected).then(|| Problem {
        path: file_ref.path.clone(),
        expected: format!("a header of digest {expected:016x}"),
        got: format!("{got:016x}"),
        ..Problem::default()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint;
    use crate::format::{ChunkEntry, FileEntry, INDEX_NAME, IndexBuilder, TensorEntry, Value};

    /// It was once subtracted twice.
    #[test]
    fn a_value_that_an_index_puts_into_a_storage_is_counted_once() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/torch_file");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.pth");
        std::fs::copy(format!("{seeds}/plain-zip"), &path).unwrap();
        let control = Control::new();
        let honest = checkpoint::open(&path, None, None, 1, &control).unwrap();
        let weight = honest.chunk(honest.tensor(honest.find("w").unwrap()).chunks.start);
        let mut builder = IndexBuilder::new(SourceKind::Torch);
        builder.root = Value::Dict(Vec::new());
        let file = FileEntry {
            name: "x.pth".into(),
            size: honest.file(0).size,
            external: true,
            ..FileEntry::default()
        };
        let file = builder.add_file(file).unwrap();
        let value = TensorEntry::bytes("value");
        let tensor = builder.add_tensor(value).unwrap();
        let (offset, length) = (weight.offset, weight.length);
        builder
            .add_chunk(ChunkEntry { tensor, file, offset, length, ..ChunkEntry::default() })
            .unwrap();
        let bytes = builder.build().unwrap();
        let forged = Index::from_bytes(bytes, &dir.path().join(INDEX_NAME)).unwrap();
        for index in [honest, forged] {
            let verified = verify(&index, false, 1, &control).unwrap();
            assert_eq!((&*verified.problems, verified.bytes_without_digest), (&[][..], 0));
        }
    }
}
