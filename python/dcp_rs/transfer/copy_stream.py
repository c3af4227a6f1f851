"""Copies between slabs of host memory and a device, on side streams of the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from dcp_rs.errors import UnsupportedError
from dcp_rs.transfer.buffers import warn_once


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory of its own."""
    return device.type != "cpu"


def _new_event(device: torch.device) -> Any:
    """Return a new event. On CUDA, waiting for it leaves the core to the threads that read."""
    if device.type == "cuda":
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return torch.Event(device=device, enable_timing=False)


#: The largest gap between two parts of a slab that is copied with them.
_GAP_BYTES = 64 << 10
_CAPTURE = (
    "a graph of the device is being captured, and nothing can be copied from it or to it: save and "
    "load before the capture or after it, and wait for `future.staged` before a capture begins"
)
#: (destination, source) of one shape.
Pair = tuple[torch.Tensor, torch.Tensor]
#: Destinations and sources that one call copies.
Group = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass(slots=True)
class Transfer:
    """The copies between a slab and a device.

    Attributes:
        direct: copies between the slab and tensors on the device.
        runs: bytes (begin, end) of the slab that move to or from the same place of the scratch
            memory, which is on the device.
        grouped: copies between tensors and scratch memory on the device.
        single: the same copies, one at a time.
    """

    direct: list[Pair] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    grouped: list[Group] = field(default_factory=list)
    single: list[Pair] = field(default_factory=list)

    def add_run(self, begin: int, end: int) -> None:
        """Add a run of bytes after the others. A small gap is copied with them."""
        if self.runs and begin - self.runs[-1][1] <= _GAP_BYTES:
            self.runs[-1] = (self.runs[-1][0], end)
        else:
            self.runs.append((begin, end))


class _Done:
    """The event of copies that are done."""

    def query(self) -> bool:
        """Return whether they are done."""
        return True

    def synchronize(self) -> None:
        """Wait until they are done."""


