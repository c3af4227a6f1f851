"""Which names of a state dict are meant."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable

__all__ = ["selector"]


def selector(include: str | Iterable[str] | None, exclude: str | Iterable[str] | None) -> Callable[[str], bool] | None:
    """Whether a name matches a glob of ``include`` (None: every name does) and none of ``exclude``; None where all names pass."""
    if include is None and exclude is None:
        return None
    wanted = None if include is None else _pattern(include)
    unwanted = None if exclude is None else _pattern(exclude)

    def passes(name: str) -> bool:
        return (wanted is None or wanted.match(name) is not None) and (unwanted is None or unwanted.match(name) is None)

    return passes


def _pattern(globs: str | Iterable[str]) -> re.Pattern[str]:
    globs = [globs] if isinstance(globs, str) else list(globs)
    return re.compile("|".join(fnmatch.translate(glob) for glob in globs) or r"(?!)")
