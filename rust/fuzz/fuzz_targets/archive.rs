//! Zip archives as `torch.save` writes them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    dcp_rs_core::fuzzing::archive(bytes);
});
