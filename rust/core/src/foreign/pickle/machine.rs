//! The interpreter of pickles: a stack and a memo. It can call nothing.
//!
//! It knows the opcodes that `pickle` emits for data (protocols 2 to 5), and refuses the others. A
//! global must be on the caller's list before it becomes a value. Calls and instances are recorded,
//! but never made. The bytes of everything that is allocated for the input are counted and limited.

mod parts;

use std::borrow::Cow;

use self::parts::{empty_dict, set};
use super::{Item, Made, Node, Pickle, Rules, Span, most_bytes};
use crate::foreign::fault::{Fault, FaultResult};

/// Limit on the bytes in the name of a global.
const MOST_NAME: u32 = 1024;

/// Reads the value at the start of `input`. Also returns the number of bytes that it takes.
pub(super) fn run<'a>(input: Cow<'a, [u8]>, rules: &Rules) -> FaultResult<(Pickle<'a>, usize)> {
    if u32::try_from(input.len()).is_err() {
        return Err(Fault::Unsupported(format!("a pickle of {} bytes", input.len())));
    }
    let mut machine = Machine {
        pickle: Pickle {
            input,
            nodes: Vec::new(),
            changed: Vec::new(),
            pool: Vec::new(),
            top: Item::None,
        },
        rules,
        at: 0,
        op_at: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        remembered: 0,
        empty: None,
        made: 0,
    };
    machine.run()?;
    Ok((machine.pickle, machine.at))
}

/// A value on the stack, and the start of the input that makes it.
#[derive(Clone, Copy)]
struct Slot {
    item: Item,
    at: usize,
}

/// A mark: the height of the stack, and the mark's position in the input.
#[derive(Clone, Copy)]
struct Mark {
    height: usize,
    at: usize,
}

struct Machine<'a, 'r> {
    pickle: Pickle<'a>,
    rules: &'r Rules,
    /// Position of the next byte.
    at: usize,
    /// Position of the current opcode.
    op_at: usize,
    stack: Vec<Slot>,
    marks: Vec<Mark>,
    memo: Vec<Option<Item>>,
    /// Number of entries in the memo.
    remembered: usize,
    /// The empty tuple, if it was made.
    empty: Option<Item>,
    /// Bytes of all nodes and of their contents.
    made: usize,
}

impl Machine<'_, '_> {
    fn run(&mut self) -> FaultResult<()> {
        let most = most_bytes(self.pickle.input.len());
        loop {
            self.op_at = self.at;
            let op = self.take::<1>()?[0];
            if self.step(op)? {
                break;
            }
            let held = size_of::<Slot>() * self.stack.len() + size_of::<Mark>() * self.marks.len();
            if (self.made + held) as u64 > most {
                return Err(Fault::Unsupported(format!(
                    "a pickle that makes more than {most} bytes"
                )));
            }
        }
        self.pickle.top = self.pop()?.item;
        if self.stack.is_empty() && self.marks.is_empty() {
            Ok(())
        } else {
            Err(self.fault("values left on the stack"))
        }
    }

