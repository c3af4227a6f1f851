//! Check of a non-tensor value before torch unpickles it.
//!
//! `torch.load(weights_only=True)` does not run arbitrary globals. Still, a pickle of a few hundred
//! bytes can crash it, keep it busy forever, or make it allocate gigabytes: keys that nest deep or
//! share their parts, `bytearray(10**12)`, compressed records. A value that passes this check makes
//! objects of a limited size in a limited time. torch alone decides which classes may be made.

use std::collections::HashMap;
use std::path::Path;

use super::archive::look_at_value;
use super::parts::Parts;
use crate::Error;
use crate::foreign::fault::{Fault, FaultResult};
use crate::foreign::pickle::{Extent, Item, Node, Pickle, Then, most_bytes};
use crate::foreign::tensor_pickle;
use crate::foreign::window::SourceFile;
use crate::geometry::element_count;
use crate::store::Opened;

/// Limit on the nesting of a value. Python shows, compares and copies values by recursion.
const MOST_NESTED: u32 = 200;

/// Reason for which torch does not get a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is not what `torch.save` writes.
    Damaged(String),
    /// It needs more resources than a value may.
    Unsafe(String),
}

/// Checks the bytes of a non-tensor value, a file of `torch.save`.
///
/// # Errors
/// The reason why torch should not get it.
pub fn check_value(bytes: &[u8]) -> Result<(), Refusal> {
    check(bytes).map_err(|fault| match fault {
        Fault::Corrupt { at, reason } => Refusal::Damaged(format!("{reason} (at byte {at})")),
        Fault::Unsupported(what) | Fault::Read(Error::Unsupported(what)) => Refusal::Unsafe(what),
        Fault::Forbidden(global) => Refusal::Unsafe(format!("it asks for {global}")),
        Fault::Read(Error::CorruptData { reason, .. }) => Refusal::Damaged(reason),
        Fault::Read(error) => Refusal::Damaged(error.to_string()),
    })
}

fn check(bytes: &[u8]) -> FaultResult<()> {
    let source = SourceFile {
        file: &Opened::Memory(bytes),
        path: Path::new("its archive"),
        size: bytes.len() as u64,
    };
    let parts = look_at_value(&source)?;
    let pickle = &parts.pickle;
    let most = most_bytes(bytes.len());
    check_storages(&parts)?;
    let extents = pickle.extents();
    if extents.iter().any(|extent| extent.depth > MOST_NESTED) {
        return Err(Fault::Unsupported(format!("it nests more than {MOST_NESTED} deep")));
    }
    let top = match pickle.top() {
        Item::Node(id) => extents[id as usize].parts,
        _ => 1,
    };
    let mut cost =
        Cost { pickle, extents: &extents, most, left: most, objects: vec![0; extents.len()] };
    // A walk over the value visits each part as often as it is referenced.
    cost.spend(top.saturating_mul(8))?;
    for id in 0..u32::try_from(extents.len()).expect("nodes have numbers of 32 bits") {
        cost.node(id)?;
    }
    Ok(())
}

/// Checks that each storage is a record of the archive, and at least as long as the pickle says.
fn check_storages(parts: &Parts) -> FaultResult<()> {
    let mut lengths = HashMap::new();
    for id in parts.pickle.persistent() {
        let Some((key, len)) = tensor_pickle::storage_extent(&parts.pickle, id) else {
            return Err(Fault::corrupt(0, "a storage of an unknown form"));
        };
        let size = parts.storage(key)?.size;
        // torch would read a record again for each different length.
        if size < len || *lengths.entry(key).or_insert(len) != len {
            let reason = format!("storage {key:?} has {size} bytes, expected {len}");
            return Err(Fault::corrupt(0, reason));
        }
    }
    Ok(())
}

/// Estimate of the bytes that torch would allocate.
struct Cost<'a> {
    pickle: &'a Pickle<'a>,
    extents: &'a [Extent],
    most: u64,
    left: u64,
    /// For each object, the bytes that it copies from its arguments.
    objects: Vec<u64>,
}

