//! Save planning: each rank lists its items in few bytes, and the coordinator assigns every chunk
//! to exactly one rank.
//!
//! Pure. The requests of all ranks are gathered on the coordinator, so their size and the time that
//! `assign` takes decide how far a save scales: both grow linearly with the number of chunks (but
//! for a sort).

mod assign;
mod request;

pub use assign::{Assignment, Rules, assign};
pub use request::{decode, encode};
