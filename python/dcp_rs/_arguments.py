"""Options that a public function does not have, and the ones that are meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from inspect import Parameter, signature
from typing import Any

__all__ = ["check_arguments", "explain_arguments"]

#: Options that people pass, by function, and what to do in their place.
_MEANT = {
    "load": {
        "strict": "allow_partial_load=True does what strict=False does elsewhere",
        "map_location": "use device=",
        "thread_count": "use threads=",
        "checkpoint_id": "pass the path as path=",
        "storage_reader": "pass the path as path=; dcp_rs.load_state_dict() takes a reader",
    },
    "save": {
        "checkpoint_id": "pass the path as path=",
        "storage_writer": "pass the path as path=; torch's dcp.save() takes a writer",
    },
    "open": {"map_location": "use device="},
    "CheckpointManager": {
        "overwrite": "save(step, state_dict, force=True) replaces a step",
        "save_id": "each step gets a new one",
        "guard": "the manager guards each commit itself",
        "parent": "reuse= takes unchanged tensors from the step before",
    },
}
_MEANT["async_save"] = _MEANT["save"]


def explain_arguments(function: Callable[..., Any], passed: Iterable[str]) -> str | None:
    """Return a message for the first keyword that ``function`` does not have; None if it has them all."""
    kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature(function).parameters.items()
    known = [name for name, one in parameters if one.kind in kinds and not name.startswith("_") and name != "self"]
    called = function.__qualname__.removesuffix(".__init__")
    for name in passed:
        if name in known:
            continue
        hint = _MEANT.get(called, {}).get(name)
        near = difflib.get_close_matches(name, known, n=1)
        if hint is None and near:
            hint = f"did you mean {near[0]!r}?"
        prefix = "" if "." in called or function.__name__ == "__init__" else "dcp_rs."
        brackets = "" if function.__name__ == "__init__" else "()"
        return f"{prefix}{called}{brackets} has no option {name!r}" + (f": {hint}" if hint else "")
    return None


def check_arguments(function: Callable[..., Any], passed: Iterable[str]) -> None:
    """Raise a TypeError if ``function`` does not have one of these keywords. The message names the one that is meant."""
    msg = explain_arguments(function, passed)
    if msg is not None:
        raise TypeError(msg)
