//! Copies of another save's files, made by the store: the counterpart of hard links on a disk
//! (`links.rs`). Their bytes never come to this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::item::SaveInfo;
use super::layout::HEADER_LIMIT;
use super::links::Links;
use super::object::give_up;
use super::reuse::{ParentFile, Reuse};
use crate::format::{Index, block_digest};
use crate::store::{Remote, StoringConnection, random_token};
use crate::{Control, Error, Result, parallel};

/// Rounds of copies for a rank, each under its own token. After a refusal, one more round leaves
/// out the refused file. After that the rank writes everything.
const ROUNDS: usize = 2;

/// The copies of one rank. If they are dropped before they are [taken](Self::take), they are
/// removed.
pub(super) struct Copies {
    remote: Arc<dyn Remote>,
    /// Concurrent copies.
    threads: usize,
    /// Paths that may exist.
    paths: Mutex<Vec<PathBuf>>,
    interrupted: AtomicBool,
    /// The process that began the save.
    owner: u32,
}

impl Copies {
    /// Starts without copies, on the store of `remote`. Makes up to `threads` at the same time.
    pub(super) fn new(remote: Arc<dyn Remote>, threads: usize) -> Self {
        Self {
            remote,
            threads,
            paths: Mutex::default(),
            interrupted: AtomicBool::new(false),
            owner: std::process::id(),
        }
    }

    pub(super) fn remote(&self) -> &Arc<dyn Remote> {
        &self.remote
    }

    pub(super) fn len(&self) -> usize {
        self.paths().len()
    }

    /// Takes the paths that may exist, to be kept or removed.
    pub(super) fn take(&self) -> Vec<PathBuf> {
        std::mem::take(&mut *self.paths())
    }

    fn paths(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        parallel::lock(&self.paths)
    }

    /// Copies the files that are worth it to `dir`, and skips those that the store can never copy.
    /// Also returns the save with the token that its names have.
    ///
    /// The store may still carry out a copy that it refused, so the name is never used again. After
    /// a refusal the rank gets another token, and copies its other files once more.
    pub(super) fn make(
        &self,
        dir: &Path,
        info: SaveInfo,
        reuse: &Reuse,
        control: &Control,
    ) -> Result<(Links, SaveInfo)> {
        let made = self.make_in_rounds(dir, info, reuse, control);
        if matches!(made, Err(Error::Interrupted)) {
            self.interrupted.store(true, Ordering::Relaxed);
        }
        made
    }

    fn make_in_rounds(
        &self,
        dir: &Path,
        mut info: SaveInfo,
        reuse: &Reuse,
        control: &Control,
    ) -> Result<(Links, SaveInfo)> {
        let mut problems = Vec::new();
        if let Some(parent) = reuse.parent()
            && let Some((connection, mut sources)) =
                copiable(parent, reuse.sources(), &mut problems)?
        {
            for _ in 0..ROUNDS {
                let (links, copies) = draft_all(parent, dir, &info, &sources)?;
                let refused = self.copy_all(parent, &copies, &*connection, control)?;
                if refused.is_empty() {
                    return Ok((Links { problems, ..links.finished() }, info));
                }
                give_up(&self.remote, &self.take(), &[], false);
                info.token = random_token()?;
                sources.retain(|source| !refused.contains_key(&source.file));
                problems.extend(refused.into_values());
            }
            if !sources.is_empty() {
                let reason = format!(
                    "copies were refused {ROUNDS} times: no more of {} was copied",
                    parent.path().display()
                );
                problems.push(Error::Unsupported(reason));
            }
        }
        Ok((Links { problems, ..Links::default() }, info))
    }

    /// Copies files of the parent, each to a path. Returns those that were refused, and why.
    fn copy_all(
        &self,
        parent: &Index,
        copies: &[(u32, PathBuf)],
        connection: &dyn StoringConnection,
        control: &Control,
    ) -> Result<BTreeMap<u32, Error>> {
        self.paths().extend(copies.iter().map(|(_, to)| to.clone()));
        let refused = parallel::map(copies.len(), self.threads, |i| {
            let (file, to) = &copies[i];
            match copy(parent, *file, to, connection, control) {
                Ok(()) => Ok(None),
                Err(problem) => tolerable(problem).map(|problem| Some((*file, problem))),
            }
        })?;
        Ok(refused.into_iter().flatten().collect())
    }
}

