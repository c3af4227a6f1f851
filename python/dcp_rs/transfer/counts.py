"""What loads read, counted."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_rs import _core
from dcp_rs._progress import Watch

__all__ = ["Counts"]


@dataclass
class Counts:
    """Bytes of loads so far: that were asked for, that were read for it, of those past the page cache, and from mappings; and the pieces of files that were read.

    Attributes:
        expected: what is going to be asked for in all, if anybody watches.
        watch: hears of what is there, and of what is expected.
    """

    wanted: int = 0
    read: int = 0
    direct: int = 0
    mapped: int = 0
    verified: int = 0
    requests: int = 0
    expected: int = 0
    watch: Watch | None = None

    def add(self, part: _core.ReadStats | Counts) -> None:
        """Adds a part of a load."""
        self.wanted += part.wanted
        self.read += part.read
        self.direct += part.direct
        self.mapped += part.mapped
        self.verified += part.verified
        self.requests += part.requests
        self.tell(0)

    def add_values(self, nbytes: int) -> None:
        """Adds values, which are read whole."""
        self.add(Counts(nbytes, nbytes))

    def tell(self, more: int) -> None:
        """Says how far the load is: so many bytes further than what was added."""
        if self.watch is not None and self.wanted + more:
            self.watch(self.wanted + more, self.expected)
