"""Conversion to a folder of stock DCP, as torch's writer lays it out. Stored chunks stay chunks."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Iterable, Iterator, Mapping
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
from dcp_rs._url import StrPath
from dcp_rs.checkpoint.folders import STOCK_NAME, sync
from dcp_rs.conversion.job import Job, Task, split
from dcp_rs.conversion.placeholders import Placeholders
from dcp_rs.engine.metadata import tensor_properties
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.nesting import TreePath, name_of, text_path

#: The numbers of the chunks of a tensor, by offsets and sizes.
_Chunks = Mapping[tuple[tuple[int, ...], tuple[int, ...]], int | None]


def write(job: Job, result: Path) -> None:
    """Write one plan for each shard, as if it was that of a rank."""
    writer = FileSystemWriter(result, sync_files=False)
    runs = split(job.tasks, job.request.shards or 1)
    chunks = {task.name: _chunks(task) for task in job.tasks}
    placeholders = Placeholders(
        task.region(number) for task in job.tasks for number in chunks[task.name].values()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        writer.set_up_storage_writer(is_coordinator=True)
        items = [[item for t in run for item in _items(t, chunks[t.name])] for run in runs]
        plans = [writer.prepare_local_plan(SavePlan(of_rank)) for of_rank in items]
        plans, metadata = create_default_global_save_plan(plans)
        metadata = dataclasses.replace(metadata, planner_data=_planner_data(job))
        plans = writer.prepare_global_plan(plans)
        writer.fs = _Files(placeholders)
        planner = _Planner(job, chunks, placeholders)
        with _torch.without_checksums():
            results = [writer.write_data(plan, planner).wait() for plan in plans]
        archives = _archives(result for of_plan in results for result in of_plan)
        placeholders.write(job, result, archives)
        writer.finish(metadata, results)
    # The writer of torch 2.8 syncs the metadata before all of it is written.
    if job.request.write_options.fsync:
        sync(result / STOCK_NAME)
    job.report.files = sum(1 for _ in result.glob("*.distcp"))


def check_nesting(job: Job) -> None:
    """Find keys and containers that DCP cannot hold, and add them to the report.

    Raises:
        UnsupportedError: there are some, and ``skip_unsupported`` is not set.
    """
    tasks = job.tasks
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
                lost[task.name] = f"the key {part[0]!r}, which is not text"
    holding = {task.path[:depth] for task in tasks for depth in range(len(task.path))}
    for container in job.containers or ():
        if container.path and container.path not in holding:
            lost[name_of(container.path)] = "an empty dict"
        elif container.kind == "Counter":
            lost[name_of(container.path)] = "a Counter"
    if lost and not job.request.skip_unsupported:
        name, what = next(iter(lost.items()))
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        msg = (
            f"{name!r}: DCP cannot hold {what}{more}; skip_unsupported=True converts nevertheless: "
            "keys become text, a Counter a dict, and empty dicts are left out"
        )
        raise UnsupportedError(msg, tensor=name)
    job.report.skipped = lost


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
    if not job.has_paths:
        return root
    paths = {task.name: text_path(task.path) for task in job.tasks}
    return {**(root or {}), **paths} if job.is_whole else paths


class _Files(FileSystem):
    """The files of the writer. Data files are streams of placeholders."""

    def __init__(self, placeholders: Placeholders) -> None:
        super().__init__()
        self._placeholders = placeholders

    @contextmanager
    def create_stream(self, path: StrPath, mode: str) -> Iterator[io.IOBase]:
        """Open a new file."""
        if Path(path).suffix == ".distcp":
            yield cast(io.IOBase, self._placeholders.stream(Path(path).name))
        else:
            with super().create_stream(path, mode) as stream:
                yield stream


def _chunks(task: Task) -> _Chunks:
    """Return the chunks of a tensor that are written; none for a value."""
    if task.dtype is None:
        return {}
    # A chunk that is stored twice is written once.
    return {(offsets, sizes): number for number, offsets, sizes in task.chunks()}


def _items(task: Task, chunks: _Chunks) -> Iterator[WriteItem]:
    """Yield the items of an entry in a plan, in the order of its chunks."""
    if task.dtype is None:
        yield WriteItem(MetadataIndex(task.name), WriteItemType.BYTE_IO)
        return
    properties = tensor_properties(task.dtype, task.item.flags)
    for offsets, sizes in chunks:
        whole = len(chunks) == 1 and sizes == task.item.shape
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        yield WriteItem(
            MetadataIndex(task.name, chunk.offsets),
            WriteItemType.TENSOR if whole else WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(task.item.shape)),
        )


class _Planner(DefaultSavePlanner):
    """Planner that resolves items to placeholders and values."""

    def __init__(self, job: Job, chunks: Mapping[str, _Chunks], placeholders: Placeholders) -> None:
        super().__init__()
        self._job = job
        self._values = {task.name: task for task in job.tasks if task.dtype is None}
        tensors = iter(placeholders.tensors)
        self._tensors = {name: [next(tensors) for _ in of] for name, of in chunks.items()}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the placeholder of a chunk, or a value."""
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._job.value(self._values[index.fqn]))
        # The global plan gave each chunk its number.
        return self._tensors[index.fqn][index.index or 0]
