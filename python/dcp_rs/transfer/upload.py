"""Loads through slabs: threads fill slabs ahead, and copies move them to their tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from dcp_rs import _core
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.dtypes import COPIED_IN_GROUPS, as_integers
from dcp_rs.tensors.memory import flat_bytes, space_of
from dcp_rs.tensors.regions import narrow
from dcp_rs.transfer.buffers import SPARE_SLABS, new_slabs, slab_bytes
from dcp_rs.transfer.copy_stream import CopyStream, Group, Transfer, copy_stream_for, is_accelerator
from dcp_rs.transfer.target import Target

#: A part of this size is worth a copy of its own. Smaller ones go to scratch memory together, and
#: are scattered on the device.
DIRECT_BYTES = 1 << 20


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
    groups: dict[tuple[torch.dtype, torch.dtype], Group] = {}
    views: dict[torch.dtype, torch.Tensor] = {}
    for copy in copies:
        at, nbytes, begin, box = copy.at, copy.nbytes, copy.begin or 0, copy.box
        target = targets[copy.target]
        tensor, dtype = target.tensor, target.dtype
        is_plain = type(tensor) in PLAIN_TYPES and not tensor.is_neg() and not tensor.is_conj()
        is_same = is_plain and tensor.dtype == dtype  # the copy moves bytes unchanged
        if is_same:
            tensor = as_integers(tensor)
            dtype = tensor.dtype
        is_whole = nbytes == tensor.numel() * dtype.itemsize
        if box is not None:
            tensor = narrow(tensor, *box)
        if is_same and nbytes >= DIRECT_BYTES and (box is None or tensor.is_contiguous()):
            memory = flat_bytes(tensor)
            transfer.direct.append((memory[begin : begin + nbytes], slab[at : at + nbytes]))
            continue
        transfer.add_run(at, at + nbytes)
        view = views.get(dtype)
        if view is None:
            view = views[dtype] = stream.scratch(slab).view(dtype)
        first, count = at // dtype.itemsize, nbytes // dtype.itemsize
        if box is not None:
            source = view.narrow(0, first, count).view(box[1])
        elif is_whole:
            first += int(view.storage_offset())
            source = view.as_strided(tensor.shape, tensor.stride(), first)
        else:
            source = view.narrow(0, first, count)
            tensor = tensor.view(-1).narrow(0, begin // dtype.itemsize, count)
        # One kernel copies a group, if all have the strides of their sources.
        is_alike = is_plain and tensor.stride() == source.stride()
        if is_alike and tensor.dtype in COPIED_IN_GROUPS and dtype in COPIED_IN_GROUPS:
            group = groups.setdefault((tensor.dtype, dtype), ([], []))
            group[0].append(tensor)
            group[1].append(source)
        else:
            transfer.single.append((tensor, source))
    transfer.grouped = list(groups.values())
    return transfer


class SlabLoad:
    """A load that fills slab after slab: a context manager to iterate over once.

    It yields (number of the device, copies, slab). Call :meth:`sent` after you start copies from
    the slab; the slab is filled again when they are done. Without that call it is filled again at
    once. The exit waits for all copies.

    Args:
        batch: the planned batch.
        regions: the parts of the batch to load. Parts for different devices never share a slab.
        sort: load in the order of the files, not in that of ``regions``.
        accelerator: pin the slabs, and use the bound on memory for accelerators.
        options: how to read.
    """

    def __init__(
        self,
        batch: _core.Batch,
        regions: Sequence[int],
        *,
        sort: bool,
        accelerator: bool,
        options: ReadOptions,
    ) -> None:
        max_bytes = options.inflight_bytes(accelerator=accelerator)
        nbytes = slab_bytes(max_bytes)
        self._reader = reader = _core.SlabReader.create(
            batch, regions, nbytes, sort=sort, **options.slabs()
        )
        room = max(1, max_bytes // nbytes)
        count = min(room, reader.workers + SPARE_SLABS, reader.batch_count)
        self._spare = max(1, min(SPARE_SLABS, count // 2))
        self._slabs = new_slabs(count, nbytes, pinned=accelerator)
        #: The slab that was yielded last, and whether copies from it started.
        self._current = 0
        self._is_sent = False
        self._pending: deque[tuple[Any, int]] = deque()

    def __enter__(self) -> Self:
        if self._slabs:
            places = [(slab.data_ptr(), slab.nbytes) for slab in self._slabs]
            self._reader.start(places, self._slabs, max(1, len(self._slabs) - self._spare))
        return self

    def __iter__(self) -> Iterator[tuple[int, list[_core.Copy], torch.Tensor]]:
        reader = self._reader
        while self._slabs:
            self._recycle()
            found = reader.next()
            if found is None:
                return
            batch, self._current = found
            self._is_sent = False
            device, copies = reader.batch(batch)
            yield device, copies, self._slabs[self._current]
            if not self._is_sent:
                reader.release(self._current)

    def sent(self, event: Any) -> None:
        """Register the event after which the last slab may be filled again."""
        self._pending.append((event, self._current))
        self._is_sent = True

    def stats(self) -> _core.ReadStats:
        """Return the counts of a load that has ended."""
        return self._reader.stats()

    def _recycle(self) -> None:
        """Release slabs whose copies are done. Wait if copies hold all spare slabs."""
        while self._pending:
            event, slab = self._pending[0]
            if len(self._pending) >= self._spare:
                event.synchronize()
            elif not event.query():
                return
            self._pending.popleft()
            self._reader.release(slab)

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        for event, _slab in self._pending:
            event.synchronize()
        # The traceback of an error may keep this object, and would keep the memory.
        self._slabs.clear()


def upload(
    batch: _core.Batch,
    regions: Sequence[int],
    targets: Sequence[Target],
    options: ReadOptions,
    tell: Callable[[int], None] | None = None,
) -> _core.ReadStats:
    """Fill targets through slabs.

    Later work on the caller's current stream of each device sees the new values. After an error the
    targets may be partly filled, and that work still comes after the copies that were started.

    Args:
        batch: the planned batch.
        regions: the parts of the batch to load.
        targets: the targets by their numbers in the batch.
        options: how to read.
        tell: called with the bytes on their way so far.
    """
    devices = {space_of(device): device for device in {t.tensor.device for t in targets}}
    accelerator = any(map(is_accelerator, devices.values()))
    streams = {number: copy_stream_for(device) for number, device in devices.items()}
    load = SlabLoad(batch, regions, sort=True, accelerator=accelerator, options=options)
    with ExitStack() as stack:
        for stream in streams.values():
            stack.callback(stream.order_before_caller)
        stack.enter_context(load)
        sent = 0
        for device, copies, slab in load:
            stream = streams[device]
            load.sent(stream.upload(slab, make_transfer(slab, stream, targets, copies)))
            if tell is not None:
                sent += sum(copy.nbytes for copy in copies)
                tell(sent)
    return load.stats()
