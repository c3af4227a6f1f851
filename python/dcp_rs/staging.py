"""A ring of slabs between host memory and a device."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import torch

__all__ = ["StagingRing"]

MIN_SLAB_BYTES = 1 << 16


class _Lane(Protocol):
    """What a device needs for copies that overlap with reading."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Starts ``destination.copy_(source)`` for each pair; returns what :meth:`wait` takes."""

    def wait(self, token: Any) -> None:
        """Blocks until the copies behind ``token`` have read their sources."""

    def close(self) -> None:
        """Makes what follows on the caller's stream wait for all copies."""


class _HostLane:
    """Destinations in host memory: a copy is done when it returns."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad():
            for destination, source in pairs:
                destination.copy_(source)

    def wait(self, token: None) -> None: ...

    def close(self) -> None: ...


class _StreamLane:
    """Destinations on an accelerator: copies go on a stream of their own, and the caller's stream waits for it at the end."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device=device)
        # Work that the caller has queued on the destinations comes first.
        self._stream.wait_stream(self._module.current_stream(device))

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        with torch.no_grad(), self._module.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        return event

    def wait(self, token: Any) -> None:
        token.synchronize()

    def close(self) -> None:
        self._module.current_stream(self._device).wait_stream(self._stream)


class StagingRing:
    """Slabs that are filled by the caller and emptied by copies, each reused only when the copies from it are done.

    Used as a context manager: on the way out, even after an error, every copy that was started has been waited for
    (by the caller's stream for an accelerator), and no slab is touched any more.
    """

    def __init__(self, lane: _Lane, slabs: Sequence[torch.Tensor]) -> None:
        self._lane = lane
        self._slabs = slabs
        self._pending: list[Any] = [None] * len(slabs)
        self._next = 0

    @classmethod
    def for_device(cls, device: torch.device, max_bytes: int, *, align: int = MIN_SLAB_BYTES) -> StagingRing:
        """A ring of at most ``max_bytes``: two slabs for host destinations, three pinned ones for an accelerator.

        A slab is a multiple of ``align`` bytes, and at least that.
        """
        count = 2 if device.type == "cpu" else 3
        slab_bytes = max(align, max_bytes // count // align * align)
        pinned = device.type != "cpu"
        slabs = [torch.empty(slab_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        return cls(_HostLane() if device.type == "cpu" else _StreamLane(device), slabs)

    @property
    def slab_bytes(self) -> int:
        """The size of a slab."""
        return self._slabs[0].numel()

    def acquire(self) -> torch.Tensor:
        """The next slab, a 1-d uint8 tensor, once nothing reads from it any more."""
        self._wait(self._next)
        return self._slabs[self._next]

    def copy_out(self, slab: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Starts the copies (destination, view of ``slab``); ``slab`` is the one acquired last."""
        if slab is not self._slabs[self._next]:
            msg = "copies from a slab that is not the one acquired last"
            raise RuntimeError(msg)
        self._pending[self._next] = self._lane.copy(pairs)
        self._next = (self._next + 1) % len(self._slabs)

    def copy_in(self, slab: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Starts the copies (view of ``slab``, source); ``slab`` is the one acquired last. They are done after ``wait(token)``."""
        self.copy_out(slab, pairs)
        return self._pending[(self._next - 1) % len(self._slabs)]

    def wait(self, token: Any) -> None:
        """Blocks until the copies behind ``token`` are done."""
        if token is not None:
            self._lane.wait(token)

    def _wait(self, slab: int) -> None:
        token, self._pending[slab] = self._pending[slab], None
        self.wait(token)

    def __enter__(self) -> StagingRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lane.close()
        for slab in range(len(self._slabs)):
            self._wait(slab)
