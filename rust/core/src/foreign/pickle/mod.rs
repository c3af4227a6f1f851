//! Pickles as plain data, made by an interpreter that can do nothing else.
//!
//! Nodes refer to each other by number, so that no depth of nesting can exhaust the stack of the
//! parser.

mod extent;
mod machine;
mod write;

pub(super) use self::extent::Extent;
pub(super) use self::write::MAX_DEPTH;

use std::borrow::Cow;

use super::fault::{Fault, FaultResult};

/// A value: small ones in place, others by the number of their node. Texts are ranges of the input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Item {
    None,
    Bool(bool),
    Int(i64),
    /// An integer of more than 64 bits, in two's complement.
    Long(Span),
    Float(f64),
    Str(Span),
    /// Text that is not UTF-8: Python accepts half of a surrogate pair.
    Surrogates(Span),
    Bytes(Span),
    /// A node, by its number.
    Node(u32),
}

impl Item {
    /// Returns a number that is not negative.
    pub(super) fn as_u64(self) -> Option<u64> {
        match self {
            Self::Int(n) => u64::try_from(n).ok(),
            _ => None,
        }
    }
}

/// Returns the bytes that a pickle of `input` bytes may expand to. Honest pickles stay far below
/// it.
pub(super) fn most_bytes(input: usize) -> u64 {
    (32 * input as u64).max(64 << 20)
}

/// Limit on the attributes of an object. Honest objects have a dozen. Objects can share their
/// attributes, and each would search all of them.
pub(super) const MOST_ATTRIBUTES: usize = 64;

/// A range of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Span {
    pub at: u32,
    pub len: u32,
}

#[derive(Debug)]
pub(super) enum Node {
    Tuple {
        first: u32,
        len: u32,
    },
    List {
        items: Vec<Item>,
        /// With [`Rules::places`], the part of the input that makes each item.
        places: Vec<Span>,
    },
    Dict {
        ordered: bool,
        pairs: Vec<(Item, Item)>,
        /// With [`Rules::places`], the part of the input that makes each value.
        places: Vec<Span>,
        /// Attributes of an `OrderedDict`.
        state: Option<Item>,
    },
    Set {
        frozen: bool,
        items: Vec<Item>,
    },
    ByteArray(Span),
    Global {
        module: Span,
        name: Span,
    },
    /// `callable(*args)` or `class.__new__(class, *args)`, and the operations on the result.
    /// `callable` is the node of a global, or with [`Rules::keep`] any node. `args` is the node of
    /// a tuple.
    Object {
        callable: u32,
        args: u32,
        how: Made,
        then: Vec<Then>,
    },
    /// Object with this persistent id.
    Persistent(Item),
}

/// Ways of making an object.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Made {
    Called,
    New,
    /// With keyword arguments, given as a dict.
    NewWith(Item),
}

/// Operations on a new object.
#[derive(Debug)]
pub(super) enum Then {
    State(Item),
    Append(Vec<Item>),
    Set(Vec<(Item, Item)>),
}

/// Description of an item, for messages.
pub(super) enum Described {
    Plain(&'static str),
    /// The global that the item is, or that makes it.
    Object(String),
}

/// Limits on the contents of a pickle.
pub(super) struct Rules {
    /// Returns whether a global may be named.
    pub allow: fn(module: &str, name: &str) -> bool,
    /// Allow persistent ids.
    pub persistent: bool,
    /// Keep values without a meaning here: sets, integers of any length, objects with items.
    pub keep: bool,
    /// Keep the place of every part, so that the part can be written again.
    pub places: bool,
}

/// A pickle that was read completely.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    input: Cow<'a, [u8]>,
    nodes: Vec<Node>,
    /// For each node, the number of nodes when it was last changed, or 0. A call with a higher
    /// number saw all of it.
    changed: Vec<u32>,
    pool: Vec<Item>,
    top: Item,
}

impl<'a> Pickle<'a> {
    /// Reads the value of `input`. No bytes may follow it.
    pub(super) fn parse(input: impl Into<Cow<'a, [u8]>>, rules: &Rules) -> FaultResult<Self> {
        let input = input.into();
        let (pickle, used) = machine::run(input, rules)?;
        if used == pickle.len() {
            Ok(pickle)
        } else {
            Err(Fault::corrupt(used as u64, "pickle: bytes after the end of the pickle"))
        }
    }

