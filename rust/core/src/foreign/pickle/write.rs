//! Writing of a part of a pickle as a pickle of its own.

use std::collections::HashMap;

use super::{Item, Made, Node, Pickle, Span, Then, most_bytes};
use crate::foreign::fault::{Fault, FaultResult};

/// Limit on the nesting of values, about that of Python's own pickler.
pub(in crate::foreign) const MAX_DEPTH: u32 = 1000;

impl Pickle<'_> {
    /// Returns a pickle of one value (protocol 2, which `torch.save` uses), and each persistent id
    /// in it once.
    ///
    /// # Errors
    /// Values that are nested too deep, names that protocol 2 cannot write, and results that are
    /// too long for the input.
    pub(in crate::foreign) fn write(&self, item: Item) -> FaultResult<(Vec<u8>, Vec<Item>)> {
        let mut writer = Writer {
            pickle: self,
            out: b"\x80\x02".to_vec(),
            longest: most_bytes(self.len()),
            todo: vec![Task::Out(b"."), Task::Item(item, 0)],
            memo: HashMap::new(),
            persistent: Vec::new(),
        };
        writer.run()?;
        Ok((writer.out, writer.persistent))
    }
}

struct Writer<'a> {
    pickle: &'a Pickle<'a>,
    out: Vec<u8>,
    /// Limit on the length. Some parts are written as often as they are used, but honest values
    /// stay far below it.
    longest: u64,
    /// Tasks, the next one last. With a list of tasks, deep nesting cannot exhaust the stack.
    todo: Vec<Task<'a>>,
    /// The number of each node and text in the new memo.
    memo: HashMap<Known, u32>,
    persistent: Vec<Item>,
}

