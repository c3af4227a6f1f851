"""Into a stock DCP folder, by torch's own writer. Stored chunks stay chunks."""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp_rs import _core, _torch
from dcp_rs.conversion.job import ConvertReport, Job, Task, split
from dcp_rs.conversion.place import Place
from dcp_rs.conversion.scratch import in_memory, to_tensors
from dcp_rs.dcp.metadata import tensor_properties
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.nesting import Container, TreePath, name_of, text_path

__all__ = ["check_nesting", "write"]

#: Up to this many bytes a chunk is put together in memory, beyond in a file.
_IN_MEMORY = 4 << 20


def write(job: Job, place: Place) -> None:
    """One plan a shard, as if each was a rank's."""
    writer = FileSystemWriter(place.folder, sync_files=False)
    planner = _Planner(job, place)
    runs = split(job.tasks, job.shards or 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        writer.set_up_storage_writer(is_coordinator=True)
        plans = [writer.prepare_local_plan(SavePlan(planner.add(run))) for run in runs]
        plans, metadata = create_default_global_save_plan(plans)
        metadata = dataclasses.replace(metadata, planner_data=_planner_data(job))
        plans = writer.prepare_global_plan(plans)
        with _torch.without_checksums():
            results = [writer.write_data(plan, planner).wait() for plan in plans]
        planner.let_go()
        _complete(job, place, [result for rank_results in results for result in rank_results])
        writer.finish(metadata, results)
    if job.options.fsync:  # not by the writer: of torch 2.8 it synced the metadata before all of it was written
        with (place.folder / ".metadata").open("rb") as file:
            os.fsync(file.fileno())
    job.report.files = sum(1 for _ in place.folder.glob("*.distcp"))


def check_nesting(tasks: Sequence[Task], containers: Sequence[Container] | None, report: ConvertReport | None) -> None:
    """Finds keys and containers that DCP cannot hold, and says in ``report`` that they are lost.

    Raises:
        UnsupportedError: there are some, and there is no ``report``.
    """
    groups = {task.path[:at] for task in tasks for at, part in enumerate(task.path) if part == "param_groups"}

    def is_number(path: TreePath, at: int) -> bool:
        """Whether it is the number of a parameter in the state of an optimizer."""
        return type(path[at][0]) is int and path[at - 1 : at] == ("state",) and path[: at - 1] in groups

    lost: dict[str, str] = {}
    for task in tasks:
        for at, part in enumerate(task.path):
            if type(part) is tuple and not is_number(task.path, at):
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
        msg = f"{name!r}: DCP cannot hold {what}{more}; skip_unsupported=True converts without it"
        raise UnsupportedError(msg, tensor=name)


def _complete(job: Job, place: Place, results: list[WriteResult]) -> None:
    """Adds the checksums that the writer left out, and syncs the files."""
    archives: dict[str, list[tuple[int, int]]] = {}
    for result in results:
        info = result.storage_data
        of_file = archives.setdefault(info.relative_path, [])
        if result.index.offset is not None:  # values were archives already
            of_file.append((info.offset, info.length))
    for name, of_file in archives.items():
        path = place.folder / name
        _core.seal_archives(os.fspath(path), of_file, job.options.threads or 0)
        if job.options.fsync:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _planner_data(job: Job) -> Any:
    root = job.source.root
    if root is not None and not isinstance(root, dict):
        return root  # of a planner of the user's own
    paths = {task.name: text_path(task.path) for task in job.tasks}
    return paths if job.renamed or job.filtered else {**(root or {}), **paths}


class _Planner(SavePlanner):
    """Finds one tensor at a time, when the writer asks for it."""

    def __init__(self, job: Job, place: Place) -> None:
        self._job = job
        self._place = place
        self._tasks: dict[str, Task] = {}
        self._last: torch.Tensor | None = None

    def add(self, tasks: list[Task]) -> list[WriteItem]:
        """The items of a plan."""
        self._tasks.update((task.name, task) for task in tasks)
        items = []
        for task in tasks:
            if task.dtype is None:
                items.append(WriteItem(MetadataIndex(task.name), WriteItemType.BYTE_IO))
                continue
            properties = tensor_properties(task.dtype, task.item.flags)
            for chunk in task.item.chunks:
                offsets = torch.Size(chunk.offsets)
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)), properties, torch.Size(task.item.shape)
                )
                whole = len(task.item.chunks) == 1 and chunk.sizes == task.item.shape
                kind = WriteItemType.TENSOR if whole else WriteItemType.SHARD
                items.append(WriteItem(MetadataIndex(task.name, offsets), kind, tensor_data=data))
        return items

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Its bytes, in the source's file if they lie there as they are."""
        self.let_go()
        task = self._tasks[write_item.index.fqn]
        if task.dtype is None or write_item.tensor_data is None:
            data = self._job.source.value(task.item)
            self._job.advance(len(data))
            return io.BytesIO(data)
        offsets = tuple(write_item.tensor_data.chunk.offsets)
        sizes = tuple(write_item.tensor_data.chunk.sizes)
        number = next(i for i, c in enumerate(task.item.chunks) if (c.offsets, c.sizes) == (offsets, sizes))
        region = task.region(number)
        view = self._job.source.view(task.item, number) if task.dtype == task.item.dtype else None
        if view is not None:
            self._job.advance(view.nbytes)
            self._job.source.check_again()
            return view
        if region.nbytes > _IN_MEMORY:
            return to_tensors(self._job, [region], self._place.folder)[0]
        self._last = in_memory(self._job, region)
        return self._last

    def let_go(self) -> None:
        """The writer keeps every tensor of a file, though it is done with it: their memory is taken away."""
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
            self._last = None

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """The plans are made elsewhere."""

    def create_local_plan(self) -> SavePlan:
        """The plans are made elsewhere."""
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        """The plans are made elsewhere."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan
