"""Options of reads and writes, as plain data with documented defaults."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypedDict, TypeVar

from dcp_rs import _core
from dcp_rs._arguments import check_arguments
from dcp_rs._progress import Progress
from dcp_rs._url import StorageOptions, StoreArguments, StrPath

if TYPE_CHECKING:
    import uuid

    import torch

__all__ = [
    "LoadArguments",
    "OpenArguments",
    "OptimizerArguments",
    "PlannerArguments",
    "ReadArguments",
    "ReadOptions",
    "ReaderArguments",
    "SaveArguments",
    "SelectArguments",
    "TrainingArguments",
    "WriteArguments",
    "WriteOptions",
    "WriterArguments",
]

T = TypeVar("T")

#: One glob over names, or several; None for all names.
Globs = str | Iterable[str] | None
#: A mapping of names, or of prefixes up to a dot; or a function of a name.
Rename = Mapping[str, str] | Callable[[str], str] | None

MIB = 1 << 20


def local_ranks() -> int | None:
    """Return the number of ranks on this machine, as torchrun sets ``LOCAL_WORLD_SIZE``.

    None if it is not set.
    """
    try:
        return max(1, int(os.environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        return None


def job_size() -> int:
    """Return the number of ranks of the job; 0 without a process group."""
    dist = sys.modules.get("torch.distributed")  # without it, there is no process group
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0
    return int(dist.get_world_size())


def has_local_peers() -> bool:
    """Return true if other ranks run on this machine, as far as that is known."""
    ranks = local_ranks()
    return (job_size() if ranks is None else ranks) > 1


def uuid_of(save_id: str) -> uuid.UUID:
    """Parse the id of a save.

    Raises:
        ValueError: it is no UUID.
    """
    import uuid  # slow to import, and few commands need it

    try:
        return uuid.UUID(save_id)
    except (ValueError, AttributeError, TypeError):
        msg = f"save_id={save_id!r}: must be a UUID of 32 hexadecimal digits"
        raise ValueError(msg) from None


def as_integer(value: object) -> int | None:
    """Return an integer of any type, such as NumPy's, as an int; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tensor of another dtype
        return None


def check_positive(name: str, value: object) -> None:
    """Raise a ``ValueError`` unless the value is a positive integer, or None."""
    if value is not None and (as_integer(value) or 0) <= 0:
        msg = f"{name}={value!r}: must be a positive integer"
        raise ValueError(msg)


def check_choice(name: str, value: object, *choices: object) -> None:
    """Raise a ``ValueError`` unless the value is one of these."""
    if value not in choices:
        msg = f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}"
        raise ValueError(msg)


def check_function(name: str, value: object, what: str) -> None:
    """Raise a ``TypeError`` unless the value can be called, or is None.

    Args:
        name: the option.
        value: its value.
        what: what it should do, in words, after "a function".
    """
    if value is not None and not callable(value):
        raise TypeError(f"{name}={value!r}: pass a function {what}")


def repeatable(values: T | Iterator[Any]) -> T | tuple[Any, ...]:
    """Return values that can be iterated over more than once: those of an iterator as a tuple."""
    return tuple(values) if isinstance(values, Iterator) else values


def take_options(function: Callable[..., Any], options: Any) -> dict[str, Any]:
    """Check the names of options, and return them for a work that may begin again.

    They are changed in place. Globs and views can be iterated over again. Options of stores are
    hidden, as tools show the variables of a traceback.

    Args:
        function: the public function that was called.
        options: its ``**options``.

    Raises:
        TypeError: the function does not take one. The message suggests another.
        TypeError, UnsupportedError: the options of a store are invalid.
    """
    check_arguments(function, options)
    for name, value in options.items():
        is_of_store = name.endswith("storage_options")
        options[name] = StorageOptions.of(value) if is_of_store else repeatable(value)
    return options  # type: ignore[no-any-return]


