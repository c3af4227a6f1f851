"""Host memory for copies: slabs on the way to files, and blocks for staging.

Both are pinned for an accelerator, by different rules. torch pins slabs, and keeps their memory for
the next load. Blocks are as large as a model, so they are pinned to the byte where the runtime can
do that, and go back to the system when the pool drops them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dcp_rs import _torch
from dcp_rs.tensors.memory import require_real_memory

__all__ = [
    "BLOCK_BYTES",
    "SLAB_BYTES",
    "SPARE_SLABS",
    "Block",
    "BlockPool",
    "new_slabs",
    "release_pinned_memory",
    "shared_blocks",
    "slab_bytes",
]

#: Slabs begin at multiples of a page, for direct I/O.
_PAGE = 4096
#: This is large against the cost of starting a copy, and small enough for one slab per thread.
SLAB_BYTES = 8 << 20
_MIN_SLAB_BYTES = 64 << 10
#: Slabs for copies in flight, in addition to those that threads fill.
SPARE_SLABS = 8
#: Size of a block, unless one tensor needs more. torch pins a power of two.
BLOCK_BYTES = 1 << 30


def slab_bytes(max_bytes: int, *, least: int = _MIN_SLAB_BYTES) -> int:
    """Return the slab size for a bound on memory: a power of two, as torch pins one anyway.

    Args:
        max_bytes: the bound on all slabs together.
        least: the smallest size.
    """
    room = max(1, max_bytes // SPARE_SLABS)
    return min(max(least, 1 << room.bit_length() - 1), max(least, SLAB_BYTES))


def new_slabs(count: int, nbytes: int, *, pinned: bool) -> list[torch.Tensor]:
    """Return ``count`` slabs: rows of ``nbytes`` bytes, aligned to a page.

    Pinned slabs cost little after the first load, as torch uses the memory of earlier ones again.
    """
    with torch.inference_mode(False):  # loads in any mode write to them
        return [_new_slab(nbytes, pinned=pinned) for _ in range(count)]


def _new_slab(nbytes: int, *, pinned: bool) -> torch.Tensor:
    slab = require_real_memory(_host_memory(nbytes, pinned=pinned))
    if slab.data_ptr() % _PAGE == 0:
        return slab
    slab = _host_memory(nbytes + _PAGE, pinned=pinned)
    skip = -slab.data_ptr() % _PAGE
    return slab[skip : skip + nbytes]


#: The process in which torch pinned memory last.
_pinned_in: int | None = None


def _host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return memory from torch, pinned if asked for. Some accelerators cannot pin."""
    if pinned:
        global _pinned_in  # noqa: PLW0603
        with contextlib.suppress(RuntimeError, NotImplementedError):
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            _pinned_in = os.getpid()
            return memory
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class Block:
    """A block of host memory. Copies from a device to a pinned one run asynchronously.

    Attributes:
        memory: all of it, as a row of bytes.
        nbytes: its size.
        kind: the type of the device that it is pinned for; None if for none.
        passed_over: the number of copies that chose other blocks since this one was used.
    """

    def __init__(self, nbytes: int, pin: torch.device | None) -> None:
        self.nbytes = nbytes
        self.kind = None if pin is None else pin.type
        self.passed_over = 0
        # CUDA and ROCm can pin existing memory.
        cudart = pin is not None and getattr(torch.get_device_module(pin), "cudart", None)
        if pin is None or not cudart:
            self.memory = _host_memory(nbytes, pinned=pin is not None)
        else:
            runtime = cudart()
            self.memory = torch.frombuffer(_pages(nbytes), dtype=torch.uint8)
            if _register(runtime, self.memory, pin):
                # The finalizer holds the memory, so that it is unpinned before it is freed.
                weakref.finalize(self, _unpin, runtime, self.memory).atexit = False
        _all_blocks.add(self)

    def shared_memory(self) -> torch.Tensor:
        """Return a copy of the memory that can be sent to another process."""
        copied = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        copied.share_memory_()  # type: ignore[no-untyped-call]
        copied.copy_(self.memory)
        return copied


def _pages(nbytes: int) -> mmap.mmap:
    """Return memory that a forked child does not inherit.

    Otherwise a write after a fork would go to a new page, which the device does not know.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    return pages


def _register(runtime: Any, memory: torch.Tensor, device: torch.device) -> bool:
    """Pin memory to the byte, and return whether that worked."""
    portable = 1  # cudaHostRegisterPortable
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)) == 0:
        return True
    # The runtime keeps the error, and the next kernel launch would raise it.
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).zero_()
    return False


def _unpin(runtime: Any, memory: torch.Tensor) -> None:
    runtime.cudaHostUnregister(memory.data_ptr())


class BlockPool:
    """Idle blocks, for the next copy of a state dict. Callers give back what they take."""

    def __init__(self) -> None:
        self.start_empty()
        _pools.add(self)

    def start_empty(self) -> None:
        """Forget all blocks, as a child of fork does with those of its parent."""
        self._lock = threading.Lock()
        self._idle: list[Block] = []

    def take(self, sizes: Sequence[int], *, pin: torch.device | None) -> list[Block]:
        """Return blocks of at least the given sizes.

        Args:
            sizes: the sizes in bytes.
            pin: the device that copies to the blocks; None if none does.
        """
        kind = None if pin is None else pin.type
        with self._lock:
            taken = [self._take(size, kind) for size in sizes]
            for block in self._idle:
                block.passed_over += 1
            # A block that two copies passed over was for another model.
            self._idle = [block for block in self._idle if block.passed_over < 2]
        return [found or Block(size, pin) for found, size in zip(taken, sizes, strict=True)]

    def _take(self, nbytes: int, kind: str | None) -> Block | None:
        """Take the smallest block that is large enough, unless it is more than twice as large."""
        fit = [b for b in self._idle if b.kind == kind and nbytes <= b.nbytes <= 2 * nbytes]
        found = min(fit, key=lambda block: block.nbytes, default=None)
        if found is not None:
            self._idle.remove(found)
        return found

    def give(self, taken: Sequence[Block]) -> None:
        """Take back blocks that nothing reads or writes any more."""
        with self._lock:
            for block in taken:
                block.passed_over = 0
            self._idle += taken

    def clear(self) -> int:
        """Drop the idle blocks, and return the bytes of those for a device."""
        with self._lock:
            idle, self._idle = self._idle, []
        return sum(block.nbytes for block in idle if block.kind is not None)


_pools: weakref.WeakSet[BlockPool] = weakref.WeakSet()
_all_blocks: weakref.WeakSet[Block] = weakref.WeakSet()
#: In a child of fork: its parent's blocks, which it must neither unpin nor free.
_left_alone: list[Block] = []


def _after_fork() -> None:
    _left_alone.extend(_all_blocks)
    for pool in list(_pools):
        pool.start_empty()


os.register_at_fork(after_in_child=_after_fork)

#: The blocks of all stagers without a cache. New pages, and pins, take longer than a copy.
shared_blocks = BlockPool()


def release_pinned_memory() -> int:
    """Free the pinned memory that loads and saves keep for the next one.

    It also returns torch's unused pinned memory to the system, which loads use again.

    Returns:
        The number of bytes that saves in the background had kept.

    Example:
        ```python
        print(dcp_rs.release_pinned_memory())
        ```
    """
    freed = sum(pool.clear() for pool in list(_pools))
    if _pinned_in == os.getpid():
        _torch.empty_host_cache()
    return freed
