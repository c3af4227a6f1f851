"""Host memory for copies: slabs on the way to files, and blocks for staging.

Both are pinned for an accelerator, by different rules. torch pins slabs, and keeps their memory for
the next load. Blocks are as large as a model, so they are pinned to the byte where the runtime can
do that, and go back to the system when the pool drops them.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from dcp_rs import _torch
from dcp_rs._log import log as _log
from dcp_rs.tensors.memory import require_real_memory

#: Slabs begin at multiples of a page, for direct I/O.
_PAGE = 4096
#: This is large against the cost of starting a copy, and small enough for one slab per thread.
SLAB_BYTES = 8 << 20
_MIN_SLAB_BYTES = 64 << 10
#: Slabs for copies in flight, in addition to those that threads fill.
SPARE_SLABS = 8
#: Size of a block, unless one tensor needs more. torch pins a power of two. Where the system limits
#: pinned memory, the blocks that fit are pinned.
BLOCK_BYTES = 256 << 20


@functools.cache
def warn_once(reason: str) -> None:
    """Log why copies are slow, once a process."""
    _log.warning("%s", reason)


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

    Args:
        count: the number of slabs.
        nbytes: the size of each.
        pinned: pin them, if that works.
    """
    slabs = []
    with torch.inference_mode(False):  # loads in any mode write to them
        for _ in range(count):
            slab = require_real_memory(host_memory(nbytes, pinned=pinned))
            if slab.data_ptr() % _PAGE:
                slab = host_memory(nbytes + _PAGE, pinned=pinned)
                skip = -slab.data_ptr() % _PAGE
                slab = slab[skip : skip + nbytes]
            slabs.append(slab)
    return slabs


#: The process in which torch pinned memory last.
_pinned_in: int | None = None


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return memory from torch, pinned if asked for. Some accelerators cannot pin."""
    if pinned:
        global _pinned_in  # noqa: PLW0603
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, NotImplementedError) as error:
            _warn_of_pageable(str(error))
        else:
            _pinned_in = os.getpid()
            return memory
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _warn_of_pageable(reason: str) -> None:
    reason = reason.partition("\n")[0]
    warn_once(f"host memory is not pinned, and copies are slower: {reason}")


class Block:
    """A block of host memory. Copies from a device to a pinned one run asynchronously.

    Args:
        nbytes: its size.
        pin: the device to pin it for; None for none.

    Attributes:
        memory: all of it, as a row of bytes.
        nbytes: its size.
        device: the device that it is pinned for; None if for none. Others of the type may use it.
        skipped: the number of copies that chose other blocks since this one was used.
    """

    def __init__(self, nbytes: int, pin: torch.device | None) -> None:
        self.nbytes = nbytes
        self.device = pin
        self.skipped = 0
        self._runtime: Any = None  # that pinned it
        # CUDA and ROCm can pin existing memory.
        cudart = pin is not None and getattr(torch.get_device_module(pin), "cudart", None)
        if pin is None or not cudart:
            self.memory = host_memory(nbytes, pinned=pin is not None)
            return
        self.memory = torch.frombuffer(_pages(nbytes), dtype=torch.uint8)
        runtime = cudart()
        if (refused := _register(runtime, self.memory, pin)) is None:
            self._runtime = runtime
        else:
            _warn_of_pageable(refused)

    @property
    def device_type(self) -> str | None:
        """The type of the device that it is pinned for."""
        return None if self.device is None else self.device.type

    def unpin(self) -> None:
        """Unpin the memory, before it is freed."""
        if self.device is not None and self._runtime is not None:
            with torch.accelerator.device_index(self.device.index):
                self._runtime.cudaHostUnregister(self.memory.data_ptr())


def _pages(nbytes: int) -> mmap.mmap:
    """Return memory that a forked child does not inherit, if the system can do that.

    Otherwise a write after a fork would go to a new page, which the device does not know.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        with contextlib.suppress(OSError):  # sandboxes refuse it
            pages.madvise(mmap.MADV_DONTFORK)
    return pages


