//! Leftovers of killed saves on a store, and their removal. A store has no locks, so only the age
//! of an object shows whether its save may still be running.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::clean::{Cleaned, Leftover, Unneeded, Verdict, judge, unneeded};
use crate::store::{Claimed, Files, StoringConnection};
use crate::{Control, Error, Result};

/// Time limit for the removal.
const PATIENCE: Duration = Duration::from_secs(60 * 60);

/// Does what [`leftovers`](super::leftovers) does, for the folder `dir` on a store. Finds data
/// files that no index names, and indexes of ranks next to one of all ranks. Stores do not list
/// incomplete uploads here.
///
/// Anything stored within `older_than` (a day by default) counts as young.
///
/// # Errors
/// [`Error::NotFound`] if nothing is there; [`Error::CorruptIndex`] if an index cannot be read;
/// [`Error::Unsupported`] if the store cannot list files; [`Error::Storage`],
/// [`Error::Interrupted`].
pub fn leftovers_remote(
    dir: &Path,
    older_than: Option<Duration>,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<Vec<Leftover>> {
    // Listed before any index is read, so that an index names all files that are committed in
    // between.
    let listed = connection.list(dir, control)?;
    let listed =
        listed.ok_or_else(|| Error::Unsupported(format!("{} cannot be listed", dir.display())))?;
    let listed = listed.files;
    if listed.is_empty() {
        return Err(Error::NotFound {
            path: dir.to_owned(),
            reason: "there are no objects".into(),
        });
    }
    let listed: BTreeMap<&str, _> = listed.iter().map(|file| (file.name.as_str(), file)).collect();
    let found =
        unneeded(Files::Remote(connection, control), dir, &listed.keys().copied().collect())?;
    let leftover = |found: Unneeded<'_>| {
        let file = listed[found.name];
        Leftover {
            path: dir.join(found.name),
            bytes: file.size,
            kind: found.kind,
            verdict: if found.is_whole {
                Verdict::Whole
            } else {
                judge(Claimed::Unknown, file.age, older_than)
            },
        }
    };
    Ok(found.into_iter().map(leftover).collect())
}

/// Removes what [`leftovers_remote`] finds with the verdict [`Verdict::Left`].
///
/// # Errors
/// Those of [`leftovers_remote`]. Then nothing was removed.
pub fn clean_remote(
    dir: &Path,
    older_than: Option<Duration>,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<Cleaned> {
    let found = leftovers_remote(dir, older_than, connection, control)?;
    let (left, kept): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|leftover| leftover.verdict == Verdict::Left);
    let paths: Vec<PathBuf> = left.iter().map(|leftover| leftover.path.clone()).collect();
    let failed = connection.remove(&paths, &[], PATIENCE, control);
    let still_there: HashSet<PathBuf> = failed
        .iter()
        .filter_map(|error| match error {
            Error::Storage { path, .. } => Some(path.clone()),
            _ => None,
        })
        .collect();
    control.check()?;
    Ok(Cleaned {
        removed: left
            .into_iter()
            .filter(|leftover| !still_there.contains(&leftover.path))
            .collect(),
        kept,
        failed,
    })
}
