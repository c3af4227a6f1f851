//! A save to files: whole pages bypass the page cache if possible, and headers are written last.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::files::{DataFiles, Handles};
use super::jobs::{Job, Span, to_usize};
use super::layout::SaveLayout;
use super::options::Resolved;
use super::sink::{Digests, Grain, Sink};
use crate::store::disk::Disk;
use crate::store::{Buffer, FileLock};
use crate::{Control, Error, Result, parallel};

/// The files of a folder.
pub(super) struct ToFiles {
    pub disk: Disk,
    /// The folder, after the parent folders that were created for it.
    pub folders: Vec<PathBuf>,
    pub layout: Arc<SaveLayout>,
    pub how: Resolved,
    pub files: DataFiles,
    /// Buffers that no thread is using.
    pub staging: Mutex<Vec<Buffer>>,
}

impl Sink for ToFiles {
    fn grain(&self, total: u64) -> Grain {
        Grain {
            job_bytes: self.how.job_bytes_for(total),
            alignment: self.how.alignment,
            threads: self.how.threads_for(total),
        }
    }

    fn write(
        &self,
        job: &Job,
        spans: &[Span<'_>],
        digests: &Digests,
        control: &Control,
    ) -> Result<()> {
        let handles = &*self.files.handles(job.file)?;
        if digests.are_none()
            && let [span] = spans
            && let bytes = &span.data[span.within(&job.bytes)]
            && (handles.direct.is_none() || self.is_aligned_alike(bytes, job.bytes.start))
        {
            return self.store(job, bytes, handles, control);
        }
        let pool = || parallel::lock(&self.staging);
        let kept = pool().pop();
        let mut buffer = kept.unwrap_or_default();
        // The offset in the buffer equals the offset in the job's first page.
        let begin = to_usize(job.bytes.start % self.how.alignment);
        let end = begin + to_usize(job.bytes.end - job.bytes.start);
        let no_memory = |e| Error::io("take memory to write", self.files.path(job.file), e);
        let bytes = &mut buffer.at_least(end).map_err(no_memory)?[begin..end];
        let rest = digests.copy(spans, job, bytes).map_err(no_memory)?;
        self.store(job, bytes, handles, control)?;
        digests.add_rest(rest, bytes).map_err(no_memory)?;
        pool().push(buffer);
        Ok(())
    }

    /// Writes headers last, after the payload is on stable storage: a file with a header is
    /// complete.
    fn finish(&self, control: &Control) -> Result<()> {
        self.sync(control)?;
        if self.how.fsync {
            self.files.sync_links(control)?;
        }
        for (number, plan) in (0..).zip(&self.layout.files) {
            control.check()?;
            let handles = self.files.handles(number)?;
            self.files.write(number, &handles, &plan.header, 0)?;
            self.files.append_refused(number, &handles, plan.size, control)?;
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
        Ok(())
    }

    fn is_own(&self) -> bool {
        self.files.is_own()
    }

    #[cfg(test)]
    fn buffers(&self) -> usize {
        self.staging.lock().unwrap().len()
    }

    fn keep(self: Box<Self>) -> Option<FileLock> {
        self.files.keep()
    }
}

impl ToFiles {
    fn sync(&self, control: &Control) -> Result<()> {
        if !self.how.fsync {
            return Ok(());
        }
        let numbers: Vec<u32> = (0..).take(self.layout.files.len()).collect();
        parallel::for_each(numbers.len(), self.how.threads, |i| {
            let handles = self.files.handles(numbers[i])?;
            self.disk.sync(&handles.plain, self.files.path(numbers[i]), control)
        })
    }

    /// Returns whether this memory is aligned for direct writes to this offset of a file.
    fn is_aligned_alike(&self, bytes: &[u8], offset: u64) -> bool {
        bytes.as_ptr().addr() as u64 % self.how.alignment == offset % self.how.alignment
    }

    /// Writes the bytes of a job: whole pages with direct I/O if possible, the rest through the
    /// page cache.
    fn store(&self, job: &Job, bytes: &[u8], handles: &Handles, control: &Control) -> Result<()> {
        let Range { start, end } = job.bytes;
        let path = self.files.path(job.file);
        let alignment = self.how.alignment;
        let mut direct = start..start;
        if let Some(file) = &handles.direct {
            let (first, last) = (start.next_multiple_of(alignment), end - end % alignment);
            if first < last {
                let pages = &bytes[to_usize(first - start)..to_usize(last - start)];
                let written =
                    self.disk.write_direct(file, path, pages, first, to_usize(alignment))?;
                direct = first..first + written as u64;
            }
        }
        let rest = [start..direct.start, direct.end..end];
        for part in rest.iter().filter(|part| !part.is_empty()) {
            let bytes = &bytes[to_usize(part.start - start)..to_usize(part.end - start)];
            self.files.write(job.file, handles, bytes, part.start)?;
        }
        if self.how.fsync
            && self.files.is_transient(job.file)
            && rest.iter().any(|part| !part.is_empty())
        {
            self.disk.sync(&handles.plain, path, control)?;
        }
        Ok(())
    }
}
