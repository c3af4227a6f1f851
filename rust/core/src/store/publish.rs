//! Publication: a file is not there, or all of it is.

use std::path::Path;

use super::disk::Disk;
use super::random_token;
use crate::Result;

/// Puts a file into a folder in one step, in the place of any that has its name: a temporary name, a sync, a
/// rename, a sync of the folder. A reader finds the old file or the new one, and a crash leaves one of them.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io). The old file is in its place then, unless it was the last sync that failed.
pub fn publish(dir: &Path, file_name: &str, bytes: &[u8], fsync: bool) -> Result<()> {
    publish_on(&Disk::default(), dir, file_name, bytes, fsync)
}

pub(crate) fn publish_on(disk: &Disk, dir: &Path, file_name: &str, bytes: &[u8], fsync: bool) -> Result<()> {
    let temporary = dir.join(format!("{file_name}.{:016x}.tmp", random_token()?));
    let file = disk.create(&temporary)?;
    let published = (|| {
        disk.write(&file, &temporary, bytes, 0)?;
        if fsync {
            disk.sync(&file, &temporary)?;
        }
        disk.rename(&temporary, &dir.join(file_name))
    })();
    if published.is_err() {
        // What failed before is the error worth reporting.
        let _ = disk.remove(&temporary);
    }
    published?;
    if fsync { disk.sync_folder(dir) } else { Ok(()) }
}
