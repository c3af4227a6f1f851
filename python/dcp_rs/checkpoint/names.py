"""Names of entries: globs, ``rename=``, and suggestions for names that do not exist."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from dcp_rs.errors import PlanError
from dcp_rs.options import Globs, Rename

#: The most names to compare letter by letter. More would take seconds.
_COMPARED = 5_000
#: The most names in a message.
_SHOWN = 5
#: The most modules in a prefix.
_PREFIX_PARTS = 3
#: The number of missing names that tell prefixes apart. All names would take minutes.
_SAMPLED = 50
_NUMBER = re.compile(r"\d+")
#: A part of a name that is a number, after another part.
_LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")


def globs(patterns: Globs) -> re.Pattern[str] | None:
    """Return one pattern for several globs, or None for None."""
    if patterns is None:
        return None
    is_several = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    several: list[Any] = list(patterns) if is_several else [patterns]
    for one in several:
        if not isinstance(one, str):
            msg = f"names are chosen by globs over names, such as 'model.*', not by {one!r}"
            raise TypeError(msg)
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in several) or r"(?!)")


def every(_name: str) -> bool:
    """Return true: the test that all names pass."""
    return True


def selector(include: Globs, exclude: Globs) -> Callable[[str], bool]:
    """Return a test of names against globs; :func:`every` if there are none.

    A name passes if it matches a glob of ``include`` (or that is None), and none of ``exclude``.
    """
    if include is None and exclude is None:
        return every
    wanted, unwanted = globs(include), globs(exclude)

    def passes(name: str) -> bool:
        return (wanted is None or wanted.match(name) is not None) and (
            unwanted is None or unwanted.match(name) is None
        )

    return passes


def nothing_passes(
    verb: Literal["load", "save"], include: Globs, exclude: Globs, names: Collection[str]
) -> str:
    """Return the message for a load or save whose globs leave nothing."""
    return (
        f"there is nothing to {verb}: no name passes include={include!r}, "
        f"exclude={exclude!r}; there are {some(names)}"
    )


def some(names: Collection[str]) -> str:
    """Return the first names and the number of the others, for a message."""
    more = len(names) - _SHOWN
    shown = ", ".join(map(repr, itertools.islice(names, _SHOWN)))
    return (shown or "no entries") + (f" and {more:,} more" if more > 0 else "")


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the name that was probably meant: one with another prefix, or of similar spelling."""
    rest = name.partition(".")[2]
    if rest in names:
        return rest
    longer = [known for known in names if known.endswith(f".{name}")]
    if not longer and rest:
        of_rest = [known for known in names if known.endswith(f".{rest}")]
        longer = of_rest if len(of_rest) == 1 else []
    if longer:
        return min(longer, key=lambda known: (len(known), known))
    # People mistype letters more often than the number of a layer.
    numbers = _NUMBER.findall(name)
    compared = [known for known in names if _NUMBER.findall(known) == numbers]
    close = difflib.get_close_matches(name, compared[:_COMPARED], n=1)
    return close[0] if close else None


def hint(name: str, names: Collection[str]) -> str:
    """Return the end of a message about a missing name: a suggestion, if there is one."""
    inner = [known for known in names if known.startswith(f"{name}.")]
    if inner:
        number = "one entry," if len(inner) == 1 else f"{len(inner):,} entries, such as"
        return f"; it is a container of {number} {min(inner, key=natural)!r}"
    known = nearest(name, names)
    if known is None:
        return _other_layers(name, names)
    if known.endswith(f".{name}") or name.endswith(f".{known}"):
        return f"; it is stored as {known!r}"
    return f"; did you mean {known!r}?"


