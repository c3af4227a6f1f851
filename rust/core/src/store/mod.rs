//! Files, folders and mappings of the operating system, and objects on a store, without knowledge
//! of the format.

use std::time::Duration;

mod buffer;
mod conditional;
mod descriptors;
pub(crate) mod disk;
mod file;
mod files;
mod fingerprint;
mod fork;
mod lock;
mod mapping;
mod platform;
mod private;
mod publish;
mod random;
mod remote;
mod residency;
mod tiers;

/// Time for which a network client may serve what it remembers of a path, before an answer counts.
pub(crate) const STALE: Duration = Duration::from_secs(5);
/// Delay before it is asked again.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Returns the time for which what a folder seems to hold may be out of date: none on a disk of
/// this machine.
pub(crate) fn patience_at(folder: &std::path::Path) -> Duration {
    let is_local = std::fs::File::open(folder).is_ok_and(|opened| !is_remote(&opened));
    if is_local { Duration::ZERO } else { STALE }
}

pub(crate) use buffer::Buffer;
pub(crate) use conditional::{another, is_refused, put_and_look, put_over, unclear};
pub use conditional::{has, put_new};
pub(crate) use descriptors::most_open;
pub use disk::{LOCK_NAME, Mode};
pub use file::FileRef;
pub(crate) use file::{open_file, read_all, read_at, read_direct_at};
pub use files::read_files;
pub(crate) use files::{Files, MOST_JSON, Opened, Stat, Storage};
pub use fingerprint::Fingerprint;
pub(crate) use lock::Claimed;
pub use lock::{FileLock, FolderLock, lock_replaced};
pub use mapping::Mapping;
pub(crate) use platform::spare_address_space;
pub use platform::{direct_align, is_remote};
pub use private::PrivateMapping;
pub use publish::{ASIDE, create_folder, publish, put_in_place};
pub(crate) use publish::{name_of_temporary, publish_on};
pub use random::{random_bytes, random_token};
pub use remote::{
    Body, Condition, Connection, Destination, FetchRange, Folder, Listed, Remote,
    StoringConnection, Upload, list_folders,
};
pub(crate) use remote::{Mismatch, Run, fetch};
pub use residency::resident_bytes;
pub use tiers::Tiers;
