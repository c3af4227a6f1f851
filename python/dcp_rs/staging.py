"""Between slabs of host memory and devices: pinned memory, streams, events, and scratch memory on the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from typing_extensions import override

from dcp_rs import _torch

__all__ = [
    "HostLane",
    "Lane",
    "StreamLane",
    "Transfer",
    "is_accelerator",
    "lane_for",
    "release_pinned_memory",
    "slab_bytes",
    "slabs",
]

MIB = 1 << 20
#: A slab begins at a multiple of this: direct reads land in it.
PAGE = 4096
#: Large against the cost of starting a copy, and small enough for each of many threads to fill one of its own.
SLAB_BYTES = 8 * MIB
MIN_SLAB_BYTES = 64 << 10
#: Slabs that copies may hold, beyond those that are being filled.
SPARE_SLABS = 8
#: Pinned memory that is kept between loads.
MAX_KEPT_BYTES = 256 * MIB


def slab_bytes(max_bytes: int, *, least: int = MIN_SLAB_BYTES) -> int:
    """The size of the slabs of a ring of ``max_bytes``: a power of two, as the pinned allocator rounds up to one."""
    room = max(1, max_bytes // SPARE_SLABS)
    return min(max(least, 1 << room.bit_length() - 1), max(least, SLAB_BYTES))


def is_accelerator(device: torch.device) -> bool:
    """Whether memory of the device is not host memory."""
    return device.type != "cpu"


# --- slabs -----------------------------------------------------------------------------------------


class _SlabCache:
    """Pinned slabs between loads: pinning takes longer than a copy. One for a process; a fork starts with none of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[torch.Tensor] = []
        # A child of fork must not free what its parent has pinned.
        self._left_alone: list[torch.Tensor] = []
        os.register_at_fork(after_in_child=self._after_fork)

    def take(self, count: int, nbytes: int, *, pinned: bool) -> list[torch.Tensor]:
        """``count`` slabs: 1-d uint8 tensors on the host, at multiples of ``PAGE``."""
        slabs: list[torch.Tensor] = []
        if pinned:
            with self._lock:
                others = [slab for slab in self._kept if slab.numel() != nbytes]
                same = [slab for slab in self._kept if slab.numel() == nbytes]
                slabs, self._kept = same[:count], same[count:]
            if others:  # of another load's size: they would count against the bound for ever
                del others
                _torch.empty_host_cache()
        while len(slabs) < count:
            slabs.append(_new_slab(nbytes, pinned=pinned))
        return slabs

    def give(self, slabs: Sequence[torch.Tensor]) -> None:
        """Takes slabs back that nothing touches any more."""
        with self._lock:
            held = sum(slab.numel() for slab in self._kept)
            for slab in slabs:
                if slab.is_pinned() and held + slab.numel() <= MAX_KEPT_BYTES:
                    self._kept.append(slab)
                    held += slab.numel()

    def clear(self) -> int:
        """Lets go of all slabs; returns their bytes."""
        with self._lock:
            kept, self._kept = self._kept, []
        freed = sum(slab.numel() for slab in kept)
        del kept
        if freed:
            _torch.empty_host_cache()
        return freed

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._left_alone += self._kept
        self._kept = []


def _new_slab(nbytes: int, *, pinned: bool) -> torch.Tensor:
    if pinned:
        try:
            slab = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, NotImplementedError):
            pass  # an accelerator without pinned memory: its copies wait
        else:
            if slab.data_ptr() % PAGE == 0:
                return slab
            return _aligned(torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True), nbytes)
    return _aligned(torch.empty(nbytes + PAGE, dtype=torch.uint8), nbytes)


def _aligned(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    skip = -memory.data_ptr() % PAGE
    return memory[skip : skip + nbytes]


#: The slabs of this process.
slabs = _SlabCache()


def release_pinned_memory() -> int:
    """Gives back the pinned memory that loads and saves keep for the next one. Returns how many bytes that was."""
    return slabs.clear()


# --- lanes -----------------------------------------------------------------------------------------

#: (destination, source), of one shape.
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Transfer:
    """The copies between a slab and a device.

    Attributes:
        direct: between the slab and tensors on the device.
        runs: bytes (begin, end) that move between the slab and the same place of the scratch memory.
        grouped: between scratch memory and tensors, all on the device: lists of destinations and sources that one call can copy.
        single: the same, one at a time.
    """

    direct: list[Pair] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    grouped: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)
    single: list[Pair] = field(default_factory=list)


