//! The entries of a saved object, with the names that DCP's flattening gives them.
//!
//! Mappings are always flattened. Lists are flattened only if they contain tensors, or containers
//! that do. Tuples are never flattened (`torch.distributed.checkpoint._traverse`, torch 2.4 and
//! later). A mapping is one value if a key is neither text nor a number, `True`, `False` or `None`.

use std::collections::HashMap;

use crate::foreign::fault::{Fault, FaultResult};
use crate::foreign::pickle::{Described, Item, MAX_DEPTH, Pickle, Span, most_bytes};
use crate::foreign::tensor_pickle::{self, StoredTensor};
use crate::format::{IndexBuilder, Value};

/// An entry.
#[derive(Debug)]
pub(super) struct Leaf {
    /// FQN.
    pub name: String,
    /// Its path in the state dict.
    pub path: Value,
    pub item: Item,
    /// The part of the pickle that makes it.
    pub place: Span,
    pub content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    Tensor(Box<StoredTensor>),
    /// Everything but a tensor over a record of bytes. Includes sparse and quantized tensors, and
    /// tensors of subclasses.
    Value,
}

/// The key of [`Tree::versions`] in the planner data of an index.
const VERSIONS: &str = "dcp_rs.module_versions";
/// The attribute with the versions of modules, which `Module.state_dict` gives its result.
const METADATA: &str = "_metadata";

/// A state dict.
pub(super) struct Tree {
    /// All entries, in order.
    pub leaves: Vec<Leaf>,
    /// The containers that no path shows: section 5 of `docs/format.md`.
    nesting: Value,
    /// For each state dict of a module (path, versions): the version of each module by name, or a
    /// dict if there is more.
    versions: Vec<Value>,
}

impl Tree {
    /// Adds the containers, and the versions of modules, to the planner data of an index.
    pub(super) fn describe_in(&mut self, builder: &mut IndexBuilder) {
        builder.merge_nesting(std::mem::replace(&mut self.nesting, Value::None));
        let new = std::mem::take(&mut self.versions);
        let Value::Dict(pairs) = &mut builder.root else { return };
        match pairs.first_mut() {
            Some((_, Value::List(known))) => known.extend(new),
            _ if new.is_empty() => {}
            _ => pairs.push((Value::Str(VERSIONS.into()), Value::List(new))),
        }
    }
}

/// Takes a pickle apart.
///
/// # Errors
/// An object other than a state dict, two entries of one name, tensors that contradict themselves,
/// and results that are too large for the pickle.
pub(super) fn read(pickle: &Pickle<'_>) -> FaultResult<Tree> {
    let mut walk = Walk {
        pickle,
        budget: most_bytes(pickle.len()),
        inner: HashMap::new(),
        mappings: HashMap::new(),
        leaves: Vec::new(),
        containers: Vec::new(),
        versions: Vec::new(),
    };
    let top = pickle.top();
    if !walk.is_mapping(top) {
        return Err(match pickle.describe(top) {
            Described::Plain(what) => {
                Fault::Unsupported(format!("it holds {what}, not a state dict"))
            }
            Described::Object(_) if tensor_pickle::is_tensor(pickle, top) => {
                Fault::Unsupported("it holds a tensor, not a state dict".into())
            }
            Described::Object(class) => Fault::Forbidden(class),
        });
    }
    walk.enter(top, "", &[], 0)?;
    let nesting = Value::List(walk.containers);
    Ok(Tree { leaves: walk.leaves, nesting, versions: walk.versions })
}

struct Walk<'a> {
    pickle: &'a Pickle<'a>,
    /// Remaining bytes that may be allocated. A shared container is entered as often as it is used.
    budget: u64,
    /// For each list, by its number, whether it is flattened.
    inner: HashMap<u32, bool>,
    /// For each dict, by its number, whether it is flattened.
    mappings: HashMap<u32, bool>,
    leaves: Vec<Leaf>,
    containers: Vec<Value>,
    versions: Vec<Value>,
}