impl Cost<'_> {
    fn spend(&mut self, bytes: u64) -> FaultResult<()> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(too_much(self.most)),
        }
    }

    fn node(&mut self, id: u32) -> FaultResult<()> {
        let pickle = self.pickle;
        match pickle.node(id) {
            Node::Tuple { len, .. } => self.spend(40 + 8 * u64::from(*len)),
            Node::List { items, .. } => self.spend(56 + 8 * items.len() as u64),
            Node::Set { items, .. } => {
                self.spend(216 + 32 * items.len() as u64)?;
                self.hash(items.iter().copied())
            }
            Node::Dict { pairs, .. } => self.pairs(pairs),
            Node::ByteArray(span) => self.spend(u64::from(span.len)),
            Node::Global { .. } => Ok(()),
            Node::Persistent(_) => self.spend(256),
            Node::Object { callable, args, then, .. } => {
                let args = pickle.as_plain_tuple(*args);
                self.call(Item::Node(*callable), args)?;
                // An empty text counts too, because each call walks its arguments.
                let copied = args.iter().map(|arg| self.length(*arg).max(8)).sum();
                self.objects[id as usize] = copied;
                self.spend(copied.saturating_add(256))?;
                for then in then {
                    match then {
                        // A state is a dict, or a tuple whose items are copied.
                        Then::State(state) => {
                            self.state(Item::Node(id), *state)?;
                            let parts = pickle.as_tuple(*state).unwrap_or_default();
                            let copied = parts.iter().map(|part| self.length(*part)).sum::<u64>();
                            self.spend(copied.saturating_add(self.length(*state)))?;
                        }
                        Then::Append(items) => self.spend(8 * items.len() as u64)?,
                        Then::Set(pairs) => self.pairs(pairs)?,
                    }
                }
                Ok(())
            }
        }
    }

    fn pairs(&mut self, pairs: &[(Item, Item)]) -> FaultResult<()> {
        self.spend(64 + 40 * pairs.len() as u64)?;
        self.hash(pairs.iter().map(|(key, _)| *key))
    }

    /// Counts the hashing of keys. A tuple is hashed each time, with everything in it.
    fn hash(&mut self, keys: impl Iterator<Item = Item>) -> FaultResult<()> {
        for key in keys {
            if let Item::Node(id) = key {
                self.spend(self.extents[id as usize].parts)?;
            }
        }
        Ok(())
    }

    /// Returns the bytes of a copy of an item, without the items that it refers to.
    fn length(&self, item: Item) -> u64 {
        let Item::Node(id) = item else {
            return match item {
                Item::Str(span) | Item::Surrogates(span) | Item::Bytes(span) | Item::Long(span) => {
                    span.len.into()
                }
                _ => 8,
            };
        };
        match self.pickle.node(id) {
            Node::Tuple { len, .. } => 8 * u64::from(*len),
            Node::List { items, .. } | Node::Set { items, .. } => 8 * items.len() as u64,
            Node::Dict { pairs, .. } => 40 * pairs.len() as u64,
            Node::ByteArray(span) => span.len.into(),
            Node::Object { .. } => self.objects[id as usize],
            Node::Global { .. } | Node::Persistent(_) => 8,
        }
    }

    /// Checks a call of a global that torch allows by default. The user is responsible for globals
    /// that the user has allowed.
    fn call(&mut self, callable: Item, args: &[Item]) -> FaultResult<()> {
        let Some(name) = self.pickle.as_global(callable).map(full_name) else {
            return Ok(()); // torch calls only globals
        };
        match name.as_str() {
            "builtins.bytes" | "builtins.bytearray" if args.iter().any(|arg| is_number(*arg)) => {
                Err(Fault::Unsupported(format!("it calls {name} with a length")))
            }
            "_codecs.encode" => match args {
                [Item::Str(_), Item::Str(codec)]
                    if self.pickle.str(*codec).starts_with("latin") =>
                {
                    Ok(())
                }
                _ => Err(Fault::Unsupported("it encodes text other than bytes".into())),
            },
            "builtins.set"
            | "builtins.frozenset"
            | "collections.OrderedDict"
            | "collections.Counter" => {
                self.plain(&name, args)?;
                for arg in args {
                    let items = self.pickle.as_list(*arg).or_else(|| self.pickle.as_tuple(*arg));
                    self.hash(items.unwrap_or_default().iter().copied())?;
                }
                Ok(())
            }
            "builtins.bytes" | "builtins.bytearray" | "builtins.complex" | "torch.Size"
            | "torch.device" | "_io.BytesIO" => self.plain(&name, args),
            "torch._utils._rebuild_tensor"
            | "torch._utils._rebuild_tensor_v2"
            | "torch._utils._rebuild_tensor_v3"
            | "torch._utils._rebuild_qtensor" => self.tensor(args),
            // These copy, to the dtype that the pickle names.
            "torch._utils._rebuild_device_tensor_from_numpy"
            | "torch._utils._rebuild_device_tensor_from_cpu_tensor" => {
                let size = args.first().map_or(0, |tensor| self.logical_size(*tensor));
                self.spend(size.saturating_mul(16))
            }
            "torch._tensor._rebuild_from_type_v2" => match args {
                [function, _, Item::Node(args), ..] => {
                    let called = self.pickle.as_global(*function).map(full_name);
                    if called.is_none_or(|called| called.starts_with("torch._tensor.")) {
                        return Err(Fault::Unsupported(
                            "it rebuilds a tensor with something that is not a function".into(),
                        ));
                    }
                    match self.pickle.node(*args) {
                        Node::Tuple { .. } => {
                            self.call(*function, self.pickle.as_plain_tuple(*args))
                        }
                        _ => Err(Fault::corrupt(0, "a tensor of a class without arguments")),
                    }
                }
                _ => Err(Fault::corrupt(0, "a tensor of a class without arguments")),
            },
            // No pickle of `torch.save` allocates memory for a tensor, because tensors have
            // storages.
            _ if name.starts_with("torch.")
                && (name.ends_with("Tensor") || name.ends_with("Storage")) =>
            {
                Err(Fault::Unsupported(format!("it makes a {name} on its own")))
            }
            _ => Ok(()),
        }
    }

    /// Checks the state that a tensor gets after it was made. torch passes the items of some states
    /// to `Tensor.set_`, which allocates what the sizes need.
    fn state(&self, tensor: Item, state: Item) -> FaultResult<()> {
        let made_by = self.pickle.made_by(tensor).map(|(module, _)| module);
        if !matches!(
            made_by,
            Some("torch" | "torch._utils" | "torch._tensor" | "torch.nn.parameter")
        ) {
            return Ok(());
        }
        match self.pickle.as_tuple(state) {
            None if state == Item::None || self.pickle.as_dict(state).is_some() => Ok(()),
            // Attributes and slots; flags and hooks; these with the data of a parameter.
            Some([_, _] | [Item::Bool(_), _, _] | [_, _, _, _, _]) => Ok(()),
            Some(parts @ [_, _, _, _]) => self.tensor(parts),
            _ => Err(Fault::Unsupported("it changes a tensor after it was made".into())),
        }
    }

    /// Refuses arguments other than data. Python iterates over them, and a tensor can have any
    /// number of items.
    fn plain(&self, name: &str, args: &[Item]) -> FaultResult<()> {
        for arg in args {
            if let Item::Node(id) = arg
                && let Node::Object { callable, .. } = self.pickle.node(*id)
                && self.pickle.as_global(Item::Node(*callable)).map(full_name).as_deref()
                    != Some("_codecs.encode")
            {
                return Err(Fault::Unsupported(format!(
                    "it calls {name} with something other than plain values"
                )));
            }
        }
        Ok(())
    }

    /// Counts a tensor by its storage, offset, sizes and strides. Strides of 0 make a tensor of any
    /// size out of a few bytes.
    fn tensor(&self, args: &[Item]) -> FaultResult<()> {
        let [storage, offset, sizes, strides, ..] = args else {
            return Err(Fault::corrupt(0, "a tensor without sizes and strides"));
        };
        let has_storage = matches!(
            storage,
            Item::Node(id) if matches!(self.pickle.node(*id), Node::Persistent(_))
        );
        let (sizes, strides) =
            (tensor_pickle::dims(self.pickle, *sizes), tensor_pickle::dims(self.pickle, *strides));
        let is_sound = has_storage && matches!(offset, Item::Int(0..)) && strides.is_some();
        match sizes.filter(|_| is_sound).map(|sizes| element_count(&sizes)) {
            Some(Some(count)) if count.saturating_mul(16) <= self.most => Ok(()),
            Some(_) => Err(too_much(self.most)),
            None => Err(Fault::corrupt(0, "a tensor without sizes and strides")),
        }
    }

    /// Returns the elements of a tensor, or of an object that was made of one.
    fn logical_size(&self, item: Item) -> u64 {
        let mut item = item;
        while let Item::Node(id) = item
            && let Node::Object { callable, args, .. } = self.pickle.node(id)
        {
            let args = self.pickle.as_plain_tuple(*args);
            let name = self.pickle.as_global(Item::Node(*callable)).map(full_name);
            let is_tensor = name.is_some_and(|name| name.starts_with("torch._utils._rebuild_"));
            if let (true, [_, _, sizes, _, ..]) = (is_tensor, args)
                && let Some(sizes) = tensor_pickle::dims(self.pickle, *sizes)
            {
                return element_count(&sizes).unwrap_or(u64::MAX);
            }
            match args {
                [first, ..] => item = *first,
                [] => break,
            }
        }
        0
    }
}

fn is_number(item: Item) -> bool {
    matches!(item, Item::Bool(_) | Item::Int(_) | Item::Long(_) | Item::Float(_))
}

/// Returns the name of a global as torch compares it: module and name joined, with the modules of
/// Python 2 renamed.
fn full_name((module, name): (&str, &str)) -> String {
    let module = match module {
        "__builtin__" => "builtins",
        "UserDict" | "UserList" | "UserString" => "collections",
        module => module,
    };
    format!("{module}.{name}")
}

fn too_much(most: u64) -> Fault {
    Fault::Unsupported(format!("it makes more than {most} bytes"))
}
