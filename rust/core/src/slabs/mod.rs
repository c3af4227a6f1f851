//! Loads through slabs of memory that a consumer empties, such as a ring of pinned buffers for
//! copies to an accelerator.
//!
//! All regions are packed into batches, each of which fills one slab. A [`Session`] fills slabs
//! ahead of the consumer, on threads that live as long as it does. Each thread fills one slab at a
//! time. The session hands out slabs in the order of the batches, and the consumer returns each for
//! another batch.

mod pack;
#[cfg(test)]
mod pack_tests;
mod plan;
mod session;
mod split;

pub use pack::{ALIGN, SlabBatch};
pub use plan::{Plan, SlabCopy, To};
pub use session::{Next, Session, Slab};
pub(crate) use split::split;
