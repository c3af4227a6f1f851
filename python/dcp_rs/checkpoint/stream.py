"""Tensors one after another in the order of their files, read ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from dcp_rs import _core
from dcp_rs._progress import Counts
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.memory import space_of
from dcp_rs.tensors.regions import read_ahead
from dcp_rs.transfer.copy_stream import CopyStream, copy_stream_for, is_accelerator
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, stored_dtype
from dcp_rs.transfer.upload import SlabLoad, make_transfer

__all__ = ["stream"]


@dataclass(slots=True)
class _Entry:
    """What the index says of one tensor or value."""

    number: int
    name: str
    is_bytes: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int

    def target(self, tensor: torch.Tensor) -> Target:
        """All of it, for ``tensor``."""
        return Target(self.number, [0] * len(self.shape), tensor, self.name, self.dtype)


def stream(
    index: _core.Index,
    device: torch.device,
    options: ReadOptions,
    value: Callable[[str], Any],
    *,
    numbers: Collection[int] | None = None,
    counts: Counts | None = None,
) -> Iterator[tuple[str, Any]]:
    """(name, tensor or value) of everything, or of the entries with these ``numbers``, in the order of the files; ``value`` gives the values.

    On a device, a tensor is safe to use on the stream that is current when the iterator is asked
    for it, be it another each time.
    """
    counts = Counts() if counts is None else counts
    entries = [
        _entry(index, number)
        for number in index.file_order()
        if numbers is None or number in numbers
    ]
    stored = [entry for entry in entries if not entry.is_bytes]
    if not is_accelerator(device):
        tensors = _read_ahead(index, stored, options, counts)
    else:
        tensors = _through_slabs(index, stored, device, options, counts)
    try:
        for entry in entries:
            yield entry.name, value(entry.name) if entry.is_bytes else next(tensors)
    finally:
        tensors.close()


def _entry(index: _core.Index, number: int) -> _Entry:
    entry = index.tensor(number)
    if entry.is_bytes:
        return _Entry(number, entry.name, True, torch.uint8, entry.shape, 0)
    dtype = stored_dtype(entry.name, entry.dtype)
    return _Entry(
        number, entry.name, False, dtype, entry.shape, dtype.itemsize * math.prod(entry.shape)
    )


# --- without slabs: a group of tensors at a time
# ---------------------------------------------------------


def _read_ahead(
    index: _core.Index, entries: Sequence[_Entry], options: ReadOptions, counts: Counts
) -> Generator[torch.Tensor, None, None]:
    """To host memory: a group is read while another is used."""

    def read(group: Sequence[_Entry], _: int) -> list[torch.Tensor]:
        made = [torch.empty(entry.shape, dtype=entry.dtype, device="cpu") for entry in group]
        targets = [entry.target(tensor) for entry, tensor in zip(group, made, strict=True)]
        fill(index, targets, options, counts)
        return made

    # What is used and what is being read are half of the bound each.
    limit = max(1, options.inflight_bytes(accelerator=False) // 2)
    for _, tensors in read_ahead(_groups(entries, limit), read):
        yield from _emptied(tensors)


def _groups(entries: Sequence[_Entry], limit: int) -> Iterator[list[_Entry]]:
    """Neighbours of up to ``limit`` bytes together, but never less than one."""
    group: list[_Entry] = []
    total = 0
    for entry in entries:
        if group and total + entry.nbytes > limit:
            yield group
            group, total = [], 0
        group.append(entry)
        total += entry.nbytes
    if group:
        yield group


def _emptied(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors, of which none is held once it was handed over."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


# --- devices: slabs are filled ahead, and a tensor's memory is made when its first bytes are there
# ------


class _Made(Sequence[Target]):
    """Targets whose memory is made when it is first asked for."""

    def __init__(self, stream: CopyStream, entries: Sequence[_Entry]) -> None:
        self._stream = stream
        self._entries = entries
        self.made: dict[int, Target] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @override
    def __getitem__(self, number: int) -> Target:  # type: ignore[override]  # nobody slices
        target = self.made.get(number)
        if target is None:
            entry = self._entries[number]
            target = self.made[number] = entry.target(self._stream.empty(entry.shape, entry.dtype))
        return target

    def take(self, number: int) -> torch.Tensor:
        """The tensor, for the stream that is current now. It is not held any longer."""
        tensor = self[number].tensor
        del self.made[number]
        return self._stream.hand_over(tensor)


def _through_slabs(
    index: _core.Index,
    entries: Sequence[_Entry],
    device: torch.device,
    options: ReadOptions,
    counts: Counts,
) -> Generator[torch.Tensor, None, None]:
    stream = copy_stream_for(device)
    targets = _Made(stream, entries)
    batch = _core.Batch(index)
    for number, entry in enumerate(entries):
        shape = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        batch.add_elsewhere(number, entry.target(shape), space_of(device), there=False)
    left = [entry.nbytes for entry in entries]
    with ExitStack() as stack:
        stack.callback(stream.order_before_caller)
        load = stack.enter_context(
            SlabLoad(batch, batch.wants(0), sort=False, accelerator=True, options=options)
        )
        first = 0
        for _, copies, slab in load:
            known = len(targets.made)
            transfer = make_transfer(slab, stream, targets, copies)
            if len(targets.made) > known:
                # New memory may be old memory that the caller's stream is not done with.
                stream.order_after_caller()
            load.sent(stream, stream.upload(slab, transfer))
            del transfer
            for copy in copies:
                left[copy.target] -= copy.nbytes
            while first < len(entries) and left[first] == 0:
                yield targets.take(first)
                first += 1
        for number in range(first, len(entries)):  # nothing but empty tensors, if anything
            yield targets.take(number)
    counts.add(load.stats())
