//! Headers of data files, from which a lost index is made again.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    dcp_rs_core::fuzzing::recovery(bytes);
});
