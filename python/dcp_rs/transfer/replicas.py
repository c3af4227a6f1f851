"""Replicas, which are tensors that several ranks hold alike, read once: who shares the reading of what."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from dcp_rs import _core, _torch
from dcp_rs.transfer.exchange import SharedReads
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = ["Offer", "is_shared", "offer", "share", "whole_targets"]

#: What ranks agree on is found for each way that tensors are cut. Models have a few; more than this many are not shared.
_MAX_CLASSES = 64


@dataclass
class Offer:
    """What one rank needs.

    Attributes:
        node: which ranks it may share with.
        digests: of its classes of targets. Ranks that have one in common share it.
        members: the targets of each class.
    """

    node: int = 0
    digests: list[bytes] = field(default_factory=list)
    members: dict[bytes, list[Target]] = field(default_factory=dict)

    def told(self) -> tuple[int, list[bytes]]:
        """What the others have to know of it. It does not grow with the model."""
        return self.node, self.digests


def offer(
    targets: Sequence[Target],
    shapes: Sequence[Sequence[int]],
    scope: Literal["node", "all"],
    process_group: dist.ProcessGroup | None,
) -> Offer:
    """Sorts targets into classes by how they are cut from their tensors, and by the way that they can be sent.

    Ranks whose class is the same in all of its regions share it: that finds the replicas of DDP, those of HSDP, and under tensor parallelism those of
    what is not split.

    Args:
        targets: of this rank.
        shapes: of the whole tensors.
        scope: share among the ranks of a node (``LOCAL_WORLD_SIZE`` consecutive ones), or among all.
        process_group: of the load.
    """
    kinds = [device.type for device in _torch.group_devices(process_group)]
    classes: dict[Any, list[Target]] = {}
    for target, shape in zip(targets, shapes, strict=True):
        sizes = tuple(target.tensor.shape)
        if 0 in sizes:
            continue
        cut = tuple(
            (-(-whole // size), at // size) for whole, at, size in zip(shape, target.offsets, sizes, strict=True)
        )
        classes.setdefault((_way(target, kinds), cut), []).append(target)
    by_size = sorted(classes.items(), key=lambda entry: sum(target.nbytes for target in entry[1]), reverse=True)
    found = Offer(dist.get_rank() // _local_world_size() if scope == "node" else 0)
    for (way, _), members in by_size[:_MAX_CLASSES]:
        members.sort(key=lambda target: (target.index, tuple(target.offsets)))
        digest = _digest(way, members)
        found.members[digest] = members
    found.digests = list(found.members)
    return found


def _way(target: Target, kinds: Sequence[str]) -> str:
    """The kind of memory to send a target from: its own, where the process group can send that."""
    kind = target.tensor.device.type
    return kind if kind in kinds else "cpu" if "cpu" in kinds else kinds[0]


def share(
    own: Offer, everyone: Sequence[tuple[int, list[bytes]]], process_group: dist.ProcessGroup | None
) -> list[SharedReads]:
    """Who reads what together, of what this rank needs: in an order in which no two ranks wait for each other."""
    kinds = [device.type for device in _torch.group_devices(process_group)]
    by_ranks: dict[tuple[tuple[int, ...], str], list[Target]] = {}
    for digest in sorted(own.digests):  # an order that all who share have
        ranks = tuple(rank for rank, (node, digests) in enumerate(everyone) if node == own.node and digest in digests)
        if len(ranks) > 1:
            targets = own.members[digest]
            by_ranks.setdefault((ranks, _way(targets[0], kinds)), []).extend(targets)
    return [SharedReads(ranks, _device(kind), by_ranks[ranks, kind]) for ranks, kind in sorted(by_ranks)]


def is_shared(everyone: Sequence[tuple[int, list[bytes]]]) -> bool:
    """Whether any ranks share anything. All ranks know the same."""
    seen: set[tuple[int, bytes]] = set()
    for node, digests in everyone:
        if not seen.isdisjoint((node, digest) for digest in digests):
            return True
        seen.update((node, digest) for digest in digests)
    return False


def whole_targets(
    index: _core.Index, names: Sequence[str], tensors: Sequence[torch.Tensor], others: Sequence[int]
) -> list[Target]:
    """Targets for whole tensors by their stored names, but for those at the places ``others``."""
    left_out = set(others)
    kept = [at for at in range(len(names)) if at not in left_out]
    described = index.describe([names[at] for at in kept])
    return [
        Target(row[0], (0,) * tensors[at].dim(), tensors[at].detach(), names[at], stored_dtype(names[at], row[1]), at)
        for at, row in zip(kept, described, strict=True)
        if row is not None
    ]


def _digest(way: str, targets: Sequence[Target]) -> bytes:
    digest = hashlib.blake2b(way.encode(), digest_size=16)
    for target in targets:
        region = (target.index, target.tensor.dim(), *target.offsets, *target.tensor.shape)
        digest.update(struct.pack(f"<{len(region)}Q", *region))
    return digest.digest()


def _local_world_size() -> int:
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def _device(kind: str) -> torch.device:
    """This rank's device of a kind."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