    /// Reads the value at the start of `input`. Also returns the number of bytes that it takes.
    pub(super) fn parse_prefix(input: Vec<u8>, rules: &Rules) -> FaultResult<(Self, usize)> {
        machine::run(input.into(), rules)
    }
}

impl Pickle<'_> {
    pub(super) fn top(&self) -> Item {
        self.top
    }

    /// Returns the length of the input in bytes.
    pub(super) fn len(&self) -> usize {
        self.input.len()
    }

    pub(super) fn str(&self, span: Span) -> &str {
        // Checked when the span was made.
        std::str::from_utf8(self.bytes(span)).unwrap_or_default()
    }

    pub(super) fn bytes(&self, span: Span) -> &[u8] {
        let at = span.at as usize;
        &self.input[at..at + span.len as usize]
    }

    pub(super) fn node(&self, id: u32) -> &Node {
        &self.nodes[id as usize]
    }

    fn node_of(&self, item: Item) -> Option<&Node> {
        match item {
            Item::Node(id) => Some(self.node(id)),
            _ => None,
        }
    }

    pub(super) fn as_str(&self, item: Item) -> Option<&str> {
        match item {
            Item::Str(span) => Some(self.str(span)),
            _ => None,
        }
    }

    /// Returns the items of a tuple or of a `torch.Size`.
    pub(super) fn as_tuple(&self, item: Item) -> Option<&[Item]> {
        match self.as_object(item) {
            Some((("torch", "Size"), [sizes], _)) => self.tuple(*sizes),
            Some(_) => None,
            None => self.tuple(item),
        }
    }

    fn tuple(&self, item: Item) -> Option<&[Item]> {
        match self.node_of(item)? {
            Node::Tuple { first, len } => {
                let first = *first as usize;
                Some(&self.pool[first..first + *len as usize])
            }
            _ => None,
        }
    }

    /// Returns the items of a tuple's node, such as arguments.
    pub(super) fn as_plain_tuple(&self, node: u32) -> &[Item] {
        self.tuple(Item::Node(node)).unwrap_or_default()
    }

    pub(super) fn as_list(&self, item: Item) -> Option<&[Item]> {
        match self.node_of(item)? {
            Node::List { items, .. } => Some(items),
            _ => None,
        }
    }

    pub(super) fn as_dict(&self, item: Item) -> Option<&[(Item, Item)]> {
        match self.dict_of(item)? {
            Node::Dict { pairs, .. } => Some(pairs),
            _ => None,
        }
    }

    /// Returns the attributes of an `OrderedDict`.
    pub(super) fn attributes(&self, item: Item) -> Option<Item> {
        match self.node_of(item)? {
            Node::Dict { state, .. } => *state,
            _ => None,
        }
    }

    /// Returns the kind of mapping, as section 5 of `docs/format.md` names it.
    pub(super) fn mapping_kind(&self, item: Item) -> &'static str {
        match (self.as_object(item), self.dict_of(item)) {
            (Some((("collections", "Counter"), ..)), _) => "Counter",
            (_, Some(Node::Dict { ordered: true, .. })) => "OrderedDict",
            _ => "dict",
        }
    }

    /// Returns the dict that an item is, or that a `Counter` is made of.
    fn dict_of(&self, item: Item) -> Option<&Node> {
        match self.as_object(item) {
            Some((("collections", "Counter"), [dict], None)) => {
                self.node_of(*dict).filter(|_| !self.is_changed_after(*dict, item))
            }
            _ => self.node_of(item),
        }
    }

    /// Returns whether a container was changed after the object `call` was made of it.
    pub(super) fn is_changed_after(&self, container: Item, call: Item) -> bool {
        match (container, call) {
            (Item::Node(id), Item::Node(call)) => self.changed[id as usize] > call,
            _ => false,
        }
    }

    pub(super) fn as_global(&self, item: Item) -> Option<(&str, &str)> {
        match self.node_of(item)? {
            Node::Global { module, name } => Some((self.str(*module), self.str(*name))),
            _ => None,
        }
    }

    /// Returns an object as (module and name of its callable, arguments, state); `None` if there
    /// were more operations on it.
    #[allow(clippy::type_complexity)] // three parts, which every caller takes apart at once
    pub(super) fn as_object(&self, item: Item) -> Option<((&str, &str), &[Item], Option<Item>)> {
        let Node::Object { callable, args, how: Made::Called | Made::New, then } =
            self.node_of(item)?
        else {
            return None;
        };
        let state = match then.as_slice() {
            [] => None,
            [Then::State(state)] => Some(*state),
            _ => return None,
        };
        Some((self.as_global(Item::Node(*callable))?, self.tuple(Item::Node(*args))?, state))
    }

    /// Returns module and name of the global that makes an object.
    pub(super) fn made_by(&self, item: Item) -> Option<(&str, &str)> {
        match self.node_of(item)? {
            Node::Object { callable, .. } => self.as_global(Item::Node(*callable)),
            _ => None,
        }
    }

    /// Returns the class of the module with this persistent id, in files of torch before 1.6.
    fn module_class(&self, id: Item) -> Option<Item> {
        match self.tuple(id)? {
            [tag, class, ..] if self.as_str(*tag) == Some("module") => Some(*class),
            _ => None,
        }
    }

    /// Returns all persistent ids.
    pub(super) fn persistent(&self) -> impl Iterator<Item = Item> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Persistent(id) => Some(*id),
            _ => None,
        })
    }

    /// Returns the parts of the input that make the items of a list, or the values of a dict.
    pub(super) fn places(&self, item: Item) -> &[Span] {
        match self.dict_of(item) {
            Some(Node::List { places, .. } | Node::Dict { places, .. }) => places,
            _ => &[],
        }
    }

    /// Returns the name of a global, even of one in a class, which protocols 2 and 3 write as
    /// `getattr(class, name)`. For any other node, returns the name of the global that makes it.
    fn name_of(&self, id: u32) -> String {
        let mut within = Vec::new();
        let mut id = id;
        // It ends, because a node is made of earlier ones.
        loop {
            match self.node(id) {
                Node::Global { module, name } => {
                    let outer = [self.str(*module), self.str(*name)];
                    let parts: Vec<&str> =
                        outer.into_iter().chain(within.into_iter().rev()).collect();
                    return parts.join(".");
                }
                Node::Object { callable, .. } => {
                    let made = self.as_object(Item::Node(id));
                    if let Some((
                        ("__builtin__" | "builtins", "getattr"),
                        [Item::Node(of), Item::Str(name)],
                        None,
                    )) = made
                    {
                        within.push(self.str(*name));
                        id = *of;
                    } else {
                        within.clear();
                        id = *callable;
                    }
                }
                Node::Persistent(made_by) => match self.module_class(*made_by) {
                    Some(Item::Node(class)) => id = class,
                    _ => return "a storage".into(),
                },
                _ => return "what is no class".into(),
            }
        }
    }

    /// Describes an item for messages.
    pub(super) fn describe(&self, item: Item) -> Described {
        let object = |made_by| Described::Object(self.name_of(made_by));
        Described::Plain(match item {
            Item::None => "None",
            Item::Bool(_) => "a truth value",
            Item::Int(_) | Item::Long(_) | Item::Float(_) => "a number",
            Item::Str(_) | Item::Surrogates(_) => "a text",
            Item::Bytes(_) => "bytes",
            Item::Node(id) => match self.node(id) {
                Node::Tuple { .. } => "a tuple",
                Node::List { .. } => "a list",
                Node::Dict { .. } => "a dict with keys that have no simple text",
                Node::Set { .. } => "a set",
                Node::ByteArray(_) => "bytes",
                Node::Persistent(_) => "a storage",
                Node::Global { .. } => return object(id),
                Node::Object { callable, .. } => return object(*callable),
            },
        })
    }

    /// Returns the value of the last pair of `dict` with the key, as Python does; `None` for a dict
    /// of more than [`MOST_ATTRIBUTES`].
    pub(super) fn get(&self, dict: Item, key: &str) -> Option<Item> {
        let pairs = self.as_dict(dict).filter(|pairs| pairs.len() <= MOST_ATTRIBUTES)?;
        let is_key =
            |item: Item| matches!(item, Item::Str(span) if self.bytes(span) == key.as_bytes());
        let found = pairs.iter().rev().find(|(k, _)| is_key(*k));
        found.map(|(_, value)| *value)
    }
}
