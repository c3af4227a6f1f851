//! The check of every file before anything is read: does it exist, is it complete, and how is it
//! best read?

use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::policy::{Access, SMALL_READ};
use super::{Catalog, FileRef, IoMode, ReadOptions, ReadReq, Sharing};
use crate::store::{
    Connection, Mapping, direct_align, is_remote, most_open, resident_bytes, spare_address_space,
};
use crate::{Error, Result, parallel};

/// A file counts as resident if at most one part in this many is missing.
const MISSING_PART: u64 = 32;
/// Below this many bytes, setting up a mapping costs more than it saves.
const SMALL: u64 = 32 << 10;
/// Files that were opened for the check stay open for the workers, if there are at most this many.
const KEEP_OPEN: usize = 64;
/// Mappings that are kept if opening a file waits. A process may have 65,530 by default.
const KEEP_MAPPED: usize = 16 << 10;
/// If opening a file waits and workers read through the page cache, one part in this many of the
/// process's limit on open files is kept open.
const PART_OPEN: usize = 4;

/// The part of a file that requests need.
#[derive(Clone, Copy, Debug, Default)]
pub struct FileDemand {
    /// Bytes to deliver.
    pub bytes: u64,
    /// `bytes`, and the gaps between the requested rows.
    pub reach: u64,
    start: u64,
    end: u64,
    /// The part of `bytes` that other processes read too, or from whose gaps they read.
    common: u64,
}

/// Returns the part of each file that the requests need: its bytes, and its range.
pub fn spans(
    files: &[FileRef],
    reqs: &[ReadReq],
    options: &ReadOptions,
    catalog: &dyn Catalog,
) -> Result<Vec<FileDemand>> {
    let mut all = vec![FileDemand::default(); files.len()];
    let of_tensors = (options.shared == Sharing::Guess).then(|| bytes_of_tensors(reqs));
    for req in reqs {
        let Some(wanted) = all.get_mut(req.file as usize) else {
            return Err(Error::Plan(format!(
                "a request names file {} of {}",
                req.file,
                files.len()
            )));
        };
        // Saturating arithmetic is enough here: the planner refuses requests that are out of
        // bounds.
        let bytes = bytes_of(req);
        let (start, end) = span(req);
        if bytes > 0 {
            wanted.start = if wanted.bytes == 0 { start } else { wanted.start.min(start) };
            wanted.end = wanted.end.max(end);
            wanted.bytes = wanted.bytes.saturating_add(bytes);
            wanted.reach = wanted.reach.saturating_add(end.saturating_sub(start));
            let is_whole = |of: &HashMap<u32, u64>| {
                catalog.tensor_bytes(req.tensor) == of.get(&req.tensor).copied()
            };
            let is_common = match &options.shared {
                Sharing::Nothing => false,
                Sharing::Guess => of_tensors.as_ref().is_some_and(is_whole) || is_thin(req, bytes),
                Sharing::Known(files) => files.get(req.file as usize).copied().unwrap_or_default(),
            };
            if is_common {
                wanted.common = wanted.common.saturating_add(bytes);
            }
        }
    }
    Ok(all)
}

/// Returns the first requested byte of a file, and the one after the last.
pub fn span(req: &ReadReq) -> (u64, u64) {
    let start = req.chunk_offset.saturating_add(req.src_offset);
    let steps = req.shape.iter().zip(&req.src_strides);
    let reach = steps.fold(req.itemsize, |n, (&s, &stride)| {
        n.saturating_add(s.saturating_sub(1).saturating_mul(stride))
    });
    (start, start.saturating_add(reach))
}

pub fn bytes_of(req: &ReadReq) -> u64 {
    req.shape.iter().fold(req.itemsize, |n, &s| n.saturating_mul(s))
}

/// Returns the requested bytes of each tensor. A tensor that is read whole may be a replica, which
/// other processes read too.
fn bytes_of_tensors(reqs: &[ReadReq]) -> HashMap<u32, u64> {
    let mut all = HashMap::new();
    for req in reqs {
        let sum: &mut u64 = all.entry(req.tensor).or_default();
        *sum = sum.saturating_add(bytes_of(req));
    }
    all
}

