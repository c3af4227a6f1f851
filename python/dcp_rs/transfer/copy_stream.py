"""Copies between slabs of host memory and a device, on side streams of the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

__all__ = [
    "CopyStream",
    "Transfer",
    "copy_stream_for",
    "is_accelerator",
    "synchronize",
]


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory of its own."""
    return device.type != "cpu"


def synchronize(device: torch.device) -> None:
    """Wait for the current stream of a device, without spinning if the device has events."""
    if _is_current(device):
        stream = torch.accelerator.current_stream(device)
        try:
            event = _new_event(device)
            event.record(stream)
        except RuntimeError:  # the device has no events
            stream.synchronize()
        else:
            event.synchronize()
    else:
        torch.get_device_module(device).synchronize()


def _is_current(device: torch.device) -> bool:
    """Return whether the device is of the kind that ``torch.accelerator`` serves."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def _new_event(device: torch.device) -> Any:
    """Return a new event. On CUDA, waiting for it leaves the core to the threads that read."""
    if device.type == "cuda":
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return torch.Event(device=device, enable_timing=False)


#: The largest gap between two parts of a slab that is copied with them.
_GAP_BYTES = 64 << 10
#: (destination, source) of one shape.
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Transfer:
    """The copies between a slab and a device.

    Attributes:
        direct: copies between the slab and tensors on the device.
        runs: bytes (begin, end) of the slab that move to or from the same place of the scratch
            memory, which is on the device.
        grouped: lists of destinations and sources for one call each. They are tensors and scratch
            memory on the device.
        single: the same copies, one at a time.
    """

    direct: list[Pair] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    grouped: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)
    single: list[Pair] = field(default_factory=list)

    def add_run(self, begin: int, end: int) -> None:
        """Add a run of bytes after the others. A small gap is copied with them."""
        if self.runs and begin - self.runs[-1][1] <= _GAP_BYTES:
            self.runs[-1] = (self.runs[-1][0], end)
        else:
            self.runs.append((begin, end))


class CopyStream:
    """Copies between slabs and a device. This class serves host memory, where they are synchronous.

    The *caller's stream* is the device's current stream at construction. Use :meth:`scratch` and
    the transfer that needs it in turn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return new memory of the caller's stream, for copies after :meth:`order_after_caller`.

        It is an ordinary tensor even in inference mode, as copies may come in another mode.
        """
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def scratch(self, slab: torch.Tensor) -> torch.Tensor:
        """Return device memory of the slab's size for the next transfer; on the host the slab."""
        return slab

    def upload(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        """Start copies out of ``slab``. The token is done when ``slab`` may be overwritten."""
        with torch.no_grad():
            for destination, source in (*transfer.direct, *transfer.single):
                destination.copy_(source)
            for destinations, sources in transfer.grouped:
                torch._foreach_copy_(destinations, sources)

    def download(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        """Start copies into ``slab``. The token is done when ``slab`` may be read."""
        self.upload(slab, transfer)

    def done(self, token: Any) -> bool:
        """Return whether the copies of a token are done. A token is used up once they are."""
        return True

    def wait(self, token: Any) -> None:
        """Block until the copies of a token are done. The token is used up then."""

    def drain(self) -> None:
        """Block until all copies are done, and raise their error if they failed."""

    def order_after_caller(self) -> None:
        """Make later copies wait for the present work of the caller's stream."""

    def order_before_caller(self) -> None:
        """Make later work of the caller's stream wait for all copies so far."""

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of :meth:`empty`, safe to use on the stream that is current now."""
        return tensor


class PairedCopyStream(CopyStream):
    """Copies on two side streams in turn, each with its own scratch memory.

    So the scattering of one slab does not delay the copy of the next.

    Raises:
        RuntimeError: the device has no side streams, or no events.
    """

    STREAMS = 2

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.Stream(device=device) for _ in range(self.STREAMS)]
        if len(set(self._streams)) < self.STREAMS:
            msg = f"{device} has one stream for all"
            raise RuntimeError(msg)
        # A consumer of single tensors may have another stream current each time.
        self._caller = torch.accelerator.current_stream(device)
        # With its number: another device may be current later.
        self._device = self._caller.device
        #: Idle events.
        self._events = [_new_event(self._device)]
        self._scratch: list[torch.Tensor | None] = [None] * self.STREAMS
        self._turn = 0
        #: The number of operations on the side streams, and how many of them each other stream is
        #: ordered after.
        self._issued = 0
        self._ordered: dict[torch.Stream, int] = {}
        self.order_after_caller()

    @override
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self._caller, torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=self._device)

    @override
    def scratch(self, slab: torch.Tensor) -> torch.Tensor:
        scratch = self._scratch[self._turn]
        if scratch is None or scratch.numel() < slab.numel():
            # The caller's stream owns it, and waits for the side streams in the end.
            scratch = self._scratch[self._turn] = self.empty((slab.numel(),), torch.uint8)
            self._streams[self._turn].wait_stream(self._caller)
        return scratch

    @override
    def upload(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        with torch.no_grad(), self._streams[self._turn]:
            for destination, source in transfer.direct:
                destination.copy_(source, non_blocking=True)
            scratch = self._scratch[self._turn]
            for begin, end in transfer.runs:
                assert scratch is not None  # noqa: S101  # scratch() precedes a transfer with runs
                scratch[begin:end].copy_(slab[begin:end], non_blocking=True)
            event = self._record()
            self._copy_on_device(transfer)
        self._next()
        return event

    @override
    def download(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        with torch.no_grad(), self._streams[self._turn]:
            self._copy_on_device(transfer)
            scratch = self._scratch[self._turn]
            for begin, end in transfer.runs:
                assert scratch is not None  # noqa: S101
                slab[begin:end].copy_(scratch[begin:end], non_blocking=True)
            for destination, source in transfer.direct:
                destination.copy_(source, non_blocking=True)
            event = self._record()
        self._next()
        return event

    @override
    def done(self, token: Any) -> bool:
        if not token.query():
            return False
        self._events.append(token)
        return True

    @override
    def wait(self, token: Any) -> None:
        token.synchronize()
        self._events.append(token)

    @override
    def drain(self) -> None:
        for stream in self._streams:
            with stream:
                event = self._record()
            self.wait(event)

    @override
    def order_after_caller(self) -> None:
        for stream in self._streams:
            stream.wait_stream(self._caller)
        self._issued += 1

    @override
    def order_before_caller(self) -> None:
        self._order_before(self._caller)

    @override
    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        taker = torch.accelerator.current_stream(self._device)
        if self._ordered.get(taker) != self._issued:
            self._order_before(taker)
        if taker != self._caller:
            # Otherwise its memory could go to another tensor before the taker's stream is done.
            tensor.record_stream(taker)
        return tensor

    def _order_before(self, stream: torch.Stream) -> None:
        for other in self._streams:
            stream.wait_stream(other)
        self._ordered[stream] = self._issued

    def _record(self) -> Any:
        event = self._events.pop() if self._events else _new_event(self._device)
        event.record()
        return event

    def _next(self) -> None:
        self._turn = (self._turn + 1) % self.STREAMS
        self._issued += 1

    def _copy_on_device(self, transfer: Transfer) -> None:
        for destinations, sources in transfer.grouped:
            torch._foreach_copy_(destinations, sources, non_blocking=True)
        for destination, source in transfer.single:
            destination.copy_(source, non_blocking=True)


class BlockingCopyStream(CopyStream):
    """Synchronous copies to a device with one stream, where scratch memory would save nothing."""

    @override
    def order_after_caller(self) -> None:
        synchronize(self._device)


def copy_stream_for(device: torch.device) -> CopyStream:
    """Return a copy stream for a device. The current stream is its caller's stream."""
    if not is_accelerator(device):
        return CopyStream(device)
    if _is_current(device):
        try:
            return PairedCopyStream(device)
        except RuntimeError:  # the device has no side streams
            pass
    return BlockingCopyStream(device)
