//! Containers and records of calls, built by opcodes from values on the stack.

use super::{Machine, Slot};
use crate::foreign::fault::{Fault, FaultResult};
use crate::foreign::pickle::{Item, Made, Node, Span, Then, most_bytes};

impl Machine<'_, '_> {
    /// Pushes a new node, whose input begins at `at`.
    pub(super) fn push_node(&mut self, node: Node, at: usize) -> FaultResult<()> {
        let Ok(id) = u32::try_from(self.pickle.nodes.len()) else {
            return Err(self.fault("too many values"));
        };
        self.made += size_of::<Node>() + size_of::<u32>();
        self.pickle.nodes.push(node);
        self.pickle.changed.push(0);
        self.stack.push(Slot { item: Item::Node(id), at });
        Ok(())
    }

    /// Pushes the empty tuple. There is only one, so that an opcode of one byte cannot make a node
    /// each time.
    pub(super) fn empty_tuple(&mut self) -> FaultResult<()> {
        if let Some(item) = self.empty {
            self.push(item);
        } else {
            self.push_node(Node::Tuple { first: 0, len: 0 }, self.op_at)?;
            self.empty = self.stack.last().map(|slot| slot.item);
        }
        Ok(())
    }

    /// Makes a tuple of the stack from `from` up. Its input begins at `at`.
    pub(super) fn tuple(&mut self, from: usize, at: usize) -> FaultResult<()> {
        let pool = &mut self.pickle.pool;
        let (Ok(first), Ok(len)) =
            (u32::try_from(pool.len()), u32::try_from(self.stack.len() - from))
        else {
            return Err(self.fault("too many values"));
        };
        pool.extend(self.stack.drain(from..).map(|slot| slot.item));
        self.made += size_of::<Item>() * len as usize;
        self.push_node(Node::Tuple { first, len }, at)
    }

    /// Returns the container below `from`, which is about to change.
    fn container(&mut self, from: usize) -> FaultResult<u32> {
        match from.checked_sub(1) {
            Some(below) if below >= self.base() => match self.stack[below].item {
                Item::Node(id) => {
                    let now = u32::try_from(self.pickle.nodes.len());
                    self.pickle.changed[id as usize] = now.unwrap_or(u32::MAX);
                    Ok(id)
                }
                _ => Err(self.fault("an item for what is not a container")),
            },
            _ => Err(self.fault("too few values on the stack")),
        }
    }

    /// Returns the part of the input that makes the value at `i` on the stack: up to the next value
    /// there, or to this opcode. Returns `None` unless places are kept.
    fn place(&self, i: usize) -> Option<Span> {
        let at = self.stack[i].at;
        let end = self.stack.get(i + 1).map_or(self.op_at, |next| next.at);
        self.rules.places.then(|| self.span_of(at, end - at).ok())?
    }

    pub(super) fn append(&mut self, from: usize) -> FaultResult<()> {
        let id = self.container(from)?;
        let new: Vec<Item> = self.stack[from..].iter().map(|slot| slot.item).collect();
        let at: Vec<Span> = (from..self.stack.len()).filter_map(|i| self.place(i)).collect();
        self.stack.truncate(from);
        self.made += (size_of::<Item>() + size_of::<Span>()) * new.len() + size_of::<Then>();
        match &mut self.pickle.nodes[id as usize] {
            Node::List { items, places } => {
                items.extend(new);
                places.extend(at);
                Ok(())
            }
            Node::Object { then, .. } if self.rules.keep => {
                then.push(Then::Append(new));
                Ok(())
            }
            _ => Err(self.fault("an item for what is not a list")),
        }
    }

    pub(super) fn add(&mut self, from: usize) -> FaultResult<()> {
        let id = self.container(from)?;
        match &mut self.pickle.nodes[id as usize] {
            Node::Set { items, frozen: false } => {
                self.made += size_of::<Item>() * (self.stack.len() - from);
                items.extend(self.stack.drain(from..).map(|slot| slot.item));
                Ok(())
            }
            _ => Err(self.fault("an item for what is not a set")),
        }
    }

