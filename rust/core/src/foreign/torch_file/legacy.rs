//! Files of torch before 1.6, which are not archives.
//!
//! ```text
//! pickles: a magic number, the version of the protocol, facts about the system, the saved value,
//!          the keys of the storages
//! of each storage, in that order: the number of its elements (8 bytes), the elements
//! ```

use std::collections::HashMap;

use super::parts::{Parts, RULES, StorageRecord};
use crate::foreign::fault::{Fault, FaultResult};
use crate::foreign::pickle::{Item, Pickle};
use crate::foreign::tensor_pickle;
use crate::foreign::window::Window;

/// The version that all releases wrote.
const PROTOCOL: i64 = 1001;
/// Bytes of the first read: enough for most pickles of a model.
const FIRST_READ: u64 = 64 << 10;

/// Parses a file that begins with the magic number.
pub(super) fn look_at(window: &Window<'_>) -> FaultResult<Parts> {
    let mut cursor = Cursor { window, at: 0 };
    cursor.pickle()?;
    let version = cursor.pickle()?.top();
    if version != Item::Int(PROTOCOL) {
        return Err(Fault::Unsupported(format!(
            "a file of torch before 1.6, of protocol {version:?}"
        )));
    }
    let system = cursor.pickle()?;
    if system.get(system.top(), "little_endian") != Some(Item::Bool(true)) {
        return Err(Fault::Unsupported("stored in a byte order other than \"little\"".into()));
    }
    let pickle_at = cursor.at;
    let pickle = cursor.pickle()?;
    tensor_pickle::check_storages_agree(&pickle)?;
    let keys = cursor.pickle()?;
    let lengths: HashMap<&str, u64> =
        pickle.persistent().filter_map(|id| tensor_pickle::storage_extent(&pickle, id)).collect();
    let mut storages = HashMap::new();
    let bad = |at, what: &str| {
        Fault::corrupt(at, format!("the storages of a file of torch before 1.6: {what}"))
    };
    for key in
        keys.as_list(keys.top()).ok_or_else(|| bad(cursor.at, "their keys are not a list"))?
    {
        let key = keys.as_str(*key).ok_or_else(|| bad(cursor.at, "a key that is not text"))?;
        let &size = lengths.get(key).ok_or_else(|| {
            Fault::Unsupported(format!("storage {key:?} has a type that cannot be read in place"))
        })?;
        let at = cursor.at + 8;
        match at.checked_add(size) {
            Some(end) if end <= window.len => cursor.at = end,
            _ => {
                return Err(bad(at, &format!("{size} bytes of {key:?} lead out of the file")));
            }
        }
        let record = StorageRecord { at, size, crc: None };
        if storages.insert(key.to_owned(), record).is_some() {
            return Err(bad(at, &format!("{key:?} is there twice")));
        }
    }
    Ok(Parts { pickle, pickle_at, pickle_is_checked: false, storages })
}

struct Cursor<'a> {
    window: &'a Window<'a>,
    at: u64,
}

impl Cursor<'_> {
    /// Reads the next pickle. Only its content shows where it ends, so reads grow until it is
    /// complete.
    fn pickle(&mut self) -> FaultResult<Pickle<'static>> {
        let most = self.window.len.saturating_sub(self.at).min(self.window.max_piece);
        let mut len = FIRST_READ.min(most);
        loop {
            let bytes = self.window.get(self.at, len)?.into_owned();
            match Pickle::parse_prefix(bytes, &RULES) {
                Ok((pickle, used)) => {
                    self.at += used as u64;
                    return Ok(pickle);
                }
                Err(Fault::Corrupt { at, reason }) if len == most => {
                    return Err(Fault::corrupt(self.at + at, reason));
                }
                Err(fault @ (Fault::Unsupported(_) | Fault::Forbidden(_) | Fault::Read(_))) => {
                    return Err(fault);
                }
                Err(Fault::Corrupt { .. }) => len = len.saturating_mul(8).min(most),
            }
        }
    }
}