class Lane(Protocol):
    """The way of slabs to one device, or back. :meth:`scratch` and the transfer that uses it take turns."""

    pinned: bool

    def scratch(self, slab: torch.Tensor) -> torch.Tensor:
        """Memory of the device as large as ``slab``, for the next transfer. Of the host: the slab itself."""

    def upload(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        """Starts the copies out of ``slab``. What it returns is done when ``slab`` may be overwritten."""

    def download(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        """Starts the copies into ``slab``. What it returns is done when ``slab`` may be read."""

    def done(self, token: Any) -> bool:
        """Whether the copies behind ``token`` are done."""

    def wait(self, token: Any) -> None:
        """Blocks until they are."""

    def order_after_caller(self) -> None:
        """Makes what is uploaded next wait for what the caller's stream holds now."""

    def order_before_caller(self) -> None:
        """Makes what follows on the caller's stream wait for all copies so far."""


class HostLane(Lane):
    """To host memory: a copy is done when it returns."""

    pinned = False

    @override
    def scratch(self, slab: torch.Tensor) -> torch.Tensor:
        return slab

    @override
    def upload(self, slab: torch.Tensor, transfer: Transfer) -> None:
        with torch.no_grad():
            for destination, source in (*transfer.direct, *transfer.single):
                destination.copy_(source)
            for destinations, sources in transfer.grouped:
                torch._foreach_copy_(destinations, sources)

    download = upload

    @override
    def done(self, token: None) -> bool:
        return True

    @override
    def wait(self, token: None) -> None: ...

    @override
    def order_after_caller(self) -> None: ...

    @override
    def order_before_caller(self) -> None: ...


class StreamLane(Lane):
    """To an accelerator: copies go on two streams in turn, each with scratch memory of its own.

    So what is scattered from one slab does not hold up the copy of the next.

    ``streams`` is the device's module of torch, as ``torch.cuda``.
    """

    pinned = True
    STREAMS = 2

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self._device = device
        self._module = streams if streams is not None else torch.get_device_module(device)
        self._streams = [self._module.Stream(device=device) for _ in range(self.STREAMS)]
        self._scratch: list[torch.Tensor | None] = [None] * self.STREAMS
        self._turn = 0
        self.order_after_caller()

    @override
    def scratch(self, slab: torch.Tensor) -> torch.Tensor:
        scratch = self._scratch[self._turn]
        if scratch is None or scratch.numel() < slab.numel():
            # From the caller's stream, which waits for these streams in the end: the memory goes back to where it came from.
            scratch = self._scratch[self._turn] = torch.empty(slab.numel(), dtype=torch.uint8, device=self._device)
            self._streams[self._turn].wait_stream(self._module.current_stream(self._device))
        return scratch

    @override
    def upload(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        stream = self._streams[self._turn]
        with torch.no_grad(), self._module.stream(stream):
            for destination, source in transfer.direct:
                self._copy(destination, source)
            scratch = self._scratch[self._turn]
            for begin, end in transfer.runs:
                assert scratch is not None  # noqa: S101  # whoever made the runs asked for it
                self._copy(scratch[begin:end], slab[begin:end])
            event = self._record(stream)
            self._within(transfer)
        self._turn = (self._turn + 1) % self.STREAMS
        return event

    @override
    def download(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        stream = self._streams[self._turn]
        with torch.no_grad(), self._module.stream(stream):
            self._within(transfer)
            scratch = self._scratch[self._turn]
            for begin, end in transfer.runs:
                assert scratch is not None  # noqa: S101  # as above
                self._copy(slab[begin:end], scratch[begin:end])
            for destination, source in transfer.direct:
                self._copy(destination, source)
            event = self._record(stream)
        self._turn = (self._turn + 1) % self.STREAMS
        return event

    @override
    def done(self, token: Any) -> bool:
        return bool(token.query())

    @override
    def wait(self, token: Any) -> None:
        token.synchronize()

    @override
    def order_after_caller(self) -> None:
        current = self._module.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(current)

    @override
    def order_before_caller(self) -> None:
        current = self._module.current_stream(self._device)
        for stream in self._streams:
            current.wait_stream(stream)

    def _record(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event

    def _within(self, transfer: Transfer) -> None:
        for destinations, sources in transfer.grouped:
            self._copy_group(destinations, sources)
        for destination, source in transfer.single:
            self._copy(destination, source)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def _copy_group(self, destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(destinations, sources, non_blocking=True)


class BlockingLane(HostLane):
    """To a device that has no streams: every copy waits. Scratch memory would save nothing."""


def lane_for(device: torch.device) -> Lane:
    """The lane to a device."""
    if not is_accelerator(device):
        return HostLane()
    module = torch.get_device_module(device)
    if all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
        return StreamLane(device, module)
    return BlockingLane()