/// Tasks of the writer. The numbers are depths.
#[derive(Clone, Copy)]
enum Task<'a> {
    Out(&'static [u8]),
    Item(Item, u32),
    Items(&'a [Item], u32),
    Pairs(&'a [(Item, Item)], u32),
    /// End of a node, which is added to the memo.
    Made(u32),
    /// The operations on an object after it was made.
    Filled(u32, u32),
}

/// Keys of the memo.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Known {
    Node(u32),
    /// Text or bytes.
    Span(Span),
}

impl<'a> Writer<'a> {
    fn run(&mut self) -> FaultResult<()> {
        while let Some(task) = self.todo.pop() {
            match task {
                Task::Out(bytes) => self.out.extend(bytes),
                Task::Item(item, depth) => self.item(item, depth)?,
                Task::Items([first, rest @ ..], depth) => {
                    self.next([Task::Item(*first, depth), Task::Items(rest, depth)]);
                }
                Task::Pairs([(key, value), rest @ ..], depth) => self.next([
                    Task::Item(*key, depth),
                    Task::Item(*value, depth),
                    Task::Pairs(rest, depth),
                ]),
                Task::Items([], _) | Task::Pairs([], _) => {}
                Task::Made(id) => {
                    self.remember_unless_made(id);
                }
                Task::Filled(id, depth) => self.fill(id, depth),
            }
            if self.out.len() as u64 > self.longest {
                return Err(Fault::Unsupported(
                    "a value that grows without bound as it repeats itself".into(),
                ));
            }
        }
        Ok(())
    }

    /// Schedules these tasks next, in this order.
    fn next<const N: usize>(&mut self, tasks: [Task<'a>; N]) {
        self.todo.extend(tasks.into_iter().rev());
    }

    fn item(&mut self, item: Item, depth: u32) -> FaultResult<()> {
        if depth > MAX_DEPTH {
            let what = format!("a value nested more than {MAX_DEPTH} deep");
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
            Item::Str(span) | Item::Surrogates(span) => {
                if !self.recall(Known::Span(span)) {
                    self.op(b'X', &span.len.to_le_bytes());
                    self.out.extend(self.pickle.bytes(span));
                    self.remember(Known::Span(span));
                }
            }
            Item::Bytes(span) => {
                if !self.recall(Known::Span(span)) {
                    self.bytes(span)?;
                    self.remember(Known::Span(span));
                }
            }
            Item::Node(id) => {
                if !self.recall(Known::Node(id)) {
                    self.node(id, depth + 1)?;
                }
            }
        }
        Ok(())
    }

    fn op(&mut self, op: u8, argument: &[u8]) {
        self.out.push(op);
        self.out.extend(argument);
    }

    /// Writes bytes as a call, as Python does: protocol 2 has no opcode for them.
    fn bytes(&mut self, span: Span) -> FaultResult<()> {
        let latin: String = self.pickle.bytes(span).iter().map(|&byte| char::from(byte)).collect();
        self.out.extend(b"c_codecs\nencode\n");
        let len = u32::try_from(latin.len())
            .map_err(|_| Fault::Unsupported("bytes over 2 GiB".into()))?;
        self.op(b'X', &len.to_le_bytes());
        self.out.extend(latin.as_bytes());
        self.op(b'X', &6_u32.to_le_bytes());
        self.out.extend(b"latin1\x86R");
        Ok(())
    }

    fn remember(&mut self, known: Known) {
        let index = u32::try_from(self.memo.len()).expect("no more than there are nodes and texts");
        self.memo.insert(known, index);
        self.op(b'r', &index.to_le_bytes());
    }

    /// Writes a memo entry, if there is one. Returns whether there is.
    fn recall(&mut self, known: Known) -> bool {
        let index = self.memo.get(&known).copied();
        if let Some(index) = index {
            self.op(b'j', &index.to_le_bytes());
        }
        index.is_some()
    }

    /// Adds a new node to the memo, and returns false. If the node contains itself, it was already
    /// written among its parts. Then this drops the second copy, uses the one in the memo, and
    /// returns true.
    fn remember_unless_made(&mut self, id: u32) -> bool {
        if self.memo.contains_key(&Known::Node(id)) {
            self.out.push(b'0');
            return self.recall(Known::Node(id));
        }
        self.remember(Known::Node(id));
        false
    }

    fn node(&mut self, id: u32, depth: u32) -> FaultResult<()> {
        let pickle = self.pickle;
        match pickle.node(id) {
            Node::Tuple { .. } => {
                let items = pickle.tuple(Item::Node(id)).unwrap_or_default();
                self.out.push(b'(');
                self.next([Task::Items(items, depth), Task::Out(b"t"), Task::Made(id)]);
            }
            Node::List { items, .. } => {
                self.out.push(b']');
                self.remember(Known::Node(id));
                self.append(items, depth);
            }
            Node::Dict { ordered, pairs, state, .. } => {
                let begin: &[u8] = if *ordered { b"ccollections\nOrderedDict\n)R" } else { b"}" };
                self.out.extend(begin);
                self.remember(Known::Node(id));
                if let Some(state) = state {
                    self.next([Task::Item(*state, depth), Task::Out(b"b")]);
                }
                self.set(pairs, depth);
            }
            Node::Set { frozen, items } => {
                let class: &[u8] =
                    if *frozen { b"c__builtin__\nfrozenset\n]" } else { b"c__builtin__\nset\n]" };
                self.out.extend(class);
                self.next([Task::Out(b"\x85R"), Task::Made(id)]);
                self.append(items, depth);
            }
            Node::ByteArray(span) => {
                self.out.extend(b"c__builtin__\nbytearray\n");
                self.bytes(*span)?;
                self.out.extend(b"\x85R");
                self.remember(Known::Node(id));
            }
            Node::Global { module, name } => {
                self.global(*module, *name)?;
                self.remember(Known::Node(id));
            }
            Node::Object { callable, args, how, .. } => {
                self.check_unchanged(id, *args)?;
                let [callable, args] =
                    [*callable, *args].map(|id| Task::Item(Item::Node(id), depth));
                let then = Task::Filled(id, depth);
                match how {
                    Made::Called => self.next([callable, args, Task::Out(b"R"), then]),
                    Made::New => self.next([callable, args, Task::Out(b"\x81"), then]),
                    // The function for this opcode in other protocols.
                    Made::NewWith(named) => {
                        self.out.extend(b"ccopyreg\n__newobj_ex__\n(");
                        self.next([
                            callable,
                            args,
                            Task::Item(*named, depth),
                            Task::Out(b"tR"),
                            then,
                        ]);
                    }
                }
            }
            Node::Persistent(item) => {
                // Files of torch before 1.6 also have the source code of a module's class.
                if let Some(class) = pickle.module_class(*item) {
                    self.next([Task::Item(class, depth)]);
                    return Ok(());
                }
                self.persistent.push(*item);
                self.next([Task::Out(b"Q"), Task::Made(id)]);
                self.persistent_id(*item, depth);
            }
        }
        Ok(())
    }

    /// Refuses a call that copies a container, if the container changes afterwards: written whole
    /// before the call, it would give another result.
    fn check_unchanged(&self, call: u32, args: u32) -> FaultResult<()> {
        let pickle = self.pickle;
        let is_copied = pickle.made_by(Item::Node(call)).is_some_and(|(module, _)| {
            let package = module.split('.').next();
            matches!(package, Some("__builtin__" | "builtins" | "collections" | "torch"))
        });
        // The arguments of a tensor's function are a tuple among those of the call.
        let inner = |arg: &Item| pickle.tuple(*arg).unwrap_or_default().iter();
        let args = pickle.as_plain_tuple(args);
        let changed = |arg: &Item| pickle.is_changed_after(*arg, Item::Node(call));
        if is_copied && args.iter().chain(args.iter().flat_map(inner)).any(changed) {
            let name = pickle.name_of(call);
            return Err(Fault::Unsupported(format!(
                "a call of {name} with something that changes afterwards"
            )));
        }
        Ok(())
    }

    /// Writes a global. A name in a class, which protocol 4 writes with dots, becomes
    /// `getattr(class, name)`, as Python writes it.
    fn global(&mut self, module: Span, name: Span) -> FaultResult<()> {
        let [module, name] = [module, name].map(|span| self.pickle.str(span));
        if module.contains('\n') || name.contains('\n') {
            return Err(Fault::Forbidden(format!("{module}.{name}")));
        }
        let mut parts = name.split('.');
        let outermost = parts.next().unwrap_or_default();
        for _ in parts.clone() {
            self.out.extend(b"c__builtin__\ngetattr\n");
        }
        self.out.extend(format!("c{module}\n{outermost}\n").bytes());
        for part in parts {
            let len = u32::try_from(part.len()).expect("part of a pickle");
            self.op(b'X', &len.to_le_bytes());
            self.out.extend(part.bytes());
            self.out.extend(b"\x86R");
        }
        Ok(())
    }

    /// Writes the operations on an object, unless they were written before.
    fn fill(&mut self, id: u32, depth: u32) {
        if self.remember_unless_made(id) {
            return;
        }
        let pickle = self.pickle;
        if let Node::Object { then, .. } = pickle.node(id) {
            for then in then.iter().rev() {
                match then {
                    Then::State(state) => self.next([Task::Item(*state, depth), Task::Out(b"b")]),
                    Then::Append(items) => self.append(items, depth),
                    Then::Set(pairs) => self.set(pairs, depth),
                }
            }
        }
    }

    /// Writes the id of a storage. torch before 1.6 wrote a sixth part, for views, which is `None`
    /// here.
    fn persistent_id(&mut self, item: Item, depth: u32) {
        match self.pickle.tuple(item) {
            Some([parts @ .., Item::None]) if parts.len() == 5 => {
                self.next([Task::Out(b"("), Task::Items(parts, depth), Task::Out(b"t")]);
            }
            _ => self.next([Task::Item(item, depth)]),
        }
    }

    fn append(&mut self, items: &'a [Item], depth: u32) {
        if !items.is_empty() {
            self.next([Task::Out(b"("), Task::Items(items, depth), Task::Out(b"e")]);
        }
    }

    fn set(&mut self, pairs: &'a [(Item, Item)], depth: u32) {
        if !pairs.is_empty() {
            self.next([Task::Out(b"("), Task::Pairs(pairs, depth), Task::Out(b"u")]);
        }
    }
}
