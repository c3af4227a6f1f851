//! The `data.pkl` of a saved tensor: its storage, and its layout there.

use std::collections::HashMap;

use super::fault::{Fault, FaultResult};
use super::pickle::{Item, MOST_ATTRIBUTES, Node, Pickle, Rules};
use crate::Dtype;
use crate::copy::Signs;
use crate::geometry::{Dims, element_count, row_major, strided_length};

/// A plain strided tensor over one storage record.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredTensor {
    /// The storage is the record `data/<key>`.
    pub key: String,
    /// Length of the storage in bytes, according to the pickle.
    pub storage_len: u64,
    pub dtype: Dtype,
    /// Offset of the first element, in bytes from the start of the storage.
    pub offset: u64,
    pub sizes: Dims,
    /// In elements.
    pub strides: Dims,
    /// Meaning of its bytes.
    pub signs: Signs,
    pub requires_grad: bool,
}

impl StoredTensor {
    /// Returns whether the elements lie in row-major order without gaps.
    pub(super) fn is_contiguous(&self) -> bool {
        if self.sizes.contains(&0) {
            return true;
        }
        let mut expected = 1;
        for (&size, &stride) in self.sizes.iter().zip(&self.strides).rev() {
            if size != 1 && stride != expected {
                return false;
            }
            expected *= size;
        }
        true
    }

    /// Returns the strides. Along a dimension of one element, a stride has no effect, so it is that
    /// of a contiguous tensor.
    pub(super) fn steps(&self) -> Dims {
        let dense = row_major(&self.sizes);
        let steps = self.sizes.iter().zip(&self.strides).zip(dense);
        steps.map(|((&size, &stride), dense)| if size == 1 { dense } else { stride }).collect()
    }

    /// Returns the number of bytes from the first element to the end of the last.
    pub(super) fn length(&self) -> u64 {
        strided_length(&self.sizes, &self.strides, self.dtype.size()).unwrap_or(u64::MAX)
    }
}

/// The functions of `torch._utils` that rebuild a strided tensor.
const STRIDED: [&str; 3] = ["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"];

/// The storage classes of `torch`, and their dtypes.
const STORAGES: [(&str, &str); 12] = [
    ("BFloat16Storage", "bfloat16"),
    ("BoolStorage", "bool"),
    ("ByteStorage", "uint8"),
    ("CharStorage", "int8"),
    ("ComplexDoubleStorage", "complex128"),
    ("ComplexFloatStorage", "complex64"),
    ("DoubleStorage", "float64"),
    ("FloatStorage", "float32"),
    ("HalfStorage", "float16"),
    ("IntStorage", "int32"),
    ("LongStorage", "int64"),
    ("ShortStorage", "int16"),
];

/// Storage classes of tensors that this crate treats as values, and the bytes of an element.
const QUANTIZED: [(&str, u64); 5] = [
    ("QInt8Storage", 1),
    ("QInt32Storage", 4),
    ("QUInt2x4Storage", 1),
    ("QUInt4x2Storage", 1),
    ("QUInt8Storage", 1),
];

/// Returns whether a global may be named. The list includes types of tensors that cannot be read,
/// so that errors can name them.
fn allow(module: &str, name: &str) -> bool {
    match module {
        "torch._utils" => name.starts_with("_rebuild_"),
        "torch._tensor" => name.starts_with("_rebuild_from_type"),
        "torch.storage" => matches!(name, "UntypedStorage" | "TypedStorage"),
        "torch.serialization" => name == "_get_layout",
        "torch.nn.parameter" => matches!(name, "Parameter" | "Buffer"),
        "collections" => name == "OrderedDict",
        // Dtypes, storages, Size, device, Tensor, and the quantizer schemes.
        "torch" => !name.contains('.'),
        _ => false,
    }
}

/// Attributes of a tensor that change it when they are set. torch sets those of a saved tensor by
/// name, so a file can replace the data in this way.
const CHANGING: [&str; 14] = [
    "__class__",
    "__dict__",
    "_backward_hooks",
    "_grad",
    "_grad_fn",
    "_post_accumulate_grad_hooks",
    "data",
    "grad",
    "grad_dtype",
    "imag",
    "names",
    "real",
    "requires_grad",
    "volatile",
];

const RULES: Rules = Rules { allow, persistent: true, keep: false, places: false };