    pub(super) fn set_items(&mut self, from: usize) -> FaultResult<()> {
        let id = self.container(from)?;
        let slots = &self.stack[from..];
        if !slots.len().is_multiple_of(2) {
            return Err(self.fault("a pair for what is not a dict"));
        }
        let new: Vec<(Item, Item)> =
            slots.chunks_exact(2).map(|pair| (pair[0].item, pair[1].item)).collect();
        let values = (from + 1..self.stack.len()).step_by(2);
        let at: Vec<Span> = values.filter_map(|i| self.place(i)).collect();
        self.stack.truncate(from);
        self.made += (2 * size_of::<Item>() + size_of::<Span>()) * new.len() + size_of::<Then>();
        match &mut self.pickle.nodes[id as usize] {
            Node::Dict { pairs, places, .. } => {
                pairs.extend(new);
                places.extend(at);
                Ok(())
            }
            Node::Object { then, .. } if self.rules.keep => {
                then.push(Then::Set(new));
                Ok(())
            }
            _ => Err(self.fault("a pair for what is not a dict")),
        }
    }

    pub(super) fn object(&mut self, how: Made) -> FaultResult<()> {
        let (args, made_by) = (self.pop()?.item, self.pop()?);
        let (Item::Node(callable), Item::Node(arguments)) = (made_by.item, args) else {
            return Err(self.not_a_call());
        };
        let Node::Tuple { len, .. } = *self.pickle.node(arguments) else {
            return Err(self.not_a_call());
        };
        let global = self.pickle.as_global(made_by.item);
        // A kept value may call anything, since torch checks the call when it loads the value.
        if global.is_none() && !self.rules.keep {
            return Err(self.not_a_call());
        }
        let dict = match global {
            Some(("collections", "OrderedDict")) => self.dict_of_pairs(how, arguments, len)?,
            _ => None,
        };
        let node =
            dict.unwrap_or(Node::Object { callable, args: arguments, how, then: Vec::new() });
        self.push_node(node, made_by.at)
    }

    /// Builds an `OrderedDict` from its arguments: none, or a list of lists of two items, as Python
    /// 2 writes it.
    fn dict_of_pairs(
        &mut self,
        how: Made,
        arguments: u32,
        count: u32,
    ) -> FaultResult<Option<Node>> {
        let list = match self.pickle.tuple(Item::Node(arguments)) {
            _ if count == 0 => return Ok(Some(empty_dict(true))),
            Some([list]) if self.rules.keep && how == Made::Called => *list,
            _ => return Ok(None),
        };
        let Some(lists) = self.pickle.as_list(list) else {
            return Ok(None);
        };
        // A list counts as often as it is used.
        self.made += (2 * size_of::<Item>() + size_of::<Span>()) * lists.len();
        if self.made as u64 > most_bytes(self.pickle.input.len()) {
            return Err(Fault::Unsupported("it grows without bound as it repeats itself".into()));
        }
        let (mut pairs, mut places) = (Vec::new(), Vec::new());
        for list in lists {
            match (self.pickle.as_list(*list), self.pickle.places(*list)) {
                (Some([key, value]), [_, place]) => {
                    pairs.push((*key, *value));
                    places.push(*place);
                }
                _ => return Ok(None),
            }
        }
        Ok(Some(Node::Dict { ordered: true, pairs, places, state: None }))
    }

    fn not_a_call(&self) -> Fault {
        self.fault("a call of what is not a global, or without a tuple of arguments")
    }

    pub(super) fn build(&mut self) -> FaultResult<()> {
        let given = self.pop()?.item;
        let from = self.floor(1)?;
        if let Item::Node(id) = self.stack[from].item {
            match &mut self.pickle.nodes[id as usize] {
                Node::Object { then, .. } if then.is_empty() || self.rules.keep => {
                    self.made += size_of::<Then>();
                    then.push(Then::State(given));
                    return Ok(());
                }
                Node::Dict { ordered: true, state: state @ None, .. } => {
                    *state = Some(given);
                    return Ok(());
                }
                _ => {}
            }
        }
        Err(self.fault("a state for what is not a new object"))
    }
}

pub(super) fn empty_dict(ordered: bool) -> Node {
    Node::Dict { ordered, pairs: Vec::new(), places: Vec::new(), state: None }
}

pub(super) fn set(frozen: bool, items: Vec<Item>) -> Node {
    Node::Set { frozen, items }
}
