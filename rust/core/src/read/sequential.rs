//! Reads of batch after batch on one thread, for callers with their own threads.
#![allow(unsafe_code)] // `read` is unsafe to call: it writes to given addresses

use std::ops::Range;
use std::sync::Arc;

use super::batch::{Batch, change_signs, stores};
use super::plan::{Plan, plan};
use super::policy::{Access, Policy};
use super::probe::{CachedHandle, Found, SharedMapping, probe, spans};
use super::worker::Worker;
use super::{Catalog, FileRef, ReadOptions, ReadReq, ReadStats, Verify, verify};
use crate::copy::Stores;
use crate::store::Connection;
use crate::{Control, Result};

/// How each file of a series of batches is read. Each file is checked once, before the first batch.
pub struct FileProbe {
    access: Vec<Access>,
    kept: Vec<CachedHandle>,
    mappings: Vec<SharedMapping>,
    policies: Vec<Policy>,
}

impl FileProbe {
    /// Opens and checks every file that plain requests need, and decides how to read it.
    pub(super) fn of_plain(
        files: &[FileRef],
        reqs: &[ReadReq],
        options: &ReadOptions,
        catalog: &dyn Catalog,
    ) -> Result<Self> {
        let wanted = spans(files, reqs, options, catalog)?;
        let Found { access, kept, mappings, .. } = probe(files, &wanted, options)?;
        let share = options.max_inflight_bytes.min(u64::from(u32::MAX));
        let policies: Vec<Policy> = access.iter().map(|access| access.policy(share)).collect();
        Ok(Self { access, kept, mappings, policies })
    }

    /// Returns the number of threads that keep cores and disk busy.
    #[must_use]
    pub fn workers(&self, threads: usize) -> usize {
        let waiting = self.access.iter().filter(|access| access.waits());
        waiting.map(|access| access.depth()).fold(threads.max(1), usize::max)
    }

    /// Returns whether a file is in memory, and read from a mapping.
    pub(crate) fn maps(&self, file: u32) -> bool {
        self.access[file as usize] == Access::Mapped
    }

    /// Returns whether reads of any file wait for storage.
    pub(super) fn waits(&self) -> bool {
        self.access.iter().any(|access| access.waits())
    }
}

/// The state of one reading thread: an open or mapped file, which it keeps from batch to batch, and
/// a connection, which threads share.
pub struct Sequential {
    worker: Worker,
    connection: Option<Arc<dyn Connection>>,
    /// Memory for coded windows.
    pub(super) memory: Vec<u8>,
}

impl Sequential {
    /// Makes a reader. `connection` is needed for files on a store: see
    /// [`connect`](super::connect).
    #[must_use]
    pub fn new(connection: Option<Arc<dyn Connection>>) -> Self {
        Self { worker: Worker::default(), connection, memory: Vec::new() }
    }

    /// Fills the destinations of plain requests, on this thread.
    ///
    /// # Safety
    /// That of [`read`](super::read).
    pub(super) unsafe fn read_plain(
        &mut self,
        files: &[FileRef],
        reqs: &[ReadReq],
        probe: &FileProbe,
        verify: Verify,
        catalog: &dyn Catalog,
        control: &Control,
    ) -> Result<()> {
        let (verify, reqs) = verify::chosen(reqs, verify, &probe.access);
        let plan = plan(files, &reqs, &probe.policies, verify, catalog)?;
        let batch = Batch {
            files,
            reqs: &reqs,
            catalog,
            verify,
            visitor: None,
            kept: &probe.kept,
            mappings: &probe.mappings,
            access: &probe.access,
            policies: &probe.policies,
            stores: stores(plan.jobs.iter().map(|job| job.wanted).sum()),
            plan,
            connection: self.connection.as_deref(),
            control,
        };
        for job in &batch.plan.jobs {
            control.check()?;
            self.worker.job(&batch, job)?;
            control.add(job.wanted);
        }
        // SAFETY: the caller guarantees it, and all elements were just written.
        unsafe { change_signs(&reqs) };
        Ok(())
    }

    /// Returns a range of a mapped file ([`FileProbe::maps`]). The range must be inside the file.
    ///
    /// # Errors
    /// Those of [`read`](super::read) for files.
    pub(crate) fn mapped(
        &mut self,
        files: &[FileRef],
        file: u32,
        range: Range<u64>,
        probe: &FileProbe,
        catalog: &dyn Catalog,
        control: &Control,
    ) -> Result<&[u8]> {
        let batch = Batch {
            files,
            reqs: &[],
            catalog,
            verify: false,
            visitor: None,
            kept: &probe.kept,
            mappings: &probe.mappings,
            access: &probe.access,
            policies: &probe.policies,
            stores: Stores::Cached,
            plan: Plan::default(),
            connection: None,
            control,
        };
        self.worker.mapped(&batch, file, range)
    }

    /// Replaces the count of delivered bytes since `before` by `bytes`, and adds bytes that are read
    /// from a mapping.
    pub(super) fn count_as(&mut self, before: u64, bytes: u64, mapped: u64) {
        let stats = &mut self.worker.stats;
        stats.bytes_wanted = before + bytes;
        stats.bytes_read += mapped;
        stats.bytes_mapped += mapped;
    }

    /// Returns the counts of this thread so far.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        self.worker.stats
    }
}
