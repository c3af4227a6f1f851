//! A look at every file before anything is read: is it there and whole, and how is it best read?

use std::fs::File;

use super::plan::Policy;
use super::{FileRef, IoMode, ReadOptions, ReadReq};
use crate::store::{direct_align, is_remote, resident_bytes};
use crate::{Error, Result};

/// Bytes of a job that is copied from a mapping: large against the cost of a job, small against the work of a thread.
const MAPPED_JOB: u64 = 2 << 20;
/// Bytes of a job read past the page cache.
const DISK_JOB: u64 = 1 << 20;
/// Bytes of a job read from the page cache: buffer and all must stay in the second-level cache.
const CACHED_JOB: u64 = 512 << 10;
/// Jobs are made smaller than the above to give every thread some, but never below this.
pub const MIN_JOB: u64 = 256 << 10;
/// Of a file that is taken as resident, at most one part in this many is not.
const MISSING_PART: u64 = 32;
/// Below this, setting up a mapping costs more than it saves.
const SMALL: u64 = 32 << 10;
/// Files opened to be checked are kept open for the workers, if there are no more than this many.
const KEEP_OPEN: usize = 64;

/// How one file is read in this call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Mapped,
    /// From the page cache, by as many threads as copy.
    Cached,
    /// From storage through the page cache.
    Buffered,
    /// From storage past the page cache.
    Direct {
        align: u64,
    },
}

impl Access {
    /// Whether more threads than cores are useful.
    pub fn waits(self) -> bool {
        matches!(self, Self::Buffered | Self::Direct { .. })
    }

    pub fn policy(self, share: u64) -> Policy {
        let (target, align) = match self {
            Self::Mapped => (MAPPED_JOB, 1),
            Self::Cached | Self::Buffered => (CACHED_JOB, 1),
            Self::Direct { align } => (DISK_JOB, align),
        };
        Policy {
            target: share.next_power_of_two().clamp(MIN_JOB, target),
            align,
            skip_gaps: self != Self::Mapped,
        }
    }
}

/// What is wanted of a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Bytes to deliver.
    pub bytes: u64,
    start: u64,
    end: u64,
}

/// What is wanted of each file: how much, and from where to where.
pub fn spans(files: &[FileRef], reqs: &[ReadReq]) -> Result<Vec<Wanted>> {
    let mut all = vec![Wanted::default(); files.len()];
    for req in reqs {
        let Some(wanted) = all.get_mut(req.file as usize) else {
            return Err(Error::Plan(format!(
                "a request names file {} of {}",
                req.file,
                files.len()
            )));
        };
        // Saturating: what is out of bounds is refused by the planner, this only weighs.
        let bytes = req.shape.iter().fold(req.itemsize, |n, &s| n.saturating_mul(s));
        let start = req.chunk_offset.saturating_add(req.src_offset);
        let steps = req.shape.iter().zip(&req.src_strides);
        let reach = steps.fold(req.itemsize, |n, (&s, &stride)| {
            n.saturating_add(s.saturating_sub(1).saturating_mul(stride))
        });
        let end = start.saturating_add(reach);
        if bytes > 0 {
            wanted.start = if wanted.bytes == 0 {
                start
            } else {
                wanted.start.min(start)
            };
            wanted.end = wanted.end.max(end);
            wanted.bytes = wanted.bytes.saturating_add(bytes);
        }
    }
    Ok(all)
}

/// Opens and checks every file that is needed before a byte of any is read, and decides how to read each.
pub fn survey(files: &[FileRef], wanted: &[Wanted], options: &ReadOptions) -> Result<(Vec<Access>, Vec<Option<File>>)> {
    let mut all = Vec::with_capacity(files.len());
    let mut kept: Vec<Option<File>> = Vec::with_capacity(files.len());
    let keep = wanted.iter().filter(|w| w.bytes > 0).count() <= KEEP_OPEN;
    for (file, wanted) in files.iter().zip(wanted) {
        if wanted.bytes == 0 {
            all.push(Access::Buffered);
            kept.push(None);
            continue;
        }
        let open = file.open(false)?;
        let missing = || {
            let span = wanted.end.saturating_sub(wanted.start);
            resident_bytes(&open, wanted.start, wanted.end)
                .map(|bytes| span.saturating_sub(bytes) > span / MISSING_PART)
        };
        let direct = || {
            let align = direct_align(&open)?;
            file.open(true).ok().map(|_| Access::Direct { align })
        };
        all.push(match options.io {
            IoMode::Mmap => Access::Mapped,
            IoMode::Buffered if missing() == Some(false) => Access::Cached,
            IoMode::Buffered => Access::Buffered,
            IoMode::Direct => direct().unwrap_or(Access::Buffered),
            IoMode::Auto => match (missing(), is_remote(&open)) {
                (Some(false), false) if wanted.bytes >= SMALL => Access::Mapped,
                (Some(false), _) => Access::Cached,
                (_, true) => Access::Buffered,
                (_, false) => direct().unwrap_or(Access::Buffered),
            },
        });
        kept.push(Some(open).filter(|_| keep));
    }
    Ok((all, kept))
}
