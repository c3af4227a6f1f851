//! The `.metadata` of a stock DCP folder: a pickle, parsed without executing any of it.

use std::collections::HashMap;
use std::path::Path;

use super::fault::{Fault, FaultResult};
use super::pickle::{Described, Item, MAX_DEPTH, Node, Pickle, Rules, most_bytes};
use super::stand_in;
use super::tensor_pickle::dims;
use crate::format::{ChunkEntry, Kind, TensorEntry, Value, parse_uuid};
use crate::geometry::Dims;
use crate::paths::{Reach, reach};
use crate::{Dtype, Result};

/// Content of a `.metadata` file as plain data.
#[derive(Clone, Debug, PartialEq)]
pub struct StockMetadata {
    /// The data files, relative to the folder.
    pub files: Vec<String>,
    /// The tensors and other values. Each FQN occurs once.
    pub entries: Vec<TensorEntry>,
    /// Locations of their chunks.
    pub items: Vec<StockItem>,
    /// Planner data that belongs to no entry: section 5 of `docs/format.md`.
    pub root: Value,
    /// Id of the save if it is a UUID, otherwise zeros.
    pub save_id: [u8; 16],
}

/// One stored chunk, or one stored value: bytes of a data file that `torch.save` wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StockItem {
    /// Index in the entries.
    pub entry: u32,
    /// Offsets of the chunk in the tensor; empty for values.
    pub offsets: Dims,
    /// Sizes of the chunk.
    pub sizes: Dims,
    /// Index in the files.
    pub file: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes in the file.
    pub length: u64,
}

/// Key in the planner data of an index. It leads to the keys of a planner's data that the format
/// cannot hold; to an empty list if all of the data is an object.
const LEFT_OUT: &str = "dcp_rs.left_out";

/// The members of torch's enum of memory formats, by value.
const MEMORY_FORMATS: [&str; 3] =
    ["TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"];

/// Allows every global: none is imported or called. The fields that are read say what an object is,
/// since some trainers have classes of their own with torch's fields. All other content is skipped.
const RULES: Rules = Rules { allow: |_, _| true, persistent: false, keep: true, places: false };

/// Parses the bytes of a `.metadata`. `path` is for messages.
pub fn parse(bytes: &[u8], path: &Path) -> Result<StockMetadata> {
    read(bytes).map_err(|fault| fault.in_index(path))
}

fn odd(what: impl Into<String>) -> Fault {
    Fault::corrupt(0, what)
}

fn read(bytes: &[u8]) -> FaultResult<StockMetadata> {
    if let Some(what) = stand_in(bytes) {
        return Err(odd(what));
    }
    let pickle = Pickle::parse(bytes, &RULES)?;
    let mut reader = Reader {
        pickle: &pickle,
        budget: most_bytes(bytes.len()),
        entries: Vec::new(),
        ids: HashMap::new(),
        chunks: Vec::new(),
        files: Vec::new(),
        file_ids: HashMap::new(),
        items: Vec::new(),
        left_out: Vec::new(),
        dropped: 0,
    };
    let top = reader.state(pickle.top(), "it is not an instance of Metadata")?;
    let part = |name| pickle.get(top, name).ok_or_else(|| odd(format!("it has no {name}")));
    reader.read_entries(part("state_dict_metadata")?)?;
    reader.read_storage(part("storage_data")?)?;
    reader.check_stored()?;
    let save_id = reader.save_id(pickle.get(top, "storage_meta"));
    let root = reader.planner_data(pickle.get(top, "planner_data").unwrap_or(Item::None))?;
    let root = reader.note_left_out(root);
    Ok(StockMetadata {
        files: reader.files,
        entries: reader.entries,
        items: reader.items,
        root,
        save_id,
    })
}

/// A chunk, and whether data is stored for it.
struct Chunk {
    offsets: Dims,
    sizes: Dims,
    stored: bool,
}

struct Reader<'a> {
    pickle: &'a Pickle<'a>,
    /// Remaining bytes that may be allocated. A shared object is allocated as often as it is used.
    budget: u64,
    entries: Vec<TensorEntry>,
    ids: HashMap<&'a str, u32>,
    /// The chunks of each entry, sorted by offsets.
    chunks: Vec<Vec<Chunk>>,
    files: Vec<String>,
    file_ids: HashMap<&'a str, u32>,
    items: Vec<StockItem>,
    /// Keys of planner data that is no plain data.
    left_out: Vec<String>,
    /// Number of pairs that dicts within planner data lack.
    dropped: usize,
}

