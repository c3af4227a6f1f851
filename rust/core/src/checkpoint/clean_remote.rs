//! What killed saves left on a store, and its removal. Nothing tells there who is at work: only the age of an object does.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::clean::{Cleaned, Kind, Leftover, Verdict, judge};
use super::recover::recoverable;
use crate::format::{DataFileName, INDEX_NAME, Index, parse_rank_index_name};
use crate::store::{Claimed, Files, StoringConnection};
use crate::{Control, Error, Result};

/// For the removal of all that was found.
const PATIENCE: Duration = Duration::from_secs(60 * 60);

/// [`leftovers`](super::leftovers) of the folder `dir` on a store: data files that no index there names, and indexes of ranks beside one of all. What was
/// begun as an upload and not completed no store lists here.
///
/// `older_than`: what was stored since is young; by default a day.
///
/// # Errors
/// [`Error::NotFound`] where there is nothing; [`Error::CorruptIndex`] where an index cannot be read; [`Error::Unsupported`] of a store that cannot be listed;
/// [`Error::Storage`], [`Error::Interrupted`].
pub fn leftovers_remote(
    dir: &Path,
    older_than: Option<Duration>,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<Vec<Leftover>> {
    // Before any index is read: what is committed in between is named by then.
    let listed = connection.list(dir, control)?;
    let listed = listed.ok_or_else(|| Error::Unsupported(format!("{} cannot be listed", dir.display())))?;
    let listed = listed.files;
    if listed.is_empty() {
        return Err(Error::NotFound {
            path: dir.to_owned(),
            reason: "there are no objects".into(),
        });
    }
    let listed: BTreeMap<&str, _> = listed.iter().map(|file| (file.name.as_str(), file)).collect();
    let has_index = listed.contains_key(INDEX_NAME);
    let is_rank_index = |name: &str| parse_rank_index_name(name).is_some();
    let files = Files::Remote(connection, control);
    let (mut named, mut has_live) = (HashSet::new(), false);
    for name in listed
        .keys()
        .filter(|name| **name == INDEX_NAME || (!has_index && is_rank_index(name)))
    {
        has_live = true;
        let path = dir.join(name);
        let gone = || Error::Storage {
            kind: crate::StorageFault::Precondition,
            action: "read",
            path: path.clone(),
            attempts: 1,
            reason: "it was removed while this went on".into(),
        };
        let index = Index::from_bytes(files.read(&path)?.ok_or_else(gone)?, &path)?;
        let last = |number| Path::new(index.file(number).name).file_name().map(OsStr::to_owned);
        named.extend((0..index.file_count()).filter_map(last));
    }
    let whole = if has_live {
        BTreeSet::new()
    } else {
        recoverable(files, dir, listed.keys().copied())?
    };
    let mut found = Vec::new();
    for (name, file) in listed {
        let data = DataFileName::parse(name);
        let kind = match data {
            _ if named.contains(OsStr::new(name)) => continue,
            Some(_) => Kind::Data,
            None if has_index && is_rank_index(name) => Kind::RankIndex,
            None => continue,
        };
        let is_whole = data.is_some_and(|data| whole.contains(&data));
        found.push(Leftover {
            path: dir.join(name),
            bytes: file.size,
            kind,
            verdict: if is_whole {
                Verdict::Whole
            } else {
                judge(Claimed::Unknown, file.age, older_than)
            },
        });
    }
    Ok(found)
}

/// Removes what [`leftovers_remote`] finds and nobody needs.
///
/// # Errors
/// Those of [`leftovers_remote`]; nothing was removed then.
pub fn clean_remote(
    dir: &Path,
    older_than: Option<Duration>,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<Cleaned> {
    let found = leftovers_remote(dir, older_than, connection, control)?;
    let (left, kept): (Vec<_>, Vec<_>) = found
        .into_iter()
        .partition(|leftover| leftover.verdict == Verdict::Left);
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
