//! Pickles of single tensors.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    dcp_rs_core::fuzzing::tensor_pickle(bytes);
});