def _other_layers(name: str, names: Collection[str]) -> str:
    """Return the end of a message about a layer that is not there: the numbers that are."""
    for found in _LAYER.finditer(name):
        before, number = name[: found.start(1)], found[1]
        there = {
            known[len(before) :].partition(".")[0] for known in names if known.startswith(before)
        }
        layers = sorted(filter(str.isdecimal, there), key=natural)
        if layers and number not in layers:
            last = f" to {before + layers[-1]!r}" if len(layers) > 1 else ""
            return f"; there are {before + layers[0]!r}{last}"
    return ""


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers by value: ``mod2`` before ``mod10``."""
    parts = re.split(r"(\d+)", name)
    return [
        # By length, then by digits: Python does not convert numbers of thousands of digits.
        (1, len(digits := part.lstrip("0")), digits)
        if part.isdecimal() and part.isascii()
        else (0, 0, part)
        for part in parts
    ]


def explain_missing(
    missing: Sequence[str], wanted: Collection[str], stored: Collection[str]
) -> str:
    """Return the end of a message about missing names: the ``rename=`` to pass, or a suggestion.

    The arguments are those of :func:`explain_prefix`.
    """
    stored = stored if isinstance(stored, set | frozenset | dict) else set(stored)
    prefix = explain_prefix(missing, wanted, stored)
    return f"; {prefix}" if prefix else hint(missing[0], stored)


def explain_prefix(
    missing: Sequence[str], wanted: Collection[str], stored: Collection[str]
) -> str | None:
    """Return the ``rename=`` that finds missing names by another prefix, and why; or None.

    Args:
        missing: the names of the state dict that the checkpoint lacks.
        wanted: all names of the state dict to load.
        stored: all names of the checkpoint.
    """
    stored = stored if isinstance(stored, set | frozenset | dict) else set(stored)
    old, new, number = _changed_prefix(missing, stored)
    # The mapping must not rename names that are right.
    is_right = str.startswith if new else lambda name, _: name in stored
    is_safe = number == len(wanted) or not any(is_right(name, new) for name in wanted)
    if number == 0 or not is_safe:
        return None
    if not new:
        said = f"its names lack the prefix {old!r}"
    else:
        said = f"its names begin with {new!r}" + (f", not with {old!r}" if old else "")
    rename = {new.removesuffix("."): old.removesuffix(".")}
    which = "" if number == len(missing) else f", which finds {number:,} of {len(missing):,} names"
    return f"{said}: pass rename={rename}{which}"


def _changed_prefix(missing: Sequence[str], stored: Collection[str]) -> tuple[str, str, int]:
    """Return the prefix of missing names, that of the checkpoint, and how many names it finds."""

    def count(prefixes: tuple[str, str], names: Sequence[str]) -> int:
        old, new = prefixes
        return sum(
            name.startswith(old) and new + name.removeprefix(old) in stored for name in names
        )

    # All prefixes that would find one of three names: another may be no name of the model.
    candidates: list[tuple[str, str]] = []
    cuts = [
        (name.split("."), cut)
        for name in dict.fromkeys((missing[0], missing[len(missing) // 2], missing[-1]))
        for cut in range(min(name.count("."), _PREFIX_PARTS) + 1)
    ]
    for parts, cut in cuts:
        old, rest = "".join(f"{part}." for part in parts[:cut]), ".".join(parts[cut:])
        news = {
            known.removesuffix(rest)
            for known in stored
            if known == rest or known.endswith(f".{rest}")
        }
        candidates += [(old, new) for new in news if new.count(".") <= _PREFIX_PARTS]
    best = max(candidates, key=lambda one: count(one, missing[:_SAMPLED]), default=("", ""))
    number = count(best, missing)
    # A single name may end like another one by chance.
    is_prefix = number > 1 or (number == len(missing) == 1 and "" in best)
    return (*best, number) if is_prefix else ("", "", 0)


def renamer(rename: Rename) -> Callable[[str], str]:
    """Return the function from stored names to names of the state dict."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    names: list[Any] = [*rename, *rename.values()] if isinstance(rename, Mapping) else [None]
    if not all(isinstance(name, str) for name in names):
        msg = f"rename={rename!r}: pass a mapping such as {{'module': ''}}, or a function of a name"
        raise TypeError(msg)
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


class LoadNames:
    """The names of a load: those of the state dict, and their stored names.

    Args:
        rename: the renaming from stored names to those of the state dict.
        include, exclude: globs over names of the state dict.
        stored: returns the names of the checkpoint. Without it, nothing is renamed.

    Attributes:
        is_selective: there is an ``include`` or ``exclude``.
        unnamed: names to load that no stored name is renamed to, after :meth:`choose`.
    """

    def __init__(
        self,
        rename: Rename,
        include: Globs,
        exclude: Globs,
        stored: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self._passes = selector(include, exclude)
        self.is_selective = self._passes is not every
        self.unnamed: list[str] = []
        self._stored: dict[str, str] | None = None  # by their new names, with rename=
        self._twice: dict[str, str] = {}
        if rename is not None and stored is not None:
            self._stored, new_name = {}, renamer(rename)
            for name in stored():
                if self._stored.setdefault(new_name(name), name) != name:
                    self._twice[new_name(name)] = name

    def wants(self, fqn: str) -> bool:
        """Return whether to load an entry of the state dict."""
        return self._passes(fqn)

    def choose(self, names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """Split the names of a state dict into those to load and those that are excluded.

        Returns:
            The names to load with their stored names, and the excluded names. Names that no stored
            name is renamed to are only in ``unnamed``.
        """
        names = list(names)
        wanted = list(filter(self._passes, names)) if self.is_selective else names
        excluded = [fqn for fqn in names if not self._passes(fqn)] if self.is_selective else []
        named = self.named(wanted)
        self.unnamed = [fqn for fqn in wanted if fqn not in named]
        return named, excluded

    def stored_name(self, fqn: str) -> str | None:
        """Return the stored name of an entry, or None if no stored name is renamed to it.

        Raises:
            PlanError: two entries have that new name.
        """
        if self._stored is None:
            return fqn
        if fqn in self._twice:
            msg = (
                f"{self._stored[fqn]!r} and {self._twice[fqn]!r} of the checkpoint would both be "
                f"named {fqn!r}, by rename="
            )
            raise PlanError(msg, tensor=fqn)
        return self._stored.get(fqn)

    def named(self, names: Iterable[str]) -> dict[str, str]:
        """Return the stored names of those entries that have one."""
        if self._stored is None:
            return {fqn: fqn for fqn in names}
        return {fqn: name for fqn in names if (name := self.stored_name(fqn)) is not None}

    def explain(self, missing: list[str], wanted: Collection[str], stored: Collection[str]) -> str:
        """Return the end of a message about missing names."""
        if self._stored is None:
            return explain_missing(missing, wanted, stored)
        return f" (rename= gives this name to no entry{hint(missing[0], self._stored)})"
