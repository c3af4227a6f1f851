"""What ranks and coordinator remember between saves (``enable_plan_caching``), for each process group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["Memory", "memory", "saving_in"]


@dataclass
class Memory:
    """What this process knows of the saves in one group.

    Attributes:
        sent: by kind of planner, the digest of the plan that the coordinator got from this rank in the last save that went well.
        received: on the coordinator, by kind of planner, the requests of the last save by their digests.
        answered: on the coordinator, by kind of planner, what was asked last, and the answer.
    """

    sent: dict[str, bytes] = field(default_factory=dict)
    received: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    answered: dict[str, tuple[Any, Any]] = field(default_factory=dict)


class _Saving(threading.local):
    group: dist.ProcessGroup | None = None


_saving = _Saving()
#: By the group's identity: one that is made anew, of whichever ranks, begins with nothing.
_by_group: WeakKeyDictionary[dist.ProcessGroup, Memory] = WeakKeyDictionary()


@contextmanager
def saving_in(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Says which group the saves of this thread go through meanwhile; None: through none.

    DCP tells neither planner nor writer. What is saved without it is sent whole, since nobody knows who the coordinator will be.
    """
    before, _saving.group = _saving.group, group
    try:
        yield
    finally:
        _saving.group = before


def memory() -> Memory | None:
    """What is known of the group that this thread saves through; None where it is not known which."""
    return None if _saving.group is None else _by_group.setdefault(_saving.group, Memory())
