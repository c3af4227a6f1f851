"""Names of entries: choosing some of them, and finding the one that was meant."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable

__all__ = ["globs", "hint", "nearest", "selector"]

#: Names that are compared letter by letter: more would take seconds.
_COMPARED = 5_000


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


def nearest(name: str, names: Collection[str]) -> str | None:
    """What ``name`` most likely is among ``names``: the same under another prefix, else what is spelled much like it."""
    first, dot, rest = name.partition(".")
    if dot and rest in names:
        return rest
    for end in (f".{name}", f".{rest}" if dot else ""):
        ends = [known for known in names if known.endswith(end)] if end else []
        if len(ends) == 1 or (ends and end[1:] == name):
            return min(ends, key=lambda known: (len(known), known))
    compared = [known for known in names if abs(len(known) - len(name)) <= 1 + len(name) // 4]
    if len(compared) > _COMPARED:
        compared = [known for known in compared if known.startswith(first + dot) or known.endswith(name[-4:])]
    close = difflib.get_close_matches(name, compared[:_COMPARED], n=1)
    return close[0] if close else None


def hint(name: str, names: Collection[str]) -> str:
    """The end of a message that says that there is no ``name``: what there is in its place, if that can be guessed."""
    known = nearest(name, names)
    if known is None:
        return ""
    if known.endswith(f".{name}") or name.endswith(f".{known}"):
        return f"; it is there as {known!r}"
    return f"; did you mean {known!r}?"
