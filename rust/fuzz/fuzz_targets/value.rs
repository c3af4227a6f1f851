//! Planner data (section 5 of `docs/format.md`).
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    dcp_rs_core::fuzzing::value(bytes);
});
