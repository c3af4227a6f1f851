//! Save planning: each rank lists its items in a compact request, and the coordinator assigns every
//! chunk to exactly one rank.
//!
//! Planning is pure. The coordinator gathers the requests of all ranks, so the size of requests and
//! the time of `assign` limit how far a save scales. Both grow linearly with the number of chunks,
//! except for a sort.

mod assign;
mod request;

pub use assign::{Assignment, assign};
pub use request::{decode, encode};
