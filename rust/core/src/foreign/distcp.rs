//! Stock DCP folders (`.distcp`), indexed in place.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::fault::{Fault, FaultResult};
use super::metadata_pickle::{self, StockItem, StockMetadata};
use super::sharding::Sharding;
use super::tensor_pickle::{self, StoredTensor};
use super::window::{Fetched, MAX_PIECE, SourceFile, Window, joined};
use super::zip::{Archive, LOCAL_MAGIC};
use crate::copy::Signs;
use crate::format::safetensors as st;
use crate::format::{ChunkEntry, FileEntry, IndexBuilder, Kind, SourceKind, TensorEntry};
use crate::store::{Files, Stat};
use crate::{Dtype, Error, Result, parallel};

/// Limit on a `.metadata`: millions of chunks.
const MOST_METADATA: u64 = 1 << 30;
/// File that identifies a stock DCP checkpoint.
pub const METADATA_NAME: &str = ".metadata";

/// Returns the name of one rank's metadata in a rank-local stock save.
#[must_use]
pub fn rank_metadata_name(rank: u32) -> String {
    format!("__{rank}{METADATA_NAME}")
}

/// Indexes the stock DCP folder `dir` from its `.metadata`, or with `rank` from that rank's own.
/// Returns the bytes of an index for a file in `dir`. If `threads` is 0, it uses all cores.
pub(crate) fn index_folder(
    files: Files<'_>,
    dir: &Path,
    rank: Option<u32>,
    threads: usize,
) -> Result<Vec<u8>> {
    let path = dir.join(rank.map_or_else(|| METADATA_NAME.to_owned(), rank_metadata_name));
    let Some(bytes) = files.read(&path, MOST_METADATA)? else {
        return Err(Error::NotFound {
            path: dir.to_owned(),
            reason: format!("there is no {}", path.display()),
        });
    };
    index_items(files, dir, metadata_pickle::parse(&bytes, &path)?, threads)
}

/// Indexes the data files that `metadata` names.
pub(crate) fn index_items(
    files: Files<'_>,
    dir: &Path,
    metadata: StockMetadata,
    threads: usize,
) -> Result<Vec<u8>> {
    let threads = files.threads(threads);
    let StockMetadata { files: names, entries, mut items, root, save_id } = metadata;
    let mut builder = IndexBuilder::new(SourceKind::Dcp);
    builder.root = root;
    builder.save_id = save_id;
    let looked_at =
        parallel::map(names.len(), threads, |i| DataFile::look_at(files, dir, &names[i]))?;
    for (name, file) in names.into_iter().zip(&looked_at) {
        builder.add_file(FileEntry::foreign(&name, file.stat.size, file.stat.mtime_ns))?;
    }
    items.sort_by_key(|item| (item.file, item.offset));
    let batches = batches(&items);
    let located = parallel::map(batches.len(), threads, |i| {
        locate_batch(files, &looked_at, &entries, batches[i])
    })?;
    for entry in entries {
        builder.add_tensor(entry)?;
    }
    for chunk in located.into_iter().flatten() {
        builder.add_chunk(chunk)?;
    }
    builder.build()
}

/// A data file as it is now. It is opened for each batch, because a checkpoint may have more files
/// than a process may have open.
struct DataFile {
    path: PathBuf,
    stat: Stat,
    /// Bytes that no archive or value has claimed. Items may not share bytes, so the time to
    /// examine them all is proportional to the file.
    left: AtomicU64,
    /// The safetensors files found in it, by their offset.
    embedded: Mutex<HashMap<u64, Arc<Embedded>>>,
}

impl DataFile {
    fn look_at(files: Files<'_>, dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let stat = files.stat(&path)?;
        Ok(Self { path, stat, left: AtomicU64::new(stat.size), embedded: Mutex::default() })
    }

    /// Claims the bytes of an item.
    fn claim(&self, item: &StockItem) -> FaultResult<()> {
        let take = |left: u64| left.checked_sub(item.length);
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Ok(()),
            Err(_) => Err(Fault::corrupt(0, "it shares bytes with other items")),
        }
    }

    /// Returns the safetensors file at the start of `window`. It is parsed once for all its
    /// tensors.
    fn embedded(&self, window: &Window<'_>) -> FaultResult<Arc<Embedded>> {
        let mut known = parallel::lock(&self.embedded);
        if let Some(embedded) = known.get(&window.start) {
            return Ok(Arc::clone(embedded));
        }
        let embedded = Arc::new(Embedded::read(window)?);
        known.insert(window.start, Arc::clone(&embedded));
        Ok(embedded)
    }
}

/// Items of a batch: enough to share reads among neighbours, few enough to spread over threads.
const BATCH: usize = 512;

