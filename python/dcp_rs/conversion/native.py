"""Into the format of this package. Stored chunks stay chunks."""

from __future__ import annotations

import secrets
import uuid
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.blocks import Region
from dcp_rs.checkpoint.merged_from import KEY
from dcp_rs.conversion.job import Job, Task, split
from dcp_rs.conversion.place import Place
from dcp_rs.tensors.dtypes import NAMES

__all__ = ["write"]


def write(job: Job, place: Place) -> None:
    """One rank a shard."""
    runs = split(job.tasks, job.shards or 1)
    root = job.source.root
    if isinstance(root, dict) and (job.renamed or job.filtered):
        root = {}
    if job.merged_from and (
        root is None or isinstance(root, dict)
    ):  # a planner's own data is left as it is
        root = {**(root or {}), KEY: [dict(one) for one in job.merged_from]}
    nesting = (
        None if job.containers is None else [(c.position, c.path, c.kind) for c in job.containers]
    )
    save_id = uuid.uuid4().bytes
    indexes: list[bytes] = []
    try:
        for rank, run in enumerate(runs):
            indexes.append(_write_rank(job, run, save_id, nesting, rank, len(runs), place))
        if place.to.store is not None:
            job.source.check_again()  # on a store nothing can be taken back after the commit
        index = place.to.commit(
            None,
            indexes,
            save_id=save_id,
            generation=place.generation,
            planner_data=root,
            items=None,
            names=(),
            fsync=job.options.fsync,
        )
    except BaseException as error:
        if place.to.store is not None:
            place.to.give_up(None, indexes, error)
        raise
    job.report.files = len(index.files())


def _write_rank(
    job: Job,
    tasks: list[Task],
    save_id: bytes,
    nesting: list[Any] | None,
    rank: int,
    world_size: int,
    place: Place,
) -> bytes:
    items: list[_core.SaveItem] = []
    regions: list[Region] = []
    numbers: list[int] = []
    values: list[tuple[int, Task]] = []
    # A custom planner's data takes the place of all paths.
    with_paths = isinstance(job.source.root, dict) or job.source.root is None
    for task in tasks:
        path = task.path if with_paths else None
        if task.dtype is None:
            values.append((len(items), task))
            items.append(
                _core.SaveItem(task.name, task.item.nbytes, path=path, position=task.item.position)
            )
            continue
        for number, chunk in enumerate(task.item.chunks):
            region = task.region(number)
            if region.numel:
                numbers.append(len(items))
                regions.append(region)
            items.append(
                _core.SaveItem(
                    task.name,
                    region.nbytes,
                    dtype=NAMES[task.dtype],
                    shape=task.item.shape,
                    offsets=chunk.offsets,
                    sizes=chunk.sizes,
                    flags=task.item.flags,
                    path=path,
                    position=task.item.position,
                )
            )
    save = _core.Save.create(
        place.to.folder,
        items,
        save_id=save_id,
        generation=place.generation,
        token=secrets.randbits(64),
        rank=rank,
        world_size=world_size,
        store=place.to.store,
        **job.engine(),
    )
    try:
        for number, task in values:
            write_value(job, save, number, task)
        job.write(save, regions, numbers)
        return save.finish(nesting)
    except BaseException:
        save.abort()
        raise


def write_value(job: Job, save: _core.Save, number: int, task: Task) -> None:
    """A value is in memory whole, one at a time."""
    data = job.source.value(task.item)
    if data:
        memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        save.write([_core.Part(number, 0, memory.data_ptr(), memory.nbytes)])
    job.advance(len(data))