/// Parses the pickle of one tensor.
pub(super) fn parse(bytes: &[u8]) -> FaultResult<StoredTensor> {
    let pickle = Pickle::parse(bytes, &RULES)?;
    check_storages_agree(&pickle)?;
    read(&pickle, pickle.top())
}

/// Checks that each storage has one type and one length. torch takes those of the first use for
/// every use. torch saves a storage without elements under one key for all of its types.
pub(super) fn check_storages_agree(pickle: &Pickle<'_>) -> FaultResult<()> {
    let reader = Reader { pickle };
    let mut known = HashMap::new();
    for id in pickle.persistent() {
        let Ok((class, key, count)) = reader.storage_parts(id) else {
            continue; // refused where it is used
        };
        let facts = (pickle.as_global(class).filter(|_| count > 0), count);
        if *known.entry(key).or_insert(facts) != facts {
            return Err(odd(&format!("storage {key:?} has two types or lengths")));
        }
    }
    Ok(())
}

/// Parses a tensor within a pickle.
pub(super) fn read(pickle: &Pickle<'_>, item: Item) -> FaultResult<StoredTensor> {
    Reader { pickle }.tensor(item, 0)
}

/// Returns the key of the storage with a persistent id, whatever its class.
pub(super) fn storage_key<'a>(pickle: &'a Pickle<'_>, id: Item) -> Option<&'a str> {
    pickle.as_str(*pickle.as_tuple(id)?.get(2)?)
}

/// Returns key and length in bytes of the storage with a persistent id, or `None` if it is not a
/// storage. Includes the storages of tensors that this crate treats as values.
pub(super) fn storage_extent<'a>(pickle: &'a Pickle<'_>, id: Item) -> Option<(&'a str, u64)> {
    let reader = Reader { pickle };
    let (class, key, count) = reader.storage_parts(id).ok()?;
    let quantized = match pickle.as_global(class) {
        Some(("torch", name)) => QUANTIZED.iter().find(|(storage, _)| *storage == name),
        _ => None,
    };
    let size = match quantized {
        Some((_, size)) => *size,
        None => reader.element(class).ok()?.map_or(1, Dtype::size),
    };
    Some((key, count.checked_mul(size)?))
}

/// Returns whether an item is a tensor of any kind, by the global that makes it.
pub(super) fn is_tensor(pickle: &Pickle<'_>, item: Item) -> bool {
    match pickle.made_by(item) {
        Some(("torch._utils", name)) => {
            name.starts_with("_rebuild_")
                && ["tensor", "parameter", "subclass"].iter().any(|kind| name.contains(kind))
        }
        Some(("torch._tensor", name)) => name.starts_with("_rebuild_from_type"),
        Some(("torch.nn.parameter", "Parameter" | "Buffer")) => true,
        _ => false,
    }
}

struct Reader<'a> {
    pickle: &'a Pickle<'a>,
}

struct Storage<'a> {
    key: &'a str,
    /// `None` for untyped bytes.
    dtype: Option<Dtype>,
    /// In elements, or in bytes if it is untyped.
    count: u64,
}

impl Storage<'_> {
    /// Returns the length in bytes.
    fn len(&self) -> Option<u64> {
        self.count.checked_mul(self.dtype.map_or(1, Dtype::size))
    }
}

fn odd(what: &str) -> Fault {
    Fault::corrupt(0, format!("pickle of a tensor: {what}"))
}

