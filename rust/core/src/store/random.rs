//! Random numbers that no two processes share, even after a fork.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::{Error, Result};

/// Returns random bytes from the operating system.
pub fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let path = Path::new("/dev/urandom");
    let mut bytes = [0; N];
    File::open(path)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| Error::io("read", path, error))?;
    Ok(bytes)
}

/// Returns a token for [`SaveInfo`](crate::write::SaveInfo), or for a temporary name.
pub fn random_token() -> Result<u64> {
    random_bytes().map(u64::from_le_bytes)
}
