//! Names in this save for reused files of another save: hard links on a disk, copies on a store
//! (`copies.rs`).

use std::io::Write as _;
use std::path::Path;

use super::files::DataFiles;
use super::item::SaveInfo;
use super::reuse::{ParentFile, Reuse};
use crate::format::{DataFileName, FileEntry, Index};
use crate::{Control, Error, Result};

/// Limit in bytes on the note about links in the header of a rank's first file. Files that do not
/// fit in the note are written.
const NOTE_LIMIT: usize = 8 << 20;

/// A file of another save that got a name in this save.
pub(super) struct Link {
    pub entry: FileEntry,
    /// (item, chunk of the parent), in the order of the bytes.
    pub chunks: Vec<(usize, u64)>,
}

/// All linked files of a rank, and the note about them.
#[derive(Default)]
pub(super) struct Links {
    pub files: Vec<Link>,
    /// The member `linked` of `DCPRS` in the header of the rank's first file, with a leading comma;
    /// empty if there are no links.
    pub note: Vec<u8>,
    /// Reasons why other files could not be linked.
    pub problems: Vec<Error>,
}

impl Links {
    /// Links the files that are worth it into `dir`. The caller holds the folder's lock.
    pub(super) fn make(
        files: &mut DataFiles,
        dir: &Path,
        info: &SaveInfo,
        reuse: &Reuse,
        control: &Control,
    ) -> Result<Self> {
        let mut made = Self::default();
        let Some(parent) = reuse.parent() else {
            return Ok(made);
        };
        for source in reuse.sources() {
            control.check()?;
            let Some(draft) = made.draft(parent, info, &source)? else {
                continue;
            };
            let (from, to) = (parent.file_path(source.file), dir.join(&draft.name));
            match files.link(&from, &to, parent.file(source.file).size)? {
                Ok(()) => made.take(parent, draft, source),
                Err(problem) => made.problems.push(problem),
            }
        }
        Ok(made.finished())
    }

    /// Returns the name of the next file, and the note with it; `None` if the file does not fit in
    /// the note or has no digest of its head.
    pub(super) fn draft(
        &self,
        parent: &Index,
        info: &SaveInfo,
        source: &ParentFile,
    ) -> Result<Option<Draft>> {
        let number = u32::try_from(self.files.len() + 1)
            .map_err(|_| Error::Plan("too many files to link".into()))?;
        let view = parent.file(source.file);
        let mut note = self.note.clone();
        let ranges = Reuse::ranges(parent, source);
        let fits = push_note(&mut note, number, view.size, view.head_digest, &ranges);
        let name = DataFileName {
            generation: info.generation,
            token: info.token,
            rank: info.rank,
            file: number,
        };
        let name = name.to_string();
        Ok(fits.then_some(Draft { name, note }))
    }

    /// Adds a file that now has the name of `draft`.
    pub(super) fn take(&mut self, parent: &Index, draft: Draft, source: ParentFile) {
        self.note = draft.note;
        self.files.push(Link {
            entry: FileEntry { name: draft.name, linked: true, ..parent.file(source.file).into() },
            chunks: source.chunks,
        });
    }

    /// Closes the list after the last file.
    pub(super) fn finished(mut self) -> Self {
        if !self.note.is_empty() {
            self.note.push(b']');
        }
        self
    }
}

/// Name of the next linked file, and the note about all linked files.
pub(super) struct Draft {
    pub name: String,
    note: Vec<u8>,
}

/// Adds a link to the note. Returns false if the note becomes too long, or if there is no digest by
/// which to recognize the file.
fn push_note(
    note: &mut Vec<u8>,
    number: u32,
    size: u64,
    head: Option<u64>,
    ranges: &[(u64, u64)],
) -> bool {
    let Some(head) = head else { return false };
    note.extend(if note.is_empty() { b",\"linked\":[".as_slice() } else { b"," });
    write!(note, "{{\"file\":{number},\"size\":{size},\"head\":\"{head:016x}\",\"bytes\":[")
        .expect("a Vec takes all");
    for (at, (begin, end)) in ranges.iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        write!(note, "{comma}[{begin},{end}]").expect("a Vec takes all");
    }
    note.extend(b"]}");
    note.len() < NOTE_LIMIT
}
