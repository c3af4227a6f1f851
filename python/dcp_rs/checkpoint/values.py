"""Non-tensor values without torch: what ``torch.save`` wrote, read by an unpickler that knows a short list of names."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dcp_rs.checkpoint.elements import ITEMSIZES, bits_dtype, numpy_dtype
from dcp_rs.errors import CorruptDataError, UnsafePickleError, UnsupportedError

__all__ = ["WHOLE", "load_value", "unwrap", "unwrap_in"]

#: A mapping without tensors that DCP's flattening would change (it makes every key text, and drops what is empty), kept whole: DCP never
#: enters tuples. In what others wrote it is a value like any other.
WHOLE = "dcp_rs.whole"


def unwrap(value: Any) -> Any:
    """What was kept whole, or the value as it is."""
    is_whole = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and value[0] == WHOLE
    return value[1] if is_whole else value


def unwrap_in(tree: Any) -> Any:
    """A nested state dict, in which nothing is wrapped any more. Its dicts and lists are changed in place."""
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    if not any(issubclass(kind, dict | list | tuple) for kind in set(map(type, values))):
        return tree  # nothing but tensors, mostly: of twenty thousand each would be asked
    places = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(places):
        if isinstance(value, dict | list):
            unwrap_in(value)
        elif isinstance(value, tuple) and unwrap(value) is not value:
            tree[key] = unwrap(value)
    return tree


def load_value(fqn: str, data: bytes) -> Any:
    """The value behind the bytes of the entry ``fqn``. Nothing that is pickled runs.

    Tensors in it become NumPy arrays (of types that NumPy lacks: their bits), a ``torch.Size`` a tuple, dtypes and devices text.

    Raises:
        UnsafePickleError: it needs more than plain types and tensors.
        UnsupportedError: a tensor in it is of a kind that this release does not know, or in another byte order.
        CorruptDataError: it is not what ``torch.save`` writes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _Unpickler(fqn, archive).load()
    except UnsafePickleError:
        raise
    except UnsupportedError as error:
        msg = f"value {fqn!r} holds what is not read without torch: {error}"
        raise UnsupportedError(msg, tensor=fqn) from error
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError) as error:
        msg = f"value {fqn!r} is not what torch.save writes: {error}"
        raise CorruptDataError(msg, tensor=fqn) from error
    except (AttributeError, OverflowError, NotImplementedError, RuntimeError) as error:  # of pickles that nobody writes
        msg = f"value {fqn!r} cannot be unpickled: {error}"
        raise CorruptDataError(msg, tensor=fqn) from error


class _Unpickler(pickle.Unpickler):
    """Every global is looked up in a list of our own; each stands for a function of this module, or a plain type."""

    def __init__(self, fqn: str, archive: zipfile.ZipFile) -> None:
        self._fqn = fqn
        self._archive = archive
        # The folder in the archive is called as the file was.
        self._pickle = next((name for name in archive.namelist() if name.endswith("/data.pkl")), "")
        if not self._pickle:
            raise zipfile.BadZipFile("it holds no data.pkl")
        says_order = self._pickle.removesuffix("data.pkl") + "byteorder" in archive.namelist()
        if says_order and (order := self._record("byteorder")) != b"little":  # the core refuses these, too
            raise UnsupportedError(f"tensors in byte order {order.decode('latin1')[:16]!r}")
        super().__init__(io.BytesIO(self._record("data.pkl")))

    def _record(self, name: str) -> bytes:
        info = self._archive.getinfo(self._pickle.removesuffix("data.pkl") + name)
        if info.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile("a record is compressed")
        return self._archive.read(info)

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a global."""
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if module == "torch" and name.removesuffix("Storage") in _STORAGES:
            return _STORAGES[name.removesuffix("Storage")]
        if module == "torch" and name in ITEMSIZES:
            return full  # a dtype
        if full in _GLOBALS:
            found = _GLOBALS[full]
            # A pickle can set attributes of what it was given: it gets an object of its own. Those of BytesIO cannot be set, and only a class makes one.
            return found if isinstance(found, str) or found is io.BytesIO else partial(found)
        msg = (
            f"value {self._fqn!r} holds a {full}, which is not read without torch: "
            "dcp_rs.open(path) reads it with torch, where that allows the class"
        )
        raise UnsafePickleError(msg, tensor=self._fqn)

    def persistent_load(self, key: Any) -> _Storage:
        """A storage: its bytes, and what they are."""
        kind, dtype, record, _, _ = key
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(record, str):
            raise pickle.UnpicklingError(f"it refers to {kind!r}")
        return _Storage(self._record(f"data/{record}"), dtype)


class _Storage:
    """The memory of tensors."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: bytes, dtype: str) -> None:
        self.data = data
        self.dtype = dtype