impl<'a> Reader<'a> {
    /// Returns the attributes of an instance of a class, whose state is a dict, or a pair of `None`
    /// and the values of slots.
    fn attributes(&self, item: Item) -> Option<Item> {
        match self.pickle.as_object(item) {
            Some((_, [], Some(state))) => match self.pickle.as_tuple(state) {
                Some([Item::None, slots]) => Some(*slots),
                _ => Some(state),
            },
            _ => None,
        }
    }

    fn state(&self, item: Item, what: &str) -> FaultResult<Item> {
        self.attributes(item).ok_or_else(|| self.unlike(item, what))
    }

    fn text(&self, item: Item, what: &str) -> FaultResult<&'a str> {
        self.pickle.as_str(item).ok_or_else(|| self.unlike(item, what))
    }

    /// Returns the fault of an item that is not what it should be. If it is an object, the fault
    /// names its class, since it may be an attack.
    fn unlike(&self, item: Item, what: &str) -> Fault {
        match self.pickle.describe(item) {
            Described::Object(class) => Fault::Forbidden(class),
            Described::Plain(_) => odd(what),
        }
    }

    /// Returns the id of the save if it is a UUID, as torch's writers make it; otherwise zeros.
    fn save_id(&self, storage_meta: Option<Item>) -> [u8; 16] {
        let id = || {
            let state = self.attributes(storage_meta?)?;
            parse_uuid(self.pickle.as_str(self.pickle.get(state, "save_id")?)?)
        };
        id().unwrap_or_default()
    }

    fn read_entries(&mut self, map: Item) -> FaultResult<()> {
        let pickle = self.pickle;
        let pairs = pickle.as_dict(map).ok_or_else(|| odd("state_dict_metadata is not a dict"))?;
        for (name, entry) in pairs {
            let name = self.text(*name, "an FQN that is not text")?;
            let id = u32::try_from(self.entries.len()).map_err(|_| odd("too many entries"))?;
            if self.ids.insert(name, id).is_some() {
                return Err(odd(format!("{name:?} is there twice")));
            }
            let (entry, chunks) = match (self.attributes(*entry), pickle.as_object(*entry)) {
                (Some(state), _) if pickle.get(state, "chunks").is_some() => {
                    self.tensor(name, state)?
                }
                (_, Some(((_, "BytesStorageMetadata"), [], _))) => {
                    (TensorEntry::bytes(name), Vec::new())
                }
                _ => {
                    let what = format!("{name:?} is neither a tensor nor bytes");
                    return Err(self.unlike(*entry, &what));
                }
            };
            // Includes the name's entry in `ids`.
            let size = size_of::<(TensorEntry, Vec<Chunk>, &str, u32)>();
            self.spend(size + name.len() + on_heap(&entry.shape), "an entry")?;
            self.entries.push(entry);
            self.chunks.push(chunks);
        }
        Ok(())
    }

    fn spend(&mut self, bytes: usize, what: &str) -> FaultResult<()> {
        let left = self.budget.checked_sub(bytes as u64);
        self.budget = left.ok_or_else(|| {
            Fault::Unsupported(format!("{what} that grows without bound as it repeats itself"))
        })?;
        Ok(())
    }

    fn tensor(&mut self, name: &str, state: Item) -> FaultResult<(TensorEntry, Vec<Chunk>)> {
        let pickle = self.pickle;
        let bad = |what: &str| odd(format!("tensor {name:?}: {what}"));
        let shape = self.dims(pickle.get(state, "size")).ok_or_else(|| bad("its size"))?;
        let properties =
            pickle.get(state, "properties").ok_or_else(|| bad("it has no properties"))?;
        let (dtype, flags) = self.properties(properties, name)?;
        let list = pickle.get(state, "chunks").and_then(|item| pickle.as_list(item));
        let list = list.ok_or_else(|| bad("it has no chunks"))?;
        let size = size_of::<Chunk>() + 2 * on_heap(&shape);
        self.spend(list.len() * size, "a list of chunks")?;
        let mut chunks = Vec::with_capacity(list.len());
        for chunk in list {
            let state = self.state(*chunk, "a chunk without fields")?;
            let (Some(offsets), Some(sizes)) =
                (self.dims(pickle.get(state, "offsets")), self.dims(pickle.get(state, "sizes")))
            else {
                return Err(bad("a chunk without offsets and sizes"));
            };
            let inside = offsets.len() == shape.len()
                && sizes.len() == shape.len()
                && shape.iter().zip(offsets.iter().zip(&sizes)).all(|(&whole, (&at, &len))| {
                    at.checked_add(len).is_some_and(|end| end <= whole)
                });
            if !inside {
                return Err(bad(&format!(
                    "chunk {sizes:?} at {offsets:?} lies outside its shape {shape:?}"
                )));
            }
            let stored = false;
            chunks.push(Chunk { offsets, sizes, stored });
        }
        chunks.sort_by(|a, b| a.offsets.cmp(&b.offsets));
        let entry = TensorEntry { flags, ..TensorEntry::tensor(name, dtype, shape) };
        Ok((entry, chunks))
    }

    /// Returns dtype and flags from `(dtype, layout, requires_grad, memory format, pin_memory[,
    /// strides])`. torch 2.15 added the strides.
    fn properties(&self, item: Item, name: &str) -> FaultResult<(Dtype, u8)> {
        let pickle = self.pickle;
        let bad = |what: &str| odd(format!("tensor {name:?}: {what}"));
        let state = self.state(item, "properties without fields")?;
        let Some(
            [dtype, layout, requires_grad, format, pin_memory]
            | [dtype, layout, requires_grad, format, pin_memory, _],
        ) = pickle.as_tuple(state)
        else {
            return Err(bad("its properties are not 5 or 6 values"));
        };
        let dtype = match pickle.as_global(*dtype) {
            Some(("torch", dtype)) => Dtype::from_name(dtype).ok_or_else(|| {
                Fault::Unsupported(format!("tensor {name:?} has dtype torch.{dtype}"))
            })?,
            _ => return Err(bad("its dtype")),
        };
        match pickle.as_object(*layout) {
            Some((("torch.serialization", "_get_layout"), [layout], _)) => {
                let layout = self.text(*layout, "a layout that is not text")?;
                if layout != "torch.strided" {
                    let what = format!("tensor {name:?} has layout {layout}");
                    return Err(Fault::Unsupported(what));
                }
            }
            _ => return Err(bad("its layout")),
        }
        let format = self.memory_format(*format).ok_or_else(|| bad("its memory format"))?;
        let bit = |item: &Item, bit: u8| if *item == Item::Bool(true) { bit } else { 0 };
        Ok((dtype, bit(requires_grad, 1) | bit(pin_memory, 2) | format << 2))
    }

    /// Returns the code of a memory format. Python 3.11.0 to 3.11.3 stored members of an enum by
    /// name, other versions by value.
    fn memory_format(&self, item: Item) -> Option<u8> {
        let mut codes = (0..).zip(MEMORY_FORMATS);
        let (code, _) = match self.pickle.as_object(item)? {
            ((_, "getattr"), [_, name], None) => {
                let name = self.pickle.as_str(*name)?;
                codes.find(|(_, known)| *known == name)?
            }
            (_, [Item::Int(value)], None) => codes.find(|(code, _)| i64::from(*code) == *value)?,
            _ => return None,
        };
        Some(code)
    }

    fn dims(&self, item: Option<Item>) -> Option<Dims> {
        dims(self.pickle, item?)
    }

    fn read_storage(&mut self, map: Item) -> FaultResult<()> {
        let pickle = self.pickle;
        let pairs = pickle.as_dict(map).ok_or_else(|| odd("storage_data is not a dict"))?;
        // Each pair becomes an item, and then a chunk of the index.
        let size = size_of::<StockItem>() + size_of::<ChunkEntry>();
        self.spend(pairs.len() * size, "stored data")?;
        self.items.reserve(pairs.len());
        for (index, info) in pairs {
            let index = self.state(*index, "stored data without an index")?;
            let name = pickle.get(index, "fqn").unwrap_or(Item::None);
            let name = self.text(name, "stored data without an FQN")?;
            let bad = |what: &str| odd(format!("stored data of {name:?}: {what}"));
            let entry = *self.ids.get(name).ok_or_else(|| bad("there is no such entry"))?;
            let offset = pickle.get(index, "offset").filter(|offset| *offset != Item::None);
            let offset = match offset {
                Some(offset) => Some(self.dims(Some(offset)).ok_or_else(|| bad("its offset"))?),
                None => None,
            };
            let info = self.state(*info, "stored data without a place")?;
            let extensions = pickle.get(info, "transform_descriptors").unwrap_or(Item::None);
            if extensions != Item::None
                && pickle.as_list(extensions).is_none_or(|list| !list.is_empty())
            {
                let names = pickle.as_list(extensions).unwrap_or_default();
                let first = names.iter().find_map(|name| pickle.as_str(*name)).unwrap_or("?");
                return Err(Fault::Unsupported(format!(
                    "{name:?} is stored through the extension {first}"
                )));
            }
            let file = pickle.get(info, "relative_path").unwrap_or(Item::None);
            let file = self.text(file, "stored data without a file")?;
            // The time to look up a name grows with its length.
            self.spend(name.len() + file.len(), "stored data")?;
            let file = self.file(file)?;
            let number = |name| pickle.get(info, name).and_then(Item::as_u64);
            let (Some(offset_in_file), Some(length)) = (number("offset"), number("length")) else {
                return Err(bad("its place in the file"));
            };
            let (offsets, sizes) = match self.entries[entry as usize].kind {
                Kind::Bytes => (Dims::new(), Dims::new()),
                Kind::Tensor => take_chunk(&mut self.chunks[entry as usize], offset.as_ref())
                    .ok_or_else(|| {
                        bad("it is no chunk of the tensor, one of several there, or stored twice")
                    })?,
            };
            self.spend(2 * (on_heap(&offsets) + on_heap(&sizes)), "stored data")?;
            self.items.push(StockItem {
                entry,
                offsets,
                sizes,
                file,
                offset: offset_in_file,
                length,
            });
        }
        Ok(())
    }

    /// Returns the number of a data file. Refuses names that lead out of the folder, which no
    /// writer makes.
    fn file(&mut self, name: &'a str) -> FaultResult<u32> {
        if let Some(&id) = self.file_ids.get(name) {
            return Ok(id);
        }
        if reach(name) != Reach::Plain {
            return Err(odd(format!("data file {name:?} leads out of the folder")));
        }
        let id = u32::try_from(self.files.len()).map_err(|_| odd("too many files"))?;
        self.file_ids.insert(name, id);
        self.files.push(name.to_owned());
        Ok(id)
    }

    /// Checks that data is stored for every value and for every chunk that is not empty.
    fn check_stored(&self) -> FaultResult<()> {
        let mut has_item = vec![false; self.entries.len()];
        for item in &self.items {
            has_item[item.entry as usize] = true;
        }
        for (entry, (chunks, has_item)) in self.entries.iter().zip(self.chunks.iter().zip(has_item))
        {
            let name = &entry.name;
            if entry.kind == Kind::Bytes && !has_item {
                return Err(odd(format!("no data is stored for {name:?}")));
            }
            if let Some(chunk) =
                chunks.iter().find(|chunk| !chunk.stored && !chunk.sizes.contains(&0))
            {
                return Err(odd(format!("no data is stored for {name:?} at {:?}", chunk.offsets)));
            }
        }
        Ok(())
    }

    /// Sets the paths of the entries, and returns the rest of the planner data.
    fn planner_data(&mut self, item: Item) -> FaultResult<Value> {
        let pickle = self.pickle;
        let pairs = pickle.as_dict(item).unwrap_or_default();
        let is_path = |item: &Item| {
            let parts = pickle.as_tuple(*item);
            let is_part = |part: &Item| matches!(part, Item::Str(_) | Item::Int(_));
            parts.is_some_and(|parts| {
                (1..=MAX_DEPTH as usize).contains(&parts.len()) && parts.iter().all(is_part)
            })
        };
        let only_paths = pickle.as_dict(item).is_some()
            && pairs.iter().all(|(name, path)| matches!(name, Item::Str(_)) && is_path(path));
        if !only_paths {
            let mut plain = Vec::new();
            for (name, value) in pairs {
                let key = self.value(*name, 1)?;
                let text = match &key {
                    Some(Value::Str(text)) => text.clone(),
                    _ => "a key of another type".into(),
                };
                let before = self.dropped;
                let value = self.value(*value, 1)?;
                if key.is_none() || value.is_none() || self.dropped > before {
                    self.left_out.push(text);
                }
                plain.extend(key.zip(value));
            }
            if pickle.as_dict(item).is_some() {
                return Ok(Value::Dict(plain));
            }
            let value = self.value(item, 0)?;
            if value.is_none() {
                self.left_out.push("all of it".into());
            }
            return Ok(value.unwrap_or(Value::None));
        }
        let mut rest = Vec::new();
        for (name, path) in pairs {
            let (Some(name), Some(path)) = (self.value(*name, 1)?, self.value(*path, 1)?) else {
                continue;
            };
            let known = match &name {
                Value::Str(name) => self.ids.get(name.as_str()).copied(),
                _ => None,
            };
            match known {
                Some(id) => self.entries[id as usize].path = Some(path),
                None => rest.push((name, path)),
            }
        }
        Ok(Value::Dict(rest))
    }

    /// Adds the keys of what is left out to the planner data.
    fn note_left_out(&mut self, root: Value) -> Value {
        if self.left_out.is_empty() {
            return root;
        }
        let keys = std::mem::take(&mut self.left_out).into_iter().map(Value::Str).collect();
        let mut pairs = if let Value::Dict(pairs) = root { pairs } else { Vec::new() };
        pairs.push((Value::Str(LEFT_OUT.into()), Value::List(keys)));
        Value::Dict(pairs)
    }

    /// Returns an item as plain data; `None` if it is something else: a set, an object, a large
    /// integer, or nested more than 64 deep. A dict is returned without such pairs.
    fn value(&mut self, item: Item, depth: u32) -> FaultResult<Option<Value>> {
        if depth > 64 {
            return Ok(None);
        }
        let pickle = self.pickle;
        let cost = match item {
            Item::Str(span) => pickle.str(span).len(),
            Item::Bytes(span) => pickle.bytes(span).len(),
            _ => 0,
        };
        self.spend(cost + size_of::<Value>(), "planner data")?;
        Ok(Some(match item {
            Item::None => Value::None,
            Item::Bool(b) => Value::Bool(b),
            Item::Int(n) => Value::Int(n),
            Item::Float(x) => Value::Float(x),
            Item::Str(span) => Value::Str(pickle.str(span).to_owned()),
            Item::Bytes(span) => Value::Bytes(pickle.bytes(span).to_vec()),
            Item::Node(id) => match pickle.node(id) {
                Node::List { items, .. } => {
                    return Ok(self.values(items, depth)?.map(Value::List));
                }
                Node::Dict { pairs, .. } => {
                    let mut plain = Vec::new();
                    for (key, value) in pairs {
                        let pair = (self.value(*key, depth + 1)?, self.value(*value, depth + 1)?);
                        if let (Some(key), Some(value)) = pair {
                            plain.push((key, value));
                        } else {
                            self.dropped += 1;
                        }
                    }
                    Value::Dict(plain)
                }
                _ => match pickle.as_tuple(item) {
                    Some(items) => return Ok(self.values(items, depth)?.map(Value::Tuple)),
                    None => return Ok(None),
                },
            },
            Item::Long(_) | Item::Surrogates(_) => return Ok(None),
        }))
    }

    fn values(&mut self, items: &[Item], depth: u32) -> FaultResult<Option<Vec<Value>>> {
        items.iter().map(|item| self.value(*item, depth + 1)).collect()
    }
}

