//! Items that another checkpoint, the *parent*, already has, so that a save need not write them.
//! They are found by digests, or because the caller says that they are frozen.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::item::{Part, SaveItem};
use super::jobs::to_usize;
use crate::format::{
    BLOCK_SIZE, BlockCell, BlockDigests, ChunkView, DataFileName, Index, Kind, SourceKind,
    block_count, content_digest,
};
use crate::store::Connection;
use crate::{Control, Error, Result, parallel};

/// Blocks that a thread hashes before it checks whether the chunk already differs.
const BLOCKS_AT_A_TIME: u64 = 4;
/// Concurrent checks of files on a store.
const LOOKS: usize = 32;

/// The items of a save, and which of them the parent has.
pub struct Reuse {
    parent: Option<Arc<Index>>,
    items: Vec<Candidate>,
    /// Number of each item's first block, followed by the end of the last.
    first_block: Vec<usize>,
    /// Digests of the hashed blocks.
    blocks: Vec<BlockCell>,
    /// Bytes compared of each item.
    compared: Mutex<Vec<u64>>,
    problems: Vec<Error>,
}

/// An item, and the chunk of the parent that may equal it.
struct Candidate {
    length: u64,
    chunk: Option<u64>,
    /// The caller says that it never changes.
    frozen: bool,
    /// The caller says so, and said so when the parent was saved. Only its first block is compared.
    trusted: bool,
    differs: AtomicBool,
}

/// A file of the parent of which enough is reused to link it.
#[derive(Clone)]
pub(super) struct ParentFile {
    /// Index of the file in the parent.
    pub file: u32,
    /// (item, chunk of the parent), in the order of the bytes.
    pub chunks: Vec<(usize, u64)>,
}

impl Reuse {
    /// Finds the chunk of `parent` for each item: one of the same name, place, shape, dtype, flags
    /// and path.
    ///
    /// `frozen` says for each item that it never changes. `trusted` says that frozen items did not
    /// change since the parent was saved. For an item that was frozen there too, only the first
    /// block is then compared, since training or loading a tensor by mistake changes that block as
    /// well.
    ///
    /// Without a parent, this only records which items are frozen. A file is not reused if another
    /// program wrote it, or if it does not match the parent's index: see
    /// [`problems`](Self::problems).
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn new(
        parent: Option<Arc<Index>>,
        items: &[SaveItem],
        frozen: &[bool],
        trusted: bool,
        control: &Control,
    ) -> Result<Self> {
        let found: Vec<Option<u64>> =
            (items.iter()).map(|item| find(parent.as_ref()?, item)).collect();
        let files = match &parent {
            Some(parent) => Files::look(
                parent,
                found.iter().flatten().map(|&chunk| parent.chunk_file(chunk)),
                control,
            )?,
            None => Files::default(),
        };
        let mut first_block = Vec::with_capacity(items.len() + 1);
        let mut blocks = 0;
        let items: Vec<Candidate> = (0..)
            .zip(items.iter().zip(found))
            .map(|(number, (item, found)): (usize, _)| {
                let frozen = frozen.get(number).copied().unwrap_or(false);
                let found = parent.as_ref().and_then(|parent| {
                    let chunk = found?;
                    Some((chunk, parent.chunk(chunk)))
                        .filter(|(_, view)| files.usable.contains(&view.file))
                });
                let trusted =
                    trusted && frozen && found.as_ref().is_some_and(|(_, view)| view.frozen);
                let found = found.filter(|(_, view)| trusted || view.content.is_some());
                first_block.push(blocks);
                if found.is_some() {
                    blocks += if trusted { 1 } else { to_usize(block_count(item.length)) };
                }
                Candidate {
                    length: item.length,
                    chunk: found.map(|(chunk, _)| chunk),
                    frozen,
                    trusted,
                    differs: AtomicBool::new(false),
                }
            })
            .collect();
        first_block.push(blocks);
        Ok(Self {
            parent,
            first_block,
            blocks: std::iter::repeat_with(BlockCell::default).take(blocks).collect(),
            compared: Mutex::new(vec![0; items.len()]),
            items,
            problems: files.problems,
        })
    }

    /// Returns the parent, if there is one.
    pub fn parent(&self) -> Option<&Index> {
        self.parent.as_deref()
    }

    /// Returns the reasons why files of the parent are not reused.
    pub fn problems(&self) -> &[Error] {
        &self.problems
    }

    /// Returns whether [`compare`](Self::compare) needs the bytes of an item.
    pub fn wants(&self, item: usize) -> bool {
        self.items[item].chunk.is_some()
    }

    /// Returns whether the first block of an item is enough.
    pub fn probes(&self, item: usize) -> bool {
        self.wants(item) && self.items[item].trusted
    }