impl<'a> Reader<'a> {
    fn tensor(&self, item: Item, depth: u32) -> FaultResult<StoredTensor> {
        let Some(((module, name), args, state)) = self.pickle.as_object(item) else {
            return Err(Fault::Unsupported("stored as something that is not a tensor".into()));
        };
        if state.is_some() {
            return Err(Fault::Unsupported("changed after it was made".into()));
        }
        match (module, name, args) {
            ("torch._utils", name, _) if STRIDED.contains(&name) => self.rebuild(name, args, item),
            // A parameter is stored as its data. Gradients and hooks are lost, but no checkpoint
            // has them.
            (
                "torch._utils",
                "_rebuild_parameter" | "_rebuild_parameter_with_state",
                [data, requires_grad, _, state @ ..],
            ) if depth == 0 && state.iter().all(|state| self.is_harmless(*state)) => {
                Ok(StoredTensor {
                    requires_grad: *requires_grad == Item::Bool(true),
                    ..self.tensor(*data, depth + 1)?
                })
            }
            // A plain tensor with Python attributes: function, type, arguments, attributes.
            (
                "torch._tensor",
                "_rebuild_from_type_v2" | "_rebuild_from_type",
                [function, kind, args, state],
            ) if self.is_harmless(*state) => {
                let (function, kind) =
                    (self.pickle.as_global(*function), self.pickle.as_global(*kind));
                let plain = matches!(
                    kind,
                    Some(("torch", "Tensor") | ("torch.nn.parameter", "Parameter" | "Buffer"))
                );
                let args = self.pickle.as_tuple(*args).ok_or_else(|| odd("no arguments"))?;
                match function {
                    Some(("torch._utils", name)) if plain && STRIDED.contains(&name) => {
                        self.rebuild(name, args, item)
                    }
                    _ => Err(Fault::Unsupported(format!(
                        "stored as {} by {}",
                        kind.map_or_else(|| "a subclass".into(), full),
                        function.map_or_else(|| "a function of its own".into(), full)
                    ))),
                }
            }
            _ => Err(Fault::Unsupported(format!("stored by {module}.{name}"))),
        }
    }

    /// Returns whether no attribute of a tensor's state changes the tensor: names and values, or a
    /// pair of these and the values of slots.
    fn is_harmless(&self, state: Item) -> bool {
        let parts = match self.pickle.as_tuple(state) {
            Some(parts) if parts.len() == 2 => parts,
            _ => &[state][..],
        };
        let name =
            |key: &Item| self.pickle.as_str(*key).is_some_and(|key| !CHANGING.contains(&key));
        parts.iter().all(|part| {
            *part == Item::None
                || self.pickle.as_dict(*part).is_some_and(|pairs| {
                    pairs.len() <= MOST_ATTRIBUTES && pairs.iter().all(|(key, _)| name(key))
                })
        })
    }

    /// Rebuilds a tensor from `_rebuild_tensor(storage, offset, size, stride)`, v2 `(…,
    /// requires_grad, hooks[, metadata])`, or v3 `(…, requires_grad, hooks, dtype[, metadata])`.
    /// `call` is the object that calls it.
    fn rebuild(&self, name: &str, args: &[Item], call: Item) -> FaultResult<StoredTensor> {
        let [storage, offset, sizes, strides, more @ ..] = args else {
            return Err(odd("too few arguments"));
        };
        let storage = self.storage(*storage)?;
        let (dtype, flags) = match (name, more) {
            ("_rebuild_tensor", []) | ("_rebuild_tensor_v2", [_, _]) => (storage.dtype, None),
            ("_rebuild_tensor_v2", [_, _, flags]) => (storage.dtype, Some(*flags)),
            ("_rebuild_tensor_v3", [_, _, dtype]) => (Some(self.dtype(*dtype)?), None),
            ("_rebuild_tensor_v3", [_, _, dtype, flags]) => {
                (Some(self.dtype(*dtype)?), Some(*flags))
            }
            _ => {
                return Err(Fault::Unsupported(format!(
                    "stored by torch._utils.{name} with {} arguments",
                    args.len()
                )));
            }
        };
        let Some(dtype) = dtype else {
            return Err(odd("a storage without a type"));
        };
        let signs = flags.map_or(Ok(Signs::default()), |flags| self.signs(flags, call))?;
        if signs.bits(dtype).is_none() {
            return Err(Fault::Unsupported(format!("stored as a lazy view of {}", dtype.name())));
        }
        let storage_len = storage.len().ok_or_else(|| odd("a storage too long"))?;
        let offset = offset
            .as_u64()
            .and_then(|n| n.checked_mul(dtype.size()))
            .ok_or_else(|| odd("its offset"))?;
        let (sizes, strides) = (self.dims(*sizes)?, self.dims(*strides)?);
        if sizes.len() != strides.len() || element_count(&sizes).is_none() {
            return Err(odd("its sizes and strides"));
        }
        // An empty part of a tensor may begin behind the end of the storage.
        let offset = if sizes.contains(&0) { 0 } else { offset };
        let tensor = StoredTensor {
            key: storage.key.to_owned(),
            storage_len,
            dtype,
            offset,
            sizes,
            strides,
            signs,
            requires_grad: more.first() == Some(&Item::Bool(true)),
        };
        if offset.checked_add(tensor.length()).is_none_or(|end| end > storage_len) {
            return Err(odd("it leads out of its storage"));
        }
        Ok(tensor)
    }

