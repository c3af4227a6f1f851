"""A folder that saves are killed over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dcp_rs
from crash.states import LARGE, stray_files

if TYPE_CHECKING:
    import random

    from crash.kills import Savers


class Folder:
    """A folder on a file system.

    Args:
        scratch: a folder to make it in.
    """

    #: How a process is ended: at once; by a signal that it does not handle; by one that it does, so
    #: that it cleans up; at once, while children that it forked in the midst of saves live on; at
    #: once, while it waits for a lock that another process takes all the time, and hears signals.
    ways: tuple[str, ...] = ("kill", "term", "handled term", "forks", "contended")
    #: Elements of the largest tensor.
    large = LARGE
    #: How to reach it.
    access: Mapping[str, Any] = {}

    def __init__(self, scratch: Path) -> None:
        self.path: Path | str = scratch / "ckpt"

    def begin(self, way: str, number: int) -> str:
        """Before the ``number``-th savers start; at which moment of a save they will be ended."""
        return "any"

    def wait(self, savers: Savers, rng: random.Random, usual: float) -> None:
        """Returns when they are to be ended: over the length of two saves, so that a later one of the same process is hit as well."""
        time.sleep(rng.uniform(0, 2 * usual))

    def settle(self) -> int:
        """After they ended. Returns how many uploads they left open."""
        return 0

    def strays(self) -> list[str]:
        """The paths of what killed saves left."""
        return [str(path) for path in stray_files(Path(self.path))]

    def clean(self) -> None:
        """Has that removed."""
        strays = self.strays()
        report = dcp_rs.clean(self.path, yes=True)
        assert [str(leftover.path) for leftover in report.removed] == strays, (report, strays)
        assert dcp_rs.verify(self.path).leftovers == []