def split_options(
    options: Mapping[str, Any], cls: type[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that are fields of a dataclass, and the others."""
    names = {each.name for each in fields(cls)}
    own = {name: value for name, value in options.items() if name in names}
    return own, {name: value for name, value in options.items() if name not in names}


def given(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass of options that differ from their defaults."""
    return {
        each.name: value
        for each in fields(options)
        if (value := getattr(options, each.name)) != each.default
    }


class _Options:
    """Base of the options of reads and writes, which are dataclasses."""

    max_inflight_bytes: int | None

    def inflight_bytes(self, *, accelerator: bool) -> int:
        """Return the bound for tensors on the CPU or on an accelerator."""
        return self.max_inflight_bytes or (256 * MIB if accelerator else 64 * MIB)


class ReadArguments(TypedDict, total=False):
    """Keyword arguments of :class:`ReadOptions`, for signatures."""

    io: Literal["auto", "mmap", "direct", "buffered"]
    threads: int | None
    verify: Literal["auto"] | bool
    shared: bool | None
    max_inflight_bytes: int | None


class OpenArguments(ReadArguments, total=False):
    """Keyword arguments of :func:`dcp_rs.open`, for functions that pass them on."""

    weights_only: bool | None
    allow_external: bool
    storage_options: StoreArguments
    tiers: Iterable[StrPath] | None
    dequantize: bool | torch.dtype
    views: Any  # a view or several, whose classes are in a module above this one


class ReaderArguments(OpenArguments, total=False):
    """Keyword arguments of :class:`dcp_rs.RsReader`, for functions that pass them on."""

    replicas: Literal["each", "node", "all"]
    progress: Progress


class PlannerArguments(TypedDict, total=False):
    """Keyword arguments of :class:`dcp_rs.RsLoadPlanner` that :func:`dcp_rs.load` takes, too."""

    rename: Rename
    include: Globs
    exclude: Globs
    dtype: torch.dtype | str | None
    allow_partial_load: bool
    device: torch.device | str | None
    assign: bool
    dtype_policy: Literal["warn", "error", "cast"]


class LoadArguments(ReaderArguments, PlannerArguments, total=False):
    """Keyword arguments of :func:`dcp_rs.load`, for functions that pass them on."""


class OptimizerArguments(ReaderArguments, total=False):
    """Keyword arguments of ``load_optim_state_dict``, for functions that pass them on."""

    rename: Rename
    include: Globs
    exclude: Globs
    dtype: torch.dtype | str | None
    partial: bool | Collection[str]
    keep_settings: bool | Collection[str]


class TrainingArguments(OptimizerArguments, total=False):
    """Keyword arguments of ``load_training_state``, for functions that pass them on."""

    names: Mapping[str, str] | None


class WriteArguments(TypedDict, total=False):
    """Keyword arguments of :class:`WriteOptions`, for signatures."""

    io: Literal["auto", "direct", "buffered"]
    threads: int | None
    fsync: bool
    max_inflight_bytes: int | None


class WriterArguments(WriteArguments, total=False):
    """Keyword arguments of :class:`dcp_rs.RsWriter` that torch's writer lacks."""

    strict_values: bool
    progress: Progress
    save_id: str | None
    parent: StrPath | None
    reuse: Globs
    verify_reuse: bool
    storage_options: StoreArguments
    guard: Callable[[], AbstractContextManager[object]] | None


class SelectArguments(TypedDict, total=False):
    """Keyword arguments of :func:`dcp_rs.save` that choose what is stored, and how."""

    include: Globs
    exclude: Globs
    dtype: torch.dtype | str | None


class SaveArguments(WriterArguments, SelectArguments, total=False):
    """Keyword arguments of :func:`dcp_rs.save`, for functions that pass them on."""

    overwrite: bool
    publish: Callable[[bytes], object] | None


@dataclass(frozen=True, kw_only=True)
class ReadOptions(_Options):
    """Options of reads: keyword arguments of ``RsReader``, ``load``, ``open`` and other readers.

    Attributes:
        io: ``"mmap"`` copies from a mapping, ``"direct"`` reads past the page cache,
            ``"buffered"`` reads through it. ``"auto"`` decides for each file, by what is in the
            page cache and by the file system.
        threads: threads that copy. Default: the cores of this process (its affinity and its
            cgroup's CPU quota), divided by ``LOCAL_WORLD_SIZE``. If fewer, up to 16 reads of a
            disk are in flight all the same, or 64 small ones, or 64 of a store.
        verify: ``"auto"`` checks the digests of blocks (1 MiB) that come from a disk or a store,
            and are read whole into contiguous memory. It checks none that are in the page cache or
            read through a mapping. ``True`` checks every block that is read, ``False`` none. A
            block is hashed while it is copied, so a destination may hold a damaged block when the
            error is raised.
        shared: other processes of this machine load the same checkpoint at the same time.
            ``io="auto"`` then reads through the page cache what they need too, so that the disk
            delivers it once. Default: true if ``LOCAL_WORLD_SIZE`` or, if that is not set, the
            process group has more than one rank. In a load of all ranks the ranks tell each other
            what they need. Otherwise it is guessed from the shapes.
        max_inflight_bytes: bound on memory beyond the destinations, in bytes. Default: 64 MiB; for
            an accelerator 256 MiB of pinned memory.
    """

    io: Literal["auto", "mmap", "direct", "buffered"] = "auto"
    threads: int | None = None
    verify: Literal["auto"] | bool = "auto"
    shared: bool | None = None
    max_inflight_bytes: int | None = None

    def __post_init__(self) -> None:
        check_choice("io", self.io, "auto", "mmap", "direct", "buffered")
        check_choice("verify", self.verify, "auto", True, False)
        check_choice("shared", self.shared, True, False, None)
        check_positive("threads", self.threads)
        check_positive("max_inflight_bytes", self.max_inflight_bytes)

    def engine(self) -> dict[str, Any]:
        """Return keyword arguments for the engine."""
        ranks = local_ranks() or 1
        return {
            "io": self.io,
            "threads": self.threads or max(1, _core.available_cores() // ranks),
            "verify": None if self.verify == "auto" else self.verify,
            "shared": has_local_peers() if self.shared is None else self.shared,
            "local_ranks": ranks,
            "max_inflight_bytes": self.max_inflight_bytes or 64 * MIB,
        }

    def slabs(self) -> dict[str, Any]:
        """Return keyword arguments for a load through slabs, which has a bound of its own."""
        arguments = self.engine()
        del arguments["max_inflight_bytes"]
        return arguments

    @property
    def shares_page_cache(self) -> bool:
        """True if reads of other ranks of this machine change how this one reads."""
        return self.shared is None and self.io == "auto" and has_local_peers()

    def alone(self) -> ReadOptions:
        """Return the options for reads that no other rank makes."""
        return replace(self, shared=False) if self.shared is None else self


@dataclass(frozen=True, kw_only=True)
class WriteOptions(_Options):
    """Options of writes: keyword arguments of ``RsWriter``, ``save`` and other writers.

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
        check_choice("io", self.io, "auto", "direct", "buffered")
        check_choice("fsync", self.fsync, True, False)
        check_positive("threads", self.threads)
        check_positive("max_inflight_bytes", self.max_inflight_bytes)

    def engine(self, *, remote: bool = False) -> dict[str, Any]:
        """Return keyword arguments for the engine; ``remote`` for an object store."""
        return {
            "io": self.io,
            "threads": self.threads or 0,  # the engine chooses
            "local_ranks": local_ranks() or 1,
            "fsync": self.fsync,
            # A store has a high latency, so more parts are in flight.
            "max_inflight_bytes": self.inflight_bytes(accelerator=remote),
        }
