"""Conversion to the format of this package. Stored chunks stay chunks."""

from __future__ import annotations

import secrets
import uuid
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.blocks import Region
from dcp_rs.checkpoint.metadata import MERGED_FROM
from dcp_rs.conversion.job import Job, Task, split
from dcp_rs.conversion.output import Output
from dcp_rs.tensors.dtypes import NAMES

__all__ = ["write"]


def write(job: Job, output: Output) -> None:
    """Write one rank for each shard."""
    runs = split(job.tasks, job.shards or 1)
    root = job.source.root
    if isinstance(root, dict) and (job.renamed or job.filtered):
        root = {}
    has_paths = root is None or isinstance(root, dict)  # else it is of a custom planner
    if job.merged_from and has_paths:
        root = {**(root or {}), MERGED_FROM: [dict(one) for one in job.merged_from]}
    nesting = (
        None if job.containers is None else [(c.position, c.path, c.kind) for c in job.containers]
    )
    save_id = uuid.uuid4().bytes
    indexes: list[bytes] = []
    try:
        for rank, run in enumerate(runs):
            indexes.append(_write_rank(job, run, save_id, nesting, rank, len(runs), output))
        if output.to.store is not None:
            job.source.check_again()  # on a store, nothing can be undone after the commit
        index = output.to.commit(
            None,
            indexes,
            save_id=save_id,
            generation=output.generation,
            planner_data=root,
            items=None,
            names=(),
            fsync=job.options.fsync,
            overwrite=output.overwrite,
        )
    except BaseException as error:
        if output.to.store is not None:
            output.to.give_up(None, indexes, error)
        raise
    job.report.files = len(index.files())


def _write_rank(
    job: Job,
    tasks: list[Task],
    save_id: bytes,
    nesting: list[Any] | None,
    rank: int,
    world_size: int,
    output: Output,
) -> bytes:
    items: list[_core.SaveItem] = []
    regions: list[Region] = []
    numbers: list[int] = []
    values: list[tuple[int, Task]] = []
    # The data of a custom planner replaces all paths.
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
        output.to.folder,
        items,
        save_id=save_id,
        generation=output.generation,
        token=secrets.randbits(64),
        rank=rank,
        world_size=world_size,
        store=output.to.store,
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
    """Write a value, which is in memory as a whole."""
    data = job.source.value(task.item)
    if data:
        memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        save.write([_core.Part(number, 0, memory.data_ptr(), memory.nbytes)])
    job.advance(len(data))
