"""Loads through slabs: the engine fills them ahead, copies empty them, events say when one may be filled again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from dcp_rs import _core, _torch
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.dtypes import AS_INTEGERS, COPIED_IN_GROUPS
from dcp_rs.transfer import slabs
from dcp_rs.transfer.lanes import Lane, Transfer, is_accelerator, lane_for

__all__ = ["Goal", "Piece", "SlabLoad", "Want", "make_goal", "make_transfer", "upload"]

#: (chunk, offsets in it, sizes, whether it goes to one run of memory, group): a rectangle to load.
Want = tuple[int, Sequence[int], Sequence[int], bool, int]
#: (item, place in the slab, bytes, first byte in the item), or (item, place, bytes, offsets in the item, sizes).
Piece = Any

#: From here on a piece is worth a copy of its own; smaller ones go down together and are scattered on the device.
DIRECT_BYTES = 1 << 20
#: What lies between two pieces is copied with them up to this.
GAP_BYTES = 64 << 10


@dataclass(slots=True)
class Goal:
    """A tensor to fill, and what is known of it.

    Attributes:
        tensor: where the elements go.
        dtype: of the elements in the slab.
        flat: it is one run of memory, in row-major order.
        same: bytes can be copied as they are.
        grouped: it can be copied together with others: its operations are torch's own, and its dtypes those that a device copies in groups.
        nbytes: bytes of the elements in the slab.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    flat: bool
    same: bool
    grouped: bool
    nbytes: int


def make_goal(tensor: torch.Tensor, dtype: torch.dtype) -> Goal:
    """The goal of elements of ``dtype``."""
    plain = type(tensor) in _torch.PLAIN_TYPES and not tensor.is_neg() and not tensor.is_conj()
    same = plain and tensor.dtype == dtype
    if same and dtype in AS_INTEGERS:
        dtype = AS_INTEGERS[dtype]
        tensor = tensor.view(dtype)
    grouped = plain and tensor.dtype in COPIED_IN_GROUPS and dtype in COPIED_IN_GROUPS
    return Goal(tensor, dtype, plain and tensor.is_contiguous(), same, grouped, tensor.numel() * dtype.itemsize)


class Goals(Protocol):
    """Goals by item: a list, or something that makes them when they are asked for."""

    def __getitem__(self, item: int, /) -> Goal: ...


