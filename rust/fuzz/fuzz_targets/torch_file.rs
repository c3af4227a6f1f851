//! Whole files of `torch.save`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    dcp_rs_core::fuzzing::torch_file(bytes);
});
