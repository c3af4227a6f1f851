//! The parsers of this folder, for [`crate::fuzzing`].

use std::fs;
use std::path::Path;

use super::window::{Window, in_memory};
use super::{distcp, metadata_pickle, tensor_pickle as pickle, torch_file as torch};
use crate::Control;
use crate::checkpoint::{RecoverOptions, recover};
use crate::format::{INDEX_NAME, Index};

/// Parses the `.metadata` of a stock checkpoint.
pub fn metadata(bytes: &[u8]) -> bool {
    metadata_pickle::parse(bytes, Path::new(".metadata")).is_ok()
}

/// Parses the `data.pkl` of a tensor.
pub fn tensor_pickle(bytes: &[u8]) -> bool {
    pickle::parse(bytes).is_ok_and(|tensor| {
        let _ = (tensor.is_contiguous(), tensor.length());
        true
    })
}

/// Parses an item of a `.distcp` file: the archive of one tensor.
pub fn archive(bytes: &[u8]) -> bool {
    in_memory("x.distcp", bytes, |source, fetched| {
        match distcp::locate_in_archive(&Window::whole(source, fetched)) {
            Ok((payload, tensor)) => {
                assert!(payload + tensor.offset + tensor.length() <= source.size);
                true
            }
            Err(_) => false,
        }
    })
}

/// Parses a file of `torch.save`, and the same bytes as a value.
pub fn torch_file(bytes: &[u8]) -> bool {
    let _ = torch::check_value(bytes);
    in_memory("x.pth", bytes, torch::take_apart)
}

/// Recovers the index of a data file.
pub fn recovery(bytes: &[u8]) -> bool {
    let folder = Path::new("/dev/shm").join(format!("dcp-rs-fuzz-{}", std::process::id()));
    let _ = fs::create_dir(&folder);
    let name = "g00000001-0123456789abcdef-r00000-f00000.safetensors";
    fs::write(folder.join(name), bytes).expect("a file in memory");
    let options = RecoverOptions { threads: 1, ..RecoverOptions::default() };
    let recovered = recover(&folder, None, &options, &Control::new());
    let _ = fs::remove_dir_all(&folder);
    recovered.is_ok_and(|index| Index::from_bytes(index, &folder.join(INDEX_NAME)).is_ok())
}
