"""Names of entries: choosing some of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable

__all__ = ["globs", "selector"]


def globs(patterns: str | Iterable[str] | None) -> re.Pattern[str] | None:
    """One pattern that matches what any of the globs does; None for None."""
    if patterns is None:
        return None
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or r"(?!)")


def selector(include: str | Iterable[str] | None, exclude: str | Iterable[str] | None) -> Callable[[str], bool] | None:
    """Whether a name matches a glob of ``include`` (None: every name does) and none of ``exclude``; None where all names pass."""
    wanted, unwanted = globs(include), globs(exclude)
    if wanted is None and unwanted is None:
        return None

    def passes(name: str) -> bool:
        return (wanted is None or wanted.match(name) is not None) and (unwanted is None or unwanted.match(name) is None)

    return passes
