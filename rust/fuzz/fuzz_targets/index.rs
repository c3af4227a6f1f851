//! Indexes: opened, and all of them looked at.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    dcp_rs_core::fuzzing::index(bytes);
});