def _tensor_v2(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any = None, _hooks: Any = None, flags: Any = None
) -> Any:
    """Elements of the storage's own dtype."""
    return _tensor(storage, storage.dtype if isinstance(storage, _Storage) else "", offset, shape, strides, flags)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, flags: Any = None
) -> Any:
    """Elements of a dtype of its own, over a storage of bytes."""
    if not isinstance(dtype, str):
        raise pickle.UnpicklingError("a tensor without a dtype")
    return _tensor(storage, dtype.removeprefix("torch."), offset, shape, strides, flags)


def _tensor(storage: Any, name: str, offset: Any, shape: Any, strides: Any, flags: Any) -> Any:
    import numpy as np

    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    dtype = numpy_dtype(name) or bits_dtype(name)
    byte_strides = [stride * dtype.itemsize for stride in strides]
    # NumPy checks that all of it lies in the bytes.
    view: Any = np.ndarray(tuple(shape), dtype, storage.data, offset * dtype.itemsize, byte_strides)
    array = view.copy()
    _change_signs(array, name, flags or {})
    return array


def _change_signs(array: Any, name: str, flags: Any) -> None:
    """In place, what torch computes where a tensor is used: it may be the conjugate, or the negative, of its memory."""
    import numpy as np

    if not isinstance(flags, dict):
        raise pickle.UnpicklingError("the flags of a tensor are no dict")
    on = {flag for flag, value in flags.items() if value}
    is_complex = "complex" in name
    if on == {"neg"} and array.dtype.name == name and array.dtype.kind in "iu":
        np.negative(array, out=array)
    elif on:
        signed = is_complex or (name in ("bfloat16", "float16", "float32", "float64") and "conj" not in on)
        if not signed or on - {"neg", "conj"}:
            raise UnsupportedError(f"a tensor of {name} with the flags {sorted(map(str, on))}")
        # Signs are highest bits, whatever NumPy takes the elements for.
        size = ITEMSIZES[name] // 2 if is_complex else ITEMSIZES[name]
        sign = 1 << (8 * size - 1)
        parts = array.reshape(-1).view(f"u{size}")
        if "neg" in on:
            parts ^= sign
        if "conj" in on:
            parts[1::2] ^= sign


def _text(encoded: str, encoding: str = "latin1") -> bytes:
    return str(encoded).encode("latin1" if encoding in ("latin1", "latin-1") else "ascii")


def _bytearray(*arguments: Any) -> bytearray:
    return bytearray(
        _text(*arguments) if arguments and isinstance(arguments[0], str) else _plain(bytes, bytes)(*arguments)
    )


def _plain(make: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
    """``make``, of nothing or of one of these kinds."""

    def call(*arguments: Any) -> Any:
        if len(arguments) > 1 or not all(isinstance(argument, kinds) for argument in arguments):
            raise pickle.UnpicklingError(f"arguments of {make.__name__}")
        return make(*arguments)

    return call


def _device(kind: str, number: int | None = None) -> str:
    return str(kind) if number is None else f"{kind}:{number}"


def _first(value: Any, *_: Any) -> Any:
    return value


def _size(sizes: Sequence[int] = ()) -> tuple[int, ...]:
    return tuple(map(int, sizes))


_STORAGES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Untyped": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_GLOBALS: dict[str, Any] = {
    "builtins.set": _plain(set, list, tuple),
    "builtins.frozenset": _plain(frozenset, list, tuple),
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _plain(bytes, bytes),
    "builtins.complex": lambda real, imaginary: complex(float(real), float(imaginary)),
    "_codecs.encode": _text,
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "_io.BytesIO": io.BytesIO,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.storage.UntypedStorage": "uint8",
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _first,
}
