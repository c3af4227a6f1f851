"""Blocks of host memory that state dicts are staged to: pinned where the device can."""

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
from dcp_rs.transfer import slabs

__all__ = ["BLOCK_BYTES", "Block", "BlockPool", "blocks", "release_pinned_memory"]

#: As large as a block becomes where torch pins it, which takes a power of two; a tensor that is
#: larger has one of its own.
BLOCK_BYTES = 1 << 30


class Block:
    """Host memory.

    Attributes:
        nbytes: its size.
        pinned: copies between it and a device can be left to the device.
        memory: all of it, a 1-d uint8 tensor.
    """

    def __init__(self, nbytes: int, pin: torch.device | None) -> None:
        self.nbytes = nbytes
        self.kind = pin and pin.type
        #: Copies that passed it over since it was used last.
        self.passed_over = 0
        self.pinned = False
        runtime = _runtime(pin) if pin is not None else None
        if runtime is not None:
            self.memory = torch.frombuffer(_pages(nbytes), dtype=torch.uint8)
        elif pin is not None:
            self.memory, self.pinned = slabs.pinned_memory(nbytes)
        else:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if pin is not None and runtime is not None:
            self._register(runtime, pin)
        _all.add(self)

    def _register(self, runtime: Any, device: torch.device) -> None:
        """Pins the memory as it is: not a byte more, and given back when the block is."""
        address = self.memory.data_ptr()
        self.pinned = (
            int(runtime.cudaHostRegister(address, self.nbytes, 1)) == 0
        )  # 1: cudaHostRegisterPortable
        if self.pinned:
            # The memory is among the arguments, so that it goes after the pin.
            weakref.finalize(self, _unpin, runtime, self.memory, os.getpid()).atexit = False
        else:
            # The runtime remembers the error until a launch is checked, and would tell somebody
            # else of it.
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=device).zero_()

    def shared_memory(self) -> torch.Tensor:
        """Return a copy of the memory that can be sent to another process."""
        copied = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        copied.share_memory_()  # type: ignore[no-untyped-call]
        copied.copy_(self.memory)
        return copied


def _runtime(device: torch.device) -> Any:
    """What can pin memory that is there already: CUDA's and ROCm's runtime; None: nothing can."""
    runtime = getattr(torch.get_device_module(device), "cudart", None)
    return None if runtime is None else runtime()


def _pages(nbytes: int) -> mmap.mmap:
    """Memory that a forked child does not get: else a write here after the fork would go to a page that the device does not know."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    return pages


def _unpin(runtime: Any, memory: torch.Tensor, pid: int) -> None:
    if os.getpid() == pid:
        runtime.cudaHostUnregister(memory.data_ptr())


#: A child of fork has neither the pins nor all of the memory: it leaves every block alone.
_all: weakref.WeakSet[Block] = weakref.WeakSet()
_left_alone: list[Block] = []


class BlockPool:
    """Blocks that no copy lies in, for the next. Whoever takes blocks gives them back when the copy is not read any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Block] = []
        _pools.add(self)

    def take(self, sizes: Sequence[int], *, pin: torch.device | None) -> list[Block]:
        """Return blocks of at least ``sizes`` bytes.

        Args:
            sizes: in bytes.
            pin: the device that copies to them; None: none does.
        """
        kind = pin and pin.type
        with self._lock:
            taken = [_take(self._idle, size, kind) for size in sizes]
            for block in self._idle:
                block.passed_over += 1
            # Twice not needed: another model's.
            self._idle = [block for block in self._idle if block.passed_over < 2]
        return [
            Block(size, pin) if found is None else found
            for size, found in zip(sizes, taken, strict=True)
        ]

    def give(self, taken: Sequence[Block]) -> None:
        """Take blocks back that nothing reads or writes any more."""
        with self._lock:
            for block in taken:
                block.passed_over = 0
            self._idle += taken

    def clear(self) -> int:
        """Let go of the blocks that are not taken. Return how many bytes of them were pinned."""
        with self._lock:
            gone, self._idle = self._idle, []
        return sum(block.nbytes for block in gone if block.pinned)

    def forget(self) -> None:
        """In a fork: the blocks are the parent's."""
        self._lock = threading.Lock()
        self._idle = []


def _take(idle: list[Block], nbytes: int, kind: Any) -> Block | None:
    """Takes the smallest block that is large enough, unless that is far larger."""
    fit = [block for block in idle if block.kind == kind and nbytes <= block.nbytes <= 2 * nbytes]
    if not fit:
        return None
    found = min(fit, key=lambda block: block.nbytes)
    idle.remove(found)
    return found


_pools: weakref.WeakSet[BlockPool] = weakref.WeakSet()
#: Blocks of stagers that keep none of their own: pages that are new, and pins, take longer than the
#: copy.
blocks = BlockPool()


def _after_fork() -> None:
    _left_alone.extend(_all)
    for pool in list(_pools):
        pool.forget()


os.register_at_fork(after_in_child=_after_fork)


def release_pinned_memory() -> int:
    """Give back the pinned memory that loads and saves keep for the next one.

    What torch keeps of pinned memory that nobody uses goes back to the system as well.

    Returns:
        How many bytes it was.

    Example:
        ```python
        print(dcp_rs.release_pinned_memory())
        ```
    """
    freed = slabs.kept.clear() + sum(pool.clear() for pool in list(_pools))
    if slabs.pinned_by_torch():
        _torch.empty_host_cache()
    return freed
