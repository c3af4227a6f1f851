"""Non-tensor values: ``torch.save`` bytes, and whether they are safe to load."""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections import OrderedDict
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._warnings import warn_caller
from dcp_rs.errors import CorruptDataError, UnsafePickleError, UnsupportedError

__all__ = [
    "check_loadable",
    "dump",
    "dump_named",
    "load",
    "plain_numbers",
    "reason",
    "warn_unless_loadable",
    "why_not_loadable",
]

# torch allows bytearray, but not bytes, which is how pickle writes b"", nor io.BytesIO, which
# torch's own examples save. Neither can run anything.
torch.serialization.add_safe_globals([bytes, io.BytesIO])


def dump(value: Any) -> bytes:
    """What DCP's planner makes of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def dump_named(fqn: str, value: Any) -> bytes:
    """The same, of the entry ``fqn``.

    Raises:
        UnsupportedError: it does not pickle.
    """
    try:
        return dump(value)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what a type's own __reduce__ raises
        msg = f"value {fqn!r} ({_type_name(value)}) cannot be pickled: {error}"
        raise UnsupportedError(msg, tensor=fqn) from error


def load(fqn: str, data: bytes, *, weights_only: bool) -> Any:
    """Unpickle the bytes of the entry ``fqn``.

    With ``weights_only``, the bytes are checked before torch gets them: a small pickle could crash
    torch, or fill the memory.

    Raises:
        UnsafePickleError: it needs more than ``torch.load(weights_only=True)`` allows, or more
            memory than its size accounts for.
        UnsupportedError: without ``weights_only``, a class of it cannot be imported.
        CorruptDataError: it is not what ``torch.save`` writes.
    """
    if weights_only and (refusal := _core.refusal(data)) is not None:
        is_damaged, why = refusal
        if is_damaged:
            msg = f"value {fqn!r} is not what torch.save writes: {why}"
            raise CorruptDataError(msg, tensor=fqn)
        msg = f"value {fqn!r} is not safe to load: {why}. Nothing was executed. Leave it out (exclude=), or pass weights_only=False if you trust whoever wrote it."
        raise UnsafePickleError(msg, tensor=fqn)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise _cannot_be_unpickled(fqn, error) from error
        msg = (
            f"value {fqn!r} does not load under torch.load(weights_only=True): {reason(error)}. Nothing was executed. Leave it out (exclude=), "
            "allow its types with torch.serialization.add_safe_globals, or pass weights_only=False if you trust whoever wrote it."
        )
        raise UnsafePickleError(msg, tensor=fqn) from error
    except (ImportError, AttributeError) as error:
        if weights_only:
            raise _cannot_be_unpickled(fqn, error) from error
        msg = f"value {fqn!r} cannot be unpickled here: {error}"
        raise UnsupportedError(msg, tensor=fqn) from error
    except (MemoryError, OSError):  # neither says anything about the value
        raise
    except Exception as error:  # whatever torch, or a class of the pickle, makes of damaged bytes
        raise _cannot_be_unpickled(fqn, error) from error


def _cannot_be_unpickled(fqn: str, error: Exception) -> CorruptDataError:
    return CorruptDataError(
        f"value {fqn!r} cannot be unpickled: {type(error).__name__}: {error}", tensor=fqn
    )


def check_loadable(fqn: str, data: bytes) -> None:
    """Raises unless the bytes load under ``weights_only=True``."""
    load(fqn, data, weights_only=True)


def warn_unless_loadable(fqn: str, value: Any, data: bytes, *, strict: bool = False) -> None:
    """Warns where ``data``, which is ``value`` as it is saved, will not load under ``weights_only=True``.

    Only what is more than plain types is tried.

    Raises:
        UnsafePickleError: such a value, with ``strict``.
    """
    why, error = _refused(fqn, value, data)
    if why is None:
        return
    if strict:
        msg = f"value {fqn!r} ({_type_name(value)}) would not load under weights_only=True, the default: {why} (strict_values=True)"
        raise UnsafePickleError(msg, tensor=fqn) from error
    warn_caller(
        f"value {fqn!r} ({_type_name(value)}) is saved, but will not load under weights_only=True, the default: {why}. "
        "Save plain types in its place (numbers, text, lists, dicts, tensors), or load it with weights_only=False"
    )


def why_not_loadable(fqn: str, value: Any) -> str | None:
    """Return why a value would not load back under ``weights_only=True``; None where it does.

    Raises:
        UnsupportedError: it does not pickle.
    """
    if _is_plain(value):
        return None
    why, _ = _refused(fqn, value, dump_named(fqn, value))
    return (
        why
        and f"value {fqn!r} ({_type_name(value)}) would not load under weights_only=True, the default: {why}"
    )


def _refused(fqn: str, value: Any, data: bytes) -> tuple[str | None, Exception | None]:
    if _is_plain(value):
        return None, None
    try:
        check_loadable(fqn, data)
    except Exception as error:  # noqa: BLE001  # whatever it is, the value does not load
        why = (
            reason(error.__cause__)
            if isinstance(error.__cause__, pickle.UnpicklingError)
            else str(error)
        )
        return why, error
    return None, None


#: What is known to load without trying, by itself and in containers.
_PLAIN = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    *PLAIN_TYPES,
}


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return _is_plain(list(value)) and _is_plain(list(value.values()))
    if kind in (list, tuple, set):
        return set(map(type, value)) <= _PLAIN or all(map(_is_plain, value))
    return kind in _PLAIN


def _type_name(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def reason(error: pickle.UnpicklingError) -> str:
    """The one part of torch's message that says what is wrong."""
    found = re.search(
        r"(?:WeightsUnpickler error:\s*|(?=Trying to load ))(.*?)(\. Please use|\.?\n|\.?$)",
        str(error),
    )
    return found[1] if found else str(error).split("\n", 1)[0]


def plain_numbers(tree: Any) -> Any:
    """The tree with Python's numbers in place of NumPy's, where it has any in dicts, lists and tuples; itself otherwise."""
    numpy = sys.modules.get("numpy")
    return tree if numpy is None else _plain(tree, numpy.generic)


def _plain(tree: Any, number: type) -> Any:
    kind = type(tree)
    if issubclass(kind, number):
        return tree.item()
    if kind in (dict, OrderedDict):
        values: Any = tree.values()
    elif kind in (list, tuple):
        values = tree
    else:
        return tree
    plain = [_plain(value, number) for value in values]
    if all(one is other for one, other in zip(plain, values, strict=True)):
        return tree
    return kind(zip(tree, plain, strict=True)) if isinstance(tree, dict) else kind(plain)
