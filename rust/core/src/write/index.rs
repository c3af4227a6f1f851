//! The index of one rank's save.

use super::item::{SaveInfo, SaveItem};
use super::layout::SaveLayout;
use super::links::Link;
use crate::Result;
use crate::copy::Signs;
use crate::format::{
    ChunkEntry, FileEntry, Index, IndexBuilder, SourceKind, TensorEntry, Value, block_digest,
};

/// Parts that an index is built from.
pub(super) struct Saved<'a> {
    pub info: &'a SaveInfo,
    pub items: Vec<SaveItem>,
    pub layout: &'a SaveLayout,
    /// Returns whether the caller says that an item never changes.
    pub frozen: &'a dyn Fn(usize) -> bool,
    /// Returns the digests of a written item: those of its blocks, and that of its content.
    pub digests: &'a dyn Fn(usize) -> (Vec<u64>, u128),
    /// Reused files.
    pub links: &'a [Link],
    pub parent: Option<&'a Index>,
}

/// Builds the bytes of the index.
pub(super) fn build(saved: Saved<'_>, nesting: Value) -> Result<Vec<u8>> {
    let mut builder = IndexBuilder::new(SourceKind::Native);
    builder.save_id = saved.info.save_id;
    builder.generation = saved.info.generation;
    builder.root = Value::Dict(vec![]);
    builder.nesting = nesting;
    builder.reserve(saved.items.len());
    for plan in &saved.layout.files {
        builder.add_file(FileEntry {
            name: plan.name.clone(),
            size: plan.size,
            data_start: plan.header.len() as u64,
            external: false,
            linked: false,
            head_digest: Some(block_digest(&plan.header)),
            mtime_ns: 0,
        })?;
    }
    let mut reused = vec![None; saved.items.len()];
    for link in saved.links {
        let file = builder.add_file(link.entry.clone())?;
        for &(item, chunk) in &link.chunks {
            reused[item] = Some((file, chunk));
        }
    }
    for (number, (item, place)) in saved.items.into_iter().zip(&saved.layout.places).enumerate() {
        let tensor = builder.add_tensor(TensorEntry {
            name: item.name,
            kind: item.kind,
            dtype: item.dtype,
            shape: item.shape,
            flags: item.flags,
            path: item.path,
            position: item.position,
        })?;
        let (file, offset, digests, content) =
            if let (Some((file, chunk)), Some(parent)) = (reused[number], saved.parent) {
                let view = parent.chunk(chunk);
                let digests =
                    view.digests.map(|range| range.map(|digest| parent.digest(digest)).collect());
                (file, view.offset, digests, view.content)
            } else {
                let (digests, content) = (saved.digests)(number);
                (place.file, place.offset, Some(digests), Some(content))
            };
        builder.add_chunk(ChunkEntry {
            tensor,
            file,
            offset,
            length: item.length,
            offsets: item.offsets,
            sizes: item.sizes,
            strides: None,
            signs: Signs::default(),
            digests,
            content,
            frozen: (saved.frozen)(number),
        })?;
    }
    builder.build()
}
