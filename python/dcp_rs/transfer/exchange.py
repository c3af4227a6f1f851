"""Ranks that share the reading of something: each reads a part, and broadcasts it to the others.

Nobody waits for a rank that has failed. What can fail by itself is done before anything is sent, and all ranks say that they are ready; an error
there is that of all. From then on ranks send each other pieces in rounds, and with each piece whether its owner has failed meanwhile, so that those
who share end in the same round, and go on to the next ones that share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from dcp_rs import _core
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.memory import check_made, is_plain
from dcp_rs.transfer import slabs
from dcp_rs.transfer.counts import Counts
from dcp_rs.transfer.lanes import Transfer, is_accelerator, lane_for
from dcp_rs.transfer.target import Target

__all__ = ["Peers", "SharedReads", "read_shared"]

T = TypeVar("T")

_ALIGNMENT = 64
_MAX_PIECE_BYTES = 16 << 20
_MIN_PIECE_BYTES = 64 << 10


class Peers(Protocol):
    """The ranks of a load, in step: :class:`dcp_rs.engine.ranks.Ranks`."""

    process_group: dist.ProcessGroup | None
    rank: int

    def global_rank(self, rank: int) -> int:
        """What a rank of the group is called among all."""

    def all(self, work: Callable[[], T]) -> list[T]:
        """Every rank does its part. Returns what all of them gave; raises on all what failed on any."""

    def together(self, work: Callable[[], T]) -> T:
        """Every rank does its part. Raises on all what failed on any."""

    def talking(self) -> AbstractContextManager[None]:
        """Around what sends and receives."""


@dataclass
class SharedReads:
    """What several ranks read together.

    Attributes:
        ranks: those, in the process group.
        way: where the memory is that they send: on the host, or on the devices that have the targets.
        targets: what all of them have, in the same order on each.
    """

    ranks: tuple[int, ...]
    way: torch.device
    targets: list[Target]

    @property
    def nbytes(self) -> int:
        """Of the targets, as they are stored."""
        return sum(target.nbytes for target in self.targets)


def read_shared(
    index: _core.Index, shared: Sequence[SharedReads], options: ReadOptions, peers: Peers
) -> tuple[Counts, bool]:
    """Fills what this rank shares with others: each reads a part of the pieces and sends them to the others. A step of all ranks.

    Returns what this rank wanted and read, and whether all is there: not where another rank failed, which the step in which this is
    done will raise on all.

    Raises:
        Exception: what made reading fail on this rank, but only when nobody waits for it any more.
        RankLostError: a rank is gone.
    """

    def prepare() -> tuple[list[_Exchange], dict[torch.device, _Room]]:
        exchanges = [_Exchange(index, reads, options, peers) for reads in shared]
        ways = {exchange.way for exchange in exchanges}
        return exchanges, {way: _Room(way, [exchange for exchange in exchanges if exchange.way == way]) for way in ways}

    exchanges, rooms = peers.together(prepare)
    halted = False
    try:
        for exchange in exchanges:
            exchange.halted = halted
            with peers.talking():
                exchange.run(rooms[exchange.way])
            halted = exchange.halted
    finally:
        for room in rooms.values():
            room.close()
    error = next((exchange.error for exchange in exchanges if exchange.error is not None), None)
    if error is not None:
        raise error
    counts = Counts()
    for exchange in exchanges:
        counts.add(exchange.counts)
    counts.wanted = sum(reads.nbytes for reads in shared)
    return counts, not halted


class _Exchange:
    """One rank's side of reading in turns. What it needs is there before it begins.

    Attributes:
        error: what made this rank fail.
        halted: a rank has failed, here or in an exchange before. Then nothing more is read, and the next piece says so.
        counts: what was read from storage.
    """

    def __init__(self, index: _core.Index, reads: SharedReads, options: ReadOptions, peers: Peers) -> None:
        self.error: BaseException | None = None
        self.halted = False
        self.counts = Counts()
        self.way = reads.way
        self._index = index
        self._options = options
        self._peers = peers
        self._ranks = [peers.global_rank(rank) for rank in reads.ranks]
        self._me = reads.ranks.index(peers.rank)
        self._on_host = not is_accelerator(reads.way)
        count = len(self._ranks)
        limit = options.inflight_bytes(accelerator=not self._on_host) // (2 * count)
        pieces = list(_pieces(reads.targets, max(_MIN_PIECE_BYTES, min(_MAX_PIECE_BYTES, limit))))
        self._rounds = [pieces[at : at + count] for at in range(0, len(pieces), count)]
        self._flags = torch.zeros(count, dtype=torch.uint8, device=reads.way)
        #: The pieces of a round, and this rank's next one; and what one of them may need.
        self.slots = count + 1
        in_place = self._on_host and all(piece.memory() is not None for piece in pieces)
        self.nbytes = 0 if in_place else max(piece.nbytes for piece in pieces)

    def run(self, room: _Room) -> None:
        """Send and receive, round by round, until all is there or one rank has failed."""
        ready = self._read(0, room)
        for number, pieces in enumerate(self._rounds):
            buffers, works = self._start(pieces, ready, room)
            # The next piece is read while this one is on its way.
            ready = self._read(number + 1, room)
            for work in works:
                work.wait()
            if self._flags.any():  # of those who share, all see the same
                self.halted = True
                return
            self._unpack(pieces, buffers)

    def _read(self, number: int, room: _Room) -> torch.Tensor | None:
        """Reads this rank's piece of a round, if it has one."""
        if number >= len(self._rounds) or self._me >= len(self._rounds[number]):
            return None
        piece = self._rounds[number][self._me]
        # Of the round before the other of the two is on its way.
        buffer = self._buffer(piece, room.slots[self._me if number % 2 else len(self._ranks)])
        if not self.halted:
            try:
                self._fill(piece, buffer, room.stages)
            except BaseException as error:  # noqa: BLE001  # raised when nobody waits for this rank any more
                self._fail(error)
        return buffer

    def _fill(self, piece: _Piece, buffer: torch.Tensor, stages: _Stages | None) -> None:
        memory = buffer if stages is None else stages.take()[: piece.nbytes]
        fills = []
        for target, offsets, sizes, at in piece.parts:
            view = _part(memory, target, sizes, at)
            first = [a + b for a, b in zip(target.offsets, offsets, strict=True)]
            fills.append(_core.Fill(target.index, first, view.shape, view.data_ptr(), view.stride()))
        self.counts.add(self._index.read_regions(fills, **self._options.engine()))
        if stages is not None:
            stages.send(memory, buffer)

    def _start(
        self, pieces: Sequence[_Piece], mine: torch.Tensor | None, room: _Room
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Begins to send this rank's piece of a round, and to receive the others'."""
        buffers: list[torch.Tensor] = []
        operations: list[dist.P2POp] = []
        group = self._peers.process_group
        self._flags.zero_()
        if self.halted:
            self._flags[self._me] = 1
        for owner, piece in enumerate(pieces):
            flag = self._flags[owner : owner + 1]
            if owner == self._me and mine is not None:
                buffers.append(mine)
                for rank in self._ranks:
                    if rank != self._ranks[self._me]:
                        operations += [dist.P2POp(dist.isend, part, rank, group) for part in (flag, mine)]
                continue
            buffers.append(self._buffer(piece, room.slots[owner]))
            operations += [dist.P2POp(dist.irecv, part, self._ranks[owner], group) for part in (flag, buffers[-1])]
        return buffers, dist.batch_isend_irecv(operations)

    def _buffer(self, piece: _Piece, slot: torch.Tensor) -> torch.Tensor:
        own = piece.memory() if self._on_host else None
        return slot[: piece.nbytes] if own is None else own

    def _unpack(self, pieces: Sequence[_Piece], buffers: Sequence[torch.Tensor]) -> None:
        if not self.halted:
            try:
                for piece, buffer in zip(pieces, buffers, strict=True):
                    piece.unpack(buffer)
            except BaseException as error:  # noqa: BLE001  # as above
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error, self.halted = error, True


class _Room:
    """Memory that exchanges of one way take turns in: ``slots`` on the way, and what is read from the storage on its way there."""

    def __init__(self, way: torch.device, exchanges: Sequence[_Exchange]) -> None:
        nbytes = max(exchange.nbytes for exchange in exchanges)
        count = max(exchange.slots for exchange in exchanges)
        self.slots = [check_made(torch.empty(nbytes, dtype=torch.uint8, device=way)) for _ in range(count)]
        self.stages = _Stages(way, nbytes) if is_accelerator(way) else None

    def close(self) -> None:
        """Gives back what is kept for the next load."""
        if self.stages is not None:
            self.stages.close()


class _Stages:
    """Two slabs of pinned memory on the way from the storage to a device: one is read into while the other one is copied."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._lane = lane_for(device)
        self._slabs = slabs.kept.take(2, nbytes, pinned=True)
        self._tokens: list[Any] = [None, None]
        self._next = 0

    def take(self) -> torch.Tensor:
        """The one that is free sooner, once it is."""
        token, self._tokens[self._next] = self._tokens[self._next], None
        if token is not None:
            self._lane.wait(token)
        return self._slabs[self._next]

    def send(self, memory: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copies what was read into the slab that was taken last. The current stream sees it there."""
        self._lane.order_after_caller()
        self._tokens[self._next] = self._lane.upload(memory, Transfer(direct=[(buffer, memory)]))
        self._lane.order_before_caller()
        self._next = 1 - self._next

    def close(self) -> None:
        """Gives the slabs back."""
        for token in self._tokens:
            if token is not None:
                self._lane.wait(token)
        slabs.kept.give(self._slabs)
        self._slabs = []


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
        # Not view(-1): a tensor of one element may have any stride.
        return view.detach().as_strided((view.numel(),), (1,)).view(torch.uint8)

    def unpack(self, buffer: torch.Tensor) -> None:
        """Copies what arrived to where it belongs."""
        own = self.memory()
        if own is not None and own.data_ptr() == buffer.data_ptr():
            return
        with torch.no_grad():
            for target, offsets, sizes, at in self.parts:
                _narrow(target.tensor, offsets, sizes).copy_(_part(buffer, target, sizes, at))


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
