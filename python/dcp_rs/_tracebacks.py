"""What the caller of a public function sees of an error: a short traceback, and for an unknown option the one that is meant.

``DCP_RS_DEBUG=1`` in the environment shows all frames.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from dcp_rs.errors import DcpRsError, InternalError

__all__ = ["check_arguments", "explain_arguments", "short_traceback", "shorten"]

P = ParamSpec("P")
R = TypeVar("R")

_OWN = "dcp_rs"
#: Packages whose frames lead from the caller's line to the error, and tell the caller nothing.
_HIDDEN = {_OWN, "torch"} | sys.stdlib_module_names


def short_traceback(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: errors that are the caller's leave it without the frames of this package.

    For an option that the function does not have, the message names the one that is meant.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if (
                isinstance(error, TypeError)
                and error.__traceback__ is not None
                and error.__traceback__.tb_next is None
            ):
                msg = explain_arguments(
                    function, kwargs
                )  # the call itself failed: its arguments do not fit
                error.args = (msg or str(error),)
            shorten(error)
            raise  # DCP_RS_DEBUG=1 shows where

    return call


def shorten(error: BaseException) -> None:
    """Drop the frames of this package from the tracebacks of an error and of its causes.

    An error that may be a defect, of this package or of torch, keeps all of its frames.
    """
    error.__traceback__ = _without(
        lambda frame: frame.f_globals.get("__name__") == __name__, error.__traceback__
    )
    if os.environ.get("DCP_RS_DEBUG", "0") != "0":
        return
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        if _is_the_callers(one):
            one.__traceback__ = _without(
                lambda frame: _package(frame) in _HIDDEN, one.__traceback__
            )


def _is_the_callers(error: BaseException) -> bool:
    """Return whether the error speaks to the caller: it is an expected one, or was raised in the caller's own code."""
    innermost = error.__traceback__
    if innermost is None or isinstance(error, InternalError):
        return False
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    root = _package(innermost.tb_frame)
    is_expected = isinstance(error, DcpRsError | OSError) or (
        isinstance(error, TypeError | ValueError) and root == _OWN
    )
    return is_expected or root not in _HIDDEN


def _without(
    hidden: Callable[[FrameType], bool], trace: TracebackType | None
) -> TracebackType | None:
    kept: TracebackType | None = None
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for one in reversed(frames):
        if not hidden(one.tb_frame):
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


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
    known = [
        name
        for name, one in parameters
        if one.kind in kinds and not name.startswith("_") and name != "self"
    ]
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