/// Cuts items that are sorted by file and offset into batches of one file each.
fn batches(items: &[StockItem]) -> Vec<&[StockItem]> {
    let files = items.chunk_by(|a, b| a.file == b.file);
    files.flat_map(|of_file| of_file.chunks(BATCH)).collect()
}

/// Bytes at both ends of an item. In nearly every archive they contain the end of the directory and
/// the pickle.
const HEAD: u64 = 1024;
const TAIL: u64 = 1024;
/// Reading this many unneeded bytes costs no more than another call.
const GAP: u64 = 16 << 10;
const LONGEST_READ: u64 = 4 << 20;
/// [`GAP`] for a store, where each call is a request.
const REMOTE_GAP: u64 = 256 << 10;

/// Returns the ranges to read for some items of a file of `size` bytes: both ends of each, with
/// near neighbours joined.
fn ranges(items: &[StockItem], size: u64, gap: u64) -> Vec<(u64, u64)> {
    let mut ends = Vec::with_capacity(2 * items.len());
    for item in items {
        let end = item.offset.saturating_add(item.length).min(size);
        let begin = item.offset.min(end);
        ends.push((begin, end.min(begin.saturating_add(HEAD))));
        ends.push((begin.max(end.saturating_sub(TAIL)), end));
    }
    joined(ends, gap, LONGEST_READ)
}

fn locate_batch(
    files: Files<'_>,
    looked_at: &[DataFile],
    entries: &[TensorEntry],
    items: &[StockItem],
) -> Result<Vec<ChunkEntry>> {
    let Some(first) = items.first() else {
        return Ok(Vec::new());
    };
    let file = &looked_at[first.file as usize];
    let opened = files.open(&file.path)?;
    let source = SourceFile { file: &opened, path: &file.path, size: file.stat.size };
    let tensors: Vec<_> =
        items.iter().filter(|item| is_stored_tensor(item, entries)).cloned().collect();
    let gap = if opened.is_remote() { REMOTE_GAP } else { GAP };
    let fetched = source.fetch_all(&ranges(&tensors, source.size, gap))?;
    let mut chunks = Vec::with_capacity(items.len());
    for item in items {
        let entry = &entries[item.entry as usize];
        let chunk = locate(file, &source, &fetched, entry, item);
        chunks.push(chunk.map_err(|fault| name_fault(fault, &file.path, entry, item))?);
    }
    Ok(chunks)
}

/// Returns whether the file must be examined for the item. Values are used as they are, and empty
/// chunks have no bytes.
fn is_stored_tensor(item: &StockItem, entries: &[TensorEntry]) -> bool {
    entries[item.entry as usize].kind == Kind::Tensor && !item.sizes.contains(&0)
}

fn name_fault(fault: Fault, path: &Path, entry: &TensorEntry, item: &StockItem) -> Error {
    let name = &entry.name;
    let unsupported = |what: &str| {
        Error::Unsupported(format!(
            "tensor {name:?} in {}: {what}, which cannot be read in place; load it with torch's \
            FileSystemReader and save it again",
            path.display()
        ))
    };
    match fault {
        Fault::Corrupt { at, reason } => {
            Error::corrupt_data(path, name, item.offset.saturating_add(at), reason)
        }
        Fault::Unsupported(what) => unsupported(&what),
        Fault::Forbidden(global) => unsupported(&format!("stored with {global}")),
        Fault::Read(e) => e,
    }
}

fn locate(
    file: &DataFile,
    source: &SourceFile<'_>,
    fetched: &[Fetched],
    entry: &TensorEntry,
    item: &StockItem,
) -> FaultResult<ChunkEntry> {
    let at = |offset, length, strides, signs| ChunkEntry {
        tensor: item.entry,
        file: item.file,
        offset,
        length,
        offsets: item.offsets.clone(),
        sizes: item.sizes.clone(),
        strides,
        signs,
        ..ChunkEntry::default()
    };
    let in_file = item.offset.checked_add(item.length).is_some_and(|end| end <= source.size);
    let Some(dtype) = entry.dtype else {
        return if in_file {
            file.claim(item)?;
            Ok(at(item.offset, item.length, None, Signs::default()))
        } else {
            Err(leads_out(item, source.size))
        };
    };
    if item.sizes.contains(&0) {
        return Ok(at(item.offset.min(source.size), 0, None, Signs::default()));
    }
    let window = |len| Window { source, start: item.offset, len, max_piece: MAX_PIECE, fetched };
    let rest = source.size.saturating_sub(item.offset);
    let magic = window(rest).get(0, 4.min(rest))?;
    if *magic != LOCAL_MAGIC {
        let (offset, length) =
            locate_in_safetensors(&*file.embedded(&window(rest))?, entry, item, dtype)?;
        return Ok(at(offset, length, None, Signs::default()));
    }
    if !in_file {
        return Err(leads_out(item, source.size));
    }
    file.claim(item)?;
    let (payload, tensor) = locate_in_archive(&window(item.length))?;
    check_stored(tensor.dtype, &tensor.sizes, dtype, item)?;
    let strides = (!tensor.is_contiguous()).then(|| tensor.strides.clone());
    let offset = item.offset + payload + tensor.offset;
    Ok(at(offset, tensor.length(), strides, tensor.signs))
}

