"""How to read and write: plain data with documented defaults. There are no environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from dcp_rs import _core
from dcp_rs._progress import Progress

if TYPE_CHECKING:
    import uuid

    import torch

__all__ = [
    "ReadArguments",
    "ReadOptions",
    "WriteArguments",
    "WriteOptions",
    "WriterArguments",
]

MIB = 1 << 20


def default_shared() -> bool:
    """Whether there are other ranks on this machine; where nobody says, as many as the process group has."""
    return _has_others(local_ranks())


def _has_others(ranks: int | None) -> bool:
    if ranks is None:
        dist = sys.modules.get(
            "torch.distributed"
        )  # where nobody imported it, there is no process group
        return (
            dist is not None
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size() > 1
        )
    return ranks > 1


def local_ranks() -> int | None:
    """How many ranks this machine has: ``LOCAL_WORLD_SIZE``, as torchrun sets it; None where nobody says."""
    try:
        return max(1, int(os.environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        return None


def uuid_of(save_id: str) -> uuid.UUID:
    """The id of a save, in one of the forms that :class:`uuid.UUID` takes.

    Raises:
        ValueError: it has none of them.
    """
    import uuid  # which commands that look need not wait for

    try:
        return uuid.UUID(save_id)
    except (ValueError, AttributeError, TypeError):
        msg = f"save_id={save_id!r}: must be a UUID of 32 hexadecimal digits"
        raise ValueError(msg) from None


def checks_pickles(weights_only: bool | None) -> bool:
    """What ``weights_only`` means: None is True, as it is to ``torch.load``."""
    return weights_only is None or bool(weights_only)


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        msg = f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}"
        raise ValueError(msg)


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        msg = f"{name}={value!r}: must be a positive integer"
        raise ValueError(msg)


class ReadArguments(TypedDict, total=False):
    """The keyword arguments that :class:`ReadOptions` describes, for signatures."""

    io: Literal["auto", "mmap", "direct", "buffered"]
    threads: int | None
    verify: Literal["auto"] | bool
    shared: bool | None
    max_inflight_bytes: int | None


class WriteArguments(TypedDict, total=False):
    """The keyword arguments that :class:`WriteOptions` describes, for signatures."""

    io: Literal["auto", "direct", "buffered"]
    threads: int | None
    fsync: bool
    max_inflight_bytes: int | None


class WriterArguments(WriteArguments, total=False):
    """The keyword arguments of ``dcp_rs.save`` that say how."""

    overwrite: bool
    strict_values: bool
    progress: Progress
    save_id: str | None
    parent: str | os.PathLike[str] | None
    reuse: str | Iterable[str] | torch.nn.Module | Any | None
    verify_reuse: bool
    storage_options: Mapping[str, Any] | Any | None
    guard: Callable[[], AbstractContextManager[object]] | None


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How bytes are read: keyword arguments of ``RsReader``, ``load``, ``open`` and other readers.

    Attributes:
        io: ``"mmap"`` copies from a mapping, ``"direct"`` reads past the page cache,
            ``"buffered"`` reads through it. ``"auto"`` decides for each file, by what is in the
            page cache and by the file system.
        threads: threads that read. Default: the cores of this process (its affinity and its
            cgroup's CPU quota), divided by ``LOCAL_WORLD_SIZE``.
        verify: ``True`` checks the digest of every block that is read. ``"auto"`` checks whole
            blocks (1 MiB) that come from a disk or a store, and none that are in the page cache. A
            block is hashed while it is copied, so a destination may hold a damaged block when the
            error is raised.
        shared: whether other processes of this machine load the same checkpoint at the same time.
            ``io="auto"`` then reads through the page cache what they need too, so that the disk
            delivers it once. Default: true if ``LOCAL_WORLD_SIZE`` or, if that is not set, the
            process group has more than one rank. In a load of all ranks the ranks tell each other
            what they need. Otherwise it is guessed from the shapes.
        max_inflight_bytes: bound on memory beyond the destinations, in bytes. Default: 64 MiB; for
            an accelerator 256 MiB of pinned memory.
    """

    io: Literal["auto", "mmap", "direct", "buffered"] = "auto"
    threads: int | None = None
    verify: Literal["auto"] | bool = False
    shared: bool | None = None
    max_inflight_bytes: int | None = None

    def __post_init__(self) -> None:
        _check("io", self.io, ("auto", "mmap", "direct", "buffered"))
        _check("verify", self.verify, ("auto", True, False))
        _check("shared", self.shared, (True, False, None))
        _check_positive("threads", self.threads)
        _check_positive("max_inflight_bytes", self.max_inflight_bytes)

    def given(self) -> dict[str, Any]:
        """The options that are not as they are by default."""
        return _given(self)

    def inflight_bytes(self, *, accelerator: bool) -> int:
        """The bound for destinations on the CPU or on an accelerator."""
        return self.max_inflight_bytes or (256 * MIB if accelerator else 64 * MIB)

    def engine(self) -> dict[str, Any]:
        """The keyword arguments of the engine's calls."""
        return {**self.slabs(), "max_inflight_bytes": self.max_inflight_bytes or 64 * MIB}

    def asks_what_others_want(self) -> bool:
        """Whether what other ranks of this machine want makes a difference, and nobody has said what to make of them."""
        return self.shared is None and self.io == "auto" and default_shared()

    def alone(self) -> ReadOptions:
        """The same, for what no other rank reads."""
        return replace(self, shared=False) if self.shared is None else self

    def slabs(self) -> dict[str, Any]:
        """Those of a load through slabs."""
        ranks = local_ranks()
        return {
            "io": self.io,
            "threads": self.threads or max(1, _core.available_cores() // (ranks or 1)),
            "verify": None if self.verify == "auto" else self.verify,
            "shared": _has_others(ranks) if self.shared is None else self.shared,
        }


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How bytes are written: keyword arguments of ``RsWriter``, ``save`` and other writers.

    Attributes:
        io: ``"direct"`` writes past the page cache, ``"buffered"`` through it. ``"auto"`` takes
            the faster way for the file system.
        threads: writes in flight. Default: as many as keep the disk busy, divided by
            ``LOCAL_WORLD_SIZE``.
        fsync: make files and folder durable before the save counts as done.
        max_inflight_bytes: bound on memory for copies that wait to be written, in bytes. Default:
            64 MiB; for an object store 256 MiB; for an accelerator 256 MiB of pinned memory.
    """

    io: Literal["auto", "direct", "buffered"] = "auto"
    threads: int | None = None
    fsync: bool = True
    max_inflight_bytes: int | None = None

    def __post_init__(self) -> None:
        _check("io", self.io, ("auto", "direct", "buffered"))
        _check("fsync", self.fsync, (True, False))
        _check_positive("threads", self.threads)
        _check_positive("max_inflight_bytes", self.max_inflight_bytes)

    def given(self) -> dict[str, Any]:
        """The options that are not as they are by default."""
        return _given(self)

    def inflight_bytes(self, *, accelerator: bool) -> int:
        """The bound for tensors on the CPU or on an accelerator."""
        return self.max_inflight_bytes or (256 * MIB if accelerator else 64 * MIB)

    def engine(self, *, remote: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of the engine's calls; ``remote``: for an object store."""
        return {
            "io": self.io,
            "threads": self.threads or 0,  # the engine knows how many writes keep a disk busy
            "local_ranks": local_ranks() or 1,
            "fsync": self.fsync,
            # A store answers slowly, so many parts are on their way at a time, each in a buffer.
            "max_inflight_bytes": self.max_inflight_bytes or (256 * MIB if remote else 64 * MIB),
        }


def _given(options: ReadOptions | WriteOptions) -> dict[str, Any]:
    values = {known.name: getattr(options, known.name) for known in fields(options)}
    return {
        known.name: values[known.name]
        for known in fields(options)
        if values[known.name] != known.default
    }
