//! State that the workers of one call share: requests, their plan, and the state of the files.
#![allow(unsafe_code)] // `change_signs` writes to given addresses.

use super::plan::Plan;
use super::policy::{Access, Policy};
use super::probe::{CachedHandle, SharedMapping};
use super::{Catalog, FileRef, ReadReq};
use crate::copy::Stores;
use crate::store::Connection;
use crate::{Control, Result};

/// Batches of at least this many bytes use streaming stores, since their output would not fit in a
/// cache.
const STREAM_BATCH: u64 = 1 << 20;

/// Called with the number and the bytes of each request.
pub type Visitor<'a> = &'a (dyn Fn(u32, &[u8]) -> Result<()> + Sync);

/// Everything that workers need to know about one call.
pub struct Batch<'a> {
    pub files: &'a [FileRef],
    pub reqs: &'a [ReadReq],
    pub catalog: &'a dyn Catalog,
    pub verify: bool,
    /// Gets the bytes in place of destinations.
    pub visitor: Option<Visitor<'a>>,
    /// Open handles from the probe, by file.
    pub kept: &'a [CachedHandle],
    pub mappings: &'a [SharedMapping],
    pub access: &'a [Access],
    pub policies: &'a [Policy],
    pub plan: Plan,
    pub stores: Stores,
    /// Fetches files on a store.
    pub connection: Option<&'a dyn Connection>,
    pub control: &'a Control,
}

/// Applies the sign bits of requests to the elements that were read.
///
/// # Safety
/// That of [`read`].
pub unsafe fn change_signs(reqs: &[ReadReq]) {
    for req in reqs.iter().filter(|req| !req.signs.is_empty() && !req.shape.contains(&0)) {
        // SAFETY: the caller guarantees it.
        unsafe { req.signs.change(req.dst.0, &req.shape, &req.dst_strides) };
    }
}

/// Chooses how to copy a batch of `total` bytes.
pub fn stores(total: u64) -> Stores {
    if total < STREAM_BATCH { Stores::Cached } else { Stores::Streaming }
}