def make_transfer(slab: torch.Tensor, lane: Lane, goals: Goals, pieces: Sequence[Piece]) -> Transfer:
    """The copies that bring the pieces of ``slab``, in the order of their places, to their goals."""
    transfer = Transfer()
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    views: _Views | None = None
    for item, at, nbytes, *part in pieces:
        goal = goals[item]
        tensor = _narrow(goal.tensor, *part) if len(part) == 2 else goal.tensor
        if goal.same and nbytes >= DIRECT_BYTES and (goal.flat if len(part) == 1 else tensor.is_contiguous()):
            begin = part[0] if len(part) == 1 else 0
            flat = tensor.view(-1).view(torch.uint8)
            transfer.direct.append((flat[begin : begin + nbytes], slab[at : at + nbytes]))
            continue
        if views is None:
            views = _Views(lane.scratch(slab))
        _extend(transfer.runs, at, at + nbytes)
        if len(part) == 2:
            source = views.tensor(goal.dtype, at, nbytes).view(part[1])
        elif nbytes == goal.nbytes:
            source = views.like(tensor, goal.dtype, at)
        else:
            begin = part[0] // goal.dtype.itemsize
            tensor = tensor.view(-1)[begin : begin + nbytes // goal.dtype.itemsize]
            source = views.tensor(goal.dtype, at, nbytes)
        if goal.grouped:
            group = groups.setdefault((tensor.dtype, goal.dtype), ([], []))
            group[0].append(tensor)
            group[1].append(source)
        else:
            transfer.single.append((tensor, source))
    transfer.grouped = list(groups.values())
    return transfer


def _extend(runs: list[tuple[int, int]], begin: int, end: int) -> None:
    """Adds bytes to runs that begin no later."""
    if runs and begin - runs[-1][1] <= GAP_BYTES:
        runs[-1] = (runs[-1][0], end)
    else:
        runs.append((begin, end))


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


class _Views:
    """Memory seen as tensors, with as few calls as can be."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._typed: dict[torch.dtype, tuple[torch.Tensor, int]] = {}

    def _of(self, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        found = self._typed.get(dtype)
        if found is None:
            typed = self._memory.view(dtype)
            found = self._typed[dtype] = typed, int(typed.storage_offset())
        return found

    def tensor(self, dtype: torch.dtype, at: int, nbytes: int) -> torch.Tensor:
        """Elements in one dimension."""
        typed, _ = self._of(dtype)
        return typed.narrow(0, at // dtype.itemsize, nbytes // dtype.itemsize)

    def like(self, tensor: torch.Tensor, dtype: torch.dtype, at: int) -> torch.Tensor:
        """Elements in the shape of a contiguous tensor."""
        typed, begin = self._of(dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), begin + at // dtype.itemsize)


class SlabLoad:
    """What is wanted of an index, slab by slab. A context manager, to iterate over once.

    It gives (group, pieces, slab). Whoever starts copies from the slab says so by :meth:`sent`; the slab is filled again when they are done, or at
    once if there are none. On the way out every copy has been waited for.

    Args:
        index: where the data is.
        wants: the rectangles. Groups do not share slabs.
        sort: in the order of the files, not that of ``wants``.
        accelerator: slabs are pinned, and the options' bound is that for accelerators.
        options: how to read.
    """

    def __init__(
        self, index: _core.Index, wants: Sequence[Want], *, sort: bool, accelerator: bool, options: ReadOptions
    ) -> None:
        self._max_bytes = options.inflight_bytes(accelerator=accelerator)
        self._slab_bytes = slabs.slab_bytes(self._max_bytes)
        self._reader = _core.SlabReader.create(index, wants, self._slab_bytes, sort=sort, **options.slabs())
        self._pinned = accelerator
        self._slabs: list[torch.Tensor] = []
        self._spare = 1
        self._current: int | None = None
        self._pending: deque[tuple[Lane, Any, int]] = deque()

    def __enter__(self) -> Self:
        reader = self._reader
        if not reader.batch_count:
            return self
        room = max(1, self._max_bytes // self._slab_bytes)
        count = min(room, reader.workers + slabs.SPARE_SLABS, reader.batch_count)
        self._spare = max(1, min(slabs.SPARE_SLABS, count // 2))
        self._slabs = slabs.kept.take(count, self._slab_bytes, pinned=self._pinned)
        reader.start([slab.data_ptr() for slab in self._slabs], self._slabs, max(1, count - self._spare))
        return self

    def __iter__(self) -> Iterator[tuple[int, list[Piece], torch.Tensor]]:
        reader = self._reader
        while reader.batch_count:
            self._recycle()
            found = reader.next()
            if found is None:
                return
            batch, self._current = found
            group, pieces = reader.batch(batch)
            yield group, pieces, self._slabs[self._current]
            if self._current is not None:
                reader.release(self._current)
                self._current = None

    def sent(self, lane: Lane, token: Any) -> None:
        """Says that the copies behind ``token`` read the slab given last."""
        if self._current is None:
            msg = "no slab was handed out for these copies"
            raise RuntimeError(msg)
        self._pending.append((lane, token, self._current))
        self._current = None

    def stats(self) -> tuple[int, int, int]:
        """(bytes wanted, bytes read, bytes read past the page cache), once the load has ended."""
        return self._reader.stats()

    def _recycle(self) -> None:
        """Gives back the slabs whose copies are done. No more than the spare ones stay: the threads need the others."""
        while self._pending:
            lane, token, slab = self._pending[0]
            if len(self._pending) >= self._spare:
                lane.wait(token)
            elif not lane.done(token):
                return
            self._pending.popleft()
            self._reader.release(slab)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()
        # Copies that cannot be waited for may still read their slabs: those are not used again.
        while self._pending:
            lane, token, _ = self._pending[0]
            lane.wait(token)
            self._pending.popleft()
        slabs.kept.give(self._slabs)
        self._slabs = []


def upload(
    index: _core.Index, wants: Sequence[Want], goals: Goals, devices: Sequence[torch.device], options: ReadOptions
) -> None:
    """Loads each rectangle to the goal of the same number; its group is the number of its device.

    When this returns, work that is queued on the caller's current stream of each device sees all of it. After an error the goals may be partly filled, and
    that work still comes after whatever copies were started.
    """
    accelerator = any(map(is_accelerator, devices))
    load = SlabLoad(index, wants, sort=True, accelerator=accelerator, options=options)
    with ExitStack() as stack:
        lanes = [lane_for(device) for device in devices]
        for lane in lanes:
            stack.callback(lane.order_before_caller)
        stack.enter_context(load)
        for group, pieces, slab in load:
            lane = lanes[group]
            load.sent(lane, lane.upload(slab, make_transfer(slab, lane, goals, pieces)))
