"""Plans that ranks need not send again: what each process remembers of the last save in a process group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dcp_rs import _core
from dcp_rs.errors import PlanError

__all__ = ["Offer", "PlanMemory", "assign", "memory_of", "offer"]


@dataclass(frozen=True)
class Offer:
    """What a rank tells the coordinator of its items.

    Attributes:
        data: what it holds; None where the coordinator has it from the save before.
        digest: of the data, where plans are remembered.
    """

    data: bytes | None
    digest: bytes = b""


@dataclass
class PlanMemory:
    """What this process knows of the last save in one group.

    Attributes:
        sent: the digest of what the coordinator has of this rank.
        received: on the coordinator, what all ranks hold, by digest.
        digests, answer: on the coordinator, what was assigned last, and how.
    """

    sent: bytes | None = None
    received: dict[bytes, bytes] = field(default_factory=dict)
    digests: tuple[bytes, ...] = ()
    answer: tuple[bool, list[bytes], int] | None = None


#: By the group's identity: one that is made anew, of whichever ranks, begins with nothing.
_by_group: WeakKeyDictionary[dist.ProcessGroup, PlanMemory] = WeakKeyDictionary()


def memory_of(group: dist.ProcessGroup | None) -> PlanMemory | None:
    """Return what is remembered of a group; None where there is none."""
    return None if group is None else _by_group.setdefault(group, PlanMemory())


def offer(data: bytes, memory: PlanMemory | None) -> Offer:
    """Return what the rank sends of its data. The caller sets ``memory.sent`` once the coordinator has answered."""
    if memory is None:
        return Offer(data)
    digest = hashlib.blake2b(data, digest_size=16).digest()
    # A save that fails may have changed what the coordinator remembers, so nothing counts as sent before its answer.
    known, memory.sent = memory.sent, None
    return Offer(None if known == digest else data, digest)


def assign(offers: Sequence[Offer], memory: PlanMemory | None, *, lowest_rank: bool) -> tuple[list[bytes], int]:
    """Assign what ranks hold to the ranks that write it.

    Returns:
        For each rank the bits of the items that it writes, and the number of items of all ranks.

    Raises:
        PlanError: what the ranks hold does not fit together; or a rank sent a digest of what the coordinator does not have.
    """
    received = {} if memory is None else memory.received
    data: list[bytes] = []
    for rank, told in enumerate(offers):
        known = received.get(told.digest) if told.data is None else told.data
        if known is None:
            msg = f"rank {rank} sent the digest of a plan that the coordinator does not have: save with the same function on all ranks"
            raise PlanError(msg)
        data.append(known)
    digests = tuple(told.digest for told in offers)
    if memory is not None and memory.digests == digests and memory.answer is not None:
        was_lowest, shares, items = memory.answer
        if was_lowest == lowest_rank:
            return shares, items
    shares, items, _ = _core.assign_saves(data, lowest_rank=lowest_rank)
    if memory is not None:
        memory.received = dict(zip(digests, data, strict=True))
        memory.digests, memory.answer = digests, (lowest_rank, shares, items)
    return shares, items
