//! Copies of another save's files, made by the store: the counterpart of hard links on a disk
//! (`links.rs`). Their bytes never come to this machine.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    /// Paths that may exist.
    paths: Mutex<Vec<PathBuf>>,
    interrupted: AtomicBool,
    /// The process that began the save.
    owner: u32,
}

impl Copies {
    /// Starts without copies, on the store of `remote`.
    pub(super) fn new(remote: Arc<dyn Remote>) -> Self {
        Self {
            remote,
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
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the files that are worth it to `dir`, and skips those that the store can never copy.
    ///
    /// The store may still carry out a copy that it refused, so the name is never used again. After
    /// a refusal the rank gets another token, and copies its other files once more.
    pub(super) fn make(
        &self,
        dir: &Path,
        info: &mut SaveInfo,
        reuse: &Reuse,
        threads: usize,
        control: &Control,
    ) -> Result<Links> {
        let made = self.copy_all(dir, info, reuse, threads, control);
        if matches!(made, Err(Error::Interrupted)) {
            self.interrupted.store(true, Ordering::Relaxed);
        }
        made
    }

    fn copy_all(
        &self,
        dir: &Path,
        info: &mut SaveInfo,
        reuse: &Reuse,
        threads: usize,
        control: &Control,
    ) -> Result<Links> {
        let mut made = Links::default();
        let found = reuse.sources();
        let (Some(parent), false) = (reuse.parent(), found.is_empty()) else {
            return Ok(made);
        };
        let Some(connection) = parent.remote().map(|remote| remote.connect_to_store(0)) else {
            made.problems
                .push(Error::Unsupported("a store cannot copy a file of a file system".into()));
            return Ok(made);
        };
        let connection = match connection {
            Ok(connection) => connection,
            Err(problem) => {
                made.problems.push(tolerable(problem)?);
                return Ok(made);
            }
        };
        let (mut sources, mut problems) = (Vec::new(), Vec::new());
        for source in found {
            match connection
                .check_copied(&parent.file_path(source.file), parent.file(source.file).size)
            {
                Ok(()) => sources.push(source),
                Err(problem) => problems.push(tolerable(problem)?),
            }
        }
        for _ in 0..ROUNDS {
            let (mut files, mut kept) = (Vec::new(), Vec::new());
            for source in sources {
                if let Some(draft) = made.draft(parent, info, &source)? {
                    files.push((source.file, dir.join(&draft.name)));
                    kept.push(ParentFile { file: source.file, chunks: source.chunks.clone() });
                    made.take(parent, draft, source);
                }
            }
            self.paths().extend(files.iter().map(|(_, to)| to.clone()));
            let copied = parallel::map(files.len(), threads, |i| {
                let (file, to) = &files[i];
                match copy(parent, *file, to, &*connection, control) {
                    Ok(()) => Ok(None),
                    Err(problem) => tolerable(problem).map(Some),
                }
            })?;
            let failed = copied.iter().any(Option::is_some);
            if !failed {
                made.problems = problems;
                return Ok(made.finished());
            }
            give_up(&self.remote, &self.take(), &[], false);
            info.token = random_token()?;
            made = Links::default();
            sources = Vec::new();
            for (source, problem) in kept.into_iter().zip(copied) {
                match problem {
                    None => sources.push(source),
                    Some(problem) => problems.push(problem),
                }
            }
        }
        if !sources.is_empty() {
            let reason = format!(
                "copies were refused {ROUNDS} times: no more of {} was copied",
                parent.path().display()
            );
            problems.push(Error::Unsupported(reason));
        }
        made.problems = problems;
        Ok(made)
    }
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
