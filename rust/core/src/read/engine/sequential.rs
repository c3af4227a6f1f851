//! Reads batch after batch on one thread, for callers with threads of their own.

use super::{
    Access, Batch, DISK_DEPTH, DISK_JOB, Error, File, FileRef, Mutex, Policy, Queue, ReadOptions, ReadReq, ReadStats,
    Worker, failed, plan, spans, stores, survey,
};
use crate::read::Catalog;
use crate::store::{read_direct_at, resident_bytes};
use crate::{Control, Result};

/// How each file of a series of batches is read: looked at once, before the first.
pub struct Survey {
    access: Vec<Access>,
    open: Vec<Option<File>>,
    policies: Vec<Policy>,
}

impl Survey {
    /// Opens and checks every file that the requests need, all batches together, and decides how to read it.
    ///
    /// # Errors
    /// Those of [`read`](super::read) for files.
    pub fn new(files: &[FileRef], reqs: &[ReadReq], options: &ReadOptions) -> Result<Self> {
        let (access, open) = survey(files, &spans(files, reqs)?, options)?;
        let policies = access.iter().map(|access| access.policy(DISK_JOB)).collect();
        Ok(Self { access, open, policies })
    }

    /// How many threads keep busy what is slowest: the cores, or the disk.
    #[must_use]
    pub fn workers(&self, threads: usize) -> usize {
        if self.access.iter().any(|access| access.waits()) {
            threads.max(DISK_DEPTH)
        } else {
            threads.max(1)
        }
    }

    /// What offsets of direct reads of a file must be multiples of, if that is how it is read.
    #[must_use]
    pub fn direct_align(&self, file: u32) -> Option<u64> {
        match self.access.get(file as usize) {
            Some(Access::Direct { align }) => Some(*align),
            _ => None,
        }
    }
}

/// The state of one thread that reads: it keeps its file open, or mapped, from batch to batch.
#[derive(Default)]
pub struct Sequential {
    worker: Worker,
}

impl Sequential {
    /// Fills every destination, on this thread.
    ///
    /// # Errors
    /// Those of [`read`](super::read).
    ///
    /// # Safety
    /// That of [`read`](super::read).
    pub unsafe fn read(
        &mut self,
        files: &[FileRef],
        reqs: &[ReadReq],
        survey: &Survey,
        verify: bool,
        catalog: &dyn Catalog,
        control: &Control,
    ) -> Result<()> {
        control.check()?;
        let plan = plan(files, reqs, &survey.policies, verify, catalog)?;
        let total = plan.jobs.iter().map(|job| job.wanted).sum();
        let mut batch = batch(files, survey, catalog, control);
        batch.reqs = reqs;
        batch.verify = verify;
        batch.stores = stores(total);
        batch.plan = plan;
        for job in &batch.plan.jobs {
            control.check()?;
            self.worker.job(&batch, job)?;
            control.add(job.wanted);
        }
        Ok(())
    }

    /// Reads bytes `start..end` of a file past the page cache, straight to where they are wanted: the first bytes of
    /// `memory`. False, and nothing done, if the page cache has them or the file system refuses: [`read`](Self::read) them then.
    ///
    /// `start`, and `memory` with its length, are multiples of the survey's alignment for the file.
    ///
    /// # Errors
    /// Those of [`read`](super::read) for files.
    pub fn read_direct(
        &mut self,
        files: &[FileRef],
        survey: &Survey,
        (file, start, end): (u32, u64, u64),
        memory: &mut [u8],
        control: &Control,
    ) -> Result<bool> {
        control.check()?;
        let (Some(align), Ok(need)) = (survey.direct_align(file), usize::try_from(end - start)) else {
            return Ok(false);
        };
        let open = &mut self.worker.open;
        open.turn_to(file);
        let empty = batch(files, survey, &Nameless, control);
        let plain = open.plain(&empty, file)?;
        if resident_bytes(plain, start, end) == Some(end - start) {
            return Ok(false);
        }
        let file = &files[file as usize];
        let unit = usize::try_from(align).unwrap_or(usize::MAX);
        match read_direct_at(open.direct(file)?, memory, start, need, unit) {
            Ok(()) => {}
            // Some file systems refuse single reads.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => return Ok(false),
            Err(e) => return Err(failed(file, start, e)),
        }
        let stats = &mut self.worker.stats;
        stats.bytes_wanted += end - start;
        stats.bytes_read += end - start;
        stats.bytes_direct += end - start;
        stats.jobs += 1;
        control.add(end - start);
        Ok(true)
    }

    /// What this thread did so far.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        self.worker.stats
    }
}

/// An empty batch over the files.
fn batch<'a>(files: &'a [FileRef], survey: &'a Survey, catalog: &'a dyn Catalog, control: &'a Control) -> Batch<'a> {
    Batch {
        files,
        reqs: &[],
        catalog,
        verify: false,
        control,
        open: &survey.open,
        access: &survey.access,
        policies: &survey.policies,
        plan: super::Plan::default(),
        queues: [Queue::default(), Queue::default()],
        stores: stores(0),
        stop: false.into(),
        failure: Mutex::<Option<Error>>::default(),
        stats: Mutex::default(),
    }
}

/// For reads that verify nothing, and so name nothing.
struct Nameless;

impl Catalog for Nameless {
    fn tensor_name(&self, _: u32) -> String {
        String::new()
    }

    fn digest(&self, _: u64) -> u64 {
        0
    }
}
