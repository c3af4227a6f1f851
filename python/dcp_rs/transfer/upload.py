"""Loads through slabs: the engine fills them ahead, copies empty them, events say when one may be filled again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from dcp_rs import _core, _torch
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.dtypes import AS_INTEGERS, COPIED_IN_GROUPS
from dcp_rs.tensors.memory import space_of
from dcp_rs.tensors.regions import narrow
from dcp_rs.transfer import slabs
from dcp_rs.transfer.copy_stream import CopyStream, Transfer, copy_stream_for, is_accelerator
from dcp_rs.transfer.target import Target

__all__ = ["SlabLoad", "make_transfer", "upload"]

#: From here on a part is worth a copy of its own; smaller ones go down together and are scattered
#: on the device.
DIRECT_BYTES = 1 << 20
#: What lies between two parts is copied with them up to this.
GAP_BYTES = 64 << 10


class _Goal:
    """The tensor of a target, and what its copies have to know of it.

    Attributes:
        tensor: where the elements go.
        dtype: of the elements in the slab.
        same: bytes can be copied as they are.
        grouped: it can be copied together with others: its operations are torch's own, and its
            dtypes those that a device copies in groups.
        nbytes: bytes of the elements in the slab.
    """

    __slots__ = ("dtype", "grouped", "nbytes", "same", "tensor")

    def __init__(self, target: Target) -> None:
        tensor, dtype = target.tensor, target.dtype
        plain = type(tensor) in _torch.PLAIN_TYPES and not tensor.is_neg() and not tensor.is_conj()
        self.same = plain and tensor.dtype == dtype
        if self.same and dtype in AS_INTEGERS:
            dtype = AS_INTEGERS[dtype]
            tensor = tensor.view(dtype)
        self.tensor = tensor
        self.dtype = dtype
        self.grouped = plain and tensor.dtype in COPIED_IN_GROUPS and dtype in COPIED_IN_GROUPS
        self.nbytes = tensor.numel() * dtype.itemsize


def make_transfer(
    slab: torch.Tensor, stream: CopyStream, targets: Sequence[Target], copies: Sequence[_core.Copy]
) -> Transfer:
    """The copies out of ``slab``, in the order of their places, as the stream takes them."""
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
            flat = tensor.view(-1).view(torch.uint8)
            transfer.direct.append((flat[begin : begin + nbytes], slab[at : at + nbytes]))
            continue
        if views is None:
            views = _Views(stream.scratch(slab))
        _extend(transfer.runs, at, at + nbytes)
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


def _extend(runs: list[tuple[int, int]], begin: int, end: int) -> None:
    """Adds bytes to runs that begin no later."""
    if runs and begin - runs[-1][1] <= GAP_BYTES:
        runs[-1] = (runs[-1][0], end)
    else:
        runs.append((begin, end))


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
    """What is wanted, slab by slab. A context manager, to iterate over once.

    It gives (number of the device, copies, slab). Whoever starts copies from the slab says so by
    :meth:`sent`; the slab is filled again when they are done, or at once if there are none. On the
    way out every copy has been waited for.

    Args:
        batch: what is planned.
        wants: which of it. What goes to different devices never shares a slab.
        sort: in the order of the files, not that of ``wants``.
        accelerator: slabs are pinned, and the options' bound is that for accelerators.
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
        self._slab_bytes = slabs.slab_bytes(self._max_bytes)
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
        count = min(room, reader.workers + slabs.SPARE_SLABS, reader.batch_count)
        self._spare = max(1, min(slabs.SPARE_SLABS, count // 2))
        self._slabs = slabs.kept.take(count, self._slab_bytes, pinned=self._pinned)
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
        """Says that the copies behind ``token`` read the slab given last."""
        if self._current is None:
            msg = "no slab was handed out for these copies"
            raise RuntimeError(msg)
        self._pending.append((stream, token, self._current))
        self._current = None

    def stats(self) -> _core.ReadStats:
        """What was read, once the load has ended."""
        return self._reader.stats()

    def _recycle(self) -> None:
        """Gives back the slabs whose copies are done. No more than the spare ones stay: the threads need the others."""
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
        # Copies that cannot be waited for may still read their slabs: those are not used again.
        while self._pending:
            stream, token, _ = self._pending[0]
            stream.wait(token)
            self._pending.popleft()
        slabs.kept.give(self._slabs)
        self._slabs = []


def upload(
    batch: _core.Batch,
    wants: Sequence[int],
    targets: Sequence[Target],
    options: ReadOptions,
    tell: Callable[[int], None] | None = None,
) -> _core.ReadStats:
    """Fills what goes through slabs: ``wants`` of a batch whose targets' numbers are those of ``targets``. ``tell`` hears of the bytes on their way.

    When this returns, work that is queued on the caller's current stream of each device sees all of
    it. After an error the targets may be partly filled, and that work still comes after whatever
    copies were started.
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
