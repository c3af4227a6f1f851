"""A conversion under way: the entries to write, with their new names and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs._progress import Watch
from dcp_rs._reports import Report
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.blocks import Region, blocks, make_slabs
from dcp_rs.checkpoint.names import renamer, selector, some
from dcp_rs.checkpoint.source import CheckpointReader, Item
from dcp_rs.conversion.request import WriteRequest
from dcp_rs.errors import PlanError
from dcp_rs.tensors.dtypes import cast_to, is_counter
from dcp_rs.tensors.nesting import Container, TreePath, moved_versions, name_of, remaining


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

    def chunks(self) -> Iterator[tuple[int | None, tuple[int, ...], tuple[int, ...]]]:
        """Yield the number, offsets and sizes of the chunks of a tensor.

        An empty tensor may have none. It is written as one chunk, without a number.
        """
        if not self.item.chunks:
            yield None, (0,) * len(self.item.shape), self.item.shape
        for number, chunk in enumerate(self.item.chunks):
            yield number, tuple(chunk.offsets), tuple(chunk.sizes)

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
        request: the result to write.
        report: to fill in.
        tasks: the entries to write.
        containers: the containers of the new state dict; None if they are not known.
        merged_from: the inputs of a merge; empty for a conversion.
        progress: is called with the bytes written, and all bytes.
        done: the bytes written.
    """

    source: CheckpointReader
    request: WriteRequest
    report: ConvertReport
    tasks: list[Task]
    containers: list[Container] | None
    merged_from: Sequence[Mapping[str, Any]]
    progress: Watch | None = None
    done: int = 0

    @property
    def is_whole(self) -> bool:
        """True if all entries are written under their names in the source."""
        return len(self.tasks) == len(self.source.items) and all(
            task.name == task.item.name for task in self.tasks
        )

    @property
    def has_paths(self) -> bool:
        """True unless the data of a custom planner replaces all paths."""
        return self.source.root is None or isinstance(self.source.root, dict)

    @cached_property
    def total(self) -> int:
        """The bytes to write. Those of a value are an estimate, until it is read."""
        return sum(task.nbytes for task in self.tasks)

    @cached_property
    def slabs(self) -> list[torch.Tensor]:
        """The memory for all blocks."""
        return make_slabs(min(self.request.buffer_bytes, self.total))

    def advance(self, nbytes: int) -> None:
        """Count bytes as written."""
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def value(self, task: Task) -> bytes:
        """Read a value, and count it as written."""
        data = self.source.value(task.item)
        # A file of torch.save stores it otherwise than it is written.
        self.total += len(data) - task.nbytes
        self.advance(len(data))
        return data

    def engine(self) -> dict[str, Any]:
        """Return the options of a save."""
        buffer = {"max_inflight_bytes": self.request.buffer_bytes}
        return self.request.write_options.engine() | buffer

    def write(self, save: _core.Save, regions: Mapping[int, Region]) -> None:
        """Read regions, and write each as the item of this number of a save."""
        items = list(regions)
        for batch in blocks(self.source, list(regions.values()), self.slabs):
            save.write(
                [
                    _core.Part(
                        items[block.region], block.at, block.data.data_ptr(), block.data.nbytes
                    )
                    for block in batch
                ]
            )
            self.advance(sum(block.data.nbytes for block in batch))


@contextmanager
def aborting(save: _core.Save) -> Iterator[None]:
    """Remove the files of a save after an error in this context."""
    try:
        yield
    except BaseException:
        save.abort()
        raise


def new_dtype(item: Item, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of an entry after a cast to ``dtype``; None for a value."""
    if item.dtype is None or is_counter(item.name, item.shape):
        return item.dtype
    return cast_to(item.dtype, dtype)


def select(
    source: CheckpointReader, request: WriteRequest
) -> tuple[list[Task], list[Container] | None]:
    """Return the included entries and containers, with their new names.

    The containers are None if those of the source are not known.

    Raises:
        PlanError: nothing is included, or two entries would have one name.
    """
    passes = selector(request.include, request.exclude)
    new_name = renamer(request.rename)
    tasks: list[Task] = []
    names: dict[str, str] = {}
    for item in source.items:
        if not passes(item.name):
            continue
        name = new_name(item.name)
        other = names.setdefault(name, item.name)
        if other != item.name:
            msg = f"{other!r} and {item.name!r} would both be named {name!r}"
            raise PlanError(msg, tensor=name)
        path = item.path if name == item.name and item.path is not None else (name,)
        tasks.append(Task(item, name, new_dtype(item, request.dtype), path))
    if source.items and not tasks:
        msg = f"none of the {len(source.items)} entries is wanted by {request.globs}"
        raise PlanError(msg)
    if isinstance(request.rename, Mapping) and all(each.name == each.item.name for each in tasks):
        there = some([each.name for each in tasks])
        warn_caller(f"rename={dict(request.rename)} renames no entry: there are {there}")
    leaves = [task.item.path for task in tasks if task.item.path is not None]
    containers = remaining(source.containers or [], leaves, passes)
    if request.rename is not None and (front := _front(tasks)):
        depth = len(front)
        tasks = [replace(t, path=path[depth:]) for t, path in zip(tasks, leaves, strict=True)]
        inside = [c for c in containers if c.path[:depth] == front]
        containers = [replace(c, path=c.path[depth:]) for c in inside]
    else:
        versions = _rename_versions(containers, tasks)
        containers = _rename_containers(containers, leaves, tasks, new_name)
        if versions:
            containers = [
                Container(0, (), "OrderedDict", versions),
                *(c for c in containers if c.path),
            ]
    return tasks, None if source.containers is None else containers


def _front(tasks: Sequence[Task]) -> TreePath:
    """Return the path of the one container of all entries, if their new names are those in it.

    The entries then keep their nesting below it. Otherwise return an empty path.
    """
    fronts: set[TreePath] = set()
    for task in tasks:
        path = task.item.path or ()
        ends = (at for at, part in enumerate(path) if isinstance(part, str))
        found = next((at for at in ends if name_of(path[at:]) == task.name), 0)
        fronts.add(path[:found])
    return fronts.pop() if len(fronts) == 1 else ()


def _rename_versions(
    containers: Sequence[Container], tasks: Sequence[Task]
) -> dict[str, Mapping[str, Any]]:
    """Return the versions of modules whose entries get new names, all of which are at the top."""
    moved: dict[str, Mapping[str, Any]] = {}
    for container in containers:
        if container.versions is None:
            continue
        depth = len(container.path)
        names = [
            (name_of(path[depth:]), task.name)
            for task in tasks
            if (path := task.item.path) is not None
            and path[:depth] == container.path
            and (not depth or task.path != path)
        ]
        if any(old != new for old, new in names):
            moved |= moved_versions(container.versions, names)
    return moved


def _rename_containers(
    containers: Sequence[Container],
    leaves: Sequence[TreePath],
    tasks: Sequence[Task],
    new_name: Callable[[str], str],
) -> list[Container]:
    """Return the containers that are left after a renaming.

    An empty container has a name, as entries have. A container of renamed entries goes.
    """
    holding = {path[:depth] for path in leaves for depth in range(len(path))}
    still = {task.path[:depth] for task in tasks for depth in range(len(task.path))}
    kept = []
    for container in containers:
        name = name_of(container.path)
        new = new_name(name) if container.path else name
        if new == name:
            if container.path not in holding or container.path in still:
                kept.append(container)
        elif container.path not in holding:
            kept.append(replace(container, path=(new,)))
    return kept


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
