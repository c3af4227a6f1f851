"""Slabs of host memory that files are read into and written from, pinned for a device, and kept between loads."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from dcp_rs.tensors.memory import check_made

__all__ = ["SPARE_SLABS", "kept", "pinned_by_torch", "pinned_memory", "slab_bytes"]

MIB = 1 << 20
#: A slab begins at a multiple of this: direct reads land in it.
PAGE = 4096
#: Large against the cost of starting a copy, and small enough for each of many threads to fill one
#: of its own.
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


class _SlabCache:
    """Pinned slabs between loads: pinning takes longer than a copy. One for a process; a fork starts with none of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[torch.Tensor] = []  # the one that was used last comes last
        # A child of fork must not free what its parent has pinned.
        self._left_alone: list[torch.Tensor] = []
        os.register_at_fork(after_in_child=self._after_fork)

    def take(self, count: int, nbytes: int, *, pinned: bool) -> list[torch.Tensor]:
        """``count`` slabs: 1-d uint8 tensors on the host, at multiples of ``PAGE``."""
        taken: list[torch.Tensor] = []
        if pinned:
            with self._lock:
                others: list[torch.Tensor] = []
                for slab in self._kept:
                    (taken if slab.numel() == nbytes and len(taken) < count else others).append(
                        slab
                    )
                # Those of another size may be the next load's, if there is room for them beside
                # these.
                self._kept = _last(others, MAX_KEPT_BYTES - count * nbytes)
        with torch.inference_mode(False):  # what is kept is written to in whichever mode
            while len(taken) < count:
                taken.append(_new_slab(nbytes, pinned=pinned))
        return taken

    def give(self, slabs: Sequence[torch.Tensor]) -> None:
        """Takes slabs back that nothing touches any more. torch keeps what there is no room for, for whoever asks it for pinned memory."""
        pinned = [slab for slab in slabs if slab.is_pinned()]
        with self._lock:
            self._kept = _last([*self._kept, *pinned], MAX_KEPT_BYTES)

    def clear(self) -> int:
        """Lets go of all slabs; returns their bytes."""
        with self._lock:
            kept, self._kept = self._kept, []
        return sum(slab.numel() for slab in kept)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._left_alone += self._kept
        self._kept = []


def _last(slabs: Sequence[torch.Tensor], max_bytes: int) -> list[torch.Tensor]:
    """The last slabs, of ``max_bytes`` at most."""
    first = len(slabs)
    while first and slabs[first - 1].numel() <= max_bytes:
        first -= 1
        max_bytes -= slabs[first].numel()
    return list(slabs[first:])


def _new_slab(nbytes: int, *, pinned: bool) -> torch.Tensor:
    if pinned:
        slab = check_made(pinned_memory(nbytes)[0])
        return (
            slab
            if slab.data_ptr() % PAGE == 0
            else _aligned(pinned_memory(nbytes + PAGE)[0], nbytes)
        )
    return _aligned(check_made(torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")), nbytes)


def pinned_memory(nbytes: int) -> tuple[torch.Tensor, bool]:
    """Memory that torch has pinned, which takes a power of two bytes, and whether it is: the accelerator may have none, and its copies wait."""
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), False
    global _pinned_in  # noqa: PLW0603
    _pinned_in = os.getpid()
    return memory, True


def pinned_by_torch() -> bool:
    """Whether torch has pinned memory for this process, and may still keep it."""
    return _pinned_in == os.getpid()


_pinned_in: int | None = None


def _aligned(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    skip = -memory.data_ptr() % PAGE
    return memory[skip : skip + nbytes]


#: The slabs of this process.
kept = _SlabCache()
