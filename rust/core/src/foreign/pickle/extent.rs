//! Depth of the values in a pickle, and their size if nothing were shared.

use super::{Item, Made, Node, Pickle, Then};

/// The size of a node with everything in it. A reference back to an enclosing node counts as one
/// part.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::foreign) struct Extent {
    pub depth: u32,
    /// Number of parts. A part counts as often as it is referenced.
    pub parts: u64,
}

/// A node on the path from the first node down, and its parts that are not yet visited.
struct Visit {
    node: u32,
    left: Vec<u32>,
    sum: Extent,
}

impl Pickle<'_> {
    /// Returns the extent of each node. It does not recurse, so deep nesting cannot exhaust the
    /// stack.
    pub(in crate::foreign) fn extents(&self) -> Vec<Extent> {
        let mut done: Vec<Option<Extent>> = vec![None; self.nodes.len()];
        let mut is_open = vec![false; self.nodes.len()];
        let mut path: Vec<Visit> = Vec::new();
        for first in 0..u32::try_from(self.nodes.len()).expect("nodes have numbers of 32 bits") {
            if done[first as usize].is_none() {
                is_open[first as usize] = true;
                path.push(self.visit(first));
            }
            while let Some(visit) = path.last_mut() {
                let Some(&part) = visit.left.last() else {
                    visit.sum.depth += 1;
                    visit.sum.parts = visit.sum.parts.saturating_add(1);
                    done[visit.node as usize] = Some(visit.sum);
                    path.pop();
                    continue;
                };
                let known = done[part as usize];
                if known.is_none() && !is_open[part as usize] {
                    is_open[part as usize] = true;
                    path.push(self.visit(part));
                    continue;
                }
                let Extent { depth, parts } = known.unwrap_or(Extent { depth: 0, parts: 1 });
                visit.sum.depth = visit.sum.depth.max(depth);
                visit.sum.parts = visit.sum.parts.saturating_add(parts);
                visit.left.pop();
            }
        }
        done.into_iter().map(Option::unwrap_or_default).collect()
    }

    fn visit(&self, node: u32) -> Visit {
        let (mut left, mut small) = (Vec::new(), 0);
        self.each_part(self.node(node), |part| match part {
            Item::Node(part) => left.push(part),
            _ => small += 1,
        });
        let sum = Extent { depth: 0, parts: small };
        Visit { node, left, sum }
    }

    /// Calls `each` with every item that a node refers to.
    fn each_part(&self, node: &Node, mut each: impl FnMut(Item)) {
        match node {
            Node::Tuple { first, len } => {
                let first = *first as usize;
                self.pool[first..first + *len as usize].iter().copied().for_each(each);
            }
            Node::List { items, .. } | Node::Set { items, .. } => {
                items.iter().copied().for_each(each);
            }
            Node::Dict { pairs, state, .. } => {
                pairs.iter().flat_map(|(key, value)| [*key, *value]).chain(*state).for_each(each);
            }
            Node::Object { callable, args, how, then } => {
                each(Item::Node(*callable));
                each(Item::Node(*args));
                if let Made::NewWith(named) = how {
                    each(*named);
                }
                for then in then {
                    match then {
                        Then::State(state) => each(*state),
                        Then::Append(items) => items.iter().copied().for_each(&mut each),
                        Then::Set(pairs) => {
                            pairs
                                .iter()
                                .flat_map(|(key, value)| [*key, *value])
                                .for_each(&mut each);
                        }
                    }
                }
            }
            Node::Persistent(id) => each(*id),
            Node::ByteArray(_) | Node::Global { .. } => {}
        }
    }
}
