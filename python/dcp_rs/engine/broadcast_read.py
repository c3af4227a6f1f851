"""Reads that several ranks share: each rank reads a part, and sends it to the other ranks.

All that can fail on one rank alone is done before the first send, except for the reads. A rank
whose read fails goes on and sends what its buffers hold, so that no rank waits for it. It raises in
the step that this is a part of, and so do all ranks.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from dcp_rs import _core, _torch
from dcp_rs._progress import Counts
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.options import ReadOptions, local_ranks
from dcp_rs.tensors.memory import flat_bytes, is_plain, require_real_memory
from dcp_rs.tensors.regions import Cut, cut, narrow, unflatten
from dcp_rs.transfer.buffers import new_slabs
from dcp_rs.transfer.copy_stream import is_accelerator
from dcp_rs.transfer.target import Target, fills

T = TypeVar("T")

#: Large tensors are cut at multiples of this many bytes.
_PAGE = 4096
_MAX_PIECE_BYTES = 16 << 20
_MIN_PIECE_BYTES = 64 << 10


@dataclass
class BroadcastGroup:
    """Ranks that share reads.

    Attributes:
        ranks: the ranks, in the process group.
        send_device: the device whose memory is sent: the CPU, or the device of the targets.
        targets: the targets that all of them have, in the same order on each rank.
    """

    ranks: tuple[int, ...]
    send_device: torch.device
    targets: list[Target]


def read_shared(
    index: _core.Index,
    groups: Sequence[BroadcastGroup],
    options: ReadOptions,
    ranks: RankGroup,
    everyone: Sequence[Offered],
) -> Counts:
    """Fill the targets that ranks share. Every rank of the load calls it.

    Args:
        index: the index of the checkpoint.
        groups: the groups of this rank.
        options: how to read.
        ranks: the ranks of the load.
        everyone: what all ranks offered.

    Returns:
        The counts of this rank. If another rank failed, the targets are filled only in part, and
        the step that this is a part of raises.

    Raises:
        Exception: the error of this rank, once no rank waits for it.
        RankLostError: a collective failed.
    """
    kept = KeptError()

    def prepare() -> tuple[list[_Exchange], dict[torch.device, _Memory], list[torch.Tensor]]:
        exchanges = [_Exchange(index, group, options, ranks, kept) for group in groups]
        own = {exchange.device for exchange in exchanges}
        memories = {
            device: _Memory(device, [one for one in exchanges if one.device == device])
            for device in own
        }
        types = {one for _, _, send_types in everyone for one in send_types if one != "cpu"}
        of_type = {device.type: device for device in own}
        first = [of_type.get(t) or _torch.device_of(ranks.process_group, t) for t in sorted(types)]
        return exchanges, memories, [torch.zeros(1, device=device) for device in first]

    exchanges, memories, first = ranks.run(prepare)
    # The first call over NCCL connects all ranks of the group, and some may share nothing.
    for tensor in first:
        with ranks.talking():
            dist.all_reduce(tensor, group=ranks.process_group)
    for exchange in exchanges:
        with ranks.talking():
            exchange.run(memories[exchange.device])
    kept.raise_it()
    counts = Counts()
    for exchange in exchanges:
        counts.add(exchange.counts)
    counts.wanted = sum(target.nbytes for group in groups for target in group.targets)
    return counts


class _Exchange:
    """Exchange of pieces between ranks that share reads. It allocates before it begins.

    In each round every rank sends one piece to the others, and reads its piece of the next round.

    Args:
        index: the index of the checkpoint.
        group: the ranks.
        options: how to read.
        ranks: the ranks of the load.
        kept: keeps an error of this rank. After it nothing is read or unpacked.

    Attributes:
        counts: counts of reads from storage.
    """

    def __init__(
        self,
        index: _core.Index,
        group: BroadcastGroup,
        options: ReadOptions,
        ranks: RankGroup,
        kept: KeptError,
    ) -> None:
        self.counts = Counts()
        self._kept = kept
        self.device = group.send_device
        self._index = index
        self._options = options
        self._group = ranks.process_group
        self._ranks = [ranks.global_rank(rank) for rank in group.ranks]
        self._me = group.ranks.index(ranks.rank)
        self._on_host = not is_accelerator(self.device)
        count = len(self._ranks)
        limit = options.inflight_bytes(accelerator=not self._on_host) // (2 * count)
        found = list(pieces(group.targets, max(_MIN_PIECE_BYTES, min(_MAX_PIECE_BYTES, limit))))
        self._rounds = [found[at : at + count] for at in range(0, len(found), count)]
        #: Buffers for the pieces of a round and this rank's next piece, and the size of each.
        self.slots = count + 1
        in_place = self._on_host and all(piece.memory() is not None for piece in found)
        self.nbytes = 0 if in_place else max(piece.nbytes for piece in found)

    def run(self, memory: _Memory) -> None:
        """Send and receive all pieces, round by round."""
        ready = self._read(0, memory)
        for number, pieces in enumerate(self._rounds):
            buffers, works = self._start(pieces, ready, memory)
            # The next piece is read while this one is sent.
            ready = self._read(number + 1, memory)
            for work in works:
                work.wait()
            self._kept.attempt(partial(self._unpack, pieces, buffers))

    def _read(self, number: int, memory: _Memory) -> torch.Tensor | None:
        """Read this rank's piece of a round, if it has one."""
        if number >= len(self._rounds) or self._me >= len(self._rounds[number]):
            return None
        piece = self._rounds[number][self._me]
        # Two buffers take turns: the other one is being sent.
        buffer = self._buffer(piece, memory.slots[self._me if number % 2 else len(self._ranks)])
        self._kept.attempt(partial(self._fill, piece, buffer, memory.slab))
        return buffer

    def _fill(self, piece: Piece, buffer: torch.Tensor, slab: torch.Tensor | None) -> None:
        memory = buffer if slab is None else slab[: piece.nbytes]
        self.counts.add(self._index.read_regions(piece.reads(memory), **self._options.engine()))
        if slab is not None:
            buffer.copy_(memory)  # it waits for the copy, so the slab is free again

    def _start(
        self, pieces: Sequence[Piece], mine: torch.Tensor | None, memory: _Memory
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Begin to send this rank's piece of a round, and to receive the other pieces."""
        buffers: list[torch.Tensor] = []
        operations: list[dist.P2POp] = []
        for owner, piece in enumerate(pieces):
            if owner == self._me and mine is not None:
                buffers.append(mine)
                others = (rank for rank in self._ranks if rank != self._ranks[self._me])
                operations += [dist.P2POp(dist.isend, mine, rank, self._group) for rank in others]
            else:
                buffers.append(self._buffer(piece, memory.slots[owner]))
                source = self._ranks[owner]
                operations.append(dist.P2POp(dist.irecv, buffers[-1], source, self._group))
        return buffers, dist.batch_isend_irecv(operations)

    def _buffer(self, piece: Piece, slot: torch.Tensor) -> torch.Tensor:
        own = piece.memory() if self._on_host else None
        return slot[: piece.nbytes] if own is None else own

    def _unpack(self, pieces: Sequence[Piece], buffers: Sequence[torch.Tensor]) -> None:
        for piece, buffer in zip(pieces, buffers, strict=True):
            piece.unpack(buffer)


class KeptError:
    """The first error of this rank, which is kept until no rank waits for this one."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do some work, unless an error is kept. Keep an error of it."""
        if self._error is None:
            try:
                return work()
            except BaseException as error:  # noqa: BLE001  # raised at the end
                self._error = error
        return None

    def raise_it(self) -> None:
        """Raise the error, if there is one."""
        if self._error is not None:
            raise self._error


class _Memory:
    """Memory that the exchanges of one device use in turn.

    Attributes:
        slots: buffers for pieces.
        slab: pinned memory for reads from storage; None for the CPU.
    """

    def __init__(self, device: torch.device, exchanges: Sequence[_Exchange]) -> None:
        nbytes = max(exchange.nbytes for exchange in exchanges)
        count = max(exchange.slots for exchange in exchanges)
        self.slots = [
            require_real_memory(torch.zeros(nbytes, dtype=torch.uint8, device=device))
            for _ in range(count)
        ]
        self.slab = new_slabs(1, nbytes, pinned=True)[0] if is_accelerator(device) else None


@dataclass(slots=True)
class Piece:
    """Elements of targets that are sent as one message."""

    targets: Sequence[Target]
    parts: list[Cut]

    @property
    def nbytes(self) -> int:
        """The bytes of the message."""
        last = self.parts[-1]
        return last.at + last.count * self.targets[last.number].dtype.itemsize

    def elements(self, buffer: torch.Tensor) -> Iterator[tuple[Target, Cut, torch.Tensor]]:
        """Yield the elements of each part in memory that holds the piece, as a row."""
        for part in self.parts:
            target = self.targets[part.number]
            yield (
                target,
                part,
                buffer[part.at : part.at + part.count * target.dtype.itemsize].view(target.dtype),
            )

    def reads(self, buffer: torch.Tensor) -> list[_core.Fill]:
        """Return the reads of the piece into memory that holds it."""
        reads: list[_core.Fill] = []
        for target, part, elements in self.elements(buffer):
            reads += fills(target.index, target.tensor.shape, part.begin, elements, target.offsets)
        return reads

    def memory(self) -> torch.Tensor | None:
        """Return the bytes of the piece in its tensor, if they are contiguous and plain."""
        part, target = self.parts[0], self.targets[self.parts[0].number]
        tensor = target.tensor
        if len(self.parts) != 1 or not is_plain(tensor, target.dtype) or not tensor.is_contiguous():
            return None
        begin = part.begin * target.dtype.itemsize
        return flat_bytes(tensor.detach())[begin : begin + self.nbytes]

    def unpack(self, buffer: torch.Tensor) -> None:
        """Copy a received piece to its targets."""
        own = self.memory()
        if own is not None and own.data_ptr() == buffer.data_ptr():
            return
        with torch.inference_mode():  # its tensors too may be filled
            for target, part, elements in self.elements(buffer):
                for offsets, values in unflatten(target.tensor.shape, part.begin, elements):
                    narrow(target.tensor, offsets, values.shape).copy_(values)


def pieces(targets: Sequence[Target], limit: int) -> Iterator[Piece]:
    """Cut and pack targets into pieces of at most ``limit`` bytes, alike on all ranks."""
    rows = (
        (target.tensor.numel(), target.dtype.itemsize, _PAGE // target.dtype.itemsize)
        for target in targets
    )
    for parts in cut(rows, limit):
        yield Piece(targets, parts)


#: Node, digests and types of send devices of an offer.
Offered = tuple[int, list[bytes], list[str]]


@dataclass
class Offer:
    """Reads that one rank may share.

    Attributes:
        node: a number of the node. Ranks of one number share.
        classes: the type of device to send from and the targets of each class, by its digest.
            Ranks share a class if their digests are equal.
    """

    node: int = 0
    classes: dict[bytes, tuple[str, list[Target]]] = field(default_factory=dict)

    @property
    def offered(self) -> Offered:
        """Return the part that the other ranks get."""
        types = {send_type for send_type, _ in self.classes.values()}
        return self.node, list(self.classes), sorted(types)


def offer(
    targets: Sequence[Target],
    shapes: Sequence[Sequence[int]],
    source: bytes,
    scope: Literal["node", "all"],
    process_group: dist.ProcessGroup | None,
) -> Offer:
    """Sort targets into classes, by the sharding of their tensors and the device to send from.

    Ranks share a class if all of its regions are equal: replicas of DDP and HSDP, and tensors that
    tensor parallelism does not shard.

    Args:
        targets: the targets of this rank.
        shapes: the shapes of the whole tensors.
        source: what the ranks read, and the size of the pieces that they cut. Only ranks of equal
            ``source`` share.
        scope: share among the ranks of a node (``LOCAL_WORLD_SIZE`` consecutive ones), or among
            all ranks.
        process_group: the group of the load.
    """
    sendable = _torch.sendable_types(process_group)
    classes: dict[Any, list[Target]] = {}
    for target, shape in zip(targets, shapes, strict=True):
        sizes = tuple(target.tensor.shape)
        if 0 in sizes:
            continue
        cut = tuple(
            (-(-whole // size), at // size)
            for whole, at, size in zip(shape, target.offsets, sizes, strict=True)
        )
        own = target.tensor.device.type
        send_type = own if own in sendable else "cpu" if "cpu" in sendable else sendable[0]
        classes.setdefault((send_type, cut), []).append(target)
    found = Offer(dist.get_rank() // (local_ranks() or 1) if scope == "node" else 0)
    for (send_type, _), members in classes.items():
        members.sort(key=lambda target: (target.index, tuple(target.offsets)))
        found.classes[_digest(source, send_type, members)] = send_type, members
    return found


def match_offers(
    own: Offer, everyone: Sequence[Offered], process_group: dist.ProcessGroup | None
) -> list[BroadcastGroup]:
    """Return the groups of this rank, in an order in which no ranks deadlock."""
    by_ranks: dict[tuple[tuple[int, ...], str], list[Target]] = {}
    for digest in sorted(own.classes):  # the same order on all ranks that share
        ranks = tuple(
            rank
            for rank, (node, digests, _) in enumerate(everyone)
            if node == own.node and digest in digests
        )
        if len(ranks) > 1:
            send_type, targets = own.classes[digest]
            by_ranks.setdefault((ranks, send_type), []).extend(targets)
    groups = []
    for (ranks, send_type), targets in sorted(by_ranks.items(), key=lambda entry: entry[0]):
        device = targets[0].tensor.device
        if device.type != send_type:
            device = _torch.device_of(process_group, send_type)
        groups.append(BroadcastGroup(ranks, device, targets))
    return groups


def any_shared(everyone: Sequence[Offered]) -> bool:
    """Return true if any ranks share reads. All ranks return the same."""
    offers = Counter((node, digest) for node, digests, _ in everyone for digest in digests)
    return any(count > 1 for count in offers.values())


def _digest(source: bytes, send_type: str, targets: Sequence[Target]) -> bytes:
    digest = hashlib.blake2b(source + send_type.encode(), digest_size=16)
    for target in targets:
        digest.update(str(target.dtype).encode())
        region = (target.index, target.tensor.dim(), *target.offsets, *target.tensor.shape)
        digest.update(struct.pack(f"<{len(region)}Q", *region))
    return digest.digest()
