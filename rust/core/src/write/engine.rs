//! A save by one rank: its data files from creation to the bytes of its index.

mod create;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::index;
use super::item::{SaveInfo, SaveItem};
use super::jobs::{Span, cut};
use super::layout::SaveLayout;
use super::links::Link;
use super::object::with_leftovers;
use super::reuse::Reuse;
use super::sink::{Digests, Sink};
use crate::format::{BLOCK_SIZE, Value};
use crate::store::FileLock;
use crate::{Control, Error, Result, parallel};

/// Some bytes of an item.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Index of the item.
    pub item: u32,
    /// Offset in the item.
    pub at: u64,
    /// The bytes.
    pub data: &'a [u8],
}

/// The data files of one rank, on their way to the disk, or to a store.
///
/// Dropped without [`finish`](Self::finish), it removes the files that it created.
pub struct Save {
    sink: Box<dyn Sink>,
    info: SaveInfo,
    items: Vec<SaveItem>,
    layout: Arc<SaveLayout>,
    /// The parent's items, and its files that are linked.
    reuse: Option<Arc<Reuse>>,
    links: Vec<Link>,
    digests: Digests,
    progress: Mutex<Progress>,
}

/// Held for the length of a write: writes follow each other, so that memory stays bounded.
struct Progress {
    /// Bytes of each item that were written.
    written: Vec<u64>,
    failed: bool,
}

impl Save {
    /// The items of which a parent's file was linked: they are not written.
    #[must_use]
    pub fn is_reused(&self) -> Vec<bool> {
        reused(&self.links, self.items.len())
    }

    /// Returns the number of requests to a store that carry or copy data; 0 on a disk.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.sink.requests()
    }

    /// The CRC-32 of every item, of a save that was created to find them out; of one that is not
    /// written yet it is of no use.
    #[must_use]
    pub fn crc32s(&self) -> Vec<u32> {
        let items = self.items.iter().enumerate();
        items.map(|(number, item)| self.digests.crc32_of(number, item.length)).collect()
    }

    /// Writes parts of items, in parallel. The parts of one item come in order, over all calls, and
    /// each but its last is a multiple of [`BLOCK_SIZE`] long. One call for many parts is much
    /// faster than many calls.
    ///
    /// `control` counts the bytes, and can stop the call.
    ///
    /// # Errors
    /// [`Error::Plan`] for a part out of order or too long; [`Error::Io`], [`Error::Interrupted`].
    /// After any error the save takes no more, and is there to be dropped.
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
        result.map_err(|error| clean_after(error, &*self.sink))
    }

    /// Gives the save up. Returns why something of it is still on the store.
    #[must_use]
    pub fn abort(self) -> Vec<Error> {
        self.sink.give_up()
    }

    /// A fork of the process that began this save has neither its threads nor its files.
    fn check_process(&self) -> Result<()> {
        if self.sink.is_own() {
            Ok(())
        } else {
            Err(Error::Plan("this save was begun before a fork, in the parent process".into()))
        }
    }

    /// Returns the number of buffers between calls.
    #[cfg(test)]
    pub(in crate::write) fn buffers(&self) -> usize {
        self.sink.buffers()
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
                    digest: self.digests.start(number, part.at),
                    data: part.data,
                });
            }
        }
        spans.sort_unstable_by_key(|span| (span.file, span.offset));
        Ok(spans)
    }

    fn write_spans(&self, spans: &[Span], control: &Control) -> Result<()> {
        let total = spans.iter().map(|span| span.data.len() as u64).sum();
        let grain = self.sink.grain(total);
        let jobs = cut(spans, grain.job_bytes, grain.alignment);
        parallel::for_each(
            jobs.len(),
            grain.threads,
            || self.sink.hand(&self.digests, control),
            |hand, number| {
                control.check()?;
                let job = &jobs[number];
                hand.write(job, &spans[job.spans.clone()])?;
                control.add(job.bytes.end - job.bytes.start);
                Ok(())
            },
        )
    }

    /// Makes the files valid and durable, and returns the bytes of this rank's index, which no file
    /// holds yet.
    ///
    /// # Errors
    /// [`Error::Plan`] where bytes of an item are missing; [`Error::Io`], [`Error::Interrupted`].
    /// The files are removed then.
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
        let saved = index::Saved {
            info: &self.info,
            items: self.items,
            layout: &self.layout,
            frozen: &|item| self.reuse.as_ref().is_some_and(|reuse| reuse.is_frozen(item)),
            digests: &|item| self.digests.of_item(item),
            links: &self.links,
            parent: self.reuse.as_ref().and_then(|reuse| reuse.parent()),
        };
        // While the disk or the store is waited for.
        let (durable, index) =
            parallel::both(|| self.sink.finish(control), || index::build(saved, nesting));
        durable.map_err(|error| clean_after(error, &*self.sink))?;
        Ok(Finished { index: index?, sink: self.sink })
    }
}

/// The complete data files of one rank. Dropped without [`keep`](Self::keep), it removes them.
pub struct Finished {
    index: Vec<u8>,
    sink: Box<dyn Sink>,
}

impl Finished {
    /// The bytes of this rank's index, which no file holds yet, and the claim on the files, to be
    /// held until the save is committed or given up: while it is, nobody takes them for those of a
    /// save that was killed.
    pub fn keep(self) -> (Vec<u8>, Option<FileLock>) {
        (self.index, self.sink.keep())
    }
}

/// Removes what a store has of a save that failed with `error`, which then names what is left.
fn clean_after(error: Error, sink: &dyn Sink) -> Error {
    if matches!(error, Error::Storage { .. }) {
        with_leftovers(error, &sink.give_up())
    } else {
        // It cannot carry a text: `abort` removes, and returns what is left.
        error
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

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
