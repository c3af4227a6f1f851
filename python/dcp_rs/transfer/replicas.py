"""Replicas read once: ranks that need the same bytes share the reading of them, and send each other what they read."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from dcp_rs import _core, _torch
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.memory import is_plain
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = ["SharedReads", "read_shared", "share", "whole_targets"]

#: What ranks agree on is found for each way that tensors are cut. Models have a few; more than this many are not shared.
_MAX_CLASSES = 64
_ALIGNMENT = 64
_MAX_PIECE_BYTES = 16 << 20
_MIN_PIECE_BYTES = 64 << 10


@dataclass
class SharedReads:
    """What is read by several ranks together, and what is left to each.

    Attributes:
        groups: ranks (in the process group) and the targets that all of them have, in the same order on each.
        rest: targets that no other rank has.
    """

    groups: list[tuple[list[int], list[Target]]] = field(default_factory=list)
    rest: list[Target] = field(default_factory=list)


def share(
    targets: Sequence[Target],
    shapes: Sequence[Sequence[int]],
    scope: Literal["node", "all"],
    process_group: dist.ProcessGroup | None,
) -> SharedReads:
    """Finds which ranks have the same targets. Collective; what is exchanged does not grow with the model.

    Targets are sorted into classes by how they are cut from their tensors, and ranks whose class is the same in all of its regions share it.
    That finds the replicas of DDP, those of HSDP, and under tensor parallelism those of what is not split.

    Args:
        targets: of this rank.
        shapes: of the whole tensors.
        scope: share among the ranks of a node (``LOCAL_WORLD_SIZE`` consecutive ones), or among all.
        process_group: of the load.
    """
    classes: dict[Any, list[Target]] = {}
    shared = SharedReads()
    for target, shape in zip(targets, shapes, strict=True):
        sizes = tuple(target.tensor.shape)
        if 0 in sizes:
            continue
        cut = tuple(
            (-(-whole // size), at // size) for whole, at, size in zip(shape, target.offsets, sizes, strict=True)
        )
        classes.setdefault(cut, []).append(target)
    by_size = sorted(classes.values(), key=_bytes_of, reverse=True)
    mine: dict[bytes, list[Target]] = {}
    for members in by_size[:_MAX_CLASSES]:
        members.sort(key=lambda target: (target.index, tuple(target.offsets)))
        mine[_digest(members)] = members
    for members in by_size[_MAX_CLASSES:]:
        shared.rest += members
    node = dist.get_rank() // _local_world_size() if scope == "node" else 0
    everyone: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, (node, list(mine)), group=process_group)
    by_ranks: dict[tuple[int, ...], list[Target]] = {}
    for digest in sorted(mine):  # an order that all ranks of a group have
        ranks = tuple(r for r, (other, digests) in enumerate(everyone) if other == node and digest in digests)
        if len(ranks) > 1:
            by_ranks.setdefault(ranks, []).extend(mine[digest])
        else:
            shared.rest += mine[digest]
    # Sorted, so that no two ranks wait for each other in different groups.
    shared.groups = [(list(ranks), by_ranks[ranks]) for ranks in sorted(by_ranks)]
    return shared


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


def read_shared(
    index: _core.Index,
    ranks: Sequence[int],
    targets: Sequence[Target],
    options: ReadOptions,
    process_group: dist.ProcessGroup | None,
) -> int:
    """Fills targets that all of ``ranks`` have: each reads a share of the pieces and sends them to the others.

    Returns the bytes that this rank read from storage. Raises what reading raises, but only when everything has been sent, so that no other rank waits. A rank that is gone makes the others
    raise what the process group raises.
    """
    me = ranks.index(dist.get_rank(process_group))
    device = _device(process_group)
    limit = options.inflight_bytes(accelerator=device.type != "cpu") // (2 * len(ranks))
    pieces = list(_pieces(targets, max(_MIN_PIECE_BYTES, min(_MAX_PIECE_BYTES, limit))))
    exchange = _Exchange(index, ranks, me, device, options, process_group)
    rounds = [pieces[at : at + len(ranks)] for at in range(0, len(pieces), len(ranks))]
    ready = exchange.read(rounds[0]) if rounds else None
    for at, current in enumerate(rounds):
        buffers, works = exchange.start(current, ready)
        # The next piece is read while this one is on its way.
        ready = exchange.read(rounds[at + 1]) if at + 1 < len(rounds) else None
        for work in works:
            work.wait()
        for piece, buffer in zip(current, buffers, strict=True):
            piece.unpack(buffer)
    if exchange.error is not None:
        raise exchange.error
    return exchange.bytes_read


@dataclass(slots=True)
class _Piece:
    """Rectangles that are sent together: (target, offsets in it, sizes, first byte), and the bytes of all."""

    parts: list[tuple[Target, Sequence[int], Sequence[int], int]]
    nbytes: int

    def memory(self) -> torch.Tensor | None:
        """The piece's own place, where it is one run of bytes of a tensor that holds what is stored."""
        if len(self.parts) != 1:
            return None
        target, offsets, sizes, _ = self.parts[0]
        view = _narrow(target.tensor, offsets, sizes)
        if not is_plain(target.tensor, target.dtype) or not view.is_contiguous():
            return None
        return view.detach().view(-1).view(torch.uint8)

    def unpack(self, buffer: torch.Tensor) -> None:
        """Copies what arrived to where it belongs."""
        own = self.memory()
        if own is not None and own.data_ptr() == buffer.data_ptr():
            return
        with torch.no_grad():
            for target, offsets, sizes, at in self.parts:
                _narrow(target.tensor, offsets, sizes).copy_(_part(buffer, target, sizes, at))


