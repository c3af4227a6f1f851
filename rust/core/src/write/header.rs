//! The header of a data file: section 2 of `docs/format.md` as text.

use std::io::Write as _;
use std::ops::Range;

use super::item::{SaveInfo, SaveItem};
use crate::Dtype;
use crate::format::{Kind, PAYLOAD_ALIGNMENT, Value, to_header_name, uuid};

/// Bound in bytes on the parts that every header has: the length before the JSON, brackets, fixed
/// keys, numbers.
pub(super) const FIXED_BOUND: u64 = 512;

/// Bytes for the two offsets of an entry, at their largest, and for its punctuation.
const OFFSETS_BOUND: usize = 2 * 20 + 8;

/// Text of one item in a header, in all three places.
#[derive(Default)]
pub(super) struct ItemText {
    /// Its entry, up to the offsets.
    entry: Vec<u8>,
    /// Its entry in `DCP_SHARDING_INFO`, escaped.
    sharding: Vec<u8>,
    /// Its entry in `DCPRS`, escaped; empty if it can be derived.
    about: Vec<u8>,
    /// Buffer for an entry before it is escaped.
    plain: Vec<u8>,
}

impl ItemText {
    pub(super) fn set(&mut self, item: &SaveItem) {
        self.entry.clear();
        self.sharding.clear();
        self.about.clear();

        push_string(&mut self.entry, &to_header_name(&item.name));
        let name_len = self.entry.len();
        let (dtype, extra) = in_header(item);

        self.entry.extend(b":{\"dtype\":\"");
        self.entry.extend(dtype.as_bytes());
        self.entry.extend(b"\",\"shape\":");
        push_list(&mut self.entry, item.sizes.iter().copied().chain(extra));
        self.entry.extend(b",\"data_offsets\":");

        self.plain.clear();
        self.plain.extend(&self.entry[..name_len]);
        self.plain.extend(b":{\"saved_offsets\":");
        push_list(&mut self.plain, item.offsets.iter().copied().chain(extra.map(|_| 0)));
        self.plain.push(b'}');
        push_escaped(&mut self.sharding, &self.plain);

        if !is_derivable(item) {
            self.plain.truncate(name_len);
            push_about(&mut self.plain, item);
            push_escaped(&mut self.about, &self.plain);
        }
    }

    /// Returns a bound on the bytes that the item adds.
    pub(super) fn bound(&self) -> u64 {
        let separators = 3;
        (self.entry.len() + OFFSETS_BOUND + self.sharding.len() + self.about.len() + separators)
            as u64
    }
}

/// The texts of the items of one file, in the form that the header has.
#[derive(Default)]
pub(super) struct FileText {
    entries: Vec<u8>,
    ranges: Vec<Range<usize>>,
    sharding: Vec<u8>,
    about: Vec<u8>,
}

impl FileText {
    pub(super) fn push(&mut self, item: &ItemText) {
        let begin = self.entries.len();
        self.entries.extend(&item.entry);
        self.ranges.push(begin..self.entries.len());
        push_member(&mut self.sharding, &item.sharding);
        push_member(&mut self.about, &item.about);
    }

