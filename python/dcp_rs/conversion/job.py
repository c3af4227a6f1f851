"""A conversion under way: the entries to write, with their new names and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._progress import Watch
from dcp_rs._reports import Report
from dcp_rs.checkpoint.blocks import Region, Slabs, blocks
from dcp_rs.checkpoint.names import Rename, globs, renamer, selector
from dcp_rs.checkpoint.source import Item, Source
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.options import WriteOptions
from dcp_rs.tensors.dtypes import BY_NAME, cast_to, is_counter
from dcp_rs.tensors.nesting import Container, TreePath, name_of, nest, remaining

__all__ = [
    "ConvertReport",
    "Job",
    "Task",
    "check_renamed",
    "new_dtype",
    "parse_dtype",
    "select",
    "select_containers",
    "split",
]

_ALIASES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
}


@dataclass(repr=False)
class ConvertReport(Report):
    """Report of :func:`dcp_rs.convert`.

    Attributes:
        written: the names in the new checkpoint.
        skipped: names in the source that the new format cannot hold, and why
            (``skip_unsupported=True``). For ``"dcp"`` it lists entries that are written with text
            for a key, and Counters that are written as a dict.
        tied: left-out second names of tensors, with the first name (``to="safetensors"``).
        bytes: the bytes of payload.
        files: the number of data files.
        seconds: the time.
    """

    _timed = "bytes"

    written: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    files: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """An entry to write.

    Attributes:
        item: the entry of the source.
        name: the new name.
        dtype: the new dtype; None for a value.
        path: the new path in the state dict.
    """

    item: Item
    name: str
    dtype: torch.dtype | None
    path: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of payload."""
        if self.dtype is None or self.item.dtype is None:
            return self.item.nbytes
        return self.item.nbytes // self.item.dtype.itemsize * self.dtype.itemsize

    def region(self, chunk: int | None = None) -> Region:
        """Return the whole tensor, or one chunk."""
        if self.dtype is None:
            raise TypeError(self.name)
        return Region(self.item, chunk, self.dtype)


@dataclass
class Job:
    """A conversion under way.

    Attributes:
        source: the checkpoint to read.
        tasks: the entries to write.
        shards: the number of files or ranks; None for the default of the format.
        options: the limits of the writes.
        report: to fill in.
        containers: the containers of the new state dict; None if they are not known.
        progress: is called with the bytes written, and all bytes.
        name: the name of files of safetensors.
        weights_only: refuse values that ``torch.load(weights_only=True)`` refuses.
        merged_from: the inputs of a merge; empty for a conversion.
        done: the bytes written.
    """

    source: Source
    tasks: list[Task]
    shards: int | None
    options: WriteOptions
    report: ConvertReport
    containers: list[Container] | None = None
    progress: Watch | None = None
    name: str = "model"
    weights_only: bool = True
    merged_from: list[Mapping[str, Any]] = field(default_factory=list)
    done: int = 0

    @cached_property
    def renamed(self) -> bool:
        """True if an entry has a new name."""
        return any(task.name != task.item.name for task in self.tasks)

    @property
    def filtered(self) -> bool:
        """True if entries are left out."""
        return len(self.tasks) < len(self.source.items)

    @cached_property
    def total(self) -> int:
        """The bytes to write."""
        return sum(task.nbytes for task in self.tasks)

    @property
    def slab_bytes(self) -> int:
        """The bytes of a slab. Three slabs and the buffers of reads and writes share the bound."""
        return self.options.inflight_bytes(accelerator=False) // 4 >> 20 << 20

    @cached_property
    def slabs(self) -> Slabs:
        """The memory for all blocks."""
        return Slabs(self.slab_bytes)

    def advance(self, nbytes: int) -> None:
        """Count bytes as written."""
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def engine(self) -> dict[str, Any]:
        """Return the options of a save."""
        return self.options.engine() | {"max_inflight_bytes": max(self.slab_bytes, 1 << 20)}

    def write(self, save: Any, regions: Sequence[Region], items: Sequence[int]) -> None:
        """Read regions, and write them as these items of a save."""
        for batch in blocks(self.source, regions, self.slabs):
            save.write(
                [
                    _core.Part(
                        items[block.region], block.at, block.data.data_ptr(), block.data.nbytes
                    )
                    for block in batch
                ]
            )
            self.advance(sum(block.data.nbytes for block in batch))


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype by torch's name, or by a short one such as ``bf16``.

    Raises:
        ValueError: it is not a floating-point dtype.
    """
    if dtype is None:
        return None
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.").lower()
        found = BY_NAME.get(_ALIASES.get(name, name))
    else:
        found = dtype
    if found is None or not found.is_floating_point or found not in BY_NAME.values():
        msg = (
            f"dtype={dtype!r}: must be one of float64, float32, float16, bfloat16, "
            "or of the float8 types"
        )
        raise ValueError(msg)
    if str(found) == "torch.float4_e2m1fn_x2":
        msg = f"dtype={dtype!r}: torch has no conversion to it"
        raise ValueError(msg)
    return found


def new_dtype(item: Item, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of an entry after a cast to ``dtype``; None for a value."""
    if item.dtype is None or is_counter(item.name, item.shape):
        return item.dtype
    return cast_to(item.dtype, dtype)


