//! Files of another save that get a name in this one, for what is reused of them.

use std::io::Write as _;
use std::path::Path;

use super::files::DataFiles;
use super::item::SaveInfo;
use super::reuse::Reuse;
use crate::format::{DataFileName, FileEntry};
use crate::{Control, Error, Result};

/// What the header of a rank's first file may say of its links, in bytes; what does not fit is written.
const NOTE_LIMIT: usize = 8 << 20;

/// A file of another save that got a name in this one.
pub(super) struct Link {
    pub entry: FileEntry,
    /// (item, chunk of the parent), in the order of the bytes.
    pub chunks: Vec<(usize, u64)>,
}

/// All of them, and what there is to say of them.
#[derive(Default)]
pub(super) struct Links {
    pub files: Vec<Link>,
    /// The member `linked` of `DCPRS` in the header of the rank's first file, with a comma before it; empty where there are none.
    pub note: Vec<u8>,
    /// Why other files could not be linked.
    pub problems: Vec<Error>,
}

impl Links {
    /// Links what is worth it into `dir`, of which the lock is held.
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
            let view = parent.file(source.file);
            let number =
                u32::try_from(made.files.len() + 1).map_err(|_| Error::Plan("too many files to link".into()))?;
            let name = DataFileName {
                generation: info.generation,
                token: info.token,
                rank: info.rank,
                file: number,
            };
            let mut note = made.note.clone();
            let ranges = Reuse::ranges(parent, &source);
            if !push_note(&mut note, number, view.size, view.head_digest, &ranges) {
                continue;
            }
            let name = name.to_string();
            if let Err(problem) = files.link(&parent.file_path(source.file), &dir.join(&name), view.size)? {
                made.problems.push(problem);
                continue;
            }
            made.note = note;
            made.files.push(Link {
                entry: FileEntry {
                    name,
                    linked: true,
                    ..view.into()
                },
                chunks: source.chunks,
            });
        }
        if !made.note.is_empty() {
            made.note.push(b']');
        }
        Ok(made)
    }
}

/// Adds a link; false where that would be too much, or there is no digest to know the file again by.
fn push_note(note: &mut Vec<u8>, number: u32, size: u64, head: Option<u64>, ranges: &[(u64, u64)]) -> bool {
    let Some(head) = head else { return false };
    note.extend(if note.is_empty() {
        b",\"linked\":[".as_slice()
    } else {
        b","
    });
    write!(
        note,
        "{{\"file\":{number},\"size\":{size},\"head\":\"{head:016x}\",\"bytes\":["
    )
    .expect("a Vec takes all");
    for (at, (begin, end)) in ranges.iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        write!(note, "{comma}[{begin},{end}]").expect("a Vec takes all");
    }
    note.extend(b"]}");
    note.len() < NOTE_LIMIT
}
