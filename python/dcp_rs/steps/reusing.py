"""What the saves of a manager take over from the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from dcp_rs.engine.reuse import Frozen
from dcp_rs.steps.keeper import Prepared

__all__ = ["Reusing"]


class Reusing:
    """How the saves of a run reuse earlier ones.

    Args:
        reuse: whether they do; or also what does not change: a module, or globs over names.
        verify: read what would be reused.

    Raises:
        TypeError: ``reuse`` is something else.
    """

    def __init__(self, reuse: bool | str | Iterable[str] | torch.nn.Module, *, verify: bool) -> None:
        self._what = None if isinstance(reuse, bool) else reuse
        self._verify = verify
        self._own: set[str] = set()  # ids of the saves that were begun here
        self.wanted = reuse is not False
        Frozen(self._what)  # what it cannot take is an error here, and not at the first save

    def distrusting(self, load: Callable[[Path], object]) -> Callable[[Path], object]:
        """``load``, before which nothing is taken for unchanged any more: what was frozen when a step was saved may be something else then."""

        def distrusted(path: Path) -> object:
            self._own.clear()
            return load(path)

        return distrusted

    def options(self, prepared: Prepared) -> dict[str, Any]:
        """The arguments of a save that say so."""
        if not self.wanted:
            return {}
        parent = prepared.parent
        # What another run froze may be something else.
        trusted = parent is not None and parent.save_id in self._own
        self._own.add(prepared.save_id)
        return {
            "parent": None if parent is None else parent.path,
            "reuse": Frozen(self._what, trusted=trusted),
            "verify_reuse": self._verify,
        }
