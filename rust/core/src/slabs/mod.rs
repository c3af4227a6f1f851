//! Loads through slabs of memory that someone else empties: a ring of pinned buffers on the way to
//! an accelerator, say.
//!
//! Everything wanted is packed into batches, each of which fills one slab. A [`Session`] fills
//! slabs ahead with threads that live as long as it does, one slab a thread, and hands them out in
//! the order of the batches; the consumer returns each slab for another batch.

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