class CopyStream:
    """Copies between slabs and a device.

    This class copies synchronously: for host memory, and for a device with one stream, where
    scratch memory would save nothing.

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
        """Return memory of the slab's size for the next transfer; here the slab itself."""
        return slab

    def reserve(self, nbytes: int) -> None:
        """Allocate the memory of :meth:`scratch` for slabs of up to ``nbytes``."""

    def upload(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        """Start copies out of ``slab``. Return the event after which it may be overwritten."""
        with torch.inference_mode():
            for destination, source in (*transfer.direct, *transfer.single):
                destination.copy_(source)
            for destinations, sources in transfer.grouped:
                torch._foreach_copy_(destinations, sources)
        return _Done()

    def download(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        """Start copies into ``slab``. Return the event after which it may be read."""
        return self.upload(slab, transfer)

    def drain(self) -> None:
        """Block until all copies are done, and raise their error if they failed."""

    def order_after_caller(self) -> None:
        """Make later copies wait for the present work of the caller's stream."""
        if is_accelerator(self._device):
            try:
                torch.accelerator.synchronize(self._device)
            except (RuntimeError, ValueError):  # `torch.accelerator` serves another kind of device
                torch.get_device_module(self._device).synchronize()

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
        ValueError: ``torch.accelerator`` serves another kind of device.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.Stream(device=device) for _ in range(2)]
        if self._streams[0] == self._streams[1]:
            msg = f"{device} has one stream for all"
            raise RuntimeError(msg)
        # A consumer of single tensors may have another stream current each time.
        self._caller = torch.accelerator.current_stream(device)
        # With its number: another device may be current later.
        super().__init__(self._caller.device)
        _new_event(self._device)
        self._scratch = [self.empty((0,), torch.uint8) for _ in self._streams]
        self._turn = 0
        #: The streams that are ordered after all operations on the side streams so far.
        self._ordered: set[torch.Stream] = set()
        self.order_after_caller()

    @contextmanager
    def _on(self, stream: torch.Stream | None = None) -> Iterator[None]:
        """Make the device current, and a stream of it.

        A stream alone makes the device before current again. CUDA gives a device a context then,
        which takes half a gigabyte: of the first GPU, where threads begin, for each rank.
        """
        with torch.accelerator.device_index(self._device.index), stream or nullcontext():
            yield

    @override
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self._on(self._caller):
            return super().empty(shape, dtype)

    @override
    def scratch(self, slab: torch.Tensor) -> torch.Tensor:
        if self._scratch[self._turn].numel() < slab.numel():
            # The caller's stream owns it, and waits for the side streams in the end.
            self._scratch[self._turn] = self.empty((slab.numel(),), torch.uint8)
            with self._on():
                self._streams[self._turn].wait_stream(self._caller)
        return self._scratch[self._turn]

    @override
    def reserve(self, nbytes: int) -> None:
        self._scratch = [self.empty((nbytes,), torch.uint8) for _ in self._streams]

    @override
    def upload(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        scratch = self._scratch[self._turn]
        with torch.inference_mode(), self._on(self._streams[self._turn]):
            _copy(transfer.direct)
            _copy((scratch[begin:end], slab[begin:end]) for begin, end in transfer.runs)
            event = self._record()
            _copy_on_device(transfer)
        self._next()
        return event

    @override
    def download(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        scratch = self._scratch[self._turn]
        with torch.inference_mode(), self._on(self._streams[self._turn]):
            _copy_on_device(transfer)
            _copy((slab[begin:end], scratch[begin:end]) for begin, end in transfer.runs)
            _copy(transfer.direct)
            event = self._record()
        self._next()
        return event

    @override
    def drain(self) -> None:
        with ExitStack() as stack:  # an error, or Ctrl-C, leaves no stream out
            for stream in self._streams:
                stack.callback(self._drain, stream)

    def _drain(self, stream: torch.Stream) -> None:
        try:
            with self._on(stream):
                self._record().synchronize()
        except RuntimeError as error:
            if "captur" in str(error):  # by another thread
                raise UnsupportedError(_CAPTURE) from error
            raise

    @override
    def order_after_caller(self) -> None:
        with self._on():
            for stream in self._streams:
                stream.wait_stream(self._caller)
        self._ordered.clear()

    @override
    def order_before_caller(self) -> None:
        self._order_before(self._caller)

    @override
    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        taker = torch.accelerator.current_stream(self._device)
        if taker not in self._ordered:
            self._order_before(taker)
        if taker != self._caller:
            # Otherwise its memory could go to another tensor before the taker's stream is done.
            tensor.record_stream(taker)
        return tensor

    def _order_before(self, stream: torch.Stream) -> None:
        with self._on():
            for other in self._streams:
                stream.wait_stream(other)
        self._ordered.add(stream)

    def _record(self) -> Any:
        event = _new_event(self._device)
        event.record()
        return event

    def _next(self) -> None:
        self._turn = 1 - self._turn
        self._ordered.clear()


def _copy(pairs: Iterable[Pair]) -> None:
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)


def _copy_on_device(transfer: Transfer) -> None:
    for destinations, sources in transfer.grouped:
        torch._foreach_copy_(destinations, sources, non_blocking=True)
    _copy(transfer.single)


def current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """Return the streams of this thread, for another one that copies to the same devices."""
    accelerator = torch.accelerator.current_accelerator()
    return [
        torch.accelerator.current_stream(device)
        for device in devices
        if accelerator is not None and device.type == accelerator.type
    ]


@contextmanager
def on_streams(streams: Iterable[torch.Stream]) -> Iterator[None]:
    """Make streams current. In a new thread each device has its default stream."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.accelerator.device_index(stream.device_index))
            stack.enter_context(stream)
        yield


def copy_stream_for(device: torch.device) -> CopyStream:
    """Return a copy stream for a device. The current stream is its caller's stream.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
        torch.OutOfMemoryError: the device has no memory left.
    """
    if is_accelerator(device):
        _check_no_capture(device)
        try:
            return PairedCopyStream(device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            # It has no side streams, or is not the kind that torch.accelerator serves.
            reason = str(error).partition("\n")[0]
            warn_once(f"copies of {device.type} are synchronous: {reason}")
    return CopyStream(device)


def _check_no_capture(device: torch.device) -> None:
    is_capturing = getattr(
        torch.get_device_module(device), "is_current_stream_capturing", lambda: False
    )
    if is_capturing():
        raise UnsupportedError(_CAPTURE)