fn leads_out(item: &StockItem, size: u64) -> Fault {
    Fault::corrupt(0, format!("its {} bytes lead out of a file of {size} bytes", item.length))
}

/// Returns the offset of the storage in the archive of one tensor, and the tensor.
pub(super) fn locate_in_archive(window: &Window<'_>) -> FaultResult<(u64, StoredTensor)> {
    let archive = Archive::open(window)?;
    let content = |name: &str, longest: u64| -> FaultResult<Option<_>> {
        let Some(record) = archive.find(name) else {
            return Ok(None);
        };
        if record.size > longest {
            return Err(Fault::Unsupported(format!("record {name:?} of {} bytes", record.size)));
        }
        let at = archive.payload(window, record)?;
        window.get(at, record.size).map(Some)
    };
    if let Some(order) = content("byteorder", 16)?
        && *order != *b"little"
    {
        let order = String::from_utf8_lossy(&order).into_owned();
        return Err(Fault::Unsupported(format!("stored in byte order {order:?}")));
    }
    let Some(pickle) = content("data.pkl", 1 << 20)? else {
        return Err(Fault::corrupt(0, "the archive has no data.pkl"));
    };
    let tensor = tensor_pickle::parse(&pickle)?;
    let Some(record) = archive.find(&format!("data/{}", tensor.key)) else {
        return Err(Fault::corrupt(0, format!("the archive has no record data/{}", tensor.key)));
    };
    let payload = archive.payload(window, record)?;
    if record.size < tensor.storage_len {
        return Err(Fault::corrupt(
            payload,
            format!("its storage has {} bytes, expected {}", record.size, tensor.storage_len),
        ));
    }
    Ok((payload, tensor))
}

/// A safetensors file within a data file. `SerializationFormat.SAFETENSORS` writes one after the
/// values, and gives every tensor in it the offset of that file.
struct Embedded {
    data_start: u64,
    tensors: HashMap<String, st::HeaderTensor>,
    sharding: Sharding,
}

impl Embedded {
    fn read(window: &Window<'_>) -> FaultResult<Self> {
        let bad = |e: st::HeaderError| {
            let reason = format!(
                "neither a torch.save archive nor a safetensors header is here: {}",
                e.reason
            );
            Fault::corrupt(e.offset, reason)
        };
        let prefix = window.get(0, st::PREFIX_LEN)?;
        let prefix = prefix.first_chunk().copied().unwrap_or_default();
        let len = st::header_len(prefix, window.len).map_err(bad)?;
        let fetched =
            window.source.fetch(window.start, st::PREFIX_LEN + len).map_err(Fault::Read)?;
        let header = st::parse(&fetched.bytes, window.len).map_err(bad)?;
        let sharding = Sharding::of(&header)?;
        let tensors =
            header.tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        Ok(Self { data_start: header.data_start, tensors, sharding })
    }
}

/// Returns the offset and length of a chunk in an embedded safetensors file.
fn locate_in_safetensors(
    embedded: &Embedded,
    entry: &TensorEntry,
    item: &StockItem,
    dtype: Dtype,
) -> FaultResult<(u64, u64)> {
    let found = embedded.tensors.get(&entry.name);
    let found =
        found.ok_or_else(|| Fault::corrupt(0, "the safetensors header here does not name it"))?;
    let (stored, sizes) = found.dtype.to_torch(&found.shape).ok_or_else(|| {
        Fault::Unsupported(format!("stored as {} {:?}", found.dtype.name(), found.shape))
    })?;
    check_stored(stored, &sizes, dtype, item)?;
    // The writer keeps only one shard for each name and file. The offsets show which one it kept.
    let offsets = embedded.sharding.offsets(found)?;
    if embedded.sharding.is_noted() && offsets != item.offsets {
        return Err(Fault::corrupt(
            0,
            format!("the shard stored here begins at {offsets:?}, expected {:?}", item.offsets),
        ));
    }
    Ok((item.offset + embedded.data_start + found.begin, found.end - found.begin))
}

fn check_stored(stored: Dtype, sizes: &[u64], dtype: Dtype, item: &StockItem) -> FaultResult<()> {
    if stored == dtype && sizes == item.sizes.as_slice() {
        return Ok(());
    }
    Err(Fault::corrupt(
        0,
        format!(
            "it is stored as {} {sizes:?}, expected {} {:?}",
            stored.name(),
            dtype.name(),
            item.sizes
        ),
    ))
}
