//! A pickle interpreter that builds plain data and can do nothing else.
//!
//! It knows the opcodes that `pickle` emits for data (protocols 2 to 5) and refuses the others. A global must be on
//! the caller's list before it even becomes a value; calls and instances are recorded, never made. Every opcode takes a byte
//! of the input and makes at most one node, so memory and time are linear in the input; nodes refer to each other by
//! number, so no depth of nesting can exhaust the stack.

use std::cmp::Ordering;

use super::fault::{Fault, FaultResult};

/// A value: small ones in place, the others by number. Texts are ranges of the input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Item {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(Span),
    Bytes(Span),
    /// A node, by its number.
    Node(u32),
}

/// A range of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    at: u32,
    len: u32,
}

#[derive(Debug)]
pub(super) enum Node {
    Tuple {
        first: u32,
        len: u32,
    },
    List(Vec<Item>),
    Dict(Vec<(Item, Item)>),
    Global {
        module: Span,
        name: Span,
    },
    /// `callable(*args)` or `class.__new__(class, *args)`, with the state it was given afterwards.
    /// `callable` is a global's node, `args` a tuple's.
    Object {
        callable: u32,
        args: u32,
        state: Option<Item>,
    },
    /// What a persistent id stands for.
    Persistent(Item),
}

/// What a pickle may hold.
pub(super) struct Rules {
    /// Whether a global may be named at all.
    pub allow: fn(module: &str, name: &str) -> bool,
    /// Whether persistent ids may occur.
    pub persistent: bool,
}

/// A pickle that was read whole.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    input: &'a [u8],
    nodes: Vec<Node>,
    pool: Vec<Item>,
    top: Item,
}

impl<'a> Pickle<'a> {
    /// Reads the one value of `input`, which must end with it.
    pub(super) fn parse(input: &'a [u8], rules: &Rules) -> FaultResult<Self> {
        if u32::try_from(input.len()).is_err() {
            return Err(Fault::Unsupported(format!("a pickle of {} bytes", input.len())));
        }
        let mut machine = Machine {
            pickle: Pickle {
                input,
                nodes: Vec::new(),
                pool: Vec::new(),
                top: Item::None,
            },
            rules,
            at: 0,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
        };
        machine.run()?;
        Ok(machine.pickle)
    }

    pub(super) fn top(&self) -> Item {
        self.top
    }

    pub(super) fn str(&self, span: Span) -> &'a str {
        // Checked when the span was made.
        std::str::from_utf8(self.bytes(span)).unwrap_or_default()
    }

    pub(super) fn bytes(&self, span: Span) -> &'a [u8] {
        let at = span.at as usize;
        &self.input[at..at + span.len as usize]
    }

    pub(super) fn node(&self, id: u32) -> &Node {
        &self.nodes[id as usize]
    }

    pub(super) fn as_str(&self, item: Item) -> Option<&'a str> {
        match item {
            Item::Str(span) => Some(self.str(span)),
            _ => None,
        }
    }

    pub(super) fn as_tuple(&self, item: Item) -> Option<&[Item]> {
        match item {
            Item::Node(id) => self.tuple(id),
            _ => None,
        }
    }

    fn tuple(&self, id: u32) -> Option<&[Item]> {
        match self.node(id) {
            Node::Tuple { first, len } => {
                let first = *first as usize;
                Some(&self.pool[first..first + *len as usize])
            }
            _ => None,
        }
    }

    pub(super) fn as_list(&self, item: Item) -> Option<&[Item]> {
        match item {
            Item::Node(id) => match self.node(id) {
                Node::List(items) => Some(items),
                _ => None,
            },
            _ => None,
        }
    }

    pub(super) fn as_dict(&self, item: Item) -> Option<&[(Item, Item)]> {
        match item {
            Item::Node(id) => match self.node(id) {
                Node::Dict(pairs) => Some(pairs),
                _ => None,
            },
            _ => None,
        }
    }

    pub(super) fn as_global(&self, item: Item) -> Option<(&'a str, &'a str)> {
        match item {
            Item::Node(id) => self.global(id),
            _ => None,
        }
    }

    fn global(&self, id: u32) -> Option<(&'a str, &'a str)> {
        match self.node(id) {
            Node::Global { module, name } => Some((self.str(*module), self.str(*name))),
            _ => None,
        }
    }

    /// An object, as (module and name of what made it, arguments, state).
    #[allow(clippy::type_complexity)] // three parts that are taken apart at once
    pub(super) fn as_object(&self, item: Item) -> Option<((&'a str, &'a str), &[Item], Option<Item>)> {
        let Item::Node(id) = item else { return None };
        match self.node(id) {
            Node::Object { callable, args, state } => Some((self.global(*callable)?, self.tuple(*args)?, *state)),
            _ => None,
        }
    }

    /// The value of the last pair of `dict` with the key, as in Python.
    pub(super) fn get(&self, dict: Item, key: &str) -> Option<Item> {
        let pairs = self.as_dict(dict)?;
        let found = pairs.iter().rev().find(|(k, _)| self.as_str(*k) == Some(key));
        found.map(|(_, value)| *value)
    }
}

