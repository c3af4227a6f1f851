"""Where copies between slabs of host memory and a device are queued: on streams of its own, with events and scratch memory there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

__all__ = [
    "CopyStream",
    "PairedCopyStream",
    "Transfer",
    "copy_stream_for",
    "is_accelerator",
    "synchronize",
]


def is_accelerator(device: torch.device) -> bool:
    """Whether memory of the device is not host memory."""
    return device.type != "cpu"


def synchronize(device: torch.device) -> None:
    """Waits for what the current stream of a device holds, without spinning where the device can tell."""
    if _is_current(device):
        stream = torch.accelerator.current_stream(device)
        try:
            event = _new_event(device)
            event.record(stream)
        except RuntimeError:  # it has no events
            stream.synchronize()
        else:
            event.synchronize()
    else:
        torch.get_device_module(device).synchronize()


def _is_current(device: torch.device) -> bool:
    """Whether torch's generic streams are those of this kind of device."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def _new_event(device: torch.device) -> Any:
    """An event to wait for. What waits for it sleeps on CUDA, where it would otherwise spin on a core that readers want."""
    if device.type == "cuda":
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return torch.Event(device=device, enable_timing=False)


#: (destination, source), of one shape.
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Transfer:
    """The copies between a slab and a device.

    Attributes:
        direct: between the slab and tensors on the device.
        runs: bytes (begin, end) that move between the slab and the same place of the scratch
            memory.
        grouped: between scratch memory and tensors, all on the device: lists of destinations and
            sources that one call can copy.
        single: the same, one at a time.
    """

    direct: list[Pair] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    grouped: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)
    single: list[Pair] = field(default_factory=list)


class CopyStream:
    """The way of slabs to one device, or back. This one is to host memory, where a copy is done when it returns.

    :meth:`scratch` and the transfer that uses it take turns. The *caller's stream* is the one that
    was current when the copy stream was made.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008  # it never changes
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New memory of the device, which goes back to the caller's stream. The copies that fill it come after :meth:`order_after_caller`.

        It is no tensor of inference, be that the mode: copies into it may come in another one.
        """
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def scratch(self, slab: torch.Tensor) -> torch.Tensor:
        """Memory of the device as large as ``slab``, for the next transfer. Of the host: the slab itself."""
        return slab

    def upload(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        """Starts the copies out of ``slab``. What it returns is done when ``slab`` may be overwritten."""
        with torch.no_grad():
            for destination, source in (*transfer.direct, *transfer.single):
                destination.copy_(source)
            for destinations, sources in transfer.grouped:
                torch._foreach_copy_(destinations, sources)

    def download(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        """Starts the copies into ``slab``. What it returns is done when ``slab`` may be read."""
        self.upload(slab, transfer)

    def done(self, token: Any) -> bool:
        """Whether the copies behind ``token`` are done. Once they are, nobody asks again."""
        return True

    def wait(self, token: Any) -> None:
        """Blocks until they are. Nobody asks again."""

    def drain(self) -> None:
        """Blocks until no copy is under way. Raises what the copies raised."""

    def order_after_caller(self) -> None:
        """Makes what is copied next wait for what the caller's stream holds now."""

    def order_before_caller(self) -> None:
        """Makes what follows on the caller's stream wait for all copies so far."""

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, whose memory is of the caller's stream and whose copies have begun, safe on the stream that is current now."""
        return tensor


class PairedCopyStream(CopyStream):
    """To an accelerator: copies go on two streams in turn, each with scratch memory of its own.

    So what is scattered from one slab does not hold up the copy of the next.

    Raises:
        RuntimeError: the device has no such streams, or no events.
    """

    STREAMS = 2

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.Stream(device=device) for _ in range(self.STREAMS)]
        if len(set(self._streams)) < self.STREAMS:
            msg = f"{device} has one stream for all"
            raise RuntimeError(msg)
        # Kept: a consumer that takes tensors one by one may have another stream current each time,
        # and memory has one home.
        self._caller = torch.accelerator.current_stream(device)
        # By its number, where it was given as the current one: another may be that by and by.
        self._device = self._caller.device
        #: Events that nothing waits for any more.
        self._events = [_new_event(self._device)]
        self._scratch: list[torch.Tensor | None] = [None] * self.STREAMS
        self._turn = 0
        #: How often these streams were asked for something, and after how much of it each other
        #: stream comes.
        self._asked = 0
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
            # Of the caller's stream, which waits for these streams in the end: the memory goes back
            # to where it came from.
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
                assert scratch is not None  # noqa: S101  # whoever made the runs asked for it
                scratch[begin:end].copy_(slab[begin:end], non_blocking=True)
            event = self._record()
            self._within(transfer)
        self._next()
        return event

    @override
    def download(self, slab: torch.Tensor, transfer: Transfer) -> Any:
        with torch.no_grad(), self._streams[self._turn]:
            self._within(transfer)
            scratch = self._scratch[self._turn]
            for begin, end in transfer.runs:
                assert scratch is not None  # noqa: S101  # as above
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
        self._asked += 1

    @override
    def order_before_caller(self) -> None:
        self._order_before(self._caller)

    @override
    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        taker = torch.accelerator.current_stream(self._device)
        if self._ordered.get(taker) != self._asked:
            self._order_before(taker)
        if taker != self._caller:
            # Else its memory would be the next tensor's as soon as it is let go, with work of the
            # taker's stream still to come.
            tensor.record_stream(taker)
        return tensor

    def _order_before(self, stream: torch.Stream) -> None:
        for other in self._streams:
            stream.wait_stream(other)
        self._ordered[stream] = self._asked

    def _record(self) -> Any:
        event = self._events.pop() if self._events else _new_event(self._device)
        event.record()
        return event

    def _next(self) -> None:
        self._turn = (self._turn + 1) % self.STREAMS
        self._asked += 1

    def _within(self, transfer: Transfer) -> None:
        for destinations, sources in transfer.grouped:
            torch._foreach_copy_(destinations, sources, non_blocking=True)
        for destination, source in transfer.single:
            destination.copy_(source, non_blocking=True)


class BlockingCopyStream(CopyStream):
    """To a device that has one stream: every copy waits. Scratch memory would save nothing."""

    @override
    def order_after_caller(self) -> None:
        synchronize(self._device)  # whichever thread copies


def copy_stream_for(device: torch.device) -> CopyStream:
    """Return the copy stream to a device. The current stream is its caller's."""
    if not is_accelerator(device):
        return CopyStream()
    if _is_current(device):
        try:
            return PairedCopyStream(device)
        except RuntimeError:  # it has no streams
            pass
    return BlockingCopyStream(device)
