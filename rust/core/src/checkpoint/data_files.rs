//! The data files of an index: their paths, whether they may be followed out of the folder, and
//! whether they still belong to this save.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::index_file::identity_of;
use crate::format::{INDEX_NAME, Identity, Index, SourceKind};
use crate::paths::{Links, Reach, Verdict, reach};
use crate::read::FileRef;
use crate::store::{Files, LOOK_AGAIN, PrivateMapping, Remote, patience_at};
use crate::{Control, Error, Result, StorageFault, parallel};

/// Describes a data file for the engine: the one place that says where it is read from. With
/// `allow_external`, names and symbolic links may lead out of the folder.
///
/// # Errors
/// [`Error::Unsupported`] if the name leads out without permission. Links are checked when the file
/// is opened.
pub fn file_ref(index: &Index, file: u32, allow_external: bool) -> Result<FileRef> {
    let view = index.file(file);
    if let Some(placed) = index.tiers().and_then(|tiers| tiers.place(file, view.name)) {
        return Ok(FileRef {
            links: placed.links,
            delivered: Some(placed.delivered),
            // A copy has another time.
            ..FileRef::new(placed.path, view.size)
        });
    }
    let path = index.file_path(file);
    if index.remote().is_some() && reach(view.name) == Reach::Outside {
        return Err(Error::Unsupported(format!(
            "{} names {}, outside its folder, which is not followed on a store",
            index.path().display(),
            view.name
        )));
    }
    if !allow_external && reach(view.name) == Reach::Outside {
        return Err(Error::Unsupported(format!(
            "{} names {}, outside its folder; pass allow_external=True to open it",
            index.path().display(),
            path.display()
        )));
    }
    Ok(FileRef {
        mtime_ns: view.mtime_ns,
        mend: mend(index),
        // With an index in memory, the links are as old as the folder (a download cache), and
        // trusted like it.
        links: if allow_external || index.is_in_memory() {
            Links::Any
        } else {
            links(index, view.external)
        },
        remote: index.remote().cloned(),
        ..FileRef::new(path, view.size)
    })
}

/// Returns the advice for data files that do not match the index.
fn mend(index: &Index) -> &'static str {
    match index.source() {
        SourceKind::Native => "dcp_rs.verify(path) lists what is lost",
        _ if index.is_in_memory() => "open the checkpoint again",
        _ => {
            "index.dcprs describes the files as they were before: if the files are right, replace \
             it with dcp_rs.index(path, overwrite=True), or remove it"
        }
    }
}

fn links(index: &Index, external: bool) -> Links {
    Links::Within { folder: index.folder(), last: external }
}

/// Does some work on data files. Does it again after a file of a tier turns out to be damaged or
/// cannot be read, and reads that file from elsewhere.
pub(super) fn passing_over<T>(index: &Index, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match work() {
            Err(Error::CorruptData { path, reason, .. }) if index.pass_over(&path, &reason) => {}
            Err(Error::Io { path, source, .. }) if index.pass_over(&path, &source.to_string()) => {}
            done => return done,
        }
    }
}

/// Checks that data files exist and have the expected length. If the folder of the index is a tier
/// itself, the files that no tier has are elsewhere: a read tells if they stay missing.
pub(super) fn check_each<'a>(
    index: &Index,
    files: impl IntoIterator<Item = &'a FileRef>,
    control: &Control,
) -> Result<()> {
    let is_tier = index.tiers().is_some_and(|tiers| tiers.has(index.path()));
    let here = files.into_iter().filter(|file| !is_tier || file.delivered.is_some());
    let (files, local): (Vec<&FileRef>, Vec<&FileRef>) =
        here.partition(|file| file.remote.is_some());
    let check = |i: usize, _| {
        control.check()?;
        local[i].open(false).map(drop).map_err(|error| explain(index, error, control))
    };
    parallel::map_waiting(local.len(), check)?;
    let Some(remote) = index.remote().filter(|_| !files.is_empty()) else {
        return Ok(());
    };
    let connection = remote.connect(1)?;
    let there = Files::Remote(&*connection, control);
    let check =
        |i: usize| check_remote(there, files[i]).map_err(|error| explain(index, error, control));
    parallel::map(files.len(), there.threads(0), check).map(drop)
}

