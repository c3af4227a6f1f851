//! Both parsers accept a file, and agree on what is in it, or both refuse it.
#![no_main]

use dcp_rs_core::format::safetensors::parse;
use safetensors::SafeTensors;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    dcp_rs_core::fuzzing::header(bytes);
    let ours = parse(bytes, bytes.len() as u64);
    let theirs = SafeTensors::read_metadata(bytes);
    assert_eq!(ours.is_ok(), theirs.is_ok(), "{:?}, {:?}", ours.err(), theirs.err());
    if let (Ok(ours), Ok((_, theirs))) = (ours, theirs) {
        let tensors = theirs.tensors();
        assert_eq!(ours.tensors.len(), tensors.len());
        for tensor in &ours.tensors {
            let info = tensors[&tensor.name];
            assert_eq!(tensor.dtype.name(), info.dtype.to_string());
            assert!(
                tensor
                    .shape
                    .iter()
                    .copied()
                    .eq(info.shape.iter().map(|&size| size as u64))
            );
            assert_eq!((tensor.begin as usize, tensor.end as usize), info.data_offsets);
        }
    }
});
