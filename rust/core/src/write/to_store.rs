//! A save to a store: each file is an object, sent in parts, each from a buffer.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::copies::Copies;
use super::item::SaveItem;
use super::jobs::{Job, Span, to_usize};
use super::layout::SaveLayout;
use super::object::{Object, give_up, with_leftovers};
use super::options::WriteOptions;
use super::sink::{Digests, Grain, Sink};
use crate::store::{Body, Condition, FileLock, Remote, StoringConnection, Upload};
use crate::{Control, Error, Result, parallel};

/// Bytes of a part.
const PART: u64 = 8 << 20;
/// Smallest part that stores accept, except for the last.
pub(super) const LEAST_PART: u64 = 5 << 20;
/// Most parts that stores accept.
const MOST_PARTS: u64 = 10_000;
/// Default number of requests in flight.
const IN_FLIGHT: usize = 32;
/// Interval at which a thread that waits for memory checks for cancellation.
const PERIOD: Duration = Duration::from_millis(50);

/// The objects of one rank.
pub(super) struct ToStore {
    remote: Arc<dyn Remote>,
    /// Connection that lasts as long as the save.
    connection: Arc<dyn StoringConnection>,
    layout: Arc<SaveLayout>,
    files: Vec<File>,
    /// Files that the store copied for the save.
    copies: Copies,
    part_bytes: u64,
    threads: usize,
    room: Arc<Room>,
    interrupted: AtomicBool,
    /// True if the objects were removed, as far as that was possible.
    given_up: AtomicBool,
    /// The process that began the save.
    owner: u32,
}

struct File {
    object: Object,
    parts: Vec<Mutex<UploadPart>>,
}

/// A part of an object.
#[derive(Default)]
struct UploadPart {
    /// Bytes of items that are still missing.
    missing: u64,
    /// The bytes so far, if they did not all come in one job.
    buffer: Option<Buffer>,
    /// The store's answer.
    sent: Option<String>,
}

impl ToStore {
    /// Begins the objects in `dir`. The `reused` items are in `copies`. If this fails, it removes
    /// what it began.
    pub(super) fn begin(
        copies: Copies,
        dir: &Path,
        layout: Arc<SaveLayout>,
        items: &[SaveItem],
        reused: &[bool],
        options: &WriteOptions,
        control: &Control,
    ) -> Result<Self> {
        let remote = Arc::clone(copies.remote());
        let largest = layout.files.iter().map(|file| file.size).max().unwrap_or(0);
        let part_bytes = part_bytes(largest, options.max_inflight_bytes);
        let files = layout.files.iter().map(|file| File {
            object: Object::new(dir.join(&file.name), Condition::Always),
            parts: std::iter::repeat_with(Mutex::default)
                .take(to_usize(file.size.div_ceil(part_bytes).max(1)))
                .collect(),
        });
        let mut begun = Self {
            connection: remote.connect_to_store(0)?,
            remote,
            files: files.collect(),
            copies,
            layout,
            part_bytes,
            threads: in_flight(options),
            room: Arc::new(Room::new(options.max_inflight_bytes)),
            interrupted: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            owner: std::process::id(),
        };
        begun.expect(items, reused);
        let large: Vec<&File> = begun.files.iter().filter(|file| file.parts.len() > 1).collect();
        let begin = |i: usize| large[i].object.begin(&*begun.connection, control);
        let done = begun.noted(parallel::for_each(large.len(), begun.threads, begin));
        done.map_err(|error| with_leftovers(error, &begun.give_up()))?;
        Ok(begun)
    }

    /// Counts the bytes of items that go to each part.
    fn expect(&mut self, items: &[SaveItem], reused: &[bool]) {
        let written = |number: &usize| !reused.get(*number).copied().unwrap_or(false);
        for number in (0..items.len()).filter(written) {
            let (item, place) = (&items[number], self.layout.places[number]);
            let mut at = place.offset;
            let end = place.offset + item.length;
            while at < end {
                let number = at / self.part_bytes;
                let next = ((number + 1) * self.part_bytes).min(end);
                let part = self.files.get_mut(place.file as usize);
                if let Some(part) = part.and_then(|file| file.parts.get_mut(to_usize(number))) {
                    part.get_mut().unwrap_or_else(PoisonError::into_inner).missing += next - at;
                }
                at = next;
            }
        }
    }

    /// Returns the range of the file that a part holds.
    fn bytes_of(&self, file: u32, number: usize) -> Range<u64> {
        let start = number as u64 * self.part_bytes;
        start..(start + self.part_bytes).min(self.layout.files[file as usize].size)
    }

