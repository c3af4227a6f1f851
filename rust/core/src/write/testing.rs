//! Items for the tests of this folder.

use proptest::prelude::*;
use smallvec::smallvec;

use super::{SaveInfo, SaveItem};
use crate::Dtype;
use crate::format::{Dims, Kind, Value};

pub(crate) const INFO: SaveInfo = SaveInfo {
    generation: 7,
    token: 0xabc,
    rank: 3,
    world_size: 5,
};

/// A tensor that is one chunk.
pub(crate) fn whole(name: &str, dtype: &str, shape: &[u64]) -> SaveItem {
    rows(name, dtype, shape, &vec![0; shape.len()], shape)
}

/// A chunk of a tensor.
pub(crate) fn rows(name: &str, dtype: &str, shape: &[u64], offsets: &[u64], sizes: &[u64]) -> SaveItem {
    let dtype = Dtype::from_name(dtype).unwrap();
    SaveItem {
        name: name.into(),
        kind: Kind::Tensor,
        dtype: Some(dtype),
        shape: Dims::from_slice(shape),
        flags: 0,
        path: None,
        offsets: Dims::from_slice(offsets),
        sizes: Dims::from_slice(sizes),
        length: sizes.iter().product::<u64>() * dtype.size(),
    }
}

/// A non-tensor value.
pub(crate) fn value(name: &str, length: u64) -> SaveItem {
    SaveItem {
        name: name.into(),
        kind: Kind::Bytes,
        dtype: None,
        shape: smallvec![],
        flags: 0,
        path: Some(Value::Tuple(vec![Value::Str(name.into()), Value::Int(-1)])),
        offsets: smallvec![],
        sizes: smallvec![],
        length,
    }
}

/// Bytes that differ from item to item and within one.
pub(crate) fn content(item: usize, length: u64) -> Vec<u8> {
    (0..length)
        .map(|at| ((at * 2_654_435_761 + item as u64 * 97) >> 7).to_le_bytes()[0])
        .collect()
}

/// The names that are most likely to go wrong.
pub(crate) fn odd_names() -> Vec<String> {
    [
        "",
        "__metadata__",
        "__metadata__~",
        "__metadata__~~",
        "__metadata__x",
        "\"",
        "\\",
        "\\\"",
        "\n\t\u{1}\u{7f}",
        "ключ.重み.🙂",
        "a/b",
    ]
    .map(String::from)
    .into_iter()
    .chain(["x".repeat(2000), "\"\\".repeat(1000)])
    .collect()
}

fn names() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[a-d]{1,2}",
        1 => ".{0,12}",
        1 => prop::sample::select(odd_names()),
    ]
}

fn paths() -> impl Strategy<Value = Option<Value>> {
    let part = prop_oneof![".{0,8}".prop_map(Value::Str), any::<i64>().prop_map(Value::Int)];
    prop::option::of(prop::collection::vec(part, 0..4).prop_map(Value::Tuple))
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::all().collect::<Vec<_>>())
}

/// The chunks of one tensor, by rows; or a value.
fn entry() -> impl Strategy<Value = Vec<SaveItem>> {
    let tensor = (
        names(),
        dtypes(),
        prop::collection::vec(0_u64..9, 0..4),
        0_u8..12,
        paths(),
        1_u64..4,
    )
        .prop_map(|(name, dtype, shape, flags, path, chunks)| {
            let height = shape.first().copied().unwrap_or(1);
            let step = if shape.is_empty() {
                1
            } else {
                height.div_ceil(chunks).max(1)
            };
            let mut items = Vec::new();
            for begin in (0..height.max(1)).step_by(usize::try_from(step).unwrap()) {
                let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.clone());
                if !shape.is_empty() {
                    offsets[0] = begin;
                    sizes[0] = step.min(height - begin);
                }
                let item = rows(&name, dtype.name(), &shape, &offsets, &sizes);
                items.push(SaveItem {
                    flags,
                    path: path.clone(),
                    ..item
                });
            }
            items
        });
    prop_oneof![
        5 => tensor,
        1 => (names(), 0_u64..9000, paths()).prop_map(|(name, length, path)| vec![SaveItem { path, ..value(&name, length) }]),
    ]
}

prop_compose! {
    /// What a rank may save: consistent items in any order.
    pub(crate) fn saves(most: usize)(entries in prop::collection::vec(entry(), 0..most))(
        items in Just({
            let mut names = std::collections::HashSet::new();
            entries.into_iter().filter(|chunks| names.insert(chunks[0].name.clone())).flatten().collect::<Vec<_>>()
        }).prop_shuffle()
    ) -> Vec<SaveItem> {
        items
    }
}
