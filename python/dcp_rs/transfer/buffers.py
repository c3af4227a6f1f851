"""Host memory that loads and saves use again: slabs on the way to files, blocks for staging.

Both are pinned for an accelerator, by different rules. torch pins slabs: they are small, and
freeing one does not wait for the device. Blocks are as large as a model, so they are pinned to the
byte where the runtime can do that, and go back to the system when the pool drops them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import override

from dcp_rs import _torch
from dcp_rs.tensors.memory import check_made

__all__ = [
    "BLOCK_BYTES",
    "SLAB_BYTES",
    "SPARE_SLABS",
    "Block",
    "BlockPool",
    "SlabPool",
    "release_pinned_memory",
    "shared_blocks",
    "slab_bytes",
    "slab_pool",
]

#: Slabs begin at multiples of a page, for direct I/O.
_PAGE = 4096
#: This is large against the cost of starting a copy, and small enough for one slab per thread.
SLAB_BYTES = 8 << 20
_MIN_SLAB_BYTES = 64 << 10
#: Slabs for copies in flight, in addition to those that threads fill.
SPARE_SLABS = 8
#: Bound on the pinned slabs that stay between loads.
MAX_KEPT_BYTES = 256 << 20
#: Size of a block, unless one tensor needs more. torch pins a power of two.
BLOCK_BYTES = 1 << 30

T = TypeVar("T")


class _Pool(Generic[T]):
    """Idle buffers. After a fork, the child has none of its parent's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[T] = []
        _pools.add(self)

    def leave_alone(self) -> list[T]:
        """Return the parent's buffers in a child of fork, and start without any."""
        self._lock = threading.Lock()
        idle, self._idle = self._idle, []
        return idle

    def clear(self) -> int:
        """Drop the idle buffers, and return the bytes of those that were pinned."""
        with self._lock:
            idle, self._idle = self._idle, []
        return sum(map(self._pinned_bytes, idle))

    def _pinned_bytes(self, buffer: T) -> int:
        raise NotImplementedError


_pools: weakref.WeakSet[_Pool[Any]] = weakref.WeakSet()
_all_blocks: weakref.WeakSet[Block] = weakref.WeakSet()
#: In a child of fork: its parent's buffers, which it must neither unpin nor free.
_left_alone: list[Any] = []


def _after_fork() -> None:
    _left_alone.extend(_all_blocks)
    for pool in list(_pools):
        _left_alone.extend(pool.leave_alone())


os.register_at_fork(after_in_child=_after_fork)


def slab_bytes(max_bytes: int, *, least: int = _MIN_SLAB_BYTES) -> int:
    """Return the slab size for a bound on memory: a power of two, as torch pins one anyway.

    Args:
        max_bytes: the bound on all slabs together.
        least: the smallest size.
    """
    room = max(1, max_bytes // SPARE_SLABS)
    return min(max(least, 1 << room.bit_length() - 1), max(least, SLAB_BYTES))


class SlabPool(_Pool[torch.Tensor]):
    """Pinned slabs between loads, because pinning takes longer than a copy.

    Slabs of one size serve the next load of that size. The most recently used ones stay, up to
    ``MAX_KEPT_BYTES``. torch keeps the memory of the others for its own use.
    """

    def take(self, count: int, nbytes: int, *, pinned: bool) -> list[torch.Tensor]:
        """Return ``count`` slabs: rows of ``nbytes`` bytes, aligned to a page."""
        taken: list[torch.Tensor] = []
        if pinned:
            with self._lock:
                others: list[torch.Tensor] = []
                for slab in self._idle:
                    fits = slab.numel() == nbytes and len(taken) < count
                    (taken if fits else others).append(slab)
                # The next load may use the others, if there is room beside these.
                self._idle = _last(others, MAX_KEPT_BYTES - count * nbytes)
        with torch.inference_mode(False):  # loads in any mode write to them
            while len(taken) < count:
                taken.append(_new_slab(nbytes, pinned=pinned))
        return taken

    def give(self, slabs: Sequence[torch.Tensor]) -> None:
        """Take back slabs that no copy uses any more."""
        pinned = [slab for slab in slabs if slab.is_pinned()]
        with self._lock:
            self._idle = _last([*self._idle, *pinned], MAX_KEPT_BYTES)

    @override
    def _pinned_bytes(self, buffer: torch.Tensor) -> int:
        return buffer.numel()


def _last(slabs: Sequence[torch.Tensor], max_bytes: int) -> list[torch.Tensor]:
    """Return the last slabs that fit in ``max_bytes``."""
    first = len(slabs)
    while first and slabs[first - 1].numel() <= max_bytes:
        first -= 1
        max_bytes -= slabs[first].numel()
    return list(slabs[first:])


def _new_slab(nbytes: int, *, pinned: bool) -> torch.Tensor:
    if pinned:
        slab = check_made(_pinned_by_torch(nbytes)[0])
        if slab.data_ptr() % _PAGE == 0:
            return slab
        slab, _ = _pinned_by_torch(nbytes + _PAGE)
    else:
        slab = check_made(torch.empty(nbytes + _PAGE, dtype=torch.uint8, device="cpu"))
    skip = -slab.data_ptr() % _PAGE
    return slab[skip : skip + nbytes]


#: The process in which torch pinned memory last.
_pinned_in: int | None = None


def _pinned_by_torch(nbytes: int) -> tuple[torch.Tensor, bool]:
    """Return memory from torch, and whether it is pinned. Some accelerators cannot pin."""
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), False
    global _pinned_in  # noqa: PLW0603
    _pinned_in = os.getpid()
    return memory, True