    /// Returns the header bytes within this range of the file.
    fn header(&self, file: u32, bytes: &Range<u64>) -> &[u8] {
        let header = &self.layout.files[file as usize].header;
        let within = |at: u64| usize::try_from(at).map_or(header.len(), |at| at.min(header.len()));
        &header[within(bytes.start)..within(bytes.end)]
    }

    fn part(&self, file: u32, number: usize) -> MutexGuard<'_, UploadPart> {
        parallel::lock(&self.files[file as usize].parts[number])
    }

    fn send(&self, file: u32, number: usize, body: &Body, control: &Control) -> Result<String> {
        let object = &self.files[file as usize].object;
        object.send(number, body, &*self.connection, control)
    }

    /// Returns a buffer for a part, with the header's bytes in it and zeros elsewhere.
    fn buffer(&self, file: u32, bytes: &Range<u64>) -> Result<Vec<u8>> {
        let length = to_usize(bytes.end - bytes.start);
        let mut buffer = self.room.taken().unused.pop().unwrap_or_default();
        buffer.clear();
        if buffer.try_reserve_exact(length).is_err() {
            let path = &self.files[file as usize].object.path;
            return Err(Error::io(
                "take memory to write",
                path,
                std::io::ErrorKind::OutOfMemory.into(),
            ));
        }
        buffer.resize(length, 0);
        let header = self.header(file, bytes);
        buffer[..header.len()].copy_from_slice(header);
        Ok(buffer)
    }

    /// Records whether the caller interrupted the work.
    fn noted<T>(&self, result: Result<T>) -> Result<T> {
        if matches!(result, Err(Error::Interrupted)) {
            self.interrupted.store(true, Ordering::Relaxed);
        }
        result
    }

    fn write_job(
        &self,
        job: &Job,
        spans: &[Span<'_>],
        digests: &Digests,
        control: &Control,
    ) -> Result<()> {
        let number = to_usize(job.bytes.start / self.part_bytes);
        let bytes = self.bytes_of(job.file, number);
        let length = job.bytes.end - job.bytes.start;
        let mut part = self.part(job.file, number);
        let completes = part.missing == length;
        // Takes the buffer out of the part, so that an error or a panic returns the memory, for
        // which other threads may wait.
        let mut buffer = if let Some(buffer) = part.buffer.take() {
            buffer
        } else {
            let share = Share::take(&self.room, self.part_bytes, completes, control)?;
            let bytes = self.buffer(job.file, &bytes)?;
            Buffer { bytes, share }
        };
        if completes {
            buffer.share.leave();
        }
        let no_memory =
            |e| Error::io("take memory to write", &self.files[job.file as usize].object.path, e);
        let begin = to_usize(job.bytes.start - bytes.start);
        let copy = begin..begin + to_usize(length);
        let rest = digests.copy(spans, job, &mut buffer.bytes[copy.clone()]).map_err(no_memory)?;
        digests.add_rest(rest, &buffer.bytes[copy]).map_err(no_memory)?;
        part.missing -= length;
        if completes {
            let body = Body::new(std::mem::take(&mut buffer.bytes));
            part.sent = Some(self.send(job.file, number, &body, control)?);
            // Reused for the next part, unless the client still holds it.
            buffer.bytes = Body::try_unwrap(body).unwrap_or_default();
        } else {
            part.buffer = Some(buffer);
        }
        Ok(())
    }

    /// Sends a part that contains no item.
    fn send_rest(&self, file: u32, number: usize, control: &Control) -> Result<()> {
        let mut part = self.part(file, number);
        if part.sent.is_none() {
            let body = Body::new(self.buffer(file, &self.bytes_of(file, number))?);
            part.sent = Some(self.send(file, number, &body, control)?);
        }
        Ok(())
    }

    fn complete(&self, file: u32, control: &Control) -> Result<()> {
        let File { object, parts } = &self.files[file as usize];
        let answers =
            (0..parts.len()).map(|number| self.part(file, number).sent.clone().unwrap_or_default());
        let size = self.layout.files[file as usize].size;
        object.complete(answers, size, &*self.connection, control)
    }
}

impl Sink for ToStore {
    fn grain(&self, _total: u64) -> Grain {
        Grain { job_bytes: self.part_bytes, alignment: self.part_bytes, threads: self.threads }
    }