    /// Executes one opcode. Returns true at the end.
    #[allow(clippy::too_many_lines)] // one line an opcode
    fn step(&mut self, op: u8) -> FaultResult<bool> {
        match op {
            // PROTO
            0x80 => match self.take::<1>()?[0] {
                2..=5 if self.op_at == 0 => {}
                version => return Err(Fault::Unsupported(format!("pickle protocol {version}"))),
            },
            // FRAME: its length is only a hint. The content is checked when it is read.
            0x95 => {
                let len = self.number::<8>()?;
                if len > (self.pickle.input.len() - self.at) as u64 {
                    return Err(self.fault("a frame longer than the pickle"));
                }
            }
            b'.' => return Ok(true),
            b'N' => self.push(Item::None),
            0x88 => self.push(Item::Bool(true)),
            0x89 => self.push(Item::Bool(false)),
            b'J' => {
                let n = i32::from_le_bytes(self.take()?);
                self.push(Item::Int(n.into()));
            }
            b'K' => {
                let n = self.take::<1>()?[0];
                self.push(Item::Int(n.into()));
            }
            b'M' => {
                let n = u16::from_le_bytes(self.take()?);
                self.push(Item::Int(n.into()));
            }
            0x8a => self.long::<1>()?,
            0x8b => self.long::<4>()?,
            b'G' => {
                let n = f64::from_be_bytes(self.take()?);
                self.push(Item::Float(n));
            }
            0x8c => self.text::<1>()?,
            b'X' => self.text::<4>()?,
            0x8d => self.text::<8>()?,
            // SHORT_BINSTRING and BINSTRING of Python 2, which readers take as text
            b'U' if self.rules.keep => self.text::<1>()?,
            b'T' if self.rules.keep => self.text::<4>()?,
            // INT, which Python 2 writes for more than 32 bits
            b'I' if self.rules.keep => {
                let digits = self.line()?;
                match self.pickle.str(digits).parse() {
                    Ok(n) => self.push(Item::Int(n)),
                    Err(_) => return Err(self.fault("an invalid number")),
                }
            }
            b'C' => self.blob::<1>()?,
            b'B' => self.blob::<4>()?,
            0x8e => self.blob::<8>()?,
            // BYTEARRAY8
            0x96 if self.rules.keep => {
                let bytes = self.span::<8>()?;
                self.push_node(Node::ByteArray(bytes), self.op_at)?;
            }
            // POP, POP_MARK: after a tuple that contains itself, which is in the memo by then
            b'0' if self.rules.keep => {
                if self.stack.len() > self.base() {
                    self.pop()?;
                } else {
                    self.pop_mark()?;
                }
            }
            b'1' if self.rules.keep => {
                let height = self.pop_mark()?.height;
                self.stack.truncate(height);
            }
            b'(' => self.marks.push(Mark { height: self.stack.len(), at: self.op_at }),
            b')' => self.empty_tuple()?,
            0x85..=0x87 => {
                let count = usize::from(op - 0x84);
                let from = self.floor(count)?;
                self.tuple(from, self.stack[from].at)?;
            }
            b't' => {
                let mark = self.pop_mark()?;
                self.tuple(mark.height, mark.at)?;
            }
            b']' => {
                let (items, places) = (Vec::new(), Vec::new());
                self.push_node(Node::List { items, places }, self.op_at)?;
            }
            b'}' => self.push_node(empty_dict(false), self.op_at)?,
            // EMPTY_SET, ADDITEMS, FROZENSET
            0x8f if self.rules.keep => self.push_node(set(false, Vec::new()), self.op_at)?,
            0x90 if self.rules.keep => {
                let from = self.pop_mark()?.height;
                self.add(from)?;
            }
            0x91 if self.rules.keep => {
                let mark = self.pop_mark()?;
                let items = self.stack.drain(mark.height..).map(|slot| slot.item).collect();
                self.push_node(set(true, items), mark.at)?;
            }
            b'a' => {
                let from = self.floor(1)?;
                self.append(from)?;
            }
            b'e' => {
                let from = self.pop_mark()?.height;
                self.append(from)?;
            }
            b's' => {
                let from = self.floor(2)?;
                self.set_items(from)?;
            }
            b'u' => {
                let from = self.pop_mark()?.height;
                self.set_items(from)?;
            }
            // memo
            b'q' => {
                let index = self.index::<1>()?;
                self.put(index)?;
            }
            b'r' => {
                let index = self.index::<4>()?;
                self.put(index)?;
            }
            0x94 => self.put(self.remembered)?,
            b'h' => self.get::<1>()?,
            b'j' => self.get::<4>()?,
            // globals and objects made with them
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name, self.op_at)?;
            }
            0x93 => match (self.pop()?.item, self.pop()?) {
                (Item::Str(name), Slot { item: Item::Str(module), at }) => {
                    self.global(module, name, at)?;
                }
                _ => return Err(self.fault("a global whose name is not text")),
            },
            b'R' => self.object(Made::Called)?,
            0x81 => self.object(Made::New)?,
            // NEWOBJ_EX
            0x92 if self.rules.keep => {
                let named = self.pop()?.item;
                self.object(Made::NewWith(named))?;
            }
            b'b' => self.build()?,
            b'Q' if self.rules.persistent => {
                let id = self.pop()?;
                self.push_node(Node::Persistent(id.item), id.at)?;
            }
            // INST names a global too, for the message.
            b'i' => {
                let (module, name) = (self.line()?, self.line()?);
                return Err(Fault::Forbidden(self.full_name(module, name)));
            }
            // EXT1, EXT2, EXT4: a global by its number in the reader's own registry.
            0x82..=0x84 => {
                return Err(Fault::Forbidden("an entry of the extension registry".into()));
            }
            _ => {
                return Err(Fault::corrupt(
                    self.op_at as u64,
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

    /// Takes a number of `N` bytes.
    fn number<const N: usize>(&mut self) -> FaultResult<u64> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&self.take::<N>()?);
        Ok(u64::from_le_bytes(wide))
    }

    /// Takes a number of `N` bytes that is an index in the memo.
    fn index<const N: usize>(&mut self) -> FaultResult<usize> {
        Ok(usize::try_from(self.number::<N>()?).unwrap_or(usize::MAX))
    }

    /// Takes a length of `N` bytes, and this many bytes.
    fn span<const N: usize>(&mut self) -> FaultResult<Span> {
        let len = self.number::<N>()?;
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

    fn text<const N: usize>(&mut self) -> FaultResult<()> {
        let span = self.span::<N>()?;
        match self.utf8(span) {
            Ok(span) => self.push(Item::Str(span)),
            Err(_) if self.rules.keep => self.push(Item::Surrogates(span)),
            Err(fault) => return Err(fault),
        }
        Ok(())
    }

    fn blob<const N: usize>(&mut self) -> FaultResult<()> {
        let span = self.span::<N>()?;
        self.push(Item::Bytes(span));
        Ok(())
    }

    /// Takes the text up to the next line feed, and the line feed.
    fn line(&mut self) -> FaultResult<Span> {
        let rest = &self.pickle.input[self.at..];
        let Some(len) = rest.iter().position(|byte| *byte == b'\n') else {
            return Err(self.fault("it ends too early"));
        };
        let span = self.span_of(self.at, len)?;
        self.at += len + 1;
        self.utf8(span)
    }

    /// Pushes an integer in two's complement. 64 bits are enough for any size.
    fn long<const N: usize>(&mut self) -> FaultResult<()> {
        let span = self.span::<N>()?;
        if span.len > 8 {
            if !self.rules.keep {
                return Err(self.fault("an integer of more than 64 bits"));
            }
            self.push(Item::Long(span));
            return Ok(());
        }
        let bytes = self.pickle.bytes(span);
        let sign = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
        let mut wide = [sign; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.push(Item::Int(i64::from_le_bytes(wide)));
        Ok(())
    }

    /// Returns the start of the stack's part above the innermost mark.
    fn base(&self) -> usize {
        self.marks.last().map_or(0, |mark| mark.height)
    }

    fn floor(&self, count: usize) -> FaultResult<usize> {
        match self.stack.len().checked_sub(count) {
            Some(from) if from >= self.base() => Ok(from),
            _ => Err(self.fault("too few values on the stack")),
        }
    }

    /// Pushes an item that this opcode alone makes.
    fn push(&mut self, item: Item) {
        self.stack.push(Slot { item, at: self.op_at });
    }

    fn pop(&mut self) -> FaultResult<Slot> {
        let from = self.floor(1)?;
        let slot = self.stack[from];
        self.stack.truncate(from);
        Ok(slot)
    }

    fn pop_mark(&mut self) -> FaultResult<Mark> {
        self.marks.pop().ok_or_else(|| self.fault("no mark on the stack"))
    }

    /// Adds the top of the stack to the memo. Picklers number its entries from 0 or 1 up, and some
    /// leave gaps. No number that is larger than the input is honest.
    fn put(&mut self, index: usize) -> FaultResult<()> {
        let item = self.stack[self.floor(1)?].item;
        if index > self.pickle.input.len() {
            return Err(self.fault("a memo index that is larger than the pickle"));
        }
        if index >= self.memo.len() {
            self.made += size_of::<Option<Item>>() * (index + 1 - self.memo.len());
            self.memo.resize(index + 1, None);
        }
        self.remembered += usize::from(self.memo[index].is_none());
        self.memo[index] = Some(item);
        Ok(())
    }

    fn get<const N: usize>(&mut self) -> FaultResult<()> {
        let index = self.index::<N>()?;
        match self.memo.get(index).copied().flatten() {
            Some(item) => {
                self.push(item);
                Ok(())
            }
            None => Err(self.fault("a memo index that was never set")),
        }
    }

    fn full_name(&self, module: Span, name: Span) -> String {
        format!("{}.{}", self.pickle.str(module), self.pickle.str(name))
    }

    fn global(&mut self, module: Span, name: Span, at: usize) -> FaultResult<()> {
        // Each call compares the name of the global that it calls.
        if module.len.saturating_add(name.len) > MOST_NAME {
            let what = format!("a pickle with a global whose name has more than {MOST_NAME} bytes");
            return Err(Fault::Unsupported(what));
        }
        if !(self.rules.allow)(self.pickle.str(module), self.pickle.str(name)) {
            return Err(Fault::Forbidden(self.full_name(module, name)));
        }
        self.push_node(Node::Global { module, name }, at)
    }
}
