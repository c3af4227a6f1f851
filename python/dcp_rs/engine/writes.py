"""What one rank writes in a save, and how the state dict was nested."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dcp_rs import _core
from dcp_rs._warnings import warn_caller
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.nesting import Container, TreePath, name_of, remaining, storable
from dcp_rs.tensors.trees import Flat
from dcp_rs.transfer.entry import Entry

__all__ = ["Nesting", "Writes"]


@dataclass
class Nesting:
    """How a state dict was nested.

    Attributes:
        paths: of its leaves, by FQN, in its order, with keys as they are.
        containers: those that the paths do not tell.
        lost: keys that the format cannot hold, by the name of what they lead to. They are text here.
    """

    paths: dict[str, TreePath]
    containers: list[Container]
    lost: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, flat: Flat) -> Nesting:
        """That of a state dict."""
        if flat.is_text:
            return cls(flat.paths, flat.containers)
        lost: dict[str, Any] = {}

        def kept(path: TreePath) -> TreePath:
            path, keys = storable(path)
            if keys:
                lost[name_of(path)] = keys[0]
            return path

        paths = {fqn: kept(path) for fqn, path in flat.paths.items()}
        return cls(paths, [Container(c.position, kept(c.path), c.kind) for c in flat.containers], lost)

    def judge(self, *, strict: bool) -> None:
        """Warn of keys that come back as text.

        Raises:
            UnsupportedError: there are some, with ``strict``; or a number of more than 64 bits, infinity, or a tuple with such.
        """
        for name, key in self.lost.items():
            keys = "keys are text, numbers, None, and tuples of such"
            if isinstance(key, int | float | tuple):  # its text could not be told from a text
                msg = f"{name!r}: the key {key!r} cannot be kept: {keys}, and integers have 64 bits"
                raise UnsupportedError(msg, tensor=name)
            msg = f"{name!r}: the key {key!r} ({type(key).__name__}) is kept as text, {str(key)!r}: {keys}"
            if strict:
                raise UnsupportedError(f"{msg} (strict_values=True)", tensor=name)
            warn_caller(msg)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The places of the leaves."""
        return {fqn: position for position, fqn in enumerate(self.paths)}

    def places(self, names: list[str]) -> tuple[list[TreePath | None], list[int | None]]:
        """The path and the position of each leaf; None of what is none."""
        if list(self.paths) == names:  # nothing was added, taken or moved
            return list(self.paths.values()), list(range(len(names)))
        return [self.paths.get(name) for name in names], [self.positions.get(name) for name in names]

    def only(self, names: Iterable[str], passes: Callable[[str], bool]) -> Nesting:
        """That of a state dict of which only the leaves ``names`` are left, and other containers that pass."""
        leaves = [self.paths[name] for name in names]
        lost = {name: key for name, key in self.lost.items() if passes(name)}
        return Nesting(self.paths, remaining(self.containers, leaves, passes), lost)

    def to_core(self) -> list[tuple[int, TreePath, str]]:
        """The containers, as ``_core.Save.finish`` takes them."""
        return [(container.position, container.path, container.kind) for container in self.containers]


@dataclass
class Writes:
    """What one rank writes.

    Attributes:
        plan: its items.
        keep: which of them it writes, a bit for each; None: all.
        tensors: the list that the plan's plain tensors are places in.
        entries: the other items that it writes.
        nesting: of the state dict, where the planner is one that knows.
    """

    plan: _core.SavePlan
    keep: bytes | None
    tensors: list[Any]
    entries: list[Entry]
    nesting: Nesting | None = None
