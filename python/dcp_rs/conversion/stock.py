"""Into a stock DCP folder, as torch's own writer lays it out. Stored chunks stay chunks."""

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
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp_rs import _torch
from dcp_rs.conversion.job import ConvertReport, Job, Task, split
from dcp_rs.conversion.place import Place
from dcp_rs.conversion.stand_ins import Content, StandIns
from dcp_rs.engine.metadata import tensor_properties
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.nesting import Container, TreePath, name_of, text_path

__all__ = ["check_nesting", "write"]


def write(job: Job, place: Place) -> None:
    """One plan a shard, as if each was a rank's."""
    writer = FileSystemWriter(place.folder, sync_files=False)
    planner = _Planner()
    runs = split(job.tasks, job.shards or 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        writer.set_up_storage_writer(is_coordinator=True)
        plans = [writer.prepare_local_plan(SavePlan(planner.add(run))) for run in runs]
        plans, metadata = create_default_global_save_plan(plans)
        metadata = dataclasses.replace(metadata, planner_data=_planner_data(job))
        plans = writer.prepare_global_plan(plans)
        planner.stand_ins = StandIns(job, planner.contents)
        writer.fs = _Files(planner.stand_ins)
        with _torch.without_checksums():
            results = [writer.write_data(plan, planner).wait() for plan in plans]
        planner.stand_ins.write(
            place.folder, _archives(result for of_plan in results for result in of_plan)
        )
        writer.finish(metadata, results)
    if (
        job.options.fsync
    ):  # not by the writer: of torch 2.8 it synced the metadata before all of it was written
        with (place.folder / ".metadata").open("rb") as file:
            os.fsync(file.fileno())
    job.report.files = sum(1 for _ in place.folder.glob("*.distcp"))


def check_nesting(
    tasks: Sequence[Task], containers: Sequence[Container] | None, report: ConvertReport | None
) -> None:
    """Finds keys and containers that DCP cannot hold, and says in ``report`` that they are lost.

    Raises:
        UnsupportedError: there are some, and there is no ``report``.
    """
    groups = {
        task.path[:at]
        for task in tasks
        for at, part in enumerate(task.path)
        if part == "param_groups"
    }

    def is_number(path: TreePath, at: int) -> bool:
        """Whether it is the number of a parameter in the state of an optimizer."""
        return (
            type(path[at][0]) is int
            and path[at - 1 : at] == ("state",)
            and path[: at - 1] in groups
        )

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


def _archives(results: Iterable[WriteResult]) -> dict[str, list[tuple[int, int]]]:
    """For each file, where archives are (first byte, length) that torch wrote now: values were some before."""
    archives: dict[str, list[tuple[int, int]]] = {}
    for result in results:
        info = result.storage_data
        of_file = archives.setdefault(info.relative_path, [])
        if result.index.offset is not None:
            of_file.append((info.offset, info.length))
    return archives


def _planner_data(job: Job) -> Any:
    root = job.source.root
    if root is not None and not isinstance(root, dict):
        return root  # of a planner of the user's own
    paths = {task.name: text_path(task.path) for task in job.tasks}
    return paths if job.renamed or job.filtered else {**(root or {}), **paths}


class _Files(FileSystem):
    """Where the writer thinks that its files are. Those of data are streams in memory, without what is in the tensors."""

    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A new file."""
        if Path(path).suffix == ".distcp":
            yield cast(io.IOBase, self._stand_ins.stream(Path(path).name))
        else:
            with super().create_stream(path, mode) as stream:
                yield stream


#: Name, offsets, sizes. A chunk without elements may be where another one is.
_Key = tuple[str, torch.Size | None, torch.Size | None]


def _key(item: WriteItem) -> _Key:
    return (
        item.index.fqn,
        item.index.offset,
        None if item.tensor_data is None else item.tensor_data.chunk.sizes,
    )


class _Planner(SavePlanner):
    """Hands out what stands for tensors and values."""

    stand_ins: StandIns

    def __init__(self) -> None:
        self.contents: list[Content] = []
        self._numbers: dict[_Key, int] = {}

    def add(self, tasks: list[Task]) -> list[WriteItem]:
        """The items of a plan."""
        items = []
        for task in tasks:
            if task.dtype is None:
                items.append(
                    self._add(WriteItem(MetadataIndex(task.name), WriteItemType.BYTE_IO), task)
                )
                continue
            properties = tensor_properties(task.dtype, task.item.flags)
            # A chunk that is stored twice is one.
            numbers = {
                (chunk.offsets, chunk.sizes): number
                for number, chunk in enumerate(task.item.chunks)
            }
            for (at, sizes), number in numbers.items():
                offsets = torch.Size(at)
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, torch.Size(sizes)),
                    properties,
                    torch.Size(task.item.shape),
                )
                whole = len(numbers) == 1 and sizes == task.item.shape
                kind = WriteItemType.TENSOR if whole else WriteItemType.SHARD
                item = WriteItem(MetadataIndex(task.name, offsets), kind, tensor_data=data)
                items.append(self._add(item, task.region(number)))
        return items

    def _add(self, item: WriteItem, content: Content) -> WriteItem:
        self._numbers[_key(item)] = len(self.contents)
        self.contents.append(content)
        return item

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What stands for it."""
        number = self._numbers[_key(write_item)]
        if write_item.type == WriteItemType.BYTE_IO:
            return self.stand_ins.value(number)
        return self.stand_ins.tensor(number)

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
