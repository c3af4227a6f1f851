"""The coordinator's message to each rank of a save: which part of which save to write."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

__all__ = ["Place", "arrived", "await_place"]

_current = threading.local()


@dataclass(frozen=True)
class Place:
    """Which rank of which save this is.

    It travels in the rank's plan. A planner that keeps plans (``enable_plan_caching``) gives the
    writer an older plan, with an older place, and torch has no other message from the coordinator.
    So a place notes in :meth:`__setstate__` that it arrived in this thread: see :func:`arrived`.

    Attributes:
        rank: the number of this rank.
        world_size: the number of ranks; 0 in a rank-local save.
        save_id: the id of the save, the same on all ranks.
        generation: section 1.1 of the format.
    """

    rank: int
    world_size: int
    save_id: bytes
    generation: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _current.place = self


def await_place() -> None:
    """Forget the place that arrived in this thread: its part of another save begins."""
    _current.place = None


def arrived() -> Place | None:
    """Return the place that was unpickled in this thread since :func:`await_place`."""
    place: Place | None = getattr(_current, "place", None)
    return place
