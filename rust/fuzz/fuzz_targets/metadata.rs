//! The `.metadata` of stock DCP.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    dcp_rs_core::fuzzing::metadata(bytes);
});