    fn storage(&self, item: Item) -> FaultResult<Storage<'a>> {
        let id = match item {
            Item::Node(id) => match self.pickle.node(id) {
                Node::Persistent(id) => *id,
                _ => return Err(odd("no storage")),
            },
            _ => return Err(odd("no storage")),
        };
        self.storage_of(id)
    }

    fn storage_of(&self, id: Item) -> FaultResult<Storage<'a>> {
        let (class, key, count) = self.storage_parts(id)?;
        let dtype = self.element(class)?;
        Ok(Storage { key, dtype, count })
    }

    /// Returns class, key and number of elements of a storage.
    fn storage_parts(&self, id: Item) -> FaultResult<(Item, &'a str, u64)> {
        // torch before 1.6 has a sixth part, for views of storages.
        let Some(
            [tag, class, key, location, count] | [tag, class, key, location, count, Item::None],
        ) = self.pickle.as_tuple(id)
        else {
            return Err(odd("a storage of an unknown form"));
        };
        let (Some("storage"), Some(key), Some(count)) =
            (self.pickle.as_str(*tag), self.pickle.as_str(*key), count.as_u64())
        else {
            return Err(odd("a storage of an unknown form"));
        };
        if self.pickle.as_str(*location) == Some("meta") {
            return Err(Fault::Unsupported("stored on the meta device, without data".into()));
        }
        Ok((*class, key, count))
    }

    /// Returns the dtype of a storage class; `None` for untyped bytes.
    fn element(&self, class: Item) -> FaultResult<Option<Dtype>> {
        match self.pickle.as_global(class) {
            Some(("torch.storage", "UntypedStorage")) => Ok(None),
            Some(("torch", name)) => match STORAGES.iter().find(|(storage, _)| *storage == name) {
                Some((_, dtype)) => Ok(Dtype::from_name(dtype)),
                None => Err(Fault::Unsupported(format!("stored in a torch.{name}"))),
            },
            _ => Err(odd("a storage of an unknown form")),
        }
    }

    fn dtype(&self, item: Item) -> FaultResult<Dtype> {
        match self.pickle.as_global(item) {
            Some(("torch", name)) => Dtype::from_name(name)
                .ok_or_else(|| Fault::Unsupported(format!("stored with dtype torch.{name}"))),
            _ => Err(odd("its dtype")),
        }
    }

    fn dims(&self, item: Item) -> FaultResult<Dims> {
        dims(self.pickle, item).ok_or_else(|| odd("its sizes and strides"))
    }

    /// Parses the flags of a view that is computed when it is read: conjugate and negative. torch
    /// takes a flag as set if it is there, but writes those only that are on.
    fn signs(&self, flags: Item, call: Item) -> FaultResult<Signs> {
        let mut signs = Signs::default();
        if flags == Item::None {
            return Ok(signs);
        }
        if self.pickle.is_changed_after(flags, call) {
            return Err(odd("its flags change after it was made"));
        }
        let pairs = self.pickle.as_dict(flags).filter(|pairs| pairs.len() <= MOST_ATTRIBUTES);
        let pairs = pairs.ok_or_else(|| odd("its flags"))?;
        for (i, (name, on)) in pairs.iter().enumerate() {
            match (self.pickle.as_str(*name), *on) {
                _ if pairs[i + 1..]
                    .iter()
                    .any(|(later, _)| self.pickle.as_str(*later) == self.pickle.as_str(*name)) =>
                {
                    return Err(odd("a flag that is there twice"));
                }
                (Some("conj"), Item::Bool(true)) => signs.conjugate = true,
                (Some("neg"), Item::Bool(true)) => signs.negative = true,
                (name, _) => {
                    let name = name.unwrap_or("?");
                    return Err(Fault::Unsupported(format!("stored as a lazy {name} view")));
                }
            }
        }
        Ok(signs)
    }
}

/// Parses sizes or strides.
pub(super) fn dims(pickle: &Pickle<'_>, item: Item) -> Option<Dims> {
    let items = pickle.as_tuple(item).filter(|items| items.len() <= 64)?;
    items.iter().map(|item| item.as_u64()).collect()
}

fn full((module, name): (&str, &str)) -> String {
    format!("{module}.{name}")
}
