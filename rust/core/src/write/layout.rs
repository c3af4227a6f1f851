//! Layout of chunks in files: section 2 of `docs/format.md`. Pure.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::header::{FIXED_BOUND, FileText, ItemText, escaped_len};
use super::item::{SaveInfo, SaveItem};
use crate::format::{DataFileName, PAYLOAD_ALIGNMENT};
use crate::{Error, Result};

/// Limit on the header of a data file in bytes, with its length and padding.
pub const HEADER_LIMIT: u64 = 64 << 20;

/// Largest offset in a file.
const MAX_FILE_SIZE: u64 = i64::MAX.unsigned_abs();

/// A data file to write.
#[derive(Clone, Debug)]
pub struct FilePlan {
    /// Its name in the folder.
    pub name: String,
    /// Its first bytes. The payload follows them.
    pub header: Vec<u8>,
    /// Its length in bytes.
    pub size: u64,
    /// Numbers of its items, in the order of their bytes.
    pub items: Vec<u32>,
}

/// Place of an item's bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Index of the file.
    pub file: u32,
    /// First byte in that file.
    pub offset: u64,
}

/// Places of all items.
#[derive(Clone, Debug)]
pub struct SaveLayout {
    /// The files. There is at least one, because recovery expects a file of every rank.
    pub files: Vec<FilePlan>,
    /// A place for each item.
    pub places: Vec<Place>,
}

/// Constraints on the layout of a save: linked files of another save, and the turns in which items
/// are written.
#[derive(Debug, Default)]
pub(super) struct LayoutConstraints {
    /// For each item, whether a linked file has it; empty if there are no links.
    pub reused: Vec<bool>,
    /// For each item, whether it is unlikely to change: such items share no file with others. Empty
    /// if this holds for no item.
    pub stays: Vec<bool>,
    /// For each item, the turn in which it is written. Items of one turn are adjacent, as far as
    /// alignment permits. Empty if there is only one turn.
    pub turns: Vec<u32>,
    /// Number of linked files. Their numbers follow that of the first written file.
    pub links: u32,
    /// Note about the links in the header of the first file, as JSON.
    pub note: Vec<u8>,
    /// Limit on the bytes of items in a file that has several items; `None` for no limit.
    pub most_bytes: Option<u64>,
}

impl LayoutConstraints {
    fn has(flags: &[bool], id: u32) -> bool {
        flags.get(id as usize).copied().unwrap_or(false)
    }
}

/// Lays out the items that one rank writes, next to linked files. Headers have at most
/// `header_limit` bytes.
///
/// # Errors
/// [`Error::TensorPlan`] names an item that is inconsistent with itself or with another, or that no
/// file can hold.
pub(super) fn plan_files_within(
    items: &[SaveItem],
    info: &SaveInfo,
    constraints: &LayoutConstraints,
    header_limit: u64,
) -> Result<SaveLayout> {
    let drafts = assign(items, constraints, header_limit)?;
    let written = u32::try_from(drafts.len()).ok();
    let files = written.and_then(|written| written.checked_add(constraints.links));
    let files = files.ok_or_else(|| Error::Plan("more than 4 billion files".into()))?;
    let mut layout = SaveLayout {
        files: Vec::with_capacity(drafts.len()),
        places: vec![Place::default(); items.len()],
    };
    for (file, draft) in (0..files).zip(drafts) {
        let number = if file == 0 { 0 } else { file + constraints.links };
        let note: &[u8] = if file == 0 { &constraints.note } else { &[] };
        let mut order: Vec<usize> = (0..draft.items.len()).collect();
        let length = |position: usize| items[draft.items[position] as usize].length;
        let turn = |position: usize| constraints.turns.get(draft.items[position] as usize);
        order.sort_by_cached_key(|&position| {
            (std::cmp::Reverse(alignment(length(position))), turn(position))
        });

        let mut spans = Vec::with_capacity(order.len());
        let mut end = 0_u64;
        for position in order {
            let begin = end;
            end = begin
                .checked_add(length(position))
                .filter(|&end| end <= MAX_FILE_SIZE - header_limit)
                .ok_or_else(|| {
                    Error::Plan(format!("file {file} would exceed {MAX_FILE_SIZE} bytes"))
                })?;
            spans.push((position, begin, end));
        }
        let header = draft.text.header(info, number, files, note, spans.iter().copied());
        let data_start = header.len() as u64;
        debug_assert!(data_start <= header_limit);
        for &(position, begin, _) in &spans {
            layout.places[draft.items[position] as usize] =
                Place { file, offset: data_start + begin };
        }
        let name = DataFileName {
            generation: info.generation,
            token: info.token,
            rank: info.rank,
            file: number,
        };
        layout.files.push(FilePlan {
            name: name.to_string(),
            header,
            size: data_start + end,
            items: spans.iter().map(|&(position, ..)| draft.items[position]).collect(),
        });
    }
    Ok(layout)
}