def _register(runtime: Any, memory: torch.Tensor, device: torch.device) -> str | None:
    """Pin memory to the byte. Return None, or why that failed."""
    probe = _probe(device)
    portable = 1  # cudaHostRegisterPortable
    # The call would give the device that is current a context, which takes memory of a GPU.
    with torch.accelerator.device_index(device.index):
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))
    if code == 0:
        return None
    # The runtime keeps the error, and the next kernel launch raises it: one that nobody needs.
    with contextlib.suppress(RuntimeError):
        probe.add_(1)
    return f"cudaHostRegister of {memory.nbytes:,} bytes failed with error {code}"


def _probe(device: torch.device) -> torch.Tensor:
    """Return a tensor for a kernel that clears an error. It is made before there may be one."""
    return torch.zeros(1, device=device)


class BlockPool:
    """Blocks of host memory for copies of state dicts. Idle ones serve the next copy.

    The pool makes and frees every block. In a child of fork it is empty: the child must neither
    unpin nor free the blocks of its parent.
    """

    def __init__(self) -> None:
        self._parents: list[Block] = []
        self._taken: list[Block] = []
        self._idle: list[Block] = []
        self._lock = threading.Lock()
        self._process = os.getpid()

    def take(self, sizes: Sequence[int], *, pin: torch.device | None) -> list[Block]:
        """Return blocks of at least the given sizes, or none if one cannot be had.

        Args:
            sizes: the sizes in bytes.
            pin: the device that copies to the blocks; None if none does.
        """
        device_type = None if pin is None else pin.type
        taken: list[Block] = []
        with self._of_process():
            found = [self._take(size, device_type) for size in sizes]
            for block in self._idle:
                block.skipped += 1
            # Blocks that two copies skipped were for another model.
            self._free([block for block in self._idle if block.skipped >= 2])
        try:
            for idle, size in zip(found, sizes, strict=True):
                if idle is not None:
                    taken.append(idle)
                    continue
                taken.append(Block(size, pin))
                self._taken.append(taken[-1])
        except BaseException:
            self.give([block for block in (*taken, *found[len(taken) :]) if block is not None])
            raise
        return taken

    def _take(self, nbytes: int, device_type: str | None) -> Block | None:
        """Take the smallest block that is large enough, unless it is more than twice as large."""
        fit = [
            block
            for block in self._idle
            if block.device_type == device_type and nbytes <= block.nbytes <= 2 * nbytes
        ]
        found = min(fit, key=lambda block: block.nbytes, default=None)
        if found is not None:
            self._idle.remove(found)
            self._taken.append(found)
        return found

    def give(self, taken: Sequence[Block]) -> None:
        """Take back blocks that nothing reads or writes any more."""
        with self._of_process():
            for block in taken:
                if block in self._taken:  # else of the parent process
                    self._taken.remove(block)
                    self._idle.append(block)
                    block.skipped = 0

    def clear(self) -> int:
        """Free the idle blocks, and return the bytes of those for a device."""
        with self._of_process():
            freed = sum(block.nbytes for block in self._idle if block.device_type is not None)
            self._free(list(self._idle))
        return freed

    def _free(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._idle.remove(block)
            block.unpin()

    def _of_process(self) -> threading.Lock:
        """Return the lock. In a child of fork, leave the blocks of the parent alone first."""
        if self._process != os.getpid():
            self._parents += [*self._taken, *self._idle]
            self._taken, self._idle = [], []
            self._lock = threading.Lock()  # a thread of the parent may have held the other
            self._process = os.getpid()
        return self._lock


#: The blocks of all saves in the background. New pages, and pins, take longer than a copy.
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
    freed = shared_blocks.clear()
    if _pinned_in == os.getpid():
        _torch.empty_host_cache()
    return freed
