"""Non-tensor values as ``torch.save`` bytes, and checks that they are safe to load."""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from types import GeneratorType, MethodType
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._warnings import warn_caller
from dcp_rs.errors import CorruptDataError, UnsafePickleError, UnsupportedError
from dcp_rs.tensors.nesting import like

# torch allows bytearray, but neither bytes, which is how pickle writes b"", nor io.BytesIO, which
# torch's own examples save. Neither can run code.
torch.serialization.add_safe_globals([bytes, io.BytesIO])

#: Types that nobody can change in place, and that load under ``weights_only=True``.
_IMMUTABLE = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.Size),
)


def dump(fqn: str, value: Any) -> bytes:
    """Return the ``torch.save`` bytes of the entry ``fqn``, as DCP's planner stores them.

    Raises:
        UnsupportedError: the value does not pickle.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a type's own __reduce__ may raise anything
        msg = f"value {fqn!r} ({_type_name(value)}) cannot be pickled: {error}{_advice(value)}"
        raise UnsupportedError(msg, tensor=fqn) from error
    return buffer.getvalue()


def load(fqn: str, data: bytes, *, weights_only: bool, path: str | None = None) -> Any:
    """Unpickle the bytes of the entry ``fqn``.

    With ``weights_only``, the bytes are checked before torch reads them, because a small pickle
    can crash torch or exhaust the memory.

    Args:
        fqn, data: the entry and its bytes.
        weights_only: as for ``torch.load``.
        path: the checkpoint, which errors name; None for a value that is being saved.

    Raises:
        UnsafePickleError: the value needs more than ``torch.load(weights_only=True)`` allows, or
            more memory than its size accounts for.
        UnsupportedError: without ``weights_only``, a class of the value cannot be imported.
        CorruptDataError: the bytes are not those of ``torch.save``.
    """
    value = f"value {fqn!r}" if path is None else f"value {fqn!r} of {path}"
    if weights_only and (refusal := _core.refusal(data)) is not None:
        is_damaged, why = refusal
        if is_damaged:
            msg = f"{value} is not what torch.save writes: {why}"
            raise CorruptDataError(msg, path=path, tensor=fqn)
        msg = (
            f"{value} is not safe to load: {why}. Nothing was executed. Leave it out "
            "(exclude=), or pass weights_only=False if you trust whoever wrote it."
        )
        raise UnsafePickleError(msg, path=path, tensor=fqn)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except (MemoryError, OSError):  # not a fault of the value
        raise
    except Exception as error:  # damaged bytes may make torch, or a class, raise anything
        if weights_only and isinstance(error, pickle.UnpicklingError):
            msg = (
                f"{value} does not load under torch.load(weights_only=True): "
                f"{_reason(error)}. Nothing was executed. Leave it out (exclude=), allow its types "
                "with torch.serialization.add_safe_globals, or pass weights_only=False if you "
                "trust whoever wrote it."
            )
            raise UnsafePickleError(msg, path=path, tensor=fqn) from error
        if not weights_only and isinstance(error, (ImportError, AttributeError)):
            msg = f"{value} cannot be unpickled here: {error}"
            raise UnsupportedError(msg, path=path, tensor=fqn) from error
        msg = f"{value} cannot be unpickled: {type(error).__name__}: {error}"
        raise CorruptDataError(msg, path=path, tensor=fqn) from error


def check_loadable(fqn: str, data: bytes, *, path: str | None = None) -> None:
    """Check that bytes load under ``weights_only=True``. Raise what :func:`load` raises."""
    load(fqn, data, weights_only=True, path=path)


def warn_unless_loadable(fqn: str, value: Any, data: bytes, *, strict: bool = False) -> None:
    """Warn if a saved value will not load under ``weights_only=True``.

    Args:
        fqn, value, data: as for :func:`why_not_loadable`.
        strict: raise in place of the warning.

    Raises:
        UnsafePickleError: the value will not load, and ``strict`` is set.
    """
    why = why_not_loadable(fqn, value, data)
    if why is None:
        return
    if strict:
        msg = f"value {fqn!r} ({_type_name(value)}) {why} (strict_values=True)"
        raise UnsafePickleError(msg, tensor=fqn)
    advice = _advice(value) or (
        ". Save plain types in its place (numbers, text, lists, dicts, tensors), or load it with "
        "weights_only=False"
    )
    warn_caller(f"value {fqn!r} ({_type_name(value)}) is saved, but {why}{advice}")


def why_not_loadable(fqn: str, value: Any, data: bytes | None = None) -> str | None:
    """Return that a value will not load under ``weights_only=True``, and why; None if it will.

    Args:
        fqn: the name of the entry.
        value: the value. A plain one is checked for its memory only.
        data: its ``torch.save`` bytes, if they are known.

    Raises:
        UnsupportedError: the value does not pickle.
    """
    if type(value) in _IMMUTABLE:
        return None
    data = dump(fqn, value) if data is None else data
    if _is_plain(value) and _core.refusal(data) is None:
        return None  # torch loads it for certain
    try:
        check_loadable(fqn, data)
    except Exception as error:  # noqa: BLE001  # the value does not load, for any reason
        cause = error.__cause__
        why = _reason(cause) if isinstance(cause, pickle.UnpicklingError) else error
        return f"will not load under weights_only=True, the default: {why}"
    return None


#: Types that load for certain, alone and in containers.
_PLAIN = {*_IMMUTABLE, *PLAIN_TYPES}


def _is_plain(value: Any) -> bool:
    cls = type(value)
    if cls in (dict, OrderedDict):
        return _is_plain(list(value)) and _is_plain(list(value.values()))
    if cls in (list, tuple, set):
        return set(map(type, value)) <= _PLAIN or all(map(_is_plain, value))
    return cls in _PLAIN


def _advice(value: Any) -> str:
    """Return the end of a message about a value that is probably a mistake."""
    if isinstance(value, MethodType):
        return f". It is a method: call it, as in model.{value.__name__}()"
    if isinstance(value, GeneratorType):
        return ". Save a dict or a list of what the generator yields, such as model.state_dict()"
    return ""


def _type_name(value: Any) -> str:
    cls = type(value)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


def _reason(error: pickle.UnpicklingError) -> str:
    """Return the part of torch's message that names the problem."""
    found = re.search(
        r"(?:WeightsUnpickler error:\s*|(?=Trying to load ))(.*?)(\. Please use|\.?\n|\.?$)",
        str(error),
    )
    return found[1] if found else str(error).split("\n", 1)[0]


def plain_numbers(tree: Any) -> Any:
    """Replace the NumPy numbers in mappings, lists and tuples by Python's.

    A mapping in a tuple is pickled, and comes back in its own type. So one of another type than
    ``dict`` and ``OrderedDict`` stays as it is there.
    """
    numpy = sys.modules.get("numpy")
    return tree if numpy is None else _plain(tree, numpy.generic)


def _plain(tree: Any, number: type, *, in_tuple: bool = False) -> Any:
    cls = type(tree)
    if issubclass(cls, number):
        return tree.item()
    if isinstance(tree, Mapping) and (not in_tuple or cls in (dict, OrderedDict)):
        items = tree.items()
        return like(tree, ((key, _plain(one, number, in_tuple=in_tuple)) for key, one in items))
    if cls in (list, tuple):
        return cls(_plain(one, number, in_tuple=in_tuple or cls is tuple) for one in tree)
    return tree
