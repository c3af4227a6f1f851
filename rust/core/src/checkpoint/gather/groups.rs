//! A batch in groups of requests. Each group is read on one thread, into memory of its own.

#![allow(unsafe_code)] // destinations are addresses that the caller guarantees

use std::ops::Range;
use std::sync::Arc;

use super::Gather;
use crate::checkpoint::explain;
use crate::format::Index;
use crate::read::{
    Destination, FileProbe, FileRef, ReadOptions, ReadReq, Sequential, Verify, bytes_of, connect,
};
use crate::store::Connection;
use crate::{Control, Result, parallel};

/// Groups of requests, after their files were opened and checked.
pub(crate) struct ReadGroups {
    index: Arc<Index>,
    files: Vec<FileRef>,
    /// Destinations are offsets in the memory of a group.
    requests: Vec<ReadReq>,
    /// The requests of each group.
    groups: Vec<Range<usize>>,
    probe: FileProbe,
    verify: Verify,
    threads: usize,
}

impl Gather {
    /// Opens and checks the files. `groups` are ranges of what was added, and destinations are
    /// offsets in the memory of a group.
    ///
    /// # Errors
    /// Those of [`read`](crate::read::read) for files.
    pub(crate) fn into_groups(
        self,
        groups: Vec<Range<usize>>,
        options: &ReadOptions,
        control: &Control,
    ) -> Result<ReadGroups> {
        let probe =
            FileProbe::new(&self.files, &self.requests, &self.options(options), &*self.index)
                .map_err(|error| explain(&self.index, error, control))?;
        let Self { index, files, requests, .. } = self;
        let threads = parallel::threads(options.threads);
        Ok(ReadGroups { index, files, requests, groups, probe, verify: options.verify, threads })
    }
}

impl ReadGroups {
    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    /// Returns the number of threads that keep cores and disk busy.
    pub(crate) fn workers(&self) -> usize {
        self.probe.workers(self.threads)
    }

    /// Returns the connection that the readers need, if the files are on a store.
    pub(crate) fn connect(&self) -> Result<Option<Arc<dyn Connection>>> {
        connect(&self.files, self.threads)
    }

    /// Reads a group to the memory at `base`, on this thread.
    ///
    /// # Errors
    /// Those of [`read`](crate::read::read).
    ///
    /// # Safety
    /// Every destination of the group is valid for writes to all its elements, and nothing else
    /// uses them meanwhile. No two share a byte.
    pub(crate) unsafe fn read(
        &self,
        group: usize,
        base: *mut u8,
        reader: &mut Sequential,
        control: &Control,
    ) -> Result<()> {
        let wanted = &self.requests[self.groups[group].clone()];
        let placed = |request: &ReadReq| ReadReq {
            dst: Destination(base.wrapping_add(request.dst.0.addr())),
            ..request.clone()
        };
        let requests: Vec<ReadReq> = wanted.iter().map(placed).collect();
        let (files, index) = (&self.files, &*self.index);
        // SAFETY: the caller guarantees it.
        unsafe { reader.read(files, &requests, &self.probe, self.verify, index, control) }
            .map_err(|error| explain(index, error, control))?;
        for request in wanted {
            files[request.file as usize].count(bytes_of(request));
        }
        Ok(())
    }
}