    /// Compares parts of items with the parent. The parts of one item come in order, over all
    /// calls. Each but the last has a length that is a multiple of [`BLOCK_SIZE`]. Stops reading an
    /// item at the first difference, and a trusted item after its first block.
    ///
    /// # Errors
    /// [`Error::Plan`] for a part out of order, or of an item that is not wanted;
    /// [`Error::Interrupted`].
    pub fn compare(&self, parts: &[Part<'_>], control: &Control) -> Result<()> {
        let mut jobs = Vec::new();
        let mut compared = parallel::lock(&self.compared);
        for part in parts {
            let number = part.item as usize;
            let length = part.data.len() as u64;
            let known = self.items.get(number).filter(|item| item.chunk.is_some());
            let end = part.at.checked_add(length);
            let fits = known.is_some_and(|item| {
                end.is_some_and(|end| {
                    end == item.length || (end < item.length && length.is_multiple_of(BLOCK_SIZE))
                })
            });
            if !fits || compared[number] != part.at {
                return Err(Error::Plan(format!(
                    "{length} bytes at {} of item {number} cannot be compared",
                    part.at
                )));
            }
            compared[number] += length;
            let first = part.at / BLOCK_SIZE;
            let last = first + block_count(length);
            let last = if self.items[number].trusted { last.min(1) } else { last };
            jobs.extend(
                (first..last).step_by(to_usize(BLOCKS_AT_A_TIME)).map(|block| (part, block, last)),
            );
        }
        drop(compared);
        parallel::for_each(jobs.len(), parallel::available(), |job| {
            control.check()?;
            let (part, first, last) = jobs[job];
            self.compare_blocks(part, first, last.min(first + BLOCKS_AT_A_TIME));
            Ok(())
        })
    }

    fn compare_blocks(&self, part: &Part<'_>, first: u64, last: u64) {
        let number = part.item as usize;
        let item = &self.items[number];
        let (Some(parent), Some(chunk)) = (self.parent(), item.chunk) else {
            return;
        };
        let chunk = parent.chunk(chunk);
        for block in first..last {
            if item.differs.load(Ordering::Relaxed) {
                return;
            }
            let begin = to_usize(block * BLOCK_SIZE - part.at);
            let end = part.data.len().min(begin + to_usize(BLOCK_SIZE));
            let found = BlockDigests::of(&part.data[begin..end]);
            let expected = chunk.digests.as_ref().map(|range| parent.digest(range.start + block));
            if expected != Some(found.digest) {
                item.differs.store(true, Ordering::Relaxed);
                return;
            }
            self.blocks[self.first_block[number] + to_usize(block)].set(found);
        }
    }

    /// Returns the chunk of the parent that equals an item, by all of its bytes or, for a trusted
    /// item, by its first block.
    fn same(&self, number: usize, compared: u64) -> Option<u64> {
        let item = &self.items[number];
        let chunk = item.chunk.filter(|_| !item.differs.load(Ordering::Relaxed))?;
        if item.trusted {
            return (compared > 0).then_some(chunk);
        }
        if compared != item.length {
            return None;
        }
        let blocks = &self.blocks[self.first_block[number]..self.first_block[number + 1]];
        let content = content_digest(blocks.iter().map(BlockCell::content));
        (self.parent()?.chunk(chunk).content == Some(content)).then_some(chunk)
    }

    /// Returns the chunks of the parent that equal items.
    pub fn chunks(&self) -> Vec<u64> {
        let compared = parallel::lock(&self.compared);
        (0..self.items.len()).filter_map(|item| self.same(item, compared[item])).collect()
    }

    /// Excludes damaged chunks of the parent from reuse.
    pub fn refuse(&self, chunks: &[u64]) {
        for item in &self.items {
            if item.chunk.is_some_and(|chunk| chunks.contains(&chunk)) {
                item.differs.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Returns whether the caller says that an item never changes.
    pub(super) fn is_frozen(&self, item: usize) -> bool {
        self.items[item].frozen
    }

    /// Returns for each item whether it is unlikely to change.
    pub(super) fn stays(&self) -> Vec<bool> {
        let compared = parallel::lock(&self.compared);
        (0..self.items.len())
            .map(|item| self.items[item].frozen || self.same(item, compared[item]).is_some())
            .collect()
    }

    /// Returns the reused byte ranges of a source, in order, as (first, one after the last).
    pub(super) fn ranges(parent: &Index, source: &ParentFile) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for &(_, chunk) in &source.chunks {
            let view = parent.chunk(chunk);
            let end = view.offset + view.length;
            match ranges.last_mut() {
                Some(last) if last.1 == view.offset => last.1 = end,
                _ => ranges.push((view.offset, end)),
            }
        }
        ranges
    }

    /// Returns the files of the parent of which at least half is reused, in order.
    pub(super) fn sources(&self) -> Vec<ParentFile> {
        let Some(parent) = self.parent() else {
            return Vec::new();
        };
        let compared = parallel::lock(&self.compared);
        let mut by_file: BTreeMap<u32, Vec<(usize, u64)>> = BTreeMap::new();
        for number in 0..self.items.len() {
            if let Some(chunk) = self.same(number, compared[number]) {
                by_file.entry(parent.chunk_file(chunk)).or_default().push((number, chunk));
            }
        }
        by_file
            .into_iter()
            .filter_map(|(file, mut chunks)| {
                chunks.sort_by_key(|&(_, chunk)| parent.chunk(chunk).offset);
                let reused: u64 = chunks.iter().map(|&(item, _)| self.items[item].length).sum();
                let view = parent.file(file);
                (reused >= (view.size - view.data_start).div_ceil(2))
                    .then_some(ParentFile { file, chunks })
            })
            .collect()
    }
}

/// Known state of the parent's files.
#[derive(Default)]
struct Files {
    /// Files that may be linked.
    usable: BTreeSet<u32>,
    /// Reasons why some files cannot be linked. Files in other formats or folders are not listed.
    problems: Vec<Error>,
}

impl Files {
    /// Checks each file once. On a store, many checks run at the same time.
    fn look(parent: &Index, files: impl Iterator<Item = u32>, control: &Control) -> Result<Self> {
        let mut usable: BTreeSet<u32> = files.collect();
        usable.retain(|&file| {
            let view = parent.file(file);
            parent.source() == SourceKind::Native
                && !view.external
                && DataFileName::parse(view.name).is_some()
        });
        let files: Vec<u32> = usable.iter().copied().collect();
        let connection =
            parent.remote().filter(|_| !files.is_empty()).map(|remote| remote.connect(0));
        let looked = match connection {
            None => files.iter().map(|&file| check(parent, file)).collect(),
            Some(Err(Error::Interrupted)) => return Err(Error::Interrupted),
            // No file can be checked, so nothing is reused. The save itself may still reach the
            // store.
            Some(Err(problem)) => {
                return Ok(Self { problems: vec![problem], ..Self::default() });
            }
            Some(Ok(connection)) => {
                let look = |i: usize| match check_remote(parent, files[i], &*connection, control) {
                    Err(Error::Interrupted) => Err(Error::Interrupted),
                    looked => Ok(looked),
                };
                parallel::map(files.len(), LOOKS, look)?
            }
        };
        let mut problems = Vec::new();
        for (file, looked) in files.into_iter().zip(looked) {
            if let Err(problem) = looked {
                usable.remove(&file);
                problems.push(problem);
            }
        }
        Ok(Self { usable, problems })
    }
}

/// Checks that a file matches the parent's index.
fn check(parent: &Index, file: u32) -> Result<()> {
    let path = parent.file_path(file);
    match fs::symlink_metadata(&path) {
        Ok(found) if !found.is_file() => {
            Err(Error::corrupt_file(&path, "it is not a regular file"))
        }
        Ok(found) => check_length(&path, found.len(), parent.file(file).size),
        Err(error) => Err(Error::io("look at", &path, error)),
    }
}

fn check_remote(
    parent: &Index,
    file: u32,
    connection: &dyn Connection,
    control: &Control,
) -> Result<()> {
    let path = parent.file_path(file);
    match connection.look(&path, control)? {
        Some(size) => check_length(&path, size, parent.file(file).size),
        None => Err(Error::corrupt_file(&path, "it is missing")),
    }
}

fn check_length(path: &Path, found: u64, expected: u64) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::corrupt_file(path, format!("it is {found} bytes long, expected {expected}")))
}

/// Returns the chunk of the parent that equals the item in everything except, perhaps, its bytes.
fn find(parent: &Index, item: &SaveItem) -> Option<u64> {
    if item.length == 0 {
        return None;
    }
    let number = parent.find(&item.name)?;
    let tensor = parent.tensor(number);
    let is_same = (tensor.kind, tensor.dtype, &tensor.shape, tensor.flags)
        == (item.kind, item.dtype, &item.shape, item.flags)
        && item.path == parent.planner_path(number);
    if !is_same {
        return None;
    }
    let at = |chunk: &ChunkView| {
        item.kind == Kind::Bytes || (&chunk.offsets, &chunk.sizes) == (&item.offsets, &item.sizes)
    };
    tensor
        .chunks
        .map(|chunk| (chunk, parent.chunk(chunk)))
        .find(|(_, view)| at(view) && view.length == item.length && view.digests.is_some())
        .map(|(chunk, _)| chunk)
}

#[cfg(test)]
#[path = "reuse_tests.rs"]
mod tests;
