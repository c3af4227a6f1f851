"""Which methods of a planner are not its class's own: what a user overrode has to be called."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

__all__ = ["Methods", "overridable"]


def overridable(kind: type) -> frozenset[str]:
    """The methods of a class of torch's planners: those that DCP may call, and those that they call."""
    return frozenset(
        name
        for base in kind.__mro__[:-1]
        for name, value in vars(base).items()
        if inspect.isroutine(value) and not name.startswith("__")
    )


class Methods:
    """The methods of a class of planners, as they are when this is made.

    Args:
        kind: the class.
        protocol: torch's class that it derives from, whose methods count.
    """

    def __init__(self, kind: type, protocol: type) -> None:
        self.names = overridable(protocol)
        self._ways = {name: _way(kind, name) for name in self.names}

    def replaced(self, planner: object, names: Iterable[str] | None = None) -> bool:
        """Whether any of the names (default: all) leads elsewhere: overridden in a subclass, set on the object, or patched in a class."""
        kind, own = type(planner), vars(planner)
        return any(
            name in own or _way(kind, name) != self._ways[name] for name in (self.names if names is None else names)
        )


def _way(kind: type, name: str) -> list[object]:
    """All that a call of the method may come to, through ``super()``."""
    return [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