def select(
    source: Source,
    *,
    dtype: torch.dtype | None,
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
    rename: Rename,
) -> list[Task]:
    """Return the included entries, with their new names.

    Raises:
        PlanError: nothing is included, or two entries would have one name.
    """
    wanted, unwanted = globs(include), globs(exclude)
    new_name = renamer(rename)
    tasks: list[Task] = []
    names: dict[str, str] = {}
    for item in source.items:
        if (wanted is not None and not wanted.match(item.name)) or (
            unwanted is not None and unwanted.match(item.name)
        ):
            continue
        name = new_name(item.name)
        other = names.setdefault(name, item.name)
        if other != item.name:
            msg = f"{other!r} and {item.name!r} would both be named {name!r}"
            raise PlanError(msg, tensor=name)
        path = item.path if name == item.name and item.path is not None else (name,)
        tasks.append(Task(source.measured(item), name, new_dtype(item, dtype), path))
    if source.items and not tasks:
        msg = (
            f"none of the {len(source.items)} entries is wanted by include={include!r}, "
            f"exclude={exclude!r}"
        )
        raise PlanError(msg)
    depth = len(_front(tasks))
    return (
        [replace(task, path=task.item.path[depth:]) for task in tasks if task.item.path]
        if depth
        else tasks
    )


def _front(tasks: Sequence[Task]) -> TreePath:
    """Return the path of the one container of all entries, if their new names are those in it.

    The entries then keep their nesting below it. Otherwise return an empty path.
    """
    first = tasks[0] if tasks else None
    if first is None or not first.item.path or first.name == first.item.name:
        return ()
    for depth in range(1, len(first.item.path)):
        front = first.item.path[:depth]
        if all(
            task.item.path is not None
            and task.item.path[:depth] == front
            and len(task.item.path) > depth
            and isinstance(task.item.path[depth], str)
            and name_of(task.item.path[depth:]) == task.name
            for task in tasks
        ):
            return front
    return ()


def select_containers(
    source: Source,
    tasks: Sequence[Task],
    *,
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
    rename: Rename,
) -> list[Container] | None:
    """Return the containers of the new state dict; None if those of the source are not known.

    An empty container has a name, as entries have. A container of renamed entries goes.
    """
    if source.containers is None:
        return None
    leaves = [task.item.path for task in tasks if task.item.path is not None]
    kept = remaining(source.containers, leaves, selector(include, exclude) or (lambda _: True))
    if rename is None:
        return kept
    if front := _front(tasks):
        inside = [c for c in kept if c.path[: len(front)] == front]
        return [Container(c.position, c.path[len(front) :], c.kind) for c in inside]
    new_name = renamer(rename)
    holding = {path[:depth] for path in leaves for depth in range(len(path))}
    containers = []
    for container in kept:
        name = name_of(container.path)
        new = new_name(name) if container.path else name
        if new == name:
            containers.append(container)
        elif container.path not in holding:
            containers.append(Container(container.position, (new,), container.kind))
    return containers


def check_renamed(
    source: Source, tasks: Sequence[Task], containers: Sequence[Container] | None
) -> None:
    """Check that renamed entries can be nested beside the others.

    Raises:
        PlanError: they cannot, and the source has no such contradiction itself.
    """
    has_paths = source.root is None or isinstance(source.root, dict)
    if not has_paths or all(task.name == task.item.name for task in tasks):
        return
    try:
        nest(((task.item.position, task.path, None) for task in tasks), containers or ())
    except PlanError:
        paths = ((task.item.position, task.item.path or (task.item.name,), None) for task in tasks)
        try:
            nest(paths, source.containers or ())
        except PlanError:
            return
        raise


def refuse_unsupported(
    tasks: Sequence[Task],
    why_not: Callable[[Task], str | None],
    to: str,
    report: ConvertReport | None,
) -> list[Task]:
    """Return the tasks that the new format can hold.

    Args:
        tasks: the entries.
        why_not: returns why the format cannot hold an entry; None if it can.
        to: the format, for the message.
        report: the report for the other entries. If it is None, they are an error.
    """
    reasons = [(task, why_not(task)) for task in tasks]
    refused = [(task, reason) for task, reason in reasons if reason is not None]
    if refused and report is None:
        named = "; ".join(f"{task.item.name!r} {reason}" for task, reason in refused[:5])
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        msg = (
            f"{to} cannot hold {len(refused)} of {len(tasks)} entries "
            f"(skip_unsupported=True leaves them out): {named}{more}"
        )
        raise UnsupportedError(msg, tensor=refused[0][0].item.name)
    if report is not None:
        report.skipped.update((task.item.name, reason) for task, reason in refused)
    return [task for task, reason in reasons if reason is None]


def split(tasks: Sequence[Task], count: int) -> list[list[Task]]:
    """Split the tasks, in order, into ``count`` runs of about the same number of bytes.

    No run is empty if there are enough tasks.
    """
    count = max(1, min(count, len(tasks)))
    runs: list[list[Task]] = []
    left = sum(task.nbytes for task in tasks)
    at = 0
    for runs_left in range(count, 0, -1):
        run: list[Task] = []
        aim, nbytes = left / runs_left, 0
        while at < len(tasks) - (runs_left - 1) and (
            runs_left == 1 or not run or nbytes + tasks[at].nbytes / 2 <= aim
        ):
            nbytes += tasks[at].nbytes
            run.append(tasks[at])
            at += 1
        left -= nbytes
        runs.append(run)
    return runs