/// Returns whether a request has short rows with gaps between them, such as some columns of a
/// matrix.
fn is_thin(req: &ReadReq, bytes: u64) -> bool {
    let mut row = req.itemsize;
    for (&size, &stride) in req.shape.iter().zip(&req.src_strides).rev() {
        if stride == row {
            row = row.saturating_mul(size);
        } else if size > 1 {
            break;
        }
    }
    row < SMALL_READ.min(bytes)
}

/// Connects to the store of the files, if they are on one. It receives on `threads` threads; 0
/// means as many as there are cores.
///
/// # Errors
/// [`Error::Io`] if the system has no thread to spare; [`Error::Unsupported`] if the store's
/// options contradict each other.
pub fn connect(files: &[FileRef], threads: usize) -> Result<Option<Arc<dyn Connection>>> {
    let remote = files.iter().find_map(|file| file.remote.as_ref());
    remote.map(|remote| remote.connect(threads)).transpose()
}

/// Handle that the check of a file leaves to the workers.
#[derive(Debug, Default)]
pub enum CachedHandle {
    /// None: workers open the file again.
    #[default]
    Nothing,
    Open(File),
    Mapped(Arc<Mapping>),
}

/// The mapping of a file. Workers share it as long as any of them uses it.
#[derive(Debug, Default)]
pub struct SharedMapping(Mutex<Weak<Mapping>>);

impl SharedMapping {
    /// Returns the existing mapping, or a new one.
    pub fn get(&self, map: impl FnOnce() -> Result<Mapping>) -> Result<Arc<Mapping>> {
        let mut known = parallel::lock(&self.0);
        if let Some(mapping) = known.upgrade() {
            return Ok(mapping);
        }
        let mapping = Arc::new(map()?);
        *known = Arc::downgrade(&mapping);
        Ok(mapping)
    }
}

/// The state of a call's files.
pub struct Found {
    /// How each file is read.
    pub access: Vec<Access>,
    /// Handle that the check of each file left.
    pub kept: Vec<CachedHandle>,
    /// Mapping of each file.
    pub mappings: Vec<SharedMapping>,
    /// True if opening a file takes long, on a network file system for example.
    pub opening_waits: bool,
}

/// Opens and checks every file that is needed, before any byte is read. Decides how to read each.
pub fn probe(files: &[FileRef], wanted: &[FileDemand], options: &ReadOptions) -> Result<Found> {
    let mut all = Found {
        // The first fetch from a store shows whether the file exists, and its length. Files without
        // requests get no jobs.
        access: files
            .iter()
            .map(|file| file.remote.as_ref().map_or(Access::Buffered, |_| Access::Remote))
            .collect(),
        kept: files.iter().map(|_| CachedHandle::Nothing).collect(),
        mappings: files.iter().map(|_| SharedMapping::default()).collect(),
        opening_waits: false,
    };
    let local = |i: &usize| wanted[*i].bytes > 0 && files[*i].remote.is_none();
    let local: Vec<usize> = (0..files.len()).filter(local).collect();
    let few = local.len() <= KEEP_OPEN;
    let may_open = OnceLock::new();
    // Each thread may work on another file, and each file is mapped once. Half of the free address
    // space is left for buffers and everything else.
    let most_mapped = spare_address_space().map_or(u64::MAX, |spare| {
        let threads = parallel::affordable(options.threads.max(parallel::available()));
        spare / (2 * threads as u64)
    });
    let look = |i: usize, waits: bool| {
        let (file, wanted) = (&files[local[i]], &wanted[local[i]]);
        let open = file.open(false)?;
        let access = access(file, &open, wanted, options, most_mapped);
        let kept = if few {
            CachedHandle::Open(open)
        } else if waits && access.maps() && i < KEEP_MAPPED {
            Mapping::new(&open)
                .map_or(CachedHandle::Nothing, |mapping| CachedHandle::Mapped(Arc::new(mapping)))
        } else if waits
            && access == Access::Cached
            && i < *may_open.get_or_init(|| most_open() / PART_OPEN)
        {
            CachedHandle::Open(open)
        } else {
            CachedHandle::Nothing
        };
        Ok((access, kept))
    };
    let found = parallel::map_waiting(local.len(), look)?;
    all.opening_waits = found.waits;
    for (i, (access, kept)) in local.into_iter().zip(found.made) {
        all.access[i] = access;
        all.kept[i] = kept;
    }
    Ok(all)
}

