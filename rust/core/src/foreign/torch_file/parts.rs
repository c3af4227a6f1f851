//! The parts of a file of `torch.save`, in either format.

use std::collections::HashMap;

use crate::foreign::fault::{Fault, FaultResult};
use crate::foreign::pickle::{Pickle, Rules};

/// Allows every global. Nothing here is made of globals, and torch checks those of a value when the
/// value is loaded.
pub(super) const RULES: Rules =
    Rules { allow: |_, _| true, persistent: true, keep: true, places: true };

/// The parts of a file.
pub(super) struct Parts {
    pub pickle: Pickle<'static>,
    /// Offset of the pickle in the file.
    pub pickle_at: u64,
    /// True if the file has a checksum of the pickle. Then it matched.
    pub pickle_is_checked: bool,
    /// By key.
    pub storages: HashMap<String, StorageRecord>,
}

impl Parts {
    /// Returns the storage with this key.
    pub(super) fn storage(&self, key: &str) -> FaultResult<StorageRecord> {
        let found = self.storages.get(key).copied();
        found.ok_or_else(|| {
            Fault::corrupt(self.pickle_at, format!("the archive has no record data/{key}"))
        })
    }
}

/// Location of a storage's bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct StorageRecord {
    pub at: u64,
    pub size: u64,
    /// Their CRC-32, if the file has it.
    pub crc: Option<u32>,
}