    /// Returns the header: length, JSON, padding. `linked` is the note about links, or empty.
    /// `spans` are the items in the order of the header, as (position in this file's items, first
    /// byte, byte after the last).
    pub(super) fn header(
        &self,
        info: &SaveInfo,
        file: u32,
        files: u32,
        linked: &[u8],
        spans: impl Iterator<Item = (usize, u64, u64)>,
    ) -> Vec<u8> {
        let SaveInfo { generation, rank, world_size, .. } = info;
        let save_id = uuid(info.save_id);
        let head = format!(
            "{{\"version\":1,\"save_id\":\"{save_id}\",\"generation\":{generation},\"rank\":{rank},\
             \"world_size\":{world_size},\"file\":{file},\"files\":{files},\"tensors\":{{"
        );
        let texts = [self.entries.len(), self.sharding.len(), self.about.len(), 2 * linked.len()];
        let capacity = texts.iter().sum::<usize>() + (OFFSETS_BOUND + 1) * self.ranges.len();
        let mut out = Vec::with_capacity(capacity.next_multiple_of(4096) + 4096);
        out.extend([0; 8]);
        out.extend(b"{\"__metadata__\":{\"format\":\"pt\",\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"{");
        out.extend(&self.sharding);
        out.extend(b"}\",\"DCPRS\":\"");
        push_escaped(&mut out, head.as_bytes());
        out.extend(&self.about);
        out.extend(b"}");
        push_escaped(&mut out, linked);
        out.extend(b"}\"}");
        for (position, begin, end) in spans {
            out.push(b',');
            out.extend(&self.entries[self.ranges[position].clone()]);
            push_list(&mut out, [begin, end].into_iter());
            out.push(b'}');
        }
        out.push(b'}');
        let alignment = usize::try_from(PAYLOAD_ALIGNMENT).expect("a small constant");
        out.resize(out.len().next_multiple_of(alignment), b' ');
        let json_len = out.len() as u64 - 8;
        out[..8].copy_from_slice(&json_len.to_le_bytes());
        out
    }
}

/// Returns the type in the header, and the size of the dimension that is appended to the shape
/// (section 2.1).
pub(super) fn in_header(item: &SaveItem) -> (&'static str, Option<u64>) {
    match item.dtype {
        None => ("U8", Some(item.length)),
        Some(dtype) if dtype.is_native_to_safetensors() || dtype.size() == 1 => {
            (dtype.header_name(), None)
        }
        Some(dtype) => (dtype.header_name(), Some(dtype.size())),
    }
}

/// Returns whether the entry in `DCPRS` follows from the rest of the header (section 2.2).
fn is_derivable(item: &SaveItem) -> bool {
    item.kind == Kind::Tensor
        && item.dtype.is_some_and(Dtype::is_native_to_safetensors)
        && item.flags == 0
        && item.sizes == item.shape
        && item.offsets.iter().all(|&offset| offset == 0)
        && !item.path.as_ref().is_some_and(Value::is_path)
}

fn push_about(out: &mut Vec<u8>, item: &SaveItem) {
    match item.dtype {
        None => out.extend(b":{\"kind\":\"bytes\""),
        Some(dtype) => {
            write!(out, ":{{\"kind\":\"tensor\",\"dtype\":\"{}\",\"shape\":", dtype.name())
                .expect("a Vec takes all");
            push_list(out, item.shape.iter().copied());
            write!(out, ",\"flags\":{}", item.flags).expect("a Vec takes all");
        }
    }
    if let Some(path) = item.path.as_ref().filter(|path| path.is_path()) {
        out.extend(b",\"path\":");
        push_key(out, path);
    }
    out.push(b'}');
}

/// Appends a part of a path, or a value inside of one. A tuple is a list in JSON.
fn push_key(out: &mut Vec<u8>, key: &Value) {
    match key {
        Value::None => out.extend(b"null"),
        Value::Bool(truth) => write!(out, "{truth}").expect("a Vec takes all"),
        Value::Int(number) => push_number(out, *number),
        Value::Float(number) => push_number(out, *number),
        Value::Str(text) => push_string(out, text),
        Value::Tuple(items) => {
            out.push(b'[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(b',');
                }
                push_key(out, item);
            }
            out.push(b']');
        }
        Value::Bytes(_) | Value::List(_) | Value::Dict(_) => unreachable!("not in a path"),
    }
}

fn push_member(object: &mut Vec<u8>, member: &[u8]) {
    if !member.is_empty() {
        if !object.is_empty() {
            object.push(b',');
        }
        object.extend(member);
    }
}

/// Appends a number with `serde_json`, which is faster than `write!`.
fn push_number(out: &mut Vec<u8>, number: impl serde::Serialize) {
    serde_json::to_writer(out, &number).expect("a Vec takes all");
}

fn push_string(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a Vec takes all");
}

fn push_list(out: &mut Vec<u8>, numbers: impl Iterator<Item = u64>) {
    out.push(b'[');
    for (i, number) in numbers.enumerate() {
        if i > 0 {
            out.push(b',');
        }
        push_number(out, number);
    }
    out.push(b']');
}

/// Appends JSON as the content of a JSON string. JSON written without line breaks has no control
/// characters.
fn push_escaped(out: &mut Vec<u8>, json: &[u8]) {
    let mut rest = json;
    while let Some(at) = rest.iter().position(|&byte| is_escaped(byte)) {
        out.extend(&rest[..at]);
        out.extend([b'\\', rest[at]]);
        rest = &rest[at + 1..];
    }
    out.extend(rest);
}

pub(super) fn escaped_len(json: &[u8]) -> usize {
    json.len() + json.iter().filter(|&&byte| is_escaped(byte)).count()
}

const fn is_escaped(byte: u8) -> bool {
    matches!(byte, b'"' | b'\\')
}
