//! A part of a pickle, written again so that it stands by itself.

use std::collections::HashMap;

use super::{Item, Made, Node, Pickle, Span, Then};
use crate::foreign::fault::{Fault, FaultResult};

/// Values nest as deep as Python's own pickler goes, about.
pub(in crate::foreign) const MAX_DEPTH: u32 = 1000;

impl Pickle<'_> {
    /// A pickle (of protocol 2, which is what `torch.save` writes) of one value, and the persistent ids in it, each once.
    ///
    /// # Errors
    /// Values nested too deep, or in themselves through a tuple; names that protocol 2 cannot write.
    pub(in crate::foreign) fn write(&self, item: Item) -> FaultResult<(Vec<u8>, Vec<Item>)> {
        let mut writer = Writer {
            pickle: self,
            out: b"\x80\x02".to_vec(),
            memo: HashMap::new(),
            persistent: Vec::new(),
        };
        writer.item(item, 0)?;
        writer.out.push(b'.');
        Ok((writer.out, writer.persistent))
    }
}

struct Writer<'a> {
    pickle: &'a Pickle<'a>,
    out: Vec<u8>,
    /// The number of each node in the new memo.
    memo: HashMap<u32, u32>,
    persistent: Vec<Item>,
}

impl Writer<'_> {
    fn item(&mut self, item: Item, depth: u32) -> FaultResult<()> {
        if depth > MAX_DEPTH {
            let what = format!("a value nested more than {MAX_DEPTH} deep, or in itself");
            return Err(Fault::Unsupported(what));
        }
        match item {
            Item::None => self.out.push(b'N'),
            Item::Bool(true) => self.out.push(0x88),
            Item::Bool(false) => self.out.push(0x89),
            Item::Int(n) => match i32::try_from(n) {
                Ok(n) => self.op(b'J', &n.to_le_bytes()),
                Err(_) => self.op(0x8a, &[&[8], &n.to_le_bytes()[..]].concat()),
            },
            Item::Long(span) => {
                match u8::try_from(span.len) {
                    Ok(len) => self.op(0x8a, &[len]),
                    Err(_) => self.op(0x8b, &span.len.to_le_bytes()),
                }
                self.out.extend(self.pickle.bytes(span));
            }
            Item::Float(x) => self.op(b'G', &x.to_be_bytes()),
            Item::Str(span) | Item::Surrogates(span) => self.text(span),
            // Protocol 2 has none: a call, as Python writes it.
            Item::Bytes(span) => {
                let latin: String = self.pickle.bytes(span).iter().map(|&byte| char::from(byte)).collect();
                self.out.extend(b"c_codecs\nencode\n");
                let len = u32::try_from(latin.len()).map_err(|_| Fault::Unsupported("bytes over 2 GiB".into()))?;
                self.op(b'X', &len.to_le_bytes());
                self.out.extend(latin.as_bytes());
                self.op(b'X', &6_u32.to_le_bytes());
                self.out.extend(b"latin1\x86R");
            }
            Item::Node(id) => self.node(id, depth + 1)?,
        }
        Ok(())
    }

    fn op(&mut self, op: u8, argument: &[u8]) {
        self.out.push(op);
        self.out.extend(argument);
    }

    fn text(&mut self, span: Span) {
        self.op(b'X', &span.len.to_le_bytes());
        self.out.extend(self.pickle.bytes(span));
    }

    fn remember(&mut self, id: u32) {
        let index = u32::try_from(self.memo.len()).expect("no more than there are nodes");
        self.memo.insert(id, index);
        self.op(b'r', &index.to_le_bytes());
    }

    fn node(&mut self, id: u32, depth: u32) -> FaultResult<()> {
        if let Some(index) = self.memo.get(&id) {
            let index = index.to_le_bytes();
            self.op(b'j', &index);
            return Ok(());
        }
        let pickle = self.pickle;
        match pickle.node(id) {
            Node::Tuple { .. } => {
                self.out.push(b'(');
                self.items(pickle.tuple(Item::Node(id)).unwrap_or_default(), depth)?;
                self.out.push(b't');
                self.remember(id);
            }
            Node::List { items, .. } => {
                self.out.push(b']');
                self.remember(id);
                self.append(items, depth)?;
            }
            Node::Dict {
                ordered, pairs, state, ..
            } => {
                let begin: &[u8] = if *ordered {
                    b"ccollections\nOrderedDict\n)R"
                } else {
                    b"}"
                };
                self.out.extend(begin);
                self.remember(id);
                self.set(pairs, depth)?;
                if let Some(state) = state {
                    self.state(*state, depth)?;
                }
            }
            Node::Global { module, name } => {
                let [module, name] = [*module, *name].map(|span| pickle.str(span));
                if module.contains('\n') || name.contains('\n') {
                    return Err(Fault::Forbidden(format!("{module}.{name}")));
                }
                self.out.extend(format!("c{module}\n{name}\n").bytes());
                self.remember(id);
            }
            Node::Object {
                callable,
                args,
                how,
                then,
            } => {
                self.node(*callable, depth + 1)?;
                self.item(Item::Node(*args), depth)?;
                self.out.push(if *how == Made::Called { b'R' } else { 0x81 });
                self.remember(id);
                for then in then {
                    match then {
                        Then::State(state) => self.state(*state, depth)?,
                        Then::Append(items) => self.append(items, depth)?,
                        Then::Set(pairs) => self.set(pairs, depth)?,
                    }
                }
            }
            Node::Persistent(item) => {
                self.persistent.push(*item);
                self.persistent_id(*item, depth)?;
                self.out.push(b'Q');
                self.remember(id);
            }
        }
        Ok(())
    }

    /// Of a storage. What torch before 1.6 wrote has a sixth part, for views, which is `None`.
    fn persistent_id(&mut self, item: Item, depth: u32) -> FaultResult<()> {
        match self.pickle.tuple(item) {
            Some([parts @ .., Item::None]) if parts.len() == 5 => {
                self.out.push(b'(');
                self.items(parts, depth)?;
                self.out.push(b't');
                Ok(())
            }
            _ => self.item(item, depth),
        }
    }

    fn items(&mut self, items: &[Item], depth: u32) -> FaultResult<()> {
        items.iter().try_for_each(|item| self.item(*item, depth))
    }

    fn append(&mut self, items: &[Item], depth: u32) -> FaultResult<()> {
        if !items.is_empty() {
            self.out.push(b'(');
            self.items(items, depth)?;
            self.out.push(b'e');
        }
        Ok(())
    }

    fn set(&mut self, pairs: &[(Item, Item)], depth: u32) -> FaultResult<()> {
        if !pairs.is_empty() {
            self.out.push(b'(');
            for (key, value) in pairs {
                self.item(*key, depth)?;
                self.item(*value, depth)?;
            }
            self.out.push(b'u');
        }
        Ok(())
    }

    fn state(&mut self, state: Item, depth: u32) -> FaultResult<()> {
        self.item(state, depth)?;
        self.out.push(b'b');
        Ok(())
    }
}
