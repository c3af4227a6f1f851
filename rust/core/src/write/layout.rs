//! Which file each chunk goes to, and where in it: section 2 of `docs/format.md`. Pure.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::header::{FIXED_BOUND, FileText, ItemText};
use crate::format::{DataFileName, Kind, PAYLOAD_ALIGNMENT, Value};
use crate::geometry::Dims;
use crate::{Dtype, Error, Result};

/// The longest header of a data file, in bytes, with its length and padding.
pub const HEADER_LIMIT: u64 = 64 << 20;

const MAX_NDIM: usize = 64;
/// The most that an offset in a file can be.
const MAX_FILE_SIZE: u64 = i64::MAX.unsigned_abs();

/// A chunk of a tensor, or another value, to be saved.
#[derive(Clone, Debug, PartialEq)]
pub struct SaveItem {
    /// FQN.
    pub name: String,
    /// Tensor or bytes.
    pub kind: Kind,
    /// Element type, for tensors.
    pub dtype: Option<Dtype>,
    /// Sizes of the whole tensor.
    pub shape: Dims,
    /// As in section 3.3 of the format.
    pub flags: u8,
    /// Its path in the state dict.
    pub path: Option<Value>,
    /// Its place among the entries of the state dict.
    pub position: Option<u32>,
    /// Where the chunk begins in the tensor.
    pub offsets: Dims,
    /// How far it extends.
    pub sizes: Dims,
    /// Its bytes: elements times element size, for a tensor.
    pub length: u64,
}

/// Which save this is, and whose part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveInfo {
    /// Random: identifies the save, on all ranks.
    pub save_id: [u8; 16],
    /// 1 + the highest that any file of the folder carries.
    pub generation: u64,
    /// Random: no two saves into a folder may share it.
    pub token: u64,
    /// The rank that writes.
    pub rank: u32,
    /// How many ranks write; 0: this one, for itself alone.
    pub world_size: u32,
}

/// A data file to be written.
#[derive(Clone, Debug)]
pub struct FilePlan {
    /// Its name in the folder.
    pub name: String,
    /// Its first bytes: the payload begins after them.
    pub header: Vec<u8>,
    /// Its length in bytes.
    pub size: u64,
    /// What is in it, in the order of the bytes: indices of items.
    pub items: Vec<u32>,
}

/// Where the bytes of an item go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Index of the file.
    pub file: u32,
    /// First byte in that file.
    pub offset: u64,
}

/// Where everything goes.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The files; at least one, so that every rank leaves a trace of its part (recovery counts on it).
    pub files: Vec<FilePlan>,
    /// A place for each item.
    pub places: Vec<Place>,
}

/// Lays out what one rank saves.
///
/// # Errors
/// [`Error::TensorPlan`] names the item that contradicts itself or another one, or that no file can hold.
pub fn plan_files(items: &[SaveItem], info: &SaveInfo) -> Result<Layout> {
    plan_files_within(items, info, HEADER_LIMIT)
}