struct Machine<'a, 'r> {
    pickle: Pickle<'a>,
    rules: &'r Rules,
    at: usize,
    stack: Vec<Item>,
    marks: Vec<usize>,
    memo: Vec<Item>,
}

impl Machine<'_, '_> {
    fn run(&mut self) -> FaultResult<()> {
        loop {
            let at = self.at;
            let op = self.take::<1>()?[0];
            if self.step(op, at)? {
                break;
            }
        }
        if self.at != self.pickle.input.len() {
            return Err(self.fault("bytes after the end of the pickle"));
        }
        self.pickle.top = self.pop()?;
        if self.stack.is_empty() && self.marks.is_empty() {
            Ok(())
        } else {
            Err(self.fault("values left on the stack"))
        }
    }

    /// Executes one opcode; true at the end.
    #[allow(clippy::too_many_lines)] // one line an opcode
    fn step(&mut self, op: u8, at: usize) -> FaultResult<bool> {
        match op {
            // PROTO
            0x80 => match self.take::<1>()?[0] {
                2..=5 if at == 0 => {}
                version => return Err(Fault::Unsupported(format!("pickle protocol {version}"))),
            },
            // FRAME: its length is a hint; what it holds is checked as it is read.
            0x95 => {
                let len = u64::from_le_bytes(self.take()?);
                if len > (self.pickle.input.len() - self.at) as u64 {
                    return Err(self.fault("a frame longer than the pickle"));
                }
            }
            b'.' => return Ok(true),
            b'N' => self.stack.push(Item::None),
            0x88 => self.stack.push(Item::Bool(true)),
            0x89 => self.stack.push(Item::Bool(false)),
            b'J' => {
                let n = i32::from_le_bytes(self.take()?);
                self.stack.push(Item::Int(n.into()));
            }
            b'K' => {
                let n = self.take::<1>()?[0];
                self.stack.push(Item::Int(n.into()));
            }
            b'M' => {
                let n = u16::from_le_bytes(self.take()?);
                self.stack.push(Item::Int(n.into()));
            }
            0x8a => self.long()?,
            b'G' => {
                let n = f64::from_be_bytes(self.take()?);
                self.stack.push(Item::Float(n));
            }
            0x8c => {
                let len = self.take::<1>()?[0].into();
                self.text(len)?;
            }
            b'X' => {
                let len = u32::from_le_bytes(self.take()?).into();
                self.text(len)?;
            }
            0x8d => {
                let len = u64::from_le_bytes(self.take()?);
                self.text(len)?;
            }
            b'C' => {
                let len = self.take::<1>()?[0].into();
                self.blob(len)?;
            }
            b'B' => {
                let len = u32::from_le_bytes(self.take()?).into();
                self.blob(len)?;
            }
            0x8e => {
                let len = u64::from_le_bytes(self.take()?);
                self.blob(len)?;
            }
            b'(' => self.marks.push(self.stack.len()),
            b')' => self.tuple(self.stack.len())?,
            0x85..=0x87 => {
                let count = usize::from(op - 0x84);
                let from = self.floor(count)?;
                self.tuple(from)?;
            }
            b't' => {
                let from = self.pop_mark()?;
                self.tuple(from)?;
            }
            b']' => self.push_node(Node::List(Vec::new()))?,
            b'}' => self.push_node(Node::Dict(Vec::new()))?,
            b'a' => {
                let from = self.floor(1)?;
                self.append(from)?;
            }
            b'e' => {
                let from = self.pop_mark()?;
                self.append(from)?;
            }
            b's' => {
                let from = self.floor(2)?;
                self.set_items(from)?;
            }
            b'u' => {
                let from = self.pop_mark()?;
                self.set_items(from)?;
            }
            // memo
            b'q' => {
                let index = self.take::<1>()?[0].into();
                self.put(index)?;
            }
            b'r' => {
                let index = u32::from_le_bytes(self.take()?) as usize;
                self.put(index)?;
            }
            0x94 => self.put(self.memo.len())?,
            b'h' => {
                let index = self.take::<1>()?[0].into();
                self.get(index)?;
            }
            b'j' => {
                let index = u32::from_le_bytes(self.take()?) as usize;
                self.get(index)?;
            }
            // globals and what is made with them
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name)?;
            }
            0x93 => match (self.pop()?, self.pop()?) {
                (Item::Str(name), Item::Str(module)) => self.global(module, name)?,
                _ => return Err(self.fault("a global whose name is not text")),
            },
            // REDUCE and NEWOBJ
            b'R' | 0x81 => self.object()?,
            b'b' => self.build()?,
            b'Q' if self.rules.persistent => {
                let id = self.pop()?;
                self.push_node(Node::Persistent(id))?;
            }
            // INST names a global too: say which.
            b'i' => {
                let (module, name) = (self.line()?, self.line()?);
                return Err(Fault::Forbidden(self.full_name(module, name)));
            }
            // EXT1, EXT2, EXT4: a global by a number of the reader's own registry.
            0x82..=0x84 => return Err(Fault::Forbidden("an entry of the extension registry".into())),
            _ => {
                return Err(Fault::corrupt(
                    at as u64,
                    format!("pickle opcode {op:#04x} is not allowed"),
                ));
            }
        }
        Ok(false)
    }

    fn fault(&self, reason: &str) -> Fault {
        Fault::corrupt(self.at as u64, format!("pickle: {reason}"))
    }

    fn take<const N: usize>(&mut self) -> FaultResult<[u8; N]> {
        match self.pickle.input[self.at..].first_chunk::<N>() {
            Some(bytes) => {
                self.at += N;
                Ok(*bytes)
            }
            None => Err(self.fault("it ends too early")),
        }
    }

    fn span(&mut self, len: u64) -> FaultResult<Span> {
        let left = self.pickle.input.len() - self.at;
        match usize::try_from(len) {
            Ok(len) if len <= left => {
                let span = self.span_of(self.at, len)?;
                self.at += len;
                Ok(span)
            }
            _ => Err(self.fault("it ends too early")),
        }
    }

    fn span_of(&self, at: usize, len: usize) -> FaultResult<Span> {
        match (u32::try_from(at), u32::try_from(len)) {
            (Ok(at), Ok(len)) => Ok(Span { at, len }),
            _ => Err(self.fault("it is too long")),
        }
    }

    fn utf8(&self, span: Span) -> FaultResult<Span> {
        match std::str::from_utf8(self.pickle.bytes(span)) {
            Ok(_) => Ok(span),
            Err(_) => Err(self.fault("text that is not UTF-8")),
        }
    }

    fn text(&mut self, len: u64) -> FaultResult<()> {
        let span = self.span(len)?;
        let span = self.utf8(span)?;
        self.stack.push(Item::Str(span));
        Ok(())
    }

    fn blob(&mut self, len: u64) -> FaultResult<()> {
        let span = self.span(len)?;
        self.stack.push(Item::Bytes(span));
        Ok(())
    }

    /// The text up to the next line feed, which is taken too.
    fn line(&mut self) -> FaultResult<Span> {
        let rest = &self.pickle.input[self.at..];
        let Some(len) = rest.iter().position(|byte| *byte == b'\n') else {
            return Err(self.fault("it ends too early"));
        };
        let span = self.span_of(self.at, len)?;
        self.at += len + 1;
        self.utf8(span)
    }

    /// LONG1: a two's complement integer, of which 64 bits are enough for any size.
    fn long(&mut self) -> FaultResult<()> {
        let len = usize::from(self.take::<1>()?[0]);
        if len > 8 {
            return Err(self.fault("an integer of more than 64 bits"));
        }
        let span = self.span(len as u64)?;
        let bytes = self.pickle.bytes(span);
        let sign = if bytes.last().is_some_and(|b| b & 0x80 != 0) {
            0xff
        } else {
            0
        };
        let mut wide = [sign; 8];
        wide[..len].copy_from_slice(bytes);
        self.stack.push(Item::Int(i64::from_le_bytes(wide)));
        Ok(())
    }

    /// Where the part of the stack that belongs to the innermost mark begins.
    fn base(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn floor(&self, count: usize) -> FaultResult<usize> {
        match self.stack.len().checked_sub(count) {
            Some(from) if from >= self.base() => Ok(from),
            _ => Err(self.fault("too few values on the stack")),
        }
    }

    fn pop(&mut self) -> FaultResult<Item> {
        let from = self.floor(1)?;
        let item = self.stack[from];
        self.stack.truncate(from);
        Ok(item)
    }

    fn pop_mark(&mut self) -> FaultResult<usize> {
        self.marks.pop().ok_or_else(|| self.fault("no mark on the stack"))
    }

    fn push_node(&mut self, node: Node) -> FaultResult<()> {
        let Ok(id) = u32::try_from(self.pickle.nodes.len()) else {
            return Err(self.fault("too many values"));
        };
        self.pickle.nodes.push(node);
        self.stack.push(Item::Node(id));
        Ok(())
    }

    /// Makes a tuple of the stack from `from` up.
    fn tuple(&mut self, from: usize) -> FaultResult<()> {
        let pool = &mut self.pickle.pool;
        let (Ok(first), Ok(len)) = (u32::try_from(pool.len()), u32::try_from(self.stack.len() - from)) else {
            return Err(self.fault("too many values"));
        };
        pool.extend(self.stack.drain(from..));
        self.push_node(Node::Tuple { first, len })
    }

    fn container(&mut self, from: usize) -> FaultResult<u32> {
        match from.checked_sub(1) {
            Some(below) if below >= self.base() => match self.stack[below] {
                Item::Node(id) => Ok(id),
                _ => Err(self.fault("an item for what is not a container")),
            },
            _ => Err(self.fault("too few values on the stack")),
        }
    }

    fn append(&mut self, from: usize) -> FaultResult<()> {
        let id = self.container(from)?;
        match &mut self.pickle.nodes[id as usize] {
            Node::List(items) => {
                items.extend(self.stack.drain(from..));
                Ok(())
            }
            _ => Err(self.fault("an item for what is not a list")),
        }
    }

    fn set_items(&mut self, from: usize) -> FaultResult<()> {
        let id = self.container(from)?;
        match &mut self.pickle.nodes[id as usize] {
            Node::Dict(pairs) if (self.stack.len() - from).is_multiple_of(2) => {
                pairs.extend(self.stack[from..].chunks_exact(2).map(|pair| (pair[0], pair[1])));
                self.stack.truncate(from);
                Ok(())
            }
            _ => Err(self.fault("a pair for what is not a dict")),
        }
    }

    /// Picklers number what they remember from 0 up, without a gap.
    fn put(&mut self, index: usize) -> FaultResult<()> {
        let item = self.stack[self.floor(1)?];
        match index.cmp(&self.memo.len()) {
            Ordering::Less => self.memo[index] = item,
            Ordering::Equal => self.memo.push(item),
            Ordering::Greater => return Err(self.fault("a memo index out of order")),
        }
        Ok(())
    }

    fn get(&mut self, index: usize) -> FaultResult<()> {
        match self.memo.get(index) {
            Some(item) => {
                self.stack.push(*item);
                Ok(())
            }
            _ => Err(self.fault("a memo index that was never set")),
        }
    }

    fn full_name(&self, module: Span, name: Span) -> String {
        format!("{}.{}", self.pickle.str(module), self.pickle.str(name))
    }

    fn global(&mut self, module: Span, name: Span) -> FaultResult<()> {
        if !(self.rules.allow)(self.pickle.str(module), self.pickle.str(name)) {
            return Err(Fault::Forbidden(self.full_name(module, name)));
        }
        self.push_node(Node::Global { module, name })
    }

    fn object(&mut self) -> FaultResult<()> {
        let (args, callable) = (self.pop()?, self.pop()?);
        let (Some(arguments), Some(global)) = (self.pickle.as_tuple(args), self.pickle.as_global(callable)) else {
            return Err(self.fault("a call of what is not a global, or without a tuple of arguments"));
        };
        match (global, arguments) {
            // Both are plain data by another name.
            (("torch", "Size"), [sizes]) if self.pickle.as_tuple(*sizes).is_some() => {
                let sizes = *sizes;
                self.stack.push(sizes);
                Ok(())
            }
            (("collections", "OrderedDict"), []) => self.push_node(Node::Dict(Vec::new())),
            _ => match (callable, args) {
                (Item::Node(callable), Item::Node(args)) => self.push_node(Node::Object {
                    callable,
                    args,
                    state: None,
                }),
                _ => unreachable!("a global and a tuple are nodes"),
            },
        }
    }

    fn build(&mut self) -> FaultResult<()> {
        let given = self.pop()?;
        let from = self.floor(1)?;
        if let Item::Node(id) = self.stack[from]
            && let Node::Object {
                state: state @ None, ..
            } = &mut self.pickle.nodes[id as usize]
        {
            *state = Some(given);
            return Ok(());
        }
        Err(self.fault("a state for what is not a new object"))
    }
}
