//! A save by one rank: its data files from creation to the bytes of its index.

mod create;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::files::{DataFiles, Handles};
use super::index;
use super::item::{SaveInfo, SaveItem};
use super::jobs::{Job, Span, cut};
use super::layout::Layout;
use super::links::Link;
use super::options::Resolved;
use super::reuse::Reuse;
use crate::format::{BLOCK_SIZE, BlockCell, BlockDigests, Value, content_digest};
use crate::store::disk::Disk;
use crate::store::{Buffer, FileLock};
use crate::{Control, Error, Result, parallel};

/// Some bytes of an item.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Index of the item.
    pub item: u32,
    /// Where in the item they begin.
    pub at: u64,
    /// The bytes.
    pub data: &'a [u8],
}

/// The data files of one rank, on their way to the disk.
///
/// Dropped without [`finish`](Self::finish), it removes the files that it created.
pub struct Save {
    disk: Disk,
    /// The folder, after those that it had to be created in.
    folders: Vec<PathBuf>,
    info: SaveInfo,
    items: Vec<SaveItem>,
    layout: Layout,
    how: Resolved,
    files: DataFiles,
    /// What a parent holds, and the files of it that are linked.
    reuse: Option<Arc<Reuse>>,
    links: Vec<Link>,
    /// For each item, the index of its first digest; and the end of the last.
    first_digest: Vec<usize>,
    digests: Vec<BlockCell>,
    progress: Mutex<Progress>,
    /// Buffers that no thread uses at the moment.
    staging: Mutex<Vec<Buffer>>,
}

/// Held for the length of a write: writes follow each other, so that memory stays bounded.
struct Progress {
    /// Bytes of each item that were written.
    written: Vec<u64>,
    failed: bool,
}

impl Save {
    /// Where everything goes.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The items of which a parent's file was linked: they are not written.
    #[must_use]
    pub fn is_reused(&self) -> Vec<bool> {
        reused(&self.links, self.items.len())
    }

    /// Writes parts of items, in parallel. The parts of one item come in order, over all calls, and each but its last
    /// is a multiple of [`BLOCK_SIZE`] long. One call for many parts is much faster than many calls.
    ///
    /// `control` counts the bytes, and can stop the call.
    ///
    /// # Errors
    /// [`Error::Plan`] for a part out of order or too long; [`Error::Io`], [`Error::Interrupted`]. After any error the
    /// save takes no more, and is there to be dropped.
    pub fn write(&self, parts: &[Part<'_>], control: &Control) -> Result<()> {
        self.check_process()?;
        let mut progress = self.progress();
        if progress.failed {
            return Err(Error::Plan("an earlier write of this save failed".into()));
        }
        let result = self
            .spans(parts, &mut progress.written)
            .and_then(|spans| self.write_spans(&spans, control));
        progress.failed = result.is_err();
        result
    }

    /// A fork of the process that began this save has neither its threads nor its files.
    fn check_process(&self) -> Result<()> {
        if self.files.is_own() {
            Ok(())
        } else {
            Err(Error::Plan(
                "this save was begun by the process that this one is a fork of".into(),
            ))
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parts as places in files, sorted. Counts them as written.
    fn spans<'a>(&self, parts: &[Part<'a>], written: &mut [u64]) -> Result<Vec<Span<'a>>> {
        let mut spans = Vec::with_capacity(parts.len());
        for part in parts {
            let number = part.item as usize;
            let Some(item) = self.items.get(number) else {
                return Err(Error::Plan(format!(
                    "there is no item {number} in this save of {}",
                    self.items.len()
                )));
            };
            let length = part.data.len() as u64;
            let done = &mut written[number];
            let end = part.at.checked_add(length).filter(|&end| end <= item.length);
            let (Some(end), true) = (end, part.at == *done) else {
                let reason = format!(
                    "{length} bytes at {}, where {} of {} bytes were written before",
                    part.at, done, item.length
                );
                return Err(Error::tensor_plan(None, &item.name, reason));
            };
            if end < item.length && !length.is_multiple_of(BLOCK_SIZE) {
                let reason = format!(
                    "{length} bytes at {} are not the last, and no multiple of {BLOCK_SIZE}",
                    part.at
                );
                return Err(Error::tensor_plan(None, &item.name, reason));
            }
            *done = end;
            if length > 0 {
                let place = self.layout.places[number];
                spans.push(Span {
                    file: place.file,
                    offset: place.offset + part.at,
                    digest: self.first_digest[number] + to_usize(part.at / BLOCK_SIZE),
                    data: part.data,
                });
            }
        }
        spans.sort_unstable_by_key(|span| (span.file, span.offset));
        Ok(spans)
    }