/// Checks that a data file on a store exists and has the expected length.
pub(super) fn check_remote(there: Files<'_>, file: &FileRef) -> Result<()> {
    match there.stat(&file.path)?.size {
        size if size == file.size => Ok(()),
        size => Err(file.has_length(size)),
    }
}

/// Returns a data file that is refused without `allow_external`, because a link leads out of the
/// folder.
pub fn find_link_outside(index: &Index) -> Option<PathBuf> {
    (0..index.file_count()).find_map(|file| {
        let path = index.file_path(file);
        let links = links(index, index.file(file).external);
        let leads_out = matches!(links.judge(&path), Ok(Verdict::Outside | Verdict::Link));
        leads_out.then_some(path)
    })
}

/// Explains an error of a read. If a data file is missing or changed, the checkpoint may have been
/// replaced. Adds the index's path to errors that lack it.
pub fn explain(index: &Index, error: Error, control: &Control) -> Error {
    let path = index.path().to_owned();
    match error {
        Error::CorruptData { path: ref file, .. }
            if index.tiers().is_some_and(|tiers| tiers.has(file)) =>
        {
            error
        }
        Error::CorruptData { .. } | Error::Storage { kind: StorageFault::Precondition, .. }
            if was_replaced_lately(index, control) =>
        {
            Error::Replaced { path }
        }
        Error::Io { ref source, .. }
            if source.kind() == ErrorKind::StaleNetworkFileHandle
                && was_replaced_lately(index, control) =>
        {
            Error::Replaced { path }
        }
        Error::TensorPlan { path: None, tensor, reason } => {
            Error::TensorPlan { path: Some(path), tensor, reason }
        }
        other => other,
    }
}

/// Does the same as [`was_replaced`]. On a network file system it looks for some seconds, because
/// the old index may still be remembered while its data files are gone.
fn was_replaced_lately(index: &Index, control: &Control) -> bool {
    let begin = Instant::now();
    let patience = match index.path().parent() {
        Some(folder) if index.remote().is_none() && index.source() == SourceKind::Native => {
            patience_at(folder)
        }
        _ => Duration::ZERO,
    };
    loop {
        if was_replaced(index, control) {
            return true;
        }
        if begin.elapsed() >= patience || control.check().is_err() {
            return false;
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// Returns whether another save has been committed here since the index was opened.
fn was_replaced(index: &Index, control: &Control) -> bool {
    if index.source() != SourceKind::Native {
        return false; // no save removes the files of others
    }
    let now = match index.remote() {
        Some(remote) => remote_identity(&**remote, index.path(), control),
        None => identity_of(index.path()),
    };
    match now {
        Some(now) => now.save_id != index.save_id(),
        // Only a save of all ranks removes the index of a single rank.
        None if index.remote().is_some() => false,
        None => {
            !index.path().ends_with(INDEX_NAME) && index.path().with_file_name(INDEX_NAME).exists()
        }
    }
}

/// Returns the identity of the index that is now on a store.
fn remote_identity(remote: &dyn Remote, path: &Path, control: &Control) -> Option<Identity> {
    let connection = remote.connect(1).ok()?;
    let start = connection.start(path, Identity::LEN as u64, true, control);
    Identity::of(start.ok()??.0.first_chunk()?)
}

/// Maps a data file privately, after a check of its length.
pub fn map_data_file(index: &Index, file: u32, allow_external: bool) -> Result<PrivateMapping> {
    passing_over(index, || {
        let file_ref = file_ref(index, file, allow_external)?;
        if file_ref.remote.is_some() {
            return Err(Error::Unsupported(format!(
                "{}: a file on a store cannot be mapped",
                file_ref.path.display()
            )));
        }
        let opened =
            file_ref.open(false).map_err(|error| explain(index, error, &Control::new()))?;
        PrivateMapping::new(&opened).map_err(|error| Error::io("map", &file_ref.path, error))
    })
}
