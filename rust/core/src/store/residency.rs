//! Bytes of a file that are in the page cache.

use std::fs::File;

use super::platform;

/// Returns the bytes of `[start, end)` that are in the page cache, rounded to pages; `None` if that
/// is unknown.
#[must_use]
pub fn resident_bytes(file: &File, start: u64, end: u64) -> Option<u64> {
    if start >= end {
        return Some(0);
    }
    platform::resident_bytes(file, start, end).map(|bytes| bytes.min(end - start))
}

#[cfg(test)]
mod tests {
    use super::super::{direct_align, is_remote};
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_just_written_is_resident() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        let got = resident_bytes(&file, 0, 1 << 20);
        // Nothing to check if the kernel does not tell.
        assert!(got.is_none_or(|bytes| bytes > 1 << 19), "{got:?}");
        assert_eq!(resident_bytes(&file, 5, 5), Some(0));
        assert!(direct_align(&file).is_none_or(u64::is_power_of_two));
        let _ = is_remote(&file);
    }
}
