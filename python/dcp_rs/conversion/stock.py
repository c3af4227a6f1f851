"""Conversion to a folder of stock DCP, as torch's writer lays it out. Stored chunks stay chunks."""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp_rs import _torch
from dcp_rs.conversion.job import ConvertReport, Job, Task, split
from dcp_rs.conversion.output import Output
from dcp_rs.conversion.placeholders import Content, Placeholders
from dcp_rs.engine.metadata import tensor_properties
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.nesting import Container, TreePath, name_of, text_path

__all__ = ["check_nesting", "write"]


def write(job: Job, output: Output) -> None:
    """Write one plan for each shard, as if it was that of a rank."""
    writer = FileSystemWriter(output.folder, sync_files=False)
    contents: dict[_Key, Content] = {}
    runs = split(job.tasks, job.shards or 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        writer.set_up_storage_writer(is_coordinator=True)
        plans = [writer.prepare_local_plan(SavePlan(_items(run, contents))) for run in runs]
        plans, metadata = create_default_global_save_plan(plans)
        metadata = dataclasses.replace(metadata, planner_data=_planner_data(job))
        plans = writer.prepare_global_plan(plans)
        planner = _Planner(job, contents)
        writer.fs = _Files(planner.placeholders)
        with _torch.without_checksums():
            results = [writer.write_data(plan, planner).wait() for plan in plans]
        archives = _archives(result for of_plan in results for result in of_plan)
        planner.placeholders.write(output.folder, archives)
        writer.finish(metadata, results)
    # The writer of torch 2.8 syncs the metadata before all of it is written.
    if job.options.fsync:
        with (output.folder / ".metadata").open("rb") as file:
            os.fsync(file.fileno())
    job.report.files = sum(1 for _ in output.folder.glob("*.distcp"))


def check_nesting(
    tasks: Sequence[Task], containers: Sequence[Container] | None, report: ConvertReport | None
) -> None:
    """Find keys and containers that DCP cannot hold, and add them to ``report``.

    Raises:
        UnsupportedError: there are some, and ``report`` is None.
    """
    groups = {
        task.path[:at]
        for task in tasks
        for at, part in enumerate(task.path)
        if part == "param_groups"
    }

    def is_parameter(path: TreePath, at: int) -> bool:
        """Return whether a key is the number of a parameter in the state of an optimizer."""
        return (
            type(path[at][0]) is int
            and path[at - 1 : at] == ("state",)
            and path[: at - 1] in groups
        )

    lost: dict[str, str] = {}
    for task in tasks:
        for at, part in enumerate(task.path):
            if type(part) is tuple and not is_parameter(task.path, at):
                lost[task.name] = f"the key {part[0]!r}, which is no text"
    holding = {task.path[:depth] for task in tasks for depth in range(len(task.path))}
    for container in containers or ():
        if container.path and container.path not in holding:
            lost[name_of(container.path)] = "an empty dict"
        elif container.kind == "Counter":
            lost[name_of(container.path)] = "a Counter"
    if report is not None:
        report.skipped.update(lost)
        return
    for name, what in lost.items():
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        msg = (
            f"{name!r}: DCP cannot hold {what}{more}; skip_unsupported=True converts nevertheless: "
            "keys become text, a Counter a dict, and empty dicts are left out"
        )
        raise UnsupportedError(msg, tensor=name)


def _archives(results: Iterable[WriteResult]) -> dict[str, list[tuple[int, int]]]:
    """Return the archives (first byte, length) that torch wrote for tensors, by file."""
    archives: dict[str, list[tuple[int, int]]] = {}
    for result in results:
        info = result.storage_data
        of_file = archives.setdefault(info.relative_path, [])
        if result.index.offset is not None:  # values have their checksums
            of_file.append((info.offset, info.length))
    return archives


def _planner_data(job: Job) -> Any:
    root = job.source.root
    if root is not None and not isinstance(root, dict):
        return root  # of a custom planner
    paths = {task.name: text_path(task.path) for task in job.tasks}
    return paths if job.renamed or job.filtered else {**(root or {}), **paths}


class _Files(FileSystem):
    """The files of the writer. Data files are streams of placeholders."""

    def __init__(self, placeholders: Placeholders) -> None:
        super().__init__()
        self._placeholders = placeholders

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a new file."""
        if Path(path).suffix == ".distcp":
            yield cast(io.IOBase, self._placeholders.stream(Path(path).name))
        else:
            with super().create_stream(path, mode) as stream:
                yield stream


#: Name, offsets, sizes. A chunk without elements may have the offsets of another one.
_Key = tuple[str, torch.Size | None, torch.Size | None]


def _key(item: WriteItem) -> _Key:
    sizes = None if item.tensor_data is None else item.tensor_data.chunk.sizes
    return item.index.fqn, item.index.offset, sizes


def _items(tasks: Sequence[Task], contents: dict[_Key, Content]) -> list[WriteItem]:
    """Return the items of a plan, and add their contents."""
    items = []

    def add(item: WriteItem, content: Content) -> None:
        contents[_key(item)] = content
        items.append(item)

    for task in tasks:
        if task.dtype is None:
            add(WriteItem(MetadataIndex(task.name), WriteItemType.BYTE_IO), task)
            continue
        properties = tensor_properties(task.dtype, task.item.flags)
        # A chunk that is stored twice is written once.
        numbers = {(chunk.offsets, chunk.sizes): n for n, chunk in enumerate(task.item.chunks)}
        for (at, sizes), number in numbers.items():
            offsets = torch.Size(at)
            chunk = ChunkStorageMetadata(offsets, torch.Size(sizes))
            data = TensorWriteData(chunk, properties, torch.Size(task.item.shape))
            whole = len(numbers) == 1 and sizes == task.item.shape
            kind = WriteItemType.TENSOR if whole else WriteItemType.SHARD
            index = MetadataIndex(task.name, offsets)
            add(WriteItem(index, kind, tensor_data=data), task.region(number))
    return items


class _Planner(DefaultSavePlanner):
    """Planner that resolves items to placeholders."""

    def __init__(self, job: Job, contents: dict[_Key, Content]) -> None:
        super().__init__()
        self._numbers = {key: number for number, key in enumerate(contents)}
        self.placeholders = Placeholders(job, list(contents.values()))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the placeholder of an item."""
        number = self._numbers[_key(write_item)]
        if write_item.type == WriteItemType.BYTE_IO:
            return self.placeholders.value(number)
        return self.placeholders.tensor(number)
