"""Blocks of host memory that state dicts are staged to: pinned where the device can.

A block is lent, and comes back by itself when the last tensor that lies in it is gone. Nobody is given one before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcp_rs import _torch
from dcp_rs.transfer import slabs

__all__ = ["BLOCK_BYTES", "Block", "Blocks", "pinned_blocks", "release_pinned_memory"]

#: As large as a block becomes where torch pins it, which takes a power of two; a tensor that is larger has one of its own.
BLOCK_BYTES = 1 << 30
#: A save that is over lets go of its state dict within this.
_GRACE = 1.0  # seconds
_POLL = 0.02  # seconds


class Block:
    """Host memory.

    Attributes:
        nbytes: its size.
        pinned: copies between it and a device can be left to the device.
        memory: all of it. Callers take what :meth:`lend` gives.
    """

    def __init__(self, nbytes: int, pin: torch.device | None) -> None:
        self.nbytes = nbytes
        self.kind = pin and pin.type
        #: Stagings that passed it over since it was used last.
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
        self.pinned = int(runtime.cudaHostRegister(address, self.nbytes, 1)) == 0  # 1: cudaHostRegisterPortable
        if self.pinned:
            # The memory is among the arguments, so that it goes after the pin.
            weakref.finalize(self, _unpin, runtime, self.memory, os.getpid()).atexit = False
        else:
            # The runtime remembers the error until a launch is checked, and would tell somebody else of it.
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=device).zero_()

    def shared_memory(self) -> torch.Tensor:
        """Return a copy of the memory that can be sent to another process."""
        copied = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        copied.share_memory_()  # type: ignore[no-untyped-call]
        copied.copy_(self.memory)
        return copied

    def lend(self, back: Callable[[Block], None]) -> torch.Tensor:
        """The memory as a 1-d uint8 tensor; ``back`` is called with the block when no tensor of its storage is left."""
        loan = (ctypes.c_char * self.nbytes).from_address(self.memory.data_ptr())
        weakref.finalize(loan, back, self).atexit = False
        return torch.frombuffer(loan, dtype=torch.uint8)


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
os.register_at_fork(after_in_child=lambda: _left_alone.extend(_all))


class Blocks:
    """The blocks of one or many stagers: those that are lent, and those that the next staging may have.

    Args:
        pinned_only: let the others go when they come back: they cost little to make.
    """

    def __init__(self, *, pinned_only: bool = False) -> None:
        self._pinned_only = pinned_only
        self._lock = threading.Lock()
        self._idle: list[Block] = []
        self._lent = 0
        # Finalizers run anywhere, in a thread that holds the lock as well; this queue is made for them.
        self._back: queue.SimpleQueue[Block] = queue.SimpleQueue()
        _pools.add(self)

    def lend(
        self,
        sizes: Sequence[int],
        *,
        pin: torch.device | None,
        under_way: Callable[[], bool] | None = None,
    ) -> list[tuple[Block, torch.Tensor]]:
        """Blocks of ``sizes`` bytes, each with the tensor that it is lent as.

        Args:
            sizes: in bytes.
            pin: the device that copies to them; None: none does.
            under_way: whether the save of what was staged last still is. Then its blocks are waited for, rather than made anew.
        """
        kind = pin and pin.type
        if under_way is not None:
            self._wait(sizes, kind, under_way)
        with self._lock:
            self._collect()
            taken: list[Block | None] = [_take(self._idle, size, kind) for size in sizes]
            for block in self._idle:
                block.passed_over += 1
            # Twice not needed: another model's.
            self._idle = [block for block in self._idle if block.passed_over < 2]
            self._lent += len(taken)
        blocks = []
        for size, found in zip(sizes, taken, strict=True):
            block = Block(size, pin) if found is None else found
            block.passed_over = 0
            blocks.append((block, block.lend(self._back.put)))
        return blocks

    def clear(self, *, pinned_only: bool = False) -> int:
        """Lets go of what is not lent. Returns how many bytes of it were pinned."""
        with self._lock:
            self._collect()
            gone = [block for block in self._idle if block.pinned or not pinned_only]
            self._idle = [block for block in self._idle if pinned_only and not block.pinned]
        return sum(block.nbytes for block in gone if block.pinned)

    def _wait(self, sizes: Sequence[int], kind: Any, under_way: Callable[[], bool]) -> None:
        until: float | None = None
        while True:
            with self._lock:
                self._collect()
                if self._lent == 0 or self._has(sizes, kind):
                    return
            if until is None and not under_way():
                until = time.monotonic() + _GRACE
            if until is not None and time.monotonic() > until:
                return  # somebody keeps the staged tensors: theirs they are
            with contextlib.suppress(queue.Empty):
                self._returned(self._back.get(timeout=_POLL))

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._returned(self._back.get_nowait())

    def _returned(self, block: Block) -> None:
        self._lent -= 1
        if block.pinned or not self._pinned_only:
            self._idle.append(block)

    def _has(self, sizes: Sequence[int], kind: Any) -> bool:
        idle = list(self._idle)
        return all(_take(idle, size, kind) is not None for size in sizes)


def _take(idle: list[Block], nbytes: int, kind: Any) -> Block | None:
    """Takes the smallest block that is large enough, unless that is far larger."""
    fit = [block for block in idle if block.kind == kind and nbytes <= block.nbytes <= 2 * nbytes]
    if not fit:
        return None
    found = min(fit, key=lambda block: block.nbytes)
    idle.remove(found)
    return found


_pools: weakref.WeakSet[Blocks] = weakref.WeakSet()
#: Pinned blocks of stagers that keep none of their own: pinning takes longer than the copy.
pinned_blocks = Blocks(pinned_only=True)


def release_pinned_memory() -> int:
    """Gives back the pinned memory that loads and saves keep for the next one. Returns how many bytes that was.

    What torch keeps of pinned memory that nobody uses goes back to the system as well.
    """
    freed = slabs.kept.clear() + sum(pool.clear(pinned_only=True) for pool in list(_pools))
    if slabs.pinned_by_torch():
        _torch.empty_host_cache()
    return freed