impl Walk<'_> {
    fn spend(&mut self, amount: usize) -> FaultResult<()> {
        match self.budget.checked_sub(amount as u64) {
            Some(left) => {
                self.budget = left;
                Ok(())
            }
            None => Err(Fault::Unsupported("it grows without bound as it repeats itself".into())),
        }
    }

    fn enter(&mut self, node: Item, prefix: &str, path: &[Value], depth: u32) -> FaultResult<()> {
        if depth > MAX_DEPTH {
            let what =
                format!("its containers are nested more than {MAX_DEPTH} deep, or in themselves");
            return Err(Fault::Unsupported(what));
        }
        let pickle = self.pickle;
        let places = pickle.places(node);
        if let Some(items) = pickle.as_list(node) {
            for ((i, item), place) in (0_i64..).zip(items).zip(places) {
                self.visit(*item, *place, (Value::Int(i), &i.to_string()), (prefix, path), depth)?;
            }
            return Ok(());
        }
        let pairs = pickle.as_dict(node).unwrap_or_default();
        // A key may be one long text that the pickle refers to again and again. Each use is copied
        // twice below.
        let texts = pairs.iter().map(|(key, _)| match key {
            Item::Str(span) => span.len as usize,
            _ => 0,
        });
        self.spend(32 * pairs.len() + 2 * texts.sum::<usize>())?;
        let kind = pickle.mapping_kind(node);
        if kind != "dict" || (pairs.is_empty() && !path.is_empty()) {
            let position =
                i64::try_from(self.leaves.len()).expect("the length of something in memory");
            let fields =
                vec![Value::Int(position), Value::Tuple(path.to_vec()), Value::Str(kind.into())];
            self.containers.push(Value::Tuple(fields));
        }
        self.take_versions(node, path)?;
        // A key may occur twice: the first key and the last value count. `True` is the key 1.
        let keys: Vec<_> =
            pairs.iter().map(|(key, _)| (*key, self.key(*key).unwrap_or_default())).collect();
        let same = |(key, text): &(Item, String)| match key {
            Item::Bool(truth) => (false, i64::from(*truth).to_string()),
            _ => (matches!(key, Item::Str(_)), text.clone()),
        };
        let mut uses: HashMap<_, (usize, usize)> = HashMap::with_capacity(keys.len());
        for (i, key) in keys.iter().enumerate() {
            uses.entry(same(key)).or_insert((i, i)).1 = i;
        }
        for (i, ((_, value), place)) in pairs.iter().zip(places).enumerate() {
            let (first, last) = uses[&same(&keys[i])];
            if last == i {
                let (item, key) = &keys[first];
                let part = match *item {
                    Item::Int(number) => Value::Tuple(vec![Value::Int(number)]),
                    Item::None => Value::Tuple(vec![Value::None]),
                    Item::Bool(truth) => Value::Tuple(vec![Value::Bool(truth)]),
                    _ => Value::Str(key.clone()),
                };
                self.visit(*value, *place, (part, key), (prefix, path), depth)?;
            }
        }
        Ok(())
    }

    /// Notes the versions of modules that a state dict has as an attribute. Other attributes have
    /// no meaning for `Module.load_state_dict`.
    fn take_versions(&mut self, node: Item, path: &[Value]) -> FaultResult<()> {
        let pickle = self.pickle;
        let found = pickle.attributes(node).and_then(|state| pickle.get(state, METADATA));
        let Some(modules) = found.and_then(|found| pickle.as_dict(found)) else { return Ok(()) };
        let mut versions = Vec::new();
        for (name, facts) in modules {
            let (Item::Str(name), Some(facts)) = (name, pickle.as_dict(*facts)) else { continue };
            let cost = |pair: &(Item, Item)| match pair {
                (Item::Str(key), Item::Str(text)) => key.len as usize + text.len as usize,
                (Item::Str(key), _) => key.len as usize,
                _ => 0,
            };
            let bytes = facts.iter().map(cost).sum::<usize>() + name.len as usize;
            self.spend(bytes + 2 * size_of::<Value>() * (1 + facts.len()))?;
            let fact = |(key, value): &(Item, Item)| {
                Some((Value::Str(pickle.as_str(*key)?.into()), self.scalar(*value)?))
            };
            let facts: Vec<(Value, Value)> = facts.iter().filter_map(fact).collect();
            let version = match facts.as_slice() {
                [(Value::Str(key), version @ Value::Int(_))] if key == "version" => version.clone(),
                _ => Value::Dict(facts),
            };
            versions.push((Value::Str(pickle.str(*name).into()), version));
        }
        let fields = vec![Value::Tuple(path.to_vec()), Value::Dict(versions)];
        self.versions.push(Value::Tuple(fields));
        Ok(())
    }

    /// Returns a value without parts; `None` for others.
    fn scalar(&self, item: Item) -> Option<Value> {
        match item {
            Item::None => Some(Value::None),
            Item::Bool(truth) => Some(Value::Bool(truth)),
            Item::Int(n) => Some(Value::Int(n)),
            Item::Float(x) => Some(Value::Float(x)),
            Item::Str(span) => Some(Value::Str(self.pickle.str(span).into())),
            _ => None,
        }
    }

    fn visit(
        &mut self,
        item: Item,
        place: Span,
        (part, text): (Value, &str),
        (prefix, path): (&str, &[Value]),
        depth: u32,
    ) -> FaultResult<()> {
        let name = if path.is_empty() { text.to_owned() } else { format!("{prefix}.{text}") };
        // The path contains the name once more.
        self.spend(2 * name.len() + (path.len() + 1) * size_of::<Value>() + size_of::<Leaf>())?;
        let mut path = path.to_vec();
        path.push(part);
        if self.is_mapping(item) || self.is_inner_list(item, depth)? {
            return self.enter(item, &name, &path, depth + 1);
        }
        let content = if tensor_pickle::is_tensor(self.pickle, item) {
            match tensor_pickle::read(self.pickle, item) {
                Ok(tensor) => {
                    let dims = 2 * size_of::<u64>() * tensor.sizes.len();
                    self.spend(size_of::<StoredTensor>() + tensor.key.len() + dims)?;
                    Content::Tensor(Box::new(tensor))
                }
                Err(Fault::Unsupported(_)) => Content::Value,
                Err(fault) => return Err(name_it(fault, &name, place)),
            }
        } else {
            Content::Value
        };
        self.leaves.push(Leaf { name, path: Value::Tuple(path), item, place, content });
        Ok(())
    }

    /// Returns a key as DCP writes it; `None` if it has no simple text.
    fn key(&self, key: Item) -> Option<String> {
        match key {
            Item::Str(span) => Some(self.pickle.str(span).to_owned()),
            Item::Int(n) => Some(n.to_string()),
            Item::None => Some("None".into()),
            Item::Bool(true) => Some("True".into()),
            Item::Bool(false) => Some("False".into()),
            _ => None,
        }
    }

    fn is_mapping(&mut self, item: Item) -> bool {
        let (Item::Node(id), Some(pairs)) = (item, self.pickle.as_dict(item)) else {
            return false;
        };
        if let Some(&known) = self.mappings.get(&id) {
            return known;
        }
        let has_text =
            |key: &Item| matches!(key, Item::Str(_) | Item::Int(_) | Item::None | Item::Bool(_));
        let is_one = pairs.iter().all(|(key, _)| has_text(key));
        self.mappings.insert(id, is_one);
        is_one
    }

    fn is_inner_list(&mut self, item: Item, depth: u32) -> FaultResult<bool> {
        let (Item::Node(id), Some(items)) = (item, self.pickle.as_list(item)) else {
            return Ok(false);
        };
        if let Some(&known) = self.inner.get(&id) {
            return Ok(known);
        }
        if depth > MAX_DEPTH {
            let what = format!("its lists are nested more than {MAX_DEPTH} deep");
            return Err(Fault::Unsupported(what));
        }
        self.inner.insert(id, false); // a list inside itself adds nothing
        for item in items {
            if self.is_mapping(*item)
                || tensor_pickle::is_tensor(self.pickle, *item)
                || self.is_inner_list(*item, depth + 1)?
            {
                self.inner.insert(id, true);
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn name_it(fault: Fault, name: &str, place: Span) -> Fault {
    match fault {
        Fault::Corrupt { reason, .. } => {
            Fault::corrupt(place.at.into(), format!("tensor {name:?}: {reason}"))
        }
        other => other,
    }
}
