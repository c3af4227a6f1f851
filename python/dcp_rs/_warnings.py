"""Warnings that point at the caller's line, not at one of this package or of torch; among them those of deprecated names of arguments."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["formerly", "warn_caller"]

#: Frames of these are passed over: what a caller called, and what that is made with.
_PACKAGES = ("dcp_rs", "torch", "contextlib", "functools")

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the nearest line outside of this package and torch."""
    level, frame = 1, sys._getframe(0)  # noqa: SLF001  # the documented way to walk up
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def formerly(
    **words: str | tuple[str, Callable[[Any], Any]],
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Takes keyword arguments under the words of the last release, too, with a ``DeprecationWarning``.

    Args:
        words: for each old word the new one; or that, and what makes the new value of the old one.

    Raises (from what is decorated):
        TypeError: an argument is given under both words.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @wraps(function)
        def called(*args: _Parameters.args, **given: _Parameters.kwargs) -> _Result:
            for old, new in words.items():
                if old not in given:
                    continue
                word, convert = new if isinstance(new, tuple) else (new, None)
                if word in given:
                    msg = f"{function.__name__}() got {old!r} and {word!r}, which are one argument"
                    raise TypeError(msg)
                value = given.pop(old)
                given[word] = value if convert is None else convert(value)
                say = f"{old}=" if convert is None else f"{old}={value!r}"
                now = f"{word}=" if convert is None else f"{word}={given[word]!r}"
                warn_caller(
                    f"{function.__name__}({say}) is {now} now; the old word works for one more release",
                    DeprecationWarning,
                )
            return function(*args, **given)

        return called

    return decorate