/// A connection to the parent's store, and the files that it can copy.
type Copiable = (Arc<dyn StoringConnection>, Vec<ParentFile>);

/// Connects to the parent's store, and returns the files that it can copy. Returns `None` if there
/// are none.
fn copiable(
    parent: &Index,
    found: Vec<ParentFile>,
    problems: &mut Vec<Error>,
) -> Result<Option<Copiable>> {
    if found.is_empty() {
        return Ok(None);
    }
    let connection = match parent.remote().map(|remote| remote.connect_to_store(0)) {
        Some(Ok(connection)) => connection,
        Some(Err(problem)) => {
            problems.push(tolerable(problem)?);
            return Ok(None);
        }
        None => {
            let reason = "a store cannot copy a file of a file system";
            problems.push(Error::Unsupported(reason.into()));
            return Ok(None);
        }
    };
    let mut sources = Vec::with_capacity(found.len());
    for source in found {
        let (path, size) = (parent.file_path(source.file), parent.file(source.file).size);
        match connection.check_copied(&path, size) {
            Ok(()) => sources.push(source),
            Err(problem) => problems.push(tolerable(problem)?),
        }
    }
    Ok(Some((connection, sources)))
}

/// Names the copies of files, as far as the note about them has room. Returns each file with its
/// copy's path.
fn draft_all(
    parent: &Index,
    dir: &Path,
    info: &SaveInfo,
    sources: &[ParentFile],
) -> Result<(Links, Vec<(u32, PathBuf)>)> {
    let (mut links, mut copies) = (Links::default(), Vec::new());
    for source in sources {
        if let Some(draft) = links.draft(parent, info, source)? {
            copies.push((source.file, dir.join(&draft.name)));
            links.take(parent, draft, source.clone());
        }
    }
    Ok((links, copies))
}

impl Drop for Copies {
    fn drop(&mut self) {
        if self.owner == std::process::id() {
            give_up(&self.remote, &self.take(), &[], self.interrupted.load(Ordering::Relaxed));
        }
    }
}

/// Makes the store copy one file, and checks the result. The copy must have the length and the
/// first bytes that the index has. The original must be unchanged, which not every store checks.
fn copy(
    parent: &Index,
    file: u32,
    to: &Path,
    connection: &dyn StoringConnection,
    control: &Control,
) -> Result<()> {
    let (view, from) = (parent.file(file), parent.file_path(file));
    if view.data_start > HEADER_LIMIT {
        return Err(Error::corrupt_file(&from, "a header of more bytes than any has"));
    }
    connection.copy(&from, to, view.size, control)?;
    let wrong = |reason: String| {
        Err(Error::corrupt_file(to, format!("the store's copy of {}: {reason}", from.display())))
    };
    match connection.start(to, view.data_start, true, control)? {
        None => return wrong("it is missing".into()),
        Some((_, size)) if size != view.size => {
            return wrong(format!("it is {size} bytes long, expected {}", view.size));
        }
        Some((head, _)) if Some(block_digest(&head)) != view.head_digest => {
            return wrong("its first bytes differ from the index".into());
        }
        Some(_) => {}
    }
    match connection.start(&from, 1, false, control)? {
        Some((_, size)) if size == view.size => Ok(()),
        Some((_, size)) => Err(Error::corrupt_file(
            &from,
            format!("it is {size} bytes long, expected {}", view.size),
        )),
        None => Err(Error::corrupt_file(&from, "it is missing")),
    }
}

/// Returns the error if it only prevents the copy of a file: the save then writes the file's
/// contents.
fn tolerable(error: Error) -> Result<Error> {
    match error {
        Error::Storage { .. }
        | Error::Io { .. }
        | Error::Unsupported(_)
        | Error::CorruptData { .. } => Ok(error),
        fatal => Err(fatal),
    }
}

#[cfg(test)]
#[path = "copies_tests.rs"]
mod tests;
