//! What leads to what in a pickle.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::{Item, Made, Node, Pickle, Then};

impl Pickle<'_> {
    /// The nodes that are, or hold at any depth, a persistent id which has a mark, each with the first mark found.
    pub(in crate::foreign) fn leading_to<T: Copy>(&self, mark: impl Fn(Item) -> Option<T>) -> HashMap<u32, T> {
        let (mut parents, mut todo) = (Vec::new(), Vec::new());
        for (parent, node) in (0_u32..).zip(&self.nodes) {
            self.each_part(node, |part| {
                if let Item::Node(part) = part {
                    parents.push((part, parent));
                }
            });
            if let Node::Persistent(id) = node {
                todo.extend(mark(*id).map(|mark| (parent, mark)));
            }
        }
        parents.sort_unstable();
        let mut found = HashMap::new();
        while let Some((node, mark)) = todo.pop() {
            if let Entry::Vacant(entry) = found.entry(node) {
                entry.insert(mark);
                let first = parents.partition_point(|(part, _)| *part < node);
                let holders = parents[first..].iter().take_while(|(part, _)| *part == node);
                todo.extend(holders.map(|(_, holder)| (*holder, mark)));
            }
        }
        found
    }

    pub(super) fn each_part(&self, node: &Node, mut each: impl FnMut(Item)) {
        match node {
            Node::Tuple { first, len } => {
                let first = *first as usize;
                self.pool[first..first + *len as usize].iter().copied().for_each(each);
            }
            Node::List { items, .. } | Node::Set { items, .. } => items.iter().copied().for_each(each),
            Node::Dict { pairs, state, .. } => {
                pairs
                    .iter()
                    .flat_map(|(key, value)| [*key, *value])
                    .chain(*state)
                    .for_each(each);
            }
            Node::Object {
                callable,
                args,
                how,
                then,
            } => {
                each(Item::Node(*callable));
                each(Item::Node(*args));
                if let Made::NewWith(named) = how {
                    each(*named);
                }
                for then in then {
                    match then {
                        Then::State(state) => each(*state),
                        Then::Append(items) => items.iter().copied().for_each(&mut each),
                        Then::Set(pairs) => pairs.iter().flat_map(|(key, value)| [*key, *value]).for_each(&mut each),
                    }
                }
            }
            Node::Persistent(id) => each(*id),
            Node::ByteArray(_) | Node::Global { .. } => {}
        }
    }
}
