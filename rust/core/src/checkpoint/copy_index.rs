//! Copies of an index over the same data, for another folder or with added digests.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use super::blocks::{each_block, open, push_blocks};
use super::data_files::{explain, file_ref};
use crate::format::{FileEntry, FileView, Index, IndexBuilder, block_count, block_digest};
use crate::store::Storage;
use crate::{Control, Error, Result};

/// Options of [`copy_index`].
#[derive(Clone, Debug, Default)]
pub struct CopyOptions {
    /// Prepend this folder to every relative file name, for an index in another folder than its
    /// data.
    pub prefix: Option<PathBuf>,
    /// Hash the payload of chunks that have no digests.
    pub digests: bool,
    /// 16 random bytes that identify the new index.
    pub save_id: [u8; 16],
    /// Threads that hash. 0: as many as there are cores.
    pub threads: usize,
}

/// Returns the bytes of an index of the same tensors in the same files, changed as `options` say.
pub fn copy_index(index: &Index, options: &CopyOptions, control: &Control) -> Result<Vec<u8>> {
    let mut builder = IndexBuilder::new(index.source());
    builder.save_id = options.save_id;
    builder.generation = index.generation();
    builder.root = index.planner_root();
    builder.nesting = index.nesting();
    let digests =
        if options.digests { hash_all(index, options.threads, control)? } else { BTreeMap::new() };
    let file = |file: FileView<'_>| -> Result<FileEntry> {
        let Some(folder) = &options.prefix else {
            return Ok(file.into());
        };
        let path = folder.join(file.name);
        let Some(name) = path.to_str() else {
            return Err(Error::Unsupported(format!("{}: the path is not UTF-8", path.display())));
        };
        Ok(FileEntry { name: name.to_owned(), external: true, linked: false, ..file.into() })
    };
    builder.merge_with(index, file, |chunk| digests.get(&chunk).cloned())?;
    builder.build()
}

/// Returns the digests of every chunk that has none.
fn hash_all(index: &Index, threads: usize, control: &Control) -> Result<BTreeMap<u64, Vec<u64>>> {
    let storage = Storage::new(index.remote(), threads, control)?;
    let there = storage.files();
    let mut files = BTreeMap::new();
    for number in 0..index.file_count() {
        let file_ref = file_ref(index, number, true)?;
        open(there, &file_ref)?;
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
    each_block(&files, &blocks, threads, control, |block, bytes| {
        let number = usize::try_from(block.number).expect("as many as fit memory");
        digests[&block.chunk][number].store(block_digest(bytes), Ordering::Relaxed);
        Ok(())
    })
    .map_err(|error| explain(index, error, control))?;
    Ok(digests
        .into_iter()
        .map(|(chunk, digests)| (chunk, digests.into_iter().map(AtomicU64::into_inner).collect()))
        .collect())
}