/// A file to which items are still added.
#[derive(Default)]
struct Draft {
    items: Vec<u32>,
    text: FileText,
    text_bound: u64,
    bytes: u64,
    full: bool,
    /// True if its items are unlikely to change; `None` while it has no items.
    stays: Option<bool>,
}

/// First item with a name, and the first file without items of that name.
struct Seen<'a> {
    item: &'a SaveItem,
    next_file: usize,
}

fn assign(
    items: &[SaveItem],
    constraints: &LayoutConstraints,
    header_limit: u64,
) -> Result<Vec<Draft>> {
    let room = (header_limit - header_limit % PAYLOAD_ALIGNMENT).saturating_sub(FIXED_BOUND);
    let count =
        u32::try_from(items.len()).map_err(|_| Error::Plan("more than 4 billion items".into()))?;
    let mut drafts =
        vec![Draft { text_bound: escaped_len(&constraints.note) as u64, ..Draft::default() }];
    let mut first_open = 0;
    let mut seen: HashMap<&str, Seen> = HashMap::with_capacity(items.len());
    let mut text = ItemText::default();
    for (id, item) in (0..count).zip(items) {
        item.check()?;
        text.set(item);
        let bound = text.bound();
        if bound > room {
            return Err(
                item.refuse(format!("takes {bound} bytes of a file's header, of at most {room}"))
            );
        }
        let seen = match seen.entry(&item.name) {
            Entry::Occupied(entry) => {
                item.agree_with(entry.get().item)?;
                entry.into_mut()
            }
            Entry::Vacant(entry) => entry.insert(Seen { item, next_file: 0 }),
        };
        if LayoutConstraints::has(&constraints.reused, id) {
            continue;
        }
        let item_stays = LayoutConstraints::has(&constraints.stays, id);
        let mut file = seen.next_file.max(first_open);
        loop {
            if file == drafts.len() {
                drafts.push(Draft::default());
            }
            let draft = &mut drafts[file];
            if draft.stays.is_some_and(|stays| stays != item_stays) {
                file += 1;
                continue;
            }
            let bytes = draft.bytes.saturating_add(item.length);
            let has_room =
                draft.items.is_empty() || constraints.most_bytes.is_none_or(|most| bytes <= most);
            if !draft.full && has_room && draft.text_bound + bound <= room {
                draft.stays = Some(item_stays);
                draft.items.push(id);
                draft.text.push(&text);
                draft.text_bound += bound;
                draft.bytes = bytes;
                break;
            }
            draft.full = true;
            file += 1;
        }
        seen.next_file = file + 1;
        while drafts.get(first_open).is_some_and(|draft| draft.full) {
            first_open += 1;
        }
    }
    Ok(drafts)
}

/// Returns the largest power of two, at most a page, that divides the length.
const fn alignment(length: u64) -> u64 {
    if length.is_multiple_of(PAYLOAD_ALIGNMENT) {
        PAYLOAD_ALIGNMENT
    } else {
        1 << length.trailing_zeros()
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