    fn write(
        &self,
        job: &Job,
        spans: &[Span<'_>],
        digests: &Digests,
        control: &Control,
    ) -> Result<()> {
        self.noted(self.write_job(job, spans, digests, control))
    }

    fn finish(&self, control: &Control) -> Result<()> {
        let parts: Vec<(u32, usize)> = (0..)
            .zip(&self.files)
            .flat_map(|(number, file)| (0..file.parts.len()).map(move |part| (number, part)))
            .collect();
        let files: Vec<u32> = (0..).take(self.files.len()).collect();
        let send = |i: usize| {
            let (file, number) = parts[i];
            control.check()?;
            self.send_rest(file, number, control)
        };
        let complete = |i: usize| self.complete(files[i], control);
        let done = parallel::for_each(parts.len(), self.threads, send)
            .and_then(|()| parallel::for_each(files.len(), self.threads, complete));
        self.noted(done)
    }

    fn is_own(&self) -> bool {
        self.owner == std::process::id()
    }

    fn requests(&self) -> u64 {
        let parts: usize = self.files.iter().map(|file| file.parts.len()).sum();
        (parts + self.copies.len()) as u64
    }

    #[cfg(test)]
    fn buffers(&self) -> usize {
        to_usize(self.room.taken().bytes / self.part_bytes)
    }

    fn give_up(&self) -> Vec<Error> {
        if !self.is_own() || self.given_up.swap(true, Ordering::Relaxed) {
            return Vec::new();
        }
        let objects = || self.files.iter().map(|file| &file.object);
        let uploads: Vec<Upload> = objects().filter_map(Object::open_upload).collect();
        let files = objects().filter_map(Object::may_be_at).chain(self.copies.take());
        let interrupted = self.interrupted.load(Ordering::Relaxed);
        give_up(&self.remote, &files.collect::<Vec<_>>(), &uploads, interrupted)
    }

    fn keep(mut self: Box<Self>) -> Option<FileLock> {
        self.files.clear();
        self.copies.take();
        None
    }
}

impl Drop for ToStore {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Returns the number of concurrent requests.
pub(super) fn in_flight(options: &WriteOptions) -> usize {
    match options.threads {
        0 => IN_FLIGHT,
        threads => threads,
    }
}

/// Returns the size of a part: at least what stores accept, and large enough that the largest file
/// has few enough parts. With little memory, parts are smaller.
pub(super) fn part_bytes(largest: u64, memory: u64) -> u64 {
    let least = if memory < 4 * PART { LEAST_PART } else { PART };
    largest.div_ceil(MOST_PARTS).next_multiple_of(1 << 20).max(least)
}

/// Memory limit for parts.
struct Room {
    most: u64,
    taken: Mutex<Taken>,
    given: Condvar,
}

#[derive(Default)]
struct Taken {
    bytes: u64,
    /// Buffers of sent parts, for the next parts.
    unused: Vec<Vec<u8>>,
    /// Bytes of complete parts that are being sent. Waiting for them is safe. An incomplete part
    /// may wait for the next call, so waiting for it could take forever.
    leaving: u64,
}

impl Room {
    fn new(most: u64) -> Self {
        Self { most, taken: Mutex::default(), given: Condvar::new() }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        parallel::lock(&self.taken)
    }
}

/// A share of the memory limit, returned when it is dropped.
struct Share {
    room: Arc<Room>,
    bytes: u64,
    leaves: bool,
}

impl Share {
    /// Takes memory once it is free. If no memory is about to be returned, exceeds the limit
    /// instead of waiting.
    fn take(room: &Arc<Room>, bytes: u64, leaves: bool, control: &Control) -> Result<Self> {
        let mut taken = room.taken();
        while taken.bytes + bytes > room.most && taken.leaving > 0 {
            let waited = room.given.wait_timeout(taken, PERIOD);
            taken = waited.unwrap_or_else(PoisonError::into_inner).0;
            control.check()?;
        }
        taken.bytes += bytes;
        if leaves {
            taken.leaving += bytes;
        }
        drop(taken);
        Ok(Self { room: Arc::clone(room), bytes, leaves })
    }

    /// Marks the share as being sent, and so about to be returned.
    fn leave(&mut self) {
        if !self.leaves {
            self.leaves = true;
            self.room.taken().leaving += self.bytes;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.room.taken();
        taken.bytes -= self.bytes;
        if self.leaves {
            taken.leaving -= self.bytes;
        }
        drop(taken);
        self.room.given.notify_all();
    }
}

/// Memory for a part. On drop, it becomes available to the next part before its share is returned.
struct Buffer {
    bytes: Vec<u8>,
    share: Share,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.share.room.taken().unused.push(bytes);
    }
}

#[cfg(test)]
#[path = "to_store_tests.rs"]
mod tests;
