"""Names of entries: globs, ``rename=``, and suggestions for names that do not exist."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dcp_rs import _core
from dcp_rs.errors import PlanError

__all__ = [
    "LoadNames",
    "Rename",
    "Renamed",
    "explain_missing",
    "globs",
    "hint",
    "natural",
    "nearest",
    "renamer",
    "repeatable",
    "selector",
    "some",
]

T = TypeVar("T")

#: The most names to compare letter by letter. More would take seconds.
_COMPARED = 5_000
#: The most names in a message.
_SHOWN = 5
#: The most modules in a prefix.
_PREFIX_PARTS = 3
#: The number of missing names that tell prefixes apart. All names would take minutes.
_SAMPLED = 100
_NUMBER = re.compile(r"\d+")


def repeatable(values: T | Iterator[Any]) -> T | tuple[Any, ...]:
    """Return values that can be iterated over more than once: those of an iterator as a tuple."""
    return tuple(values) if isinstance(values, Iterator) else values


def globs(patterns: str | Iterable[str] | None) -> re.Pattern[str] | None:
    """Return one pattern for several globs, or None for None."""
    if patterns is None:
        return None
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or r"(?!)")


def selector(
    include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
) -> Callable[[str], bool] | None:
    """Return a test of names against globs, or None if all names pass.

    A name passes if it matches a glob of ``include`` (or that is None), and none of ``exclude``.
    """
    if include is None and exclude is None:
        return None
    wanted, unwanted = globs(include), globs(exclude)

    def passes(name: str) -> bool:
        return (wanted is None or wanted.match(name) is not None) and (
            unwanted is None or unwanted.match(name) is None
        )

    return passes


def some(names: Collection[str]) -> str:
    """Return the first names and the number of the others, for a message."""
    more = len(names) - _SHOWN
    shown = ", ".join(map(repr, itertools.islice(names, _SHOWN)))
    return (shown or "no entries") + (f" and {more:,} more" if more > 0 else "")


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the name that was probably meant: one with another prefix, or of similar spelling."""
    first, dot, rest = name.partition(".")
    if dot and rest in names:
        return rest
    for end in (f".{name}", f".{rest}" if dot else ""):
        ends = [known for known in names if known.endswith(end)] if end else []
        if len(ends) == 1 or (ends and end[1:] == name):
            return min(ends, key=lambda known: (len(known), known))
    compared = [known for known in names if abs(len(known) - len(name)) <= 1 + len(name) // 4]
    numbers = _NUMBER.findall(name)
    of_same_numbers = (
        [known for known in compared if _NUMBER.findall(known) == numbers] if numbers else []
    )
    if len(compared) > _COMPARED:
        compared = [
            known
            for known in compared
            if known.startswith(first + dot) or known.endswith(name[-4:])
        ]
    import difflib  # a tenth of the package's import time, for mistakes only

    # People mistype letters more often than the number of a layer.
    for among in (of_same_numbers, compared):
        if close := difflib.get_close_matches(name, among[:_COMPARED], n=1):
            return close[0]
    return None


def hint(name: str, names: Collection[str]) -> str:
    """Return the end of a message about a missing name: a suggestion, if there is one."""
    inner = [known for known in names if known.startswith(f"{name}.")]
    if inner:
        number = "one entry," if len(inner) == 1 else f"{len(inner):,} entries, such as"
        return f"; it is a container of {number} {min(inner, key=natural)!r}"
    known = nearest(name, names)
    if known is None:
        return ""
    if known.endswith(f".{name}") or name.endswith(f".{known}"):
        return f"; it is stored as {known!r}"
    return f"; did you mean {known!r}?"


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers by value: ``mod2`` before ``mod10``."""
    parts = re.split(r"(\d+)", name)
    return [
        (1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part)
        for part in parts
    ]


def explain_missing(
    missing: Sequence[str], wanted: Collection[str], stored: Collection[str]
) -> str:
    """Return the end of a message about missing names: the ``rename=`` to pass, or a suggestion.

    Args:
        missing: the names of the state dict that the checkpoint lacks.
        wanted: all names of the state dict to load.
        stored: all names of the checkpoint.
    """
    stored = stored if isinstance(stored, set | frozenset | dict) else set(stored)
    old, new, number = _changed_prefix(missing, stored)
    if number == 0:
        return hint(missing[0], stored)
    if not new:
        said = f"its names lack the prefix {old!r}"
    else:
        said = f"its names begin with {new!r}" + (f", not with {old!r}" if old else "")
    before, after = new.removesuffix("."), old.removesuffix(".")
    if number == len(wanted) or (new and not any(name.startswith(new) for name in wanted)):
        mend = f"{{{before!r}: {after!r}}}"
    else:  # a mapping of the prefix would rename correct names, too
        first = next(
            name
            for name in missing
            if name.startswith(old) and new + name.removeprefix(old) in stored
        )
        mend = f"{{{new + first.removeprefix(old)!r}: {first!r}, ...}}"
    which = "" if number == len(missing) else f", which finds {number:,} of {len(missing):,} names"
    return f"; {said}: pass rename={mend}{which}"


def _changed_prefix(missing: Sequence[str], stored: Collection[str]) -> tuple[str, str, int]:
    """Return the prefix of missing names, that of the checkpoint, and how many names it finds."""
    parts, sample = missing[0].split("."), missing[:_SAMPLED]
    found: tuple[str, str, int] = ("", "", 0)
    for cut in range(min(len(parts), _PREFIX_PARTS + 1)):
        old, rest = "".join(f"{part}." for part in parts[:cut]), ".".join(parts[cut:])
        ends = [name.removeprefix(old) for name in sample if name.startswith(old)]
        for known in stored:
            if known != rest and not known.endswith(f".{rest}"):
                continue
            new = known[: len(known) - len(rest)]
            if new.count(".") > _PREFIX_PARTS:
                continue
            number = sum(new + end in stored for end in ends)
            if number > found[2]:
                found = (old, new, number)
        if found[2] == len(sample):
            break
    old, new, _ = found
    number = sum(
        name.startswith(old) and new + name.removeprefix(old) in stored for name in missing
    )
    # A single name may end like another one by chance.
    is_prefix = number > 1 or (number == len(missing) == 1 and not (old and new))
    return (old, new, number) if is_prefix else ("", "", 0)


#: A mapping of names, or of prefixes up to a dot; or a function of a name.
Rename = Mapping[str, str] | Callable[[str], str] | None


def renamer(rename: Rename) -> Callable[[str], str]:
    """Return the function from stored names to names of the state dict."""
    if rename is None:
        return lambda name: name
    if not isinstance(rename, Mapping):
        return rename
    olds = sorted((old.removesuffix(".") for old in rename), key=len, reverse=True)
    news = {old.removesuffix("."): new.removesuffix(".") for old, new in rename.items()}
    pattern = re.compile("|".join(rf"{re.escape(old)}(?=\.|\Z)" if old else "" for old in olds))

    def renamed(name: str) -> str:
        found = pattern.match(name) if olds else None
        if found is None:
            return name
        new, rest = news[found[0]], name[found.end() :].removeprefix(".")
        return f"{new}.{rest}" if new and rest else new or rest

    return renamed


class Renamed:
    """The names of a checkpoint after ``rename``.

    Args:
        rename: a mapping or function, as for :func:`renamer`.
        stored: all names of the checkpoint.
    """

    def __init__(
        self, rename: Mapping[str, str] | Callable[[str], str], stored: Iterable[str]
    ) -> None:
        new_name = renamer(rename)
        self._stored: dict[str, str] = {}
        self._twice: dict[str, str] = {}
        for name in stored:
            if self._stored.setdefault(new_name(name), name) != name:
                self._twice[new_name(name)] = name

    def stored_name(self, name: str) -> str | None:
        """Return the stored name of the entry with the new name ``name``, or None.

        Raises:
            PlanError: two entries have that new name.
        """
        if name in self._twice:
            msg = (
                f"{self._stored[name]!r} and {self._twice[name]!r} of the checkpoint would both be "
                f"named {name!r}, by rename="
            )
            raise PlanError(msg, tensor=name)
        return self._stored.get(name)

    def explain(self, name: str) -> str:
        """Return the end of a message about a missing name."""
        return f" (rename= gives this name to no entry{hint(name, self._stored)})"


class LoadNames:
    """The names of a load: those of the state dict, and their stored names.

    Args:
        rename: the renaming from stored names to those of the state dict.
        include, exclude: globs over names of the state dict.
        index: the checkpoint. Without one, nothing is renamed.

    Attributes:
        unnamed: names to load that no stored name is renamed to, after :meth:`choose`.
    """

    def __init__(
        self,
        rename: Rename,
        include: str | Iterable[str] | None,
        exclude: str | Iterable[str] | None,
        index: _core.Index | None = None,
    ) -> None:
        self._passes = selector(include, exclude)
        self._renamed = None if rename is None or index is None else Renamed(rename, index.names())
        self.unnamed: list[str] = []

    @property
    def is_selective(self) -> bool:
        """True if there is an ``include`` or ``exclude``."""
        return self._passes is not None

    def wants(self, fqn: str) -> bool:
        """Return whether to load an entry of the state dict."""
        return self._passes is None or self._passes(fqn)

    def choose(self, names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """Split the names of a state dict into those to load and those that are excluded.

        Returns:
            The names to load with their stored names, and the excluded names. Names that no stored
            name is renamed to are only in ``unnamed``.
        """
        wanted, excluded = list(names), []
        if self._passes is not None:
            excluded = [fqn for fqn in wanted if not self._passes(fqn)]
            wanted = list(filter(self._passes, wanted))
        if self._renamed is None:
            return dict(zip(wanted, wanted, strict=True)), excluded
        named = self.named(wanted)
        self.unnamed = [fqn for fqn in wanted if fqn not in named]
        return named, excluded

    def stored_name(self, fqn: str) -> str | None:
        """Return the stored name of an entry, or None if no stored name is renamed to it."""
        return fqn if self._renamed is None else self._renamed.stored_name(fqn)

    def named(self, names: Iterable[str]) -> dict[str, str]:
        """Return the stored names of those entries that have one."""
        return {fqn: name for fqn in names if (name := self.stored_name(fqn)) is not None}

    def explain(self, missing: list[str], wanted: Collection[str], stored: Collection[str]) -> str:
        """Return the end of a message about missing names."""
        return (
            explain_missing(missing, wanted, stored)
            if self._renamed is None
            else self._renamed.explain(missing[0])
        )
