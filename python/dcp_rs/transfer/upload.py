"""Loads through slabs: threads fill slabs ahead, and copies move them to their tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from dcp_rs import _core, _torch
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.dtypes import COPIED_IN_GROUPS, as_integers
from dcp_rs.tensors.memory import flat_bytes, space_of
from dcp_rs.tensors.regions import narrow
from dcp_rs.transfer.buffers import SPARE_SLABS, slab_bytes, slab_pool
from dcp_rs.transfer.copy_stream import CopyStream, Transfer, copy_stream_for, is_accelerator
from dcp_rs.transfer.target import Target

__all__ = ["SlabLoad", "make_transfer", "upload"]

#: A part of this size is worth a copy of its own. Smaller ones go to scratch memory together, and
#: are scattered on the device.
DIRECT_BYTES = 1 << 20


class _Goal:
    """The tensor of a target, and how to copy to it.

    Attributes:
        tensor: the tensor to fill.
        dtype: the dtype of the elements in the slab.
        same: whether the copy moves bytes unchanged.
        grouped: whether one call may copy it together with other tensors.
        nbytes: the bytes of the elements in the slab.
    """

    __slots__ = ("dtype", "grouped", "nbytes", "same", "tensor")

    def __init__(self, target: Target) -> None:
        tensor, dtype = target.tensor, target.dtype
        plain = type(tensor) in _torch.PLAIN_TYPES and not tensor.is_neg() and not tensor.is_conj()
        self.same = plain and tensor.dtype == dtype
        if self.same:
            tensor = as_integers(tensor)
            dtype = tensor.dtype
        self.tensor = tensor
        self.dtype = dtype
        self.grouped = plain and tensor.dtype in COPIED_IN_GROUPS and dtype in COPIED_IN_GROUPS
        self.nbytes = tensor.numel() * dtype.itemsize


def make_transfer(
    slab: torch.Tensor,
    stream: CopyStream,
    targets: Sequence[Target] | Mapping[int, Target],
    copies: Sequence[_core.Copy],
) -> Transfer:
    """Return the transfer of a filled slab to its targets.

    Args:
        slab: the slab.
        stream: the stream that will run the transfer.
        targets: the targets by their numbers in the batch.
        copies: the parts of the slab, in order.
    """
    transfer = Transfer()
    groups: dict[
        tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]
    ] = {}
    views: _Views | None = None
    goals: dict[int, _Goal] = {}
    for copy in copies:
        number, at, nbytes, box = copy.target, copy.at, copy.nbytes, copy.box
        begin = copy.begin or 0
        goal = goals.get(number)
        if goal is None:
            goal = goals[number] = _Goal(targets[number])
        tensor = goal.tensor if box is None else narrow(goal.tensor, *box)
        if goal.same and nbytes >= DIRECT_BYTES and (box is None or tensor.is_contiguous()):
            memory = flat_bytes(tensor)
            transfer.direct.append((memory[begin : begin + nbytes], slab[at : at + nbytes]))
            continue
        if views is None:
            views = _Views(stream.scratch(slab))
        transfer.add_run(at, at + nbytes)
        if box is not None:
            source = views.tensor(goal.dtype, at, nbytes).view(box[1])
        elif nbytes == goal.nbytes:
            source = views.like(tensor, goal.dtype, at)
        else:
            first = begin // goal.dtype.itemsize
            tensor = tensor.view(-1)[first : first + nbytes // goal.dtype.itemsize]
            source = views.tensor(goal.dtype, at, nbytes)
        if goal.grouped:
            group = groups.setdefault((tensor.dtype, goal.dtype), ([], []))
            group[0].append(tensor)
            group[1].append(source)
        else:
            transfer.single.append((tensor, source))
    transfer.grouped = list(groups.values())
    return transfer


class _Views:
    """Views of memory as tensors, with few calls of torch."""

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
        """Return a row of elements."""
        typed, _ = self._of(dtype)
        return typed.narrow(0, at // dtype.itemsize, nbytes // dtype.itemsize)

    def like(self, tensor: torch.Tensor, dtype: torch.dtype, at: int) -> torch.Tensor:
        """Return elements in the shape of a contiguous tensor."""
        typed, begin = self._of(dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), begin + at // dtype.itemsize)


class SlabLoad:
    """A load that fills slab after slab: a context manager to iterate over once.

    It yields (number of the device, copies, slab). Call :meth:`sent` after you start copies from
    the slab; the slab is filled again when they are done. Without that call it is filled again at
    once. The exit waits for all copies.

    Args:
        batch: the planned batch.
        wants: the parts of the batch to load. Parts for different devices never share a slab.
        sort: load in the order of the files, not in that of ``wants``.
        accelerator: pin the slabs, and use the bound on memory for accelerators.
        options: how to read.
    """

    def __init__(
        self,
        batch: _core.Batch,
        wants: Sequence[int],
        *,
        sort: bool,
        accelerator: bool,
        options: ReadOptions,
    ) -> None:
        self._max_bytes = options.inflight_bytes(accelerator=accelerator)
        self._slab_bytes = slab_bytes(self._max_bytes)
        self._reader = _core.SlabReader.create(
            batch, wants, self._slab_bytes, sort=sort, **options.slabs()
        )
        self._pinned = accelerator
        self._slabs: list[torch.Tensor] = []
        self._spare = 1
        self._current: int | None = None
        self._pending: deque[tuple[CopyStream, Any, int]] = deque()

    def __enter__(self) -> Self:
        reader = self._reader
        if not reader.batch_count:
            return self
        room = max(1, self._max_bytes // self._slab_bytes)
        count = min(room, reader.workers + SPARE_SLABS, reader.batch_count)
        self._spare = max(1, min(SPARE_SLABS, count // 2))
        self._slabs = slab_pool.take(count, self._slab_bytes, pinned=self._pinned)
        places = [(slab.data_ptr(), slab.nbytes) for slab in self._slabs]
        reader.start(places, self._slabs, max(1, count - self._spare))
        return self

    def __iter__(self) -> Iterator[tuple[int, list[_core.Copy], torch.Tensor]]:
        reader = self._reader
        while reader.batch_count:
            self._recycle()
            found = reader.next()
            if found is None:
                return
            batch, self._current = found
            device, copies = reader.batch(batch)
            yield device, copies, self._slabs[self._current]
            if self._current is not None:
                reader.release(self._current)
                self._current = None

    def sent(self, stream: CopyStream, token: Any) -> None:
        """Register the token of copies that read the last slab."""
        if self._current is None:
            msg = "no slab was handed out for these copies"
            raise RuntimeError(msg)
        self._pending.append((stream, token, self._current))
        self._current = None

    def stats(self) -> _core.ReadStats:
        """Return the counts of a load that has ended."""
        return self._reader.stats()

    def _recycle(self) -> None:
        """Release slabs whose copies are done. Wait if copies hold all spare slabs."""
        while self._pending:
            stream, token, slab = self._pending[0]
            if len(self._pending) >= self._spare:
                stream.wait(token)
            elif not stream.done(token):
                return
            self._pending.popleft()
            self._reader.release(slab)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.close()
        # If waiting fails, the copies may still read their slabs, so the pool must not get them.
        while self._pending:
            stream, token, _ = self._pending[0]
            stream.wait(token)
            self._pending.popleft()
        slab_pool.give(self._slabs)
        self._slabs = []


def upload(
    batch: _core.Batch,
    wants: Sequence[int],
    targets: Sequence[Target],
    options: ReadOptions,
    tell: Callable[[int], None] | None = None,
) -> _core.ReadStats:
    """Fill targets through slabs.

    Later work on the caller's current stream of each device sees the new values. After an error the
    targets may be partly filled, and that work still comes after the copies that were started.

    Args:
        batch: the planned batch.
        wants: the parts of the batch to load.
        targets: the targets by their numbers in the batch.
        options: how to read.
        tell: called with the bytes on their way so far.
    """
    devices = {
        space_of(device): device for device in {target.tensor.device: None for target in targets}
    }
    accelerator = any(map(is_accelerator, devices.values()))
    load = SlabLoad(batch, wants, sort=True, accelerator=accelerator, options=options)
    with ExitStack() as stack:
        streams = {number: copy_stream_for(device) for number, device in devices.items()}
        for stream in streams.values():
            stack.callback(stream.order_before_caller)
        stack.enter_context(load)
        sent = 0
        for device, copies, slab in load:
            stream = streams[device]
            load.sent(stream, stream.upload(slab, make_transfer(slab, stream, targets, copies)))
            if tell is not None:
                sent += sum(copy.nbytes for copy in copies)
                tell(sent)
    return load.stats()
