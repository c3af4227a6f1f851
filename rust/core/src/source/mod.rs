//! Checkpoints as they are found.

mod data_header;
mod recover;

pub use recover::{RecoverOptions, recover};
