//! A save of one rank, from the creation of its data files to the bytes of its index.

mod create;

use std::sync::{Arc, Mutex, MutexGuard};

use super::index;
use super::item::{Part, SaveInfo, SaveItem};
use super::jobs::{Span, cut};
use super::layout::SaveLayout;
use super::links::Link;
use super::object::with_leftovers;
use super::reuse::Reuse;
use super::sink::{Digests, Sink};
use crate::format::{BLOCK_SIZE, Value};
use crate::store::FileLock;
use crate::{Control, Error, Result, parallel};

/// The data files of one rank while they are written to a disk or a store.
///
/// If the save is dropped before [`finish`](Self::finish), it removes the files that it created.
pub struct Save {
    sink: Box<dyn Sink>,
    info: SaveInfo,
    items: Vec<SaveItem>,
    layout: Arc<SaveLayout>,
    /// The parent's items, and the files of the parent that are linked.
    reuse: Option<Arc<Reuse>>,
    links: Vec<Link>,
    digests: Digests,
    progress: Mutex<Progress>,
}

/// Locked during a write: writes follow each other, so that memory stays bounded.
struct Progress {
    /// Bytes written of each item.
    written: Vec<u64>,
    failed: bool,
}

impl Save {
    /// Returns for each item whether a linked file of the parent has it, so that it is not written.
    #[must_use]
    pub fn is_reused(&self) -> Vec<bool> {
        reused(&self.links, self.items.len())
    }

    /// Returns the number of requests to a store that carry or copy data; 0 on a disk.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.sink.requests()
    }

    /// Returns the CRC-32 of each item, if the save was created to compute them. The value has no
    /// meaning for an item that is not yet written.
    #[must_use]
    pub fn crc32s(&self) -> Vec<u32> {
        let items = self.items.iter().enumerate();
        items.map(|(number, item)| self.digests.crc32_of(number, item.length)).collect()
    }

    /// Writes parts of items, in parallel. The parts of one item come in order, over all calls.
    /// Each but the last has a length that is a multiple of [`BLOCK_SIZE`]. One call with many
    /// parts is much faster than many calls.
    ///
    /// `control` counts the bytes, and can stop the call.
    ///
    /// # Errors
    /// [`Error::Plan`] for a part out of order or too long; [`Error::Io`], [`Error::Interrupted`].
    /// After an error, the save accepts no more parts and can only be dropped.
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

    /// Abandons the save. Returns the reasons why something of it is still on the store.
    #[must_use]
    pub fn abort(self) -> Vec<Error> {
        self.sink.give_up()
    }

    /// Raises an error in a fork of the process that began this save: the fork has neither its
    /// threads nor its files.
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
        parallel::lock(&self.progress)
    }

    /// Returns the parts as spans of files, sorted, and counts them as written.
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
        parallel::for_each(jobs.len(), grain.threads, |number| {
            control.check()?;
            let job = &jobs[number];
            self.sink.write(job, &spans[job.spans.clone()], &self.digests, control)?;
            control.add(job.bytes.end - job.bytes.start);
            Ok(())
        })
    }

    /// Makes the files valid and durable. Returns the bytes of this rank's index, which is not yet
    /// in a file.
    ///
    /// # Errors
    /// [`Error::Plan`] if bytes of an item are missing; [`Error::Io`], [`Error::Interrupted`].
    /// After an error the files are removed.
    pub fn finish(self, control: &Control) -> Result<Vec<u8>> {
        Ok(self.finish_with(Value::None, control)?.keep().0)
    }

    /// Does the same as [`finish`](Self::finish), with the containers of the state dict that no
    /// path shows.
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
        // Builds the index while the disk or the store works.
        let (durable, index) =
            parallel::both(|| self.sink.finish(control), || index::build(saved, nesting));
        durable.map_err(|error| clean_after(error, &*self.sink))?;
        Ok(Finished { index: index?, sink: self.sink })
    }
}

/// The complete data files of one rank. They are removed on drop, unless they are
/// [kept](Self::keep).
pub struct Finished {
    index: Vec<u8>,
    sink: Box<dyn Sink>,
}

impl Finished {
    /// Keeps the files. Returns the bytes of this rank's index, which is not yet in a file, and the
    /// claim on the files. Hold the claim until the save is committed or abandoned: without it,
    /// `clean` takes the files for those of a killed save.
    pub fn keep(self) -> (Vec<u8>, Option<FileLock>) {
        (self.index, self.sink.keep())
    }
}

/// Removes from a store what a failed save left there. Adds to `error` what could not be removed.
fn clean_after(error: Error, sink: &dyn Sink) -> Error {
    if matches!(error, Error::Storage { .. }) {
        with_leftovers(error, &sink.give_up())
    } else {
        // This error has no text to extend. `abort` removes the objects, and returns what is left.
        error
    }
}

/// Returns for each of `items` whether a linked file has it.
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
