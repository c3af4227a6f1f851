"""Short tracebacks: the caller's lines and one sentence. ``DCP_RS_DEBUG=1`` in the environment shows all frames."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from dcp_rs._arguments import explain_arguments
from dcp_rs.errors import DcpRsError, InternalError

__all__ = ["short_traceback", "shorten"]

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
            if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
                msg = explain_arguments(function, kwargs)  # the call itself failed: its arguments do not fit
                error.args = (msg or str(error),)
            shorten(error)
            raise  # DCP_RS_DEBUG=1 shows where

    return call


def shorten(error: BaseException) -> None:
    """Drop the frames of this package from the tracebacks of an error and of its causes.

    An error that may be a defect, of this package or of torch, keeps all of its frames.
    """
    error.__traceback__ = _without(lambda frame: frame.f_globals.get("__name__") == __name__, error.__traceback__)
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
            one.__traceback__ = _without(lambda frame: _package(frame) in _HIDDEN, one.__traceback__)


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


def _without(hidden: Callable[[FrameType], bool], trace: TracebackType | None) -> TracebackType | None:
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
