"""``rename=``: from stored names to wanted ones, and what that means for a load, which asks for wanted names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

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
    """The names of a checkpoint after ``rename``, and the stored name of each.

    Args:
        rename: as for :func:`renamer`.
        stored: all names of the checkpoint.
    """

    def __init__(self, rename: Mapping[str, str] | Callable[[str], str], stored: Iterable[str]) -> None:
        new_name = renamer(rename)
        self._stored: dict[str, str] = {}
        self._twice: dict[str, str] = {}
        for name in stored:
            if self._stored.setdefault(new_name(name), name) != name:
                self._twice[new_name(name)] = name

    def stored_name(self, name: str) -> str | None:
        """Return the stored name of the entry that ``rename`` calls ``name``, or None.

        Raises:
            PlanError: two entries would have that name.
        """
        if name in self._twice:
            msg = f"{self._stored[name]!r} and {self._twice[name]!r} of the checkpoint would both be named {name!r}, by rename="
            raise PlanError(msg, tensor=name)
        return self._stored.get(name)

    def explain(self, name: str) -> str:
        """The end of a message that says that there is no ``name``."""
        return f" (rename= gives this name to no entry{hint(name, self._stored)})"
