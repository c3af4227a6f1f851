"""Non-tensor values: ``torch.save`` bytes, and whether they are safe to load."""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch

from dcp_rs.errors import CorruptDataError, UnsafePickleError

__all__ = ["check_loadable", "dump", "load", "reason"]

# torch allows bytearray, but not bytes, which is how pickle writes b"". Neither can run anything.
torch.serialization.add_safe_globals([bytes])


def dump(value: Any) -> bytes:
    """What DCP's planner makes of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(fqn: str, data: bytes, *, weights_only: bool) -> Any:
    """The value behind the bytes of the entry ``fqn``.

    Raises:
        UnsafePickleError: it needs more than ``torch.load(weights_only=True)`` allows.
        CorruptDataError: it is not what ``torch.save`` writes.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only:
            msg = f"value {fqn!r} cannot be unpickled: {error}"
            raise CorruptDataError(msg, tensor=fqn) from error
        msg = (
            f"value {fqn!r} does not load under torch.load(weights_only=True): {reason(error)}. "
            "Allow its types with torch.serialization.add_safe_globals, or pass weights_only=False if you trust whoever wrote it."
        )
        raise UnsafePickleError(msg, tensor=fqn) from error
    except (RuntimeError, EOFError, ValueError) as error:
        msg = f"value {fqn!r} is not what torch.save writes: {error}"
        raise CorruptDataError(msg, tensor=fqn) from error


def check_loadable(fqn: str, data: bytes) -> None:
    """Raises unless the bytes load under ``weights_only=True``."""
    load(fqn, data, weights_only=True)


def reason(error: pickle.UnpicklingError) -> str:
    """The one part of torch's message that says what is wrong."""
    found = re.search(r"WeightsUnpickler error: (.*?)(\. Please use|\n|$)", str(error))
    return found[1] if found else str(error).split("\n", 1)[0]
