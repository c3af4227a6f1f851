//! Tests of the crate from outside. One binary: each would link the whole crate again.

mod api;
mod read;
mod serve_rows;
