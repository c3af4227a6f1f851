//! `cargo bench -p dcp-rs-benches` measures the parts of the core.