    fn write_spans(&self, spans: &[Span], control: &Control) -> Result<()> {
        let total = spans.iter().map(|span| span.data.len() as u64).sum();
        let jobs = cut(spans, self.how.job_bytes_for(total), self.how.alignment);
        parallel::for_each(
            jobs.len(),
            self.how.threads,
            || None,
            |open, number| {
                control.check()?;
                let job = &jobs[number];
                let handles = self.handles(open, job.file)?;
                self.write_job(job, &spans[job.spans.clone()], handles, control)?;
                control.add(job.bytes.end - job.bytes.start);
                Ok(())
            },
        )
    }

    /// The handles of a file; jobs come sorted by file, so a worker keeps the last ones.
    fn handles<'a>(&self, open: &'a mut Option<(u32, Arc<Handles>)>, file: u32) -> Result<&'a Handles> {
        let kept = open.take().filter(|(number, _)| *number == file);
        let handles = match kept {
            Some((_, handles)) => handles,
            None => self.files.handles(file)?,
        };
        Ok(&open.insert((file, handles)).1)
    }

    fn write_job(&self, job: &Job, spans: &[Span], handles: &Handles, control: &Control) -> Result<()> {
        if let [span] = spans
            && let bytes = &span.data[to_usize(job.bytes.start - span.offset)..to_usize(job.bytes.end - span.offset)]
            && (handles.direct.is_none() || self.is_aligned_alike(bytes, job.bytes.start))
        {
            self.digest(span, job, |_| ());
            return self.store(job, bytes, handles, control);
        }
        let pool = || self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = pool().pop();
        let mut buffer = kept.unwrap_or_default();
        // Where the job begins in its first page, it begins in the buffer.
        let begin = to_usize(job.bytes.start % self.how.alignment);
        let end = begin + to_usize(job.bytes.end - job.bytes.start);
        let memory = buffer.at_least(end);
        let bytes =
            &mut memory.map_err(|e| Error::io("take memory to write", self.files.path(job.file), e))?[begin..end];
        let mut at = 0;
        for span in spans {
            self.digest(span, job, |piece| {
                bytes[at..at + piece.len()].copy_from_slice(piece);
                at += piece.len();
            });
        }
        let result = self.store(job, bytes, handles, control);
        pool().push(buffer);
        result
    }

    /// Hashes the blocks of a span that begin in the job, and hands on the bytes of the span that lie in the job, each
    /// piece right after it was hashed. A block that reaches beyond the job is hashed here and handed on with the next.
    fn digest<'a>(&self, span: &Span<'a>, job: &Job, mut hand_on: impl FnMut(&'a [u8])) {
        let block_size = to_usize(BLOCK_SIZE);
        let end = to_usize(job.bytes.end.min(span.end()) - span.offset);
        let mut at = to_usize(job.bytes.start.saturating_sub(span.offset));
        while at < end {
            let block = at / block_size;
            let next = (block + 1) * block_size;
            if at.is_multiple_of(block_size) {
                self.digests[span.digest + block].set(BlockDigests::of(&span.data[at..next.min(span.data.len())]));
            }
            hand_on(&span.data[at..next.min(end)]);
            at = next;
        }
    }

    /// Whether direct writes can start from this memory for this place in a file.
    fn is_aligned_alike(&self, bytes: &[u8], offset: u64) -> bool {
        bytes.as_ptr().addr() as u64 % self.how.alignment == offset % self.how.alignment
    }

    /// Writes the bytes of a job: whole pages past the cache where that is possible, the rest through it.
    fn store(&self, job: &Job, bytes: &[u8], handles: &Handles, control: &Control) -> Result<()> {
        let Range { start, end } = job.bytes;
        let path = self.files.path(job.file);
        let alignment = self.how.alignment;
        let mut direct = start..start;
        if let Some(file) = &handles.direct {
            let (first, last) = (start.next_multiple_of(alignment), end - end % alignment);
            if first < last {
                let pages = &bytes[to_usize(first - start)..to_usize(last - start)];
                let written = self.disk.write_direct(file, path, pages, first, to_usize(alignment))?;
                direct = first..first + written as u64;
            }
        }
        let rest = [start..direct.start, direct.end..end];
        for part in rest.iter().filter(|part| !part.is_empty()) {
            let bytes = &bytes[to_usize(part.start - start)..to_usize(part.end - start)];
            self.disk.write(&handles.plain, path, bytes, part.start)?;
        }
        if self.how.fsync && self.files.is_transient(job.file) && rest.iter().any(|part| !part.is_empty()) {
            self.disk.sync(&handles.plain, path, control)?;
        }
        Ok(())
    }

    /// Makes the files valid and durable, and returns the bytes of this rank's index, which no file holds yet.
    ///
    /// Headers are written last, after the payload is on stable storage: a file with a header is complete.
    ///
    /// # Errors
    /// [`Error::Plan`] where bytes of an item are missing; [`Error::Io`], [`Error::Interrupted`]. The files are removed then.
    pub fn finish(self, control: &Control) -> Result<Vec<u8>> {
        Ok(self.finish_with(Value::None, control)?.keep().0)
    }

    /// [`finish`](Self::finish), with the containers of the state dict that the paths do not tell.
    pub fn finish_with(self, nesting: Value, control: &Control) -> Result<Finished> {
        self.check_process()?;
        let progress = self.progress();
        if progress.failed {
            return Err(Error::Plan("a write of this save failed".into()));
        }
        for (item, written) in self.items.iter().zip(&progress.written) {
            if *written != item.length {
                let reason = format!("{written} of {} bytes were written", item.length);
                return Err(Error::tensor_plan(None, &item.name, reason));
            }
        }
        drop(progress);
        self.sync(control)?;
        if self.how.fsync {
            self.files.sync_links(control)?;
        }
        for (number, plan) in (0..).zip(&self.layout.files) {
            control.check()?;
            let handles = self.files.handles(number)?;
            self.disk
                .write(&handles.plain, self.files.path(number), &plan.header, 0)?;
            if self.how.fsync && self.files.is_transient(number) {
                self.disk.sync(&handles.plain, self.files.path(number), control)?;
            }
        }
        self.sync(control)?;
        if self.how.fsync {
            for folder in self.folders.iter().rev() {
                control.check()?;
                self.disk.sync_folder(folder)?;
            }
        }
        let index = self.index(nesting)?;
        Ok(Finished {
            index,
            files: self.files,
        })
    }

    fn sync(&self, control: &Control) -> Result<()> {
        if !self.how.fsync {
            return Ok(());
        }
        let numbers: Vec<u32> = (0..).take(self.layout.files.len()).collect();
        parallel::for_each(
            numbers.len(),
            self.how.threads,
            || (),
            |(), i| {
                let handles = self.files.handles(numbers[i])?;
                self.disk.sync(&handles.plain, self.files.path(numbers[i]), control)
            },
        )
    }

    fn index(&self, nesting: Value) -> Result<Vec<u8>> {
        let saved = index::Saved {
            info: &self.info,
            items: &self.items,
            layout: &self.layout,
            frozen: &|item| self.reuse.as_ref().is_some_and(|reuse| reuse.is_frozen(item)),
            digests: &|item| {
                let blocks = &self.digests[self.first_digest[item]..self.first_digest[item + 1]];
                let digests = blocks.iter().map(BlockCell::digest).collect();
                (digests, content_digest(blocks.iter().map(BlockCell::content)))
            },
            links: &self.links,
            parent: self.reuse.as_ref().and_then(|reuse| reuse.parent()),
        };
        index::build(&saved, nesting)
    }
}

/// The complete data files of one rank. Dropped without [`keep`](Self::keep), it removes them.
pub struct Finished {
    index: Vec<u8>,
    files: DataFiles,
}

impl Finished {
    /// The bytes of this rank's index, which no file holds yet, and the claim on the files, to be held until the save is committed or given up:
    /// while it is, nobody takes them for those of a save that was killed.
    pub fn keep(self) -> (Vec<u8>, Option<FileLock>) {
        (self.index, self.files.keep())
    }
}

/// For each of so many items, whether a link holds it.
fn reused(links: &[Link], items: usize) -> Vec<bool> {
    let mut reused = vec![false; items];
    for &(item, _) in links.iter().flat_map(|link| &link.chunks) {
        reused[item] = true;
    }
    reused
}

/// For lengths of what is in memory.
fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("the length of something in memory")
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