class Block:
    """A block of host memory.

    Attributes:
        nbytes: its size.
        kind: the type of the device that it is pinned for; None if for none.
        pinned: whether it is pinned, so that copies from a device run asynchronously.
        memory: all of it, as a row of bytes.
        passed_over: the number of copies that chose other blocks since this one was used.
    """

    def __init__(self, nbytes: int, pin: torch.device | None) -> None:
        self.nbytes = nbytes
        self.kind = pin and pin.type
        self.passed_over = 0
        runtime = None if pin is None else _runtime(pin)
        if pin is None:
            self.memory, self.pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), False
        elif runtime is None:
            self.memory, self.pinned = _pinned_by_torch(nbytes)
        else:
            self.memory = torch.frombuffer(_pages(nbytes), dtype=torch.uint8)
            self.pinned = _register(runtime, self.memory, pin)
            if self.pinned:
                # The finalizer holds the memory, so that it is unpinned before it is freed.
                weakref.finalize(self, _unpin, runtime, self.memory, os.getpid()).atexit = False
        _all_blocks.add(self)

    def shared_memory(self) -> torch.Tensor:
        """Return a copy of the memory that can be sent to another process."""
        copied = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        copied.share_memory_()  # type: ignore[no-untyped-call]
        copied.copy_(self.memory)
        return copied


def _runtime(device: torch.device) -> Any:
    """Return the runtime of CUDA or ROCm, which can pin existing memory; None for others."""
    runtime = getattr(torch.get_device_module(device), "cudart", None)
    return None if runtime is None else runtime()


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


def _unpin(runtime: Any, memory: torch.Tensor, pid: int) -> None:
    if os.getpid() == pid:
        runtime.cudaHostUnregister(memory.data_ptr())


class BlockPool(_Pool[Block]):
    """Blocks for the next copy of a state dict. Callers give back what they take."""

    def take(self, sizes: Sequence[int], *, pin: torch.device | None) -> list[Block]:
        """Return blocks of at least the given sizes.

        Args:
            sizes: the sizes in bytes.
            pin: the device that copies to the blocks; None if none does.
        """
        kind = pin and pin.type
        with self._lock:
            taken = [_take(self._idle, size, kind) for size in sizes]
            for block in self._idle:
                block.passed_over += 1
            # A block that two copies passed over was for another model.
            self._idle = [block for block in self._idle if block.passed_over < 2]
        return [
            Block(size, pin) if found is None else found
            for size, found in zip(sizes, taken, strict=True)
        ]

    def give(self, taken: Sequence[Block]) -> None:
        """Take back blocks that nothing reads or writes any more."""
        with self._lock:
            for block in taken:
                block.passed_over = 0
            self._idle += taken

    @override
    def _pinned_bytes(self, buffer: Block) -> int:
        return buffer.nbytes if buffer.pinned else 0


def _take(idle: list[Block], nbytes: int, kind: Any) -> Block | None:
    """Take the smallest block that is large enough, unless it is more than twice as large."""
    fit = [block for block in idle if block.kind == kind and nbytes <= block.nbytes <= 2 * nbytes]
    if not fit:
        return None
    found = min(fit, key=lambda block: block.nbytes)
    idle.remove(found)
    return found


#: The slabs of this process.
slab_pool = SlabPool()
#: The blocks of all stagers without a cache. New pages, and pins, take longer than a copy.
shared_blocks = BlockPool()


def release_pinned_memory() -> int:
    """Free the pinned memory that loads and saves keep for the next one.

    It also returns torch's unused pinned memory to the system.

    Returns:
        The number of bytes that were kept.

    Example:
        ```python
        print(dcp_rs.release_pinned_memory())
        ```
    """
    freed = sum(pool.clear() for pool in list(_pools))
    if _pinned_in == os.getpid():
        _torch.empty_host_cache()
    return freed
