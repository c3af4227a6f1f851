"""Read the pickle of a stock `.metadata` as plain data, executing none of it.

This is an interpreter of its own and not a subclass of `pickle.Unpickler`: it has no way to import or call
anything. Globals must be on a list before they become even a name; calls and instances are recorded, never made. It keeps the rules of
`rust/core/src/source/pickle.rs`, which reads large files fast; each is tested against the other's fixtures.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import CorruptIndexError, UnsafePickleError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
# Where releases of torch before 2.3 took the class of tensor properties from.
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"

DTYPES = frozenset(
    [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "bfloat16",
        "complex64",
        "complex128",
        "complex32",
        "bcomplex32",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ]
)
# Can be named in a `.metadata`, and have no raw bytes of their own.
_OTHER_DTYPES = frozenset(
    [
        "bits16",
        "bits1x8",
        "bits2x4",
        "bits4x2",
        "bits8",
        "int1",
        "int2",
        "int3",
        "int4",
        "int5",
        "int6",
        "int7",
        "qint32",
        "qint8",
        "quint2x4",
        "quint4x2",
        "quint8",
        "uint1",
        "uint2",
        "uint3",
        "uint4",
        "uint5",
        "uint6",
        "uint7",
        "half",
        "float",
    ]
)

_PATHS = frozenset(("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"))
_ALLOWED: dict[str, frozenset[str]] = {
    _METADATA: frozenset(
        [
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ]
    ),
    _FILESYSTEM: frozenset(("_StorageInfo",)),
    _OLD_PROPERTIES: frozenset(("TensorProperties", "MEM_FORMAT_ENCODING")),
    "torch": DTYPES | _OTHER_DTYPES | {"Size"},
    "torch.serialization": frozenset(("_get_layout",)),
    "collections": frozenset(("OrderedDict",)),
    # The folder that was saved to; Python 3.13 has the classes in another place.
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}


class Global(NamedTuple):
    """A name that was on the list. Never resolved."""

    module: str
    name: str


class Object:
    """What a pickle would have made by calling `callable(*args)`, and the state it would have given it."""

    __slots__ = ("args", "made_by", "state")

    def __init__(self, made_by: Global, args: tuple[Any, ...]) -> None:
        self.made_by = made_by
        self.args = args
        self.state: Any = None


class Dict(list[tuple[Any, Any]]):
    """The pairs of a dict: keys need not be hashable, and nothing is compared."""

    def get(self, key: str) -> Any:
        """The value of the last pair with the key, or None."""
        for k, value in reversed(self):
            if isinstance(k, str) and k == key:
                return value
        return None


class _Mark:
    pass


_MARK = _Mark()


def unpickle(data: bytes) -> Any:
    """The value of a pickle as plain data: `None`, bool, int, float, str, bytes, tuple, list, `Dict`, `Global` and `Object`.

    Raises:
        UnsafePickleError: it names something that is not on the list.
        CorruptIndexError: it is not a well-formed pickle, or uses what no `.metadata` does.
    """
    try:
        return _Machine(data).run()
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as e:
        raise CorruptIndexError(f"not a well-formed pickle: {e}") from None


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        data, ops = self.data, _OPS
        while True:
            op = data[self.at]
            self.at += 1
            if op == 0x2E:  # STOP
                break
            handler = ops.get(op)
            if handler is None:
                raise CorruptIndexError(f"pickle opcode {op:#04x} is not allowed (at byte {self.at - 1})")
            handler(self)
        if self.at != len(data) or len(self.stack) != 1 or self.stack[0] is _MARK:
            raise CorruptIndexError("bytes after the end of the pickle, or values left on its stack")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise CorruptIndexError("a pickle ends too early")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, form: str) -> int:
        (n,) = struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))
        return int(n)

    def pop(self) -> Any:
        item = self.stack.pop()
        if item is _MARK:
            raise CorruptIndexError("too few values on the stack of a pickle")
        return item

    def pop_mark(self) -> list[Any]:
        stack = self.stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                items = stack[place + 1 :]
                del stack[place:]
                return items
        raise CorruptIndexError("no mark on the stack of a pickle")

    def push_global(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise CorruptIndexError("a global whose name is not text")
        if name not in _ALLOWED.get(module, ()):
            raise UnsafePickleError(f"unsafe pickle: it asks for {module}.{name}")
        self.stack.append(Global(module, name))

    # one method an opcode, or a few alike

    def proto(self) -> None:
        version = self.take(1)[0]
        if self.at != 2 or not 2 <= version <= 5:
            raise UnsupportedError(f"pickle protocol {version}")

    def frame(self) -> None:
        if self.number("Q") > len(self.data) - self.at:
            raise CorruptIndexError("a frame longer than its pickle")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def text(self, length: int) -> None:
        self.stack.append(self.take(length).decode())

    def long1(self) -> None:
        length = self.take(1)[0]
        if length > 8:
            raise CorruptIndexError("an integer of more than 64 bits")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def binfloat(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def tuple_of(self, count: int) -> None:
        items = tuple(self.pop() for _ in range(count))
        self.stack.append(items[::-1])

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise CorruptIndexError("an item for what is not a list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not Dict or len(items) % 2:
            raise CorruptIndexError("a pair for what is not a dict")
        target.extend(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def put(self, index: int) -> None:
        item = self.stack[-1]
        if item is _MARK or index > len(self.memo):
            raise CorruptIndexError("a memo index out of order")
        if index == len(self.memo):
            self.memo.append(item)
        else:
            self.memo[index] = item

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.push_global(module, name)

    def inst(self) -> None:
        raise UnsafePickleError(f"unsafe pickle: it asks for {self.line()}.{self.line()}")

    def extension(self) -> None:
        raise UnsafePickleError("unsafe pickle: it asks for an entry of the extension registry")

    def make(self) -> None:
        args, made_by = self.pop(), self.pop()
        if not isinstance(made_by, Global) or type(args) is not tuple:
            raise CorruptIndexError("a call of what is not a global, or without a tuple of arguments")
        if made_by == ("torch", "Size") and len(args) == 1 and type(args[0]) is tuple:
            self.stack.append(args[0])
        elif made_by == ("collections", "OrderedDict") and not args:
            self.stack.append(Dict())
        else:
            self.stack.append(Object(made_by, args))

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if type(target) is not Object or target.state is not None:
            raise CorruptIndexError("a state for what is not a new object")
        target.state = state


_OPS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("J"): lambda m: m.stack.append(m.number("i")),
    ord("K"): lambda m: m.stack.append(m.number("B")),
    ord("M"): lambda m: m.stack.append(m.number("H")),
    0x8A: _Machine.long1,
    ord("G"): _Machine.binfloat,
    0x8C: lambda m: m.text(m.number("B")),
    ord("X"): lambda m: m.text(m.number("I")),
    0x8D: lambda m: m.text(m.number("Q")),
    ord("C"): lambda m: m.stack.append(m.take(m.number("B"))),
    ord("B"): lambda m: m.stack.append(m.take(m.number("I"))),
    0x8E: lambda m: m.stack.append(m.take(m.number("Q"))),
    ord("("): lambda m: m.stack.append(_MARK),
    ord(")"): lambda m: m.stack.append(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.stack.append(tuple(m.pop_mark())),
    ord("]"): lambda m: m.stack.append([]),
    ord("}"): lambda m: m.stack.append(Dict()),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.pop_mark()),
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m.set_items(m.pop_mark()),
    ord("q"): lambda m: m.put(m.number("B")),
    ord("r"): lambda m: m.put(m.number("I")),
    0x94: lambda m: m.put(len(m.memo)),
    ord("h"): lambda m: m.get(m.number("B")),
    ord("j"): lambda m: m.get(m.number("I")),
    ord("c"): lambda m: m.push_global(m.line(), m.line()),
    0x93: _Machine.stack_global,
    ord("i"): _Machine.inst,
    0x82: _Machine.extension,
    0x83: _Machine.extension,
    0x84: _Machine.extension,
    ord("R"): _Machine.make,
    0x81: _Machine.make,
    ord("b"): _Machine.build,
}


def unpickle_metadata(data: bytes) -> dict[str, Any]:
    """What a `.metadata` says, as plain data.

    Returns:
        `files`: names of the data files, relative to the folder.
        `tensors`: of each FQN `(dtype, shape, requires_grad, memory_format, pin_memory, [(offsets, sizes), ...])`, where `dtype` is
        torch's name without the `torch.` and `memory_format` is 0 contiguous, 1 channels_last, 2 preserve.
        `values`: the FQNs of what is no tensor.
        `items`: `(fqn, offsets or None, file, offset, length)`, in bytes; `file` is an index in `files`.
        `planner_data`: tuples, lists, dicts and simple values; None where there is none.

    Raises:
        UnsafePickleError: the pickle names something that is not on the list.
        CorruptIndexError: it is not a `.metadata`.
        UnsupportedError: it is one, of data that cannot be read in place.
    """
    top = _state(unpickle(data), _METADATA, "Metadata")
    tensors: dict[str, Any] = {}
    values: dict[str, None] = {}
    for fqn, entry in _dict(top.get("state_dict_metadata"), "state_dict_metadata"):
        if not isinstance(fqn, str) or fqn in tensors or fqn in values:
            raise CorruptIndexError(f"an FQN that is not text, or is there twice: {fqn!r:.100}")
        if isinstance(entry, Object) and entry.made_by == (_METADATA, "BytesStorageMetadata"):
            values[fqn] = None
        else:
            tensors[fqn] = _tensor(fqn, _state(entry, _METADATA, "TensorStorageMetadata"))
    files: dict[str, int] = {}
    items = []
    for index, info in _dict(top.get("storage_data"), "storage_data"):
        items.append(
            _item(
                _state(index, _METADATA, "MetadataIndex"),
                _state(info, _FILESYSTEM, "_StorageInfo"),
                files,
            )
        )
    planner_data = _plain(top.get("planner_data"), [64 * len(data) + (1 << 16)], 0)
    return {
        "files": list(files),
        "tensors": tensors,
        "values": list(values),
        "items": items,
        "planner_data": planner_data,
    }


def _state(item: Any, module: str, name: str) -> Dict:
    if isinstance(item, Object) and item.made_by == (module, name) and not item.args and type(item.state) is Dict:
        return item.state
    raise CorruptIndexError(f"a {name} was expected")


def _dict(item: Any, name: str) -> Dict:
    if type(item) is Dict:
        return item
    raise CorruptIndexError(f"{name} is not a dict")


def _sizes(item: Any) -> tuple[int, ...]:
    if type(item) is tuple and len(item) <= 64 and all(type(n) is int and n >= 0 for n in item):
        return item
    raise CorruptIndexError("sizes or offsets that are none")


def _tensor(fqn: str, state: Dict) -> tuple[Any, ...]:
    properties = state.get("properties")
    names = ((_METADATA, "TensorProperties"), (_OLD_PROPERTIES, "TensorProperties"))
    if not isinstance(properties, Object) or properties.made_by not in names:
        raise CorruptIndexError(f"tensor {fqn!r}: its properties")
    fields = properties.state
    # Strides came with torch 2.15.
    if type(fields) is not tuple or len(fields) not in (5, 6):
        raise CorruptIndexError(f"tensor {fqn!r}: its properties are not 5 or 6 values")
    dtype, layout, requires_grad, memory_format, pin_memory = fields[:5]
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise CorruptIndexError(f"tensor {fqn!r}: its dtype")
    if dtype.name not in DTYPES:
        raise UnsupportedError(f"tensor {fqn!r} has dtype torch.{dtype.name}")
    if not isinstance(layout, Object) or layout.args != ("torch.strided",):
        raise UnsupportedError(f"tensor {fqn!r} has layout {getattr(layout, 'args', layout)!r:.50}")
    if not isinstance(memory_format, Object) or memory_format.args not in ((0,), (1,), (2,)):
        raise CorruptIndexError(f"tensor {fqn!r}: its memory format")
    chunks = []
    listed = state.get("chunks")
    if type(listed) is not list:
        raise CorruptIndexError(f"tensor {fqn!r}: it has no chunks")
    for chunk in listed:
        box = _state(chunk, _METADATA, "ChunkStorageMetadata")
        chunks.append((_sizes(box.get("offsets")), _sizes(box.get("sizes"))))
    shape = _sizes(state.get("size"))
    return (
        dtype.name,
        shape,
        requires_grad is True,
        memory_format.args[0],
        pin_memory is True,
        chunks,
    )


def _item(index: Dict, info: Dict, files: dict[str, int]) -> tuple[Any, ...]:
    fqn, offset = index.get("fqn"), index.get("offset")
    extensions = info.get("transform_descriptors")
    if extensions:
        raise UnsupportedError(f"{fqn!r} is stored through the extension {extensions!r:.100}")
    name, at, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if type(fqn) is not str or type(name) is not str or type(at) is not int or type(length) is not int:
        raise CorruptIndexError(f"stored data of {fqn!r:.100}: its place")
    if at < 0 or length < 0:
        raise CorruptIndexError(f"stored data of {fqn!r:.100}: its place in the file")
    if name.startswith("/") or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise CorruptIndexError(f"data file {name!r} leads out of the folder")
    file = files.setdefault(name, len(files))
    return fqn, None if offset is None else _sizes(offset), file, at, length


def _plain(item: Any, budget: list[int], depth: int) -> Any:
    """Planner data without the classes of this module. `budget` bounds what shared values are copied to."""
    budget[0] -= 1 + (len(item) if isinstance(item, (str, bytes)) else 0)
    if budget[0] < 0:
        raise UnsupportedError("planner data that repeats itself without measure")
    if depth > 64:
        raise UnsupportedError("planner data is nested more than 64 deep")
    if item is None or isinstance(item, (bool, int, float, str, bytes)):
        return item
    if type(item) is tuple:
        return tuple(_plain(part, budget, depth + 1) for part in item)
    if type(item) is list:
        return [_plain(part, budget, depth + 1) for part in item]
    if type(item) is Dict:
        pairs = [(_plain(key, budget, depth + 1), _plain(value, budget, depth + 1)) for key, value in item]
        try:
            return dict(pairs)
        except TypeError:
            raise CorruptIndexError("planner data with a key that cannot be one") from None
    raise UnsupportedError("planner data that is more than plain values")