class _Exchange:
    """One rank's side of reading in turns."""

    def __init__(
        self,
        index: _core.Index,
        ranks: Sequence[int],
        me: int,
        device: torch.device,
        options: ReadOptions,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._index = index
        self._ranks = [r if process_group is None else dist.get_global_rank(process_group, r) for r in ranks]
        self._me = me
        self._device = device
        self._options = options
        self._group = process_group
        self.bytes_read = 0
        self.error: Exception | None = None

    def read(self, pieces: Sequence[_Piece]) -> torch.Tensor | None:
        """Reads this rank's piece of a round, if it has one."""
        if self._me >= len(pieces):
            return None
        piece = pieces[self._me]
        own = piece.memory() if self._device.type == "cpu" else None
        buffer = torch.empty(piece.nbytes, dtype=torch.uint8) if own is None else own
        if self.error is None:
            requests = []
            for target, offsets, sizes, at in piece.parts:
                view = _part(buffer, target, sizes, at)
                first = [a + b for a, b in zip(target.offsets, offsets, strict=True)]
                requests.append((target.index, first, view.shape, view.data_ptr(), view.stride()))
            try:
                self.bytes_read += self._index.read_regions(requests, **self._options.engine())[1]
            except Exception as error:  # noqa: BLE001  # raised when the others have what they wait for
                self.error = error
        return buffer.to(self._device)

    def start(self, pieces: Sequence[_Piece], mine: torch.Tensor | None) -> tuple[list[torch.Tensor], list[Any]]:
        """Begins to send this rank's piece of a round, and to receive the others'."""
        buffers: list[torch.Tensor] = []
        operations = []
        for owner, piece in enumerate(pieces):
            if owner == self._me and mine is not None:
                buffers.append(mine)
                peers = [rank for at, rank in enumerate(self._ranks) if at != self._me]
                operations += [dist.P2POp(dist.isend, mine, rank, self._group) for rank in peers]
                continue
            own = piece.memory() if self._device.type == "cpu" else None
            buffer = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._device) if own is None else own
            buffers.append(buffer)
            operations.append(dist.P2POp(dist.irecv, buffer, self._ranks[owner], self._group))
        return buffers, dist.batch_isend_irecv(operations)


def _pieces(targets: Sequence[Target], limit: int) -> Iterator[_Piece]:
    """Cuts and packs the targets into pieces of at most ``limit`` bytes, the same on every rank that has the same targets."""
    parts: list[tuple[Target, Sequence[int], Sequence[int], int]] = []
    end = 0
    for target in targets:
        for offsets, sizes in _cut(tuple(target.tensor.shape), target.dtype.itemsize, limit):
            nbytes = target.dtype.itemsize
            for size in sizes:
                nbytes *= size
            if parts and end + nbytes > limit:
                yield _Piece(parts, end)
                parts, end = [], 0
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
            parts.append((target, offsets, sizes, at))
            end = at + nbytes
    if parts:
        yield _Piece(parts, end)


def _cut(sizes: tuple[int, ...], itemsize: int, limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a rectangle into (offsets, sizes) of at most ``limit`` bytes and at least one element, in row-major order."""
    inner = itemsize
    for size in sizes[1:]:
        inner *= size
    if not sizes or inner * sizes[0] <= limit:
        yield (0,) * len(sizes), sizes
    elif inner <= limit:
        step = limit // inner
        for begin in range(0, sizes[0], step):
            yield (begin, *(0,) * (len(sizes) - 1)), (min(step, sizes[0] - begin), *sizes[1:])
    else:
        for begin in range(sizes[0]):
            for offsets, part in _cut(sizes[1:], itemsize, limit):
                yield (begin, *offsets), (1, *part)


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _part(buffer: torch.Tensor, target: Target, sizes: Sequence[int], at: int) -> torch.Tensor:
    count = 1
    for size in sizes:
        count *= size
    return buffer[at : at + count * target.dtype.itemsize].view(target.dtype).view(tuple(sizes))


def _bytes_of(targets: Sequence[Target]) -> int:
    return sum(target.tensor.numel() * target.dtype.itemsize for target in targets)


def _digest(targets: Sequence[Target]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for target in targets:
        region = (target.index, target.tensor.dim(), *target.offsets, *target.tensor.shape)
        digest.update(struct.pack(f"<{len(region)}Q", *region))
    return digest.digest()


def _local_world_size() -> int:
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def _device(process_group: dist.ProcessGroup | None) -> torch.device:
    """Where what is sent has to be: host memory if the group can send that, else its accelerator."""
    devices = _torch.group_devices(process_group or dist.group.WORLD)  # type: ignore[arg-type]  # it is initialized
    if any(device.type == "cpu" for device in devices):
        return torch.device("cpu")
    kind = devices[0].type
    return torch.device(kind, torch.get_device_module(kind).current_device())