/// Chooses how to read a file.
fn access(
    file: &FileRef,
    open: &File,
    wanted: &FileDemand,
    options: &ReadOptions,
    most_mapped: u64,
) -> Access {
    let may_map = || file.size <= most_mapped && Mapping::is_possible(open);
    let missing = || {
        let span = wanted.end.saturating_sub(wanted.start);
        resident_bytes(open, wanted.start, wanted.end)
            .map(|bytes| span.saturating_sub(bytes) > span / MISSING_PART)
    };
    let direct = || {
        let align = direct_align(open)?;
        file.open(true).ok().map(|_| Access::Direct { align })
    };
    match options.io {
        IoMode::Mmap if Mapping::is_possible(open) => Access::Mapped,
        IoMode::Buffered if missing() == Some(false) => Access::Cached,
        IoMode::Mmap | IoMode::Buffered => Access::Buffered,
        IoMode::Direct => direct().unwrap_or(Access::Buffered),
        IoMode::Auto => match (missing(), is_remote(open)) {
            (Some(false), false) if wanted.bytes >= SMALL && may_map() => Access::Mapped,
            (Some(false), _) => Access::Cached,
            (_, true) => Access::Buffered,
            _ if wanted.common > wanted.bytes / 2 && Mapping::tells_errors() && may_map() => {
                Access::Shared
            }
            (_, false) => direct().unwrap_or(Access::Buffered),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use smallvec::smallvec;

    use super::super::Destination;

    use super::*;

    struct Sizes;

    impl Catalog for Sizes {
        fn tensor_name(&self, _: u32) -> String {
            String::new()
        }
        fn digest(&self, _: u64) -> u64 {
            0
        }
        fn tensor_bytes(&self, _: u32) -> Option<u64> {
            Some(1 << 20)
        }
    }

    /// Returns a request for `rows` rows of `width` bytes, of a chunk whose rows have `pitch`
    /// bytes.
    fn rows(rows: u64, width: u64, pitch: u64) -> ReadReq {
        ReadReq {
            shape: smallvec![rows, width],
            src_strides: smallvec![pitch, 1],
            dst_strides: smallvec![width, 1],
            ..ReadReq::bytes(0, 0, 0, rows * pitch, Destination(std::ptr::null_mut()))
        }
    }

    fn common(reqs: &[ReadReq], shared: Sharing) -> u64 {
        let file = FileRef::new("x", 1 << 20);
        let options = ReadOptions { shared, ..ReadOptions::default() };
        spans(&[file], reqs, &options, &Sizes).unwrap()[0].common
    }

    /// Once, 32 threads mapped a file 351 times for 320 jobs.
    #[test]
    fn a_file_is_mapped_once_for_all_workers() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let (shared, made) = (SharedMapping::default(), AtomicUsize::new(0));
        let map = || {
            made.fetch_add(1, Ordering::Relaxed);
            Ok(Mapping::new(&file).unwrap())
        };
        let first = shared.get(map).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert!(Arc::ptr_eq(&first, &shared.get(map).unwrap())));
            }
        });
        assert_eq!(made.load(Ordering::Relaxed), 1);
        drop(first);
        assert_eq!(shared.get(map).unwrap().len(), 4096, "it is unmapped once nobody has it");
        assert_eq!(made.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn replicas_and_columns_are_common_and_rows_are_not() {
        let (whole, half, columns) =
            (rows(256, 4096, 4096), rows(128, 4096, 4096), rows(256, 1024, 4096));
        let guess = |reqs: &[ReadReq]| common(reqs, Sharing::Guess);
        assert_eq!(guess(std::slice::from_ref(&whole)), 1 << 20);
        assert_eq!(guess(&[half.clone(), half.clone()]), 1 << 20, "whole, in two chunks");
        assert_eq!(guess(std::slice::from_ref(&half)), 0);
        assert_eq!(guess(std::slice::from_ref(&columns)), 256 << 10);
        assert_eq!(guess(&[rows(4, 64 << 10, 256 << 10)]), 0, "long rows");
        assert_eq!(guess(&[rows(1, 64, 4096)]), 0, "one row");
        let all = [whole, half, columns];
        assert_eq!(common(&all, Sharing::Nothing), 0, "alone on the machine");
        // If sharing is known, the shapes do not matter.
        assert_eq!(common(&all, Sharing::Known([false].into())), 0);
        assert_eq!(common(&all, Sharing::Known([true].into())), 7 << 18);
    }
}
