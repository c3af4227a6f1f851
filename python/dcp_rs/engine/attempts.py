"""Loads that failed: what they may have written has to be overwritten, or the state is of no one save."""

from __future__ import annotations

import os
from collections.abc import Collection

from dcp_rs.errors import CorruptDataError

__all__ = ["Attempts"]

#: A message names so many entries.
_NAMED = 8


class Attempts:
    """The names that failed loads into one state dict may have filled, on this rank.

    Attributes:
        filled: those names, and the path that each was filled from.
        is_refused: whether a load was refused because it would leave some of them as they are.
    """

    def __init__(self) -> None:
        self.is_refused = False
        self.filled: dict[str, str] = {}

    def check(self, path: str | os.PathLike[str], names: Collection[str]) -> None:
        """Check that a load fills all that failed loads may have filled.

        Args:
            path: of the load.
            names: that it fills wholly.

        Raises:
            CorruptDataError: it leaves some of them as they are.
        """
        left = [name for name in self.filled if name not in names]
        if left:
            self.is_refused = True
            named = ", ".join(map(repr, left[:_NAMED])) + (f" and {len(left) - _NAMED} more" if left[_NAMED:] else "")
            msg = (
                f"{path} does not hold all of {named}, and a load of {self.filled[left[0]]} that failed may have written there: the state is of no "
                "one save; make it anew before it is loaded into"
            )
            raise CorruptDataError(msg, path=path, tensor=left[0])

    def failed(self, path: str | os.PathLike[str], names: Collection[str]) -> None:
        """Note a load that failed, and the names that it may have filled."""
        self.filled.update(dict.fromkeys(names, os.fspath(path)))