/// [`plan_files`] with another limit for headers, in bytes.
pub(super) fn plan_files_within(items: &[SaveItem], info: &SaveInfo, header_limit: u64) -> Result<Layout> {
    let drafts = assign(items, header_limit)?;
    let files = u32::try_from(drafts.len()).map_err(|_| Error::Plan("more than 4 billion files".into()))?;
    let mut layout = Layout {
        files: Vec::with_capacity(drafts.len()),
        places: vec![Place::default(); items.len()],
    };
    for (file, draft) in (0..files).zip(drafts) {
        let mut order: Vec<usize> = (0..draft.items.len()).collect();
        let length = |position: usize| items[draft.items[position] as usize].length;
        order.sort_by_key(|&position| std::cmp::Reverse(alignment(length(position))));

        let mut spans = Vec::with_capacity(order.len());
        let mut end = 0_u64;
        for position in order {
            let begin = end;
            end = begin
                .checked_add(length(position))
                .filter(|&end| end <= MAX_FILE_SIZE - header_limit)
                .ok_or_else(|| Error::Plan(format!("file {file} would exceed {MAX_FILE_SIZE} bytes")))?;
            spans.push((position, begin, end));
        }
        let header = draft.text.header(info, file, files, spans.iter().copied());
        let data_start = header.len() as u64;
        debug_assert!(data_start <= header_limit);
        for &(position, begin, _) in &spans {
            layout.places[draft.items[position] as usize] = Place {
                file,
                offset: data_start + begin,
            };
        }
        let name = DataFileName {
            generation: info.generation,
            token: info.token,
            rank: info.rank,
            file,
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

/// A file while items are still added to it.
#[derive(Default)]
struct Draft {
    items: Vec<u32>,
    text: FileText,
    text_bound: u64,
    full: bool,
}

/// What the items of one name have in common, and the first file that has none of them.
struct Seen<'a> {
    item: &'a SaveItem,
    next_file: usize,
}

fn assign(items: &[SaveItem], header_limit: u64) -> Result<Vec<Draft>> {
    let room = (header_limit - header_limit % PAYLOAD_ALIGNMENT).saturating_sub(FIXED_BOUND);
    let count = u32::try_from(items.len()).map_err(|_| Error::Plan("more than 4 billion items".into()))?;
    let mut drafts = vec![Draft::default()];
    let mut first_open = 0;
    let mut seen: HashMap<&str, Seen> = HashMap::with_capacity(items.len());
    let mut text = ItemText::default();
    for (id, item) in (0..count).zip(items) {
        check(item)?;
        text.set(item);
        let bound = text.bound();
        if bound > room {
            return Err(refuse(
                item,
                format!("takes {bound} bytes of a file's header, of at most {room}"),
            ));
        }
        let seen = match seen.entry(&item.name) {
            Entry::Occupied(entry) => {
                agree(entry.get().item, item)?;
                entry.into_mut()
            }
            Entry::Vacant(entry) => entry.insert(Seen { item, next_file: 0 }),
        };
        let mut file = seen.next_file.max(first_open);
        loop {
            if file == drafts.len() {
                drafts.push(Draft::default());
            }
            let draft = &mut drafts[file];
            if !draft.full && draft.text_bound + bound <= room {
                draft.items.push(id);
                draft.text.push(&text);
                draft.text_bound += bound;
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

/// The largest power of two, at most a page, that divides the length.
const fn alignment(length: u64) -> u64 {
    if length.is_multiple_of(PAYLOAD_ALIGNMENT) {
        PAYLOAD_ALIGNMENT
    } else {
        1 << length.trailing_zeros()
    }
}

fn refuse(item: &SaveItem, reason: impl std::fmt::Display) -> Error {
    let name: String = item.name.chars().take(200).collect();
    Error::tensor_plan(None, &name, format!("it cannot be saved: {reason}"))
}

fn check(item: &SaveItem) -> Result<()> {
    let dims = [&item.shape, &item.offsets, &item.sizes].map(Dims::len);
    let Some(dtype) = item.dtype.filter(|_| item.kind == Kind::Tensor) else {
        return match (item.kind, item.dtype, dims, item.flags) {
            (Kind::Bytes, None, [0, 0, 0], 0) => Ok(()),
            (Kind::Bytes, ..) => Err(refuse(item, "a non-tensor value has no dtype, shape or flags")),
            (Kind::Tensor, ..) => Err(refuse(item, "a tensor needs a dtype")),
        };
    };
    if dims != [item.shape.len(); 3] || item.shape.len() > MAX_NDIM {
        return Err(refuse(
            item,
            format!("it has {dims:?} sizes, offsets and chunk sizes; at most {MAX_NDIM}"),
        ));
    }
    if item.flags >> 4 != 0 || item.flags >> 2 == 3 {
        return Err(refuse(item, format!("unknown flags {:#x}", item.flags)));
    }
    for ((&size, &offset), &extent) in item.sizes.iter().zip(&item.offsets).zip(&item.shape) {
        if offset.checked_add(size).is_none_or(|end| end > extent) {
            return Err(refuse(
                item,
                format!(
                    "chunk {:?} at {:?} does not lie in the shape {:?}",
                    item.sizes.as_slice(),
                    item.offsets.as_slice(),
                    item.shape.as_slice()
                ),
            ));
        }
    }
    // In bits and in this order, even where a size is 0: safetensors multiplies so, and refuses what overflows.
    let bits = item
        .sizes
        .iter()
        .try_fold(1_u64, |n, &size| n.checked_mul(size))
        .and_then(|n| n.checked_mul(8 * dtype.size()));
    match bits {
        None => Err(refuse(item, format!("sizes {:?} overflow", item.sizes.as_slice()))),
        Some(bits) if bits / 8 != item.length => Err(refuse(
            item,
            format!("{} bytes given, {} expected", item.length, bits / 8),
        )),
        Some(_) => Ok(()),
    }
}

/// Chunks of one name are of one tensor.
fn agree(first: &SaveItem, item: &SaveItem) -> Result<()> {
    if item.kind == Kind::Bytes {
        return Err(refuse(item, "a second value of this name"));
    }
    if (first.kind, first.dtype, &first.shape) != (item.kind, item.dtype, &item.shape) {
        return Err(refuse(item, "two chunks of it disagree in kind, dtype or shape"));
    }
    Ok(())
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
