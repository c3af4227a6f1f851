//! State that the workers of one call share: requests, their plan, and the files as found.
#![allow(unsafe_code)] // `change_signs` writes to addresses that it is given.

use super::plan::Plan;
use super::policy::{Access, Policy};
use super::probe::{CachedHandle, SharedMapping};
use super::{Catalog, FileRef, ReadReq};
use crate::copy::Stores;
use crate::store::Connection;
use crate::{Control, Result};

/// From here on a batch is streamed: what it writes would not stay in a cache anyway.
const STREAM_BATCH: u64 = 1 << 20;

/// Sees the bytes of each request, by its number.
pub type Visitor<'a> = &'a (dyn Fn(u32, &[u8]) -> Result<()> + Sync);

/// All that workers need to know of one call.
pub struct Batch<'a> {
    pub files: &'a [FileRef],
    pub reqs: &'a [ReadReq],
    pub catalog: &'a dyn Catalog,
    pub verify: bool,
    /// Gets the bytes of a call that delivers none.
    pub visitor: Option<Visitor<'a>>,
    /// Open handles that the probe left, by file.
    pub kept: &'a [CachedHandle],
    pub mappings: &'a [SharedMapping],
    pub access: &'a [Access],
    pub policies: &'a [Policy],
    pub plan: Plan,
    pub stores: Stores,
    /// Fetches files that are on a store.
    pub connection: Option<&'a dyn Connection>,
    pub control: &'a Control,
}

/// Makes of what was read what it stands for.
///
/// # Safety
/// That of [`read`].
pub unsafe fn change_signs(reqs: &[ReadReq]) {
    for req in reqs.iter().filter(|req| !req.signs.is_empty() && !req.shape.contains(&0)) {
        // SAFETY: as the caller vouches.
        unsafe { req.signs.change(req.dst.0, &req.shape, &req.dst_strides) };
    }
}

/// Chooses how to copy a batch of so many bytes.
pub fn stores(total: u64) -> Stores {
    if total < STREAM_BATCH { Stores::Cached } else { Stores::Streaming }
}
