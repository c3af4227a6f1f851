"""Streams of tensors in the order of their files, read ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._progress import Counts
from dcp_rs.checkpoint.entries import check_held
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.memory import space_of
from dcp_rs.tensors.regions import read_ahead
from dcp_rs.transfer.copy_stream import copy_stream_for, is_accelerator
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, groups, stored_dtype
from dcp_rs.transfer.upload import SlabLoad, make_transfer


def stream(
    index: _core.Index,
    device: torch.device,
    options: ReadOptions,
    value: Callable[[str], Any],
    *,
    numbers: Collection[int] | None = None,
    counts: Counts | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor or value) of entries, in the order of the files.

    A tensor on a device is safe to use on the stream that was current when it was asked for.

    Args:
        index: the checkpoint.
        device: the device of the tensors.
        options: how to read.
        value: a function that reads a non-tensor value by its name.
        numbers: the numbers of the entries; default: all.
        counts: counters for the bytes.
    """
    counts = Counts() if counts is None else counts
    chosen = [n for n in index.file_order() if numbers is None or n in numbers]
    stored = {n: entry for n in chosen if not (entry := index.tensor(n)).is_bytes}
    index.check_expanded(list(stored))
    if is_accelerator(device):
        # On meta: memory is made when its first bytes are there.
        targets = [Target.whole(number, entry, "meta") for number, entry in stored.items()]
        tensors = _through_slabs(index, targets, device, options, counts)
    else:
        tensors = _read_ahead(index, stored, options, counts)
    try:
        for number in chosen:
            name = index.name(number)
            yield name, next(tensors) if number in stored else value(name)
    finally:
        tensors.close()


def _read_ahead(
    index: _core.Index,
    entries: Mapping[int, _core.TensorEntry],
    options: ReadOptions,
    counts: Counts,
) -> Generator[torch.Tensor, None, None]:
    """Yield tensors in host memory, while a thread reads the next group of them."""
    check_held(index, [(n, [0] * len(entry.shape), entry.shape) for n, entry in entries.items()])

    def read(group: Sequence[int], _: int) -> list[torch.Tensor]:
        targets = [Target.whole(number, entries[number], "cpu") for number in group]
        fill(index, targets, options, counts)
        return [target.tensor for target in targets]

    sizes = [
        (number, stored_dtype(entry.name, entry.dtype).itemsize * math.prod(entry.shape))
        for number, entry in entries.items()
    ]
    # Two groups are in memory, one in use and one that is being read.
    limit = max(1, options.inflight_bytes(accelerator=False) // 2)
    for _, tensors in read_ahead(groups(sizes, limit), read):
        tensors.reverse()
        while tensors:
            yield tensors.pop()  # the consumer has the only reference


def _through_slabs(
    index: _core.Index,
    targets: Sequence[Target],
    device: torch.device,
    options: ReadOptions,
    counts: Counts,
) -> Generator[torch.Tensor, None, None]:
    """Yield tensors on a device. A tensor's memory is made when its first bytes are read."""
    stream = copy_stream_for(device)
    made: dict[int, Target] = {}

    def make(number: int) -> Target:
        target = targets[number]
        return replace(target, tensor=stream.empty(tuple(target.tensor.shape), target.dtype))

    def take(number: int) -> torch.Tensor:
        """Return a tensor for the current stream, and forget it. An empty one is made here."""
        return stream.hand_over((made.pop(number, None) or make(number)).tensor)

    batch = _core.Batch(index)
    for number, target in enumerate(targets):
        batch.add_device_target(number, target, space_of(device), there=False)
    left = [target.nbytes for target in targets]
    with ExitStack() as stack:
        stack.callback(stream.order_before_caller)
        load = stack.enter_context(
            SlabLoad(batch, batch.slab_regions(0), sort=False, accelerator=True, options=options)
        )
        first = 0
        for _, copies, slab in load:
            if new := {copy.target for copy in copies} - made.keys():
                made |= {number: make(number) for number in sorted(new)}
                # The caller's stream may still use the new memory for an older tensor.
                stream.order_after_caller()
            transfer = make_transfer(slab, stream, made, copies)
            load.sent(stream.upload(slab, transfer))
            del transfer
            for copy in copies:
                left[copy.target] -= copy.nbytes
            while first < len(targets) and left[first] == 0:
                yield take(first)
                first += 1
        for number in range(first, len(targets)):  # empty tensors at the end
            yield take(number)
    counts.add(load.stats())