/// Returns the bytes that dimensions take on the heap.
fn on_heap(dims: &Dims) -> usize {
    if dims.spilled() { size_of::<u64>() * dims.len() } else { 0 }
}

/// Marks the chunk at `offsets` as stored, and returns its offsets and sizes. Returns `None` if it
/// was stored before. Empty shards of a tensor share their offsets with each other, and perhaps
/// with one shard that is not empty. That shard then takes precedence.
fn take_chunk(chunks: &mut [Chunk], offsets: Option<&Dims>) -> Option<(Dims, Dims)> {
    let run = match offsets {
        Some(offsets) => {
            let first = chunks.partition_point(|chunk| chunk.offsets < *offsets);
            let count = chunks[first..].partition_point(|chunk| chunk.offsets == *offsets);
            &mut chunks[first..first + count]
        }
        // Without offsets, the tensor must have a single chunk.
        None if chunks.len() == 1 => chunks,
        None => return None,
    };
    let meant = run.iter().position(|chunk| !chunk.sizes.contains(&0)).unwrap_or(0);
    let Chunk { sizes, stored, .. } = run.get(meant)?;
    let sizes = sizes.clone();
    if *stored || run.iter().any(|chunk| !chunk.sizes.contains(&0) && chunk.sizes != sizes) {
        return None;
    }
    for chunk in run.iter_mut() {
        chunk.stored = true;
    }
    Some((run[meant].offsets.clone(), sizes))
}
