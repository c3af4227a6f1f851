"""``rename=``: from stored names to wanted ones, and what that means for a load, which asks for wanted names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import hint
from dcp_rs.errors import PlanError

__all__ = ["Rename", "Renamed", "renamer"]

#: A mapping of names, or of what names begin with up to a dot; or a function of a name.
Rename = Mapping[str, str] | Callable[[str], str] | None


def renamer(rename: Rename) -> Callable[[str], str]:
    """From a stored name to the wanted one."""
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
    """What a checkpoint has under other names than those that are wanted.

    In the last release ``rename`` of a load went from wanted names to stored ones, a mapping of whole names. One that can only be meant so still works,
    with a ``DeprecationWarning``.

    Args:
        rename: as for :func:`renamer`.
        stored: all names of the checkpoint.
        wanted: the names that are to be loaded.
    """

    def __init__(
        self, rename: Mapping[str, str] | Callable[[str], str], stored: Collection[str], wanted: Collection[str]
    ) -> None:
        new_name = renamer(rename)
        self._stored: dict[str, str] = {}
        self._twice: dict[str, str] = {}
        for name in stored:
            if self._stored.setdefault(new_name(name), name) != name:
                self._twice[new_name(name)] = name
        self._backwards = self._of_last_release(rename, stored, wanted)

    def stored_name(self, name: str) -> str | None:
        """What the checkpoint calls the entry that is wanted as ``name``; None where it has none.

        Raises:
            PlanError: two entries would have that name.
        """
        if self._backwards is not None:
            return self._backwards(name)
        if name in self._twice:
            msg = f"{self._stored[name]!r} and {self._twice[name]!r} of the checkpoint would both be named {name!r}, by rename="
            raise PlanError(msg, tensor=name)
        return self._stored.get(name)

    def explain(self, name: str) -> str:
        """The end of a message that says that there is no ``name``."""
        if self._backwards is not None:
            return f" (which it was asked for as {self._backwards(name)!r}, by rename=)"
        return f" (rename= gives no entry this name{hint(name, self._stored)})"

    def _of_last_release(
        self, rename: Mapping[str, str] | Callable[[str], str], stored: Collection[str], wanted: Collection[str]
    ) -> Callable[[str], str | None] | None:
        """``rename`` from wanted names to stored ones, if it can only be meant so."""
        if not isinstance(rename, Mapping) and all(name in self._stored for name in wanted):
            return None
        held = stored if isinstance(stored, set | frozenset | dict) else set(stored)
        backwards = _lenient(rename)
        found = [(name, before) for name in wanted if (before := backwards(name)) in held]
        if all(before == name or self._stored.get(name) == before for name, before in found):
            return None  # it does nothing in that direction, or the same
        asked = set(wanted)
        renames = any(
            name in asked and before != name for name, before in [*self._stored.items(), *self._twice.items()]
        )
        direction = "rename= goes from stored names to wanted ones"
        if not renames and len(found) > sum(name in self._stored for name in asked):
            warn_caller(
                f"{direction}: turn this one around, which goes from wanted names to stored ones; that works for one more release",
                DeprecationWarning,
            )
            return backwards
        if len(found) >= sum(name in self._stored for name in asked):
            warn_caller(
                f"{direction}, and is read so; this one has a meaning in the other direction, too, which the last release gave it"
            )
        return None


def _lenient(rename: Mapping[str, str] | Callable[[str], str]) -> Callable[[str], str | None]:
    """A function of wanted names, where it is one: one of stored names need not take them."""
    if isinstance(rename, Mapping):
        return lambda name: rename.get(name, name)

    def called(name: str) -> str | None:
        try:
            return rename(name)
        except Exception:  # noqa: BLE001  # whatever it does with a name that it is not for
            return None

    return called
