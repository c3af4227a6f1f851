"""Conversion to the format of this package. Stored chunks stay chunks."""

from __future__ import annotations

import secrets
import uuid
from pathlib import Path
from typing import Any

from dcp_rs import _core
from dcp_rs.checkpoint.blocks import Region
from dcp_rs.checkpoint.folders import is_foreign
from dcp_rs.checkpoint.metadata import MERGED_FROM, with_versions
from dcp_rs.conversion.job import Job, Task, aborting, split
from dcp_rs.engine.destination import Destination
from dcp_rs.errors import CheckpointExistsError
from dcp_rs.tensors.dtypes import NAMES


def write(job: Job, result: Path) -> None:
    """Write one rank for each shard, and commit them. On a store, that replaces what is there now.

    Raises:
        CheckpointExistsError: there is a checkpoint, and ``overwrite`` is not set; or there is one
            of another format.
        StorageError: see :mod:`dcp_rs.errors`.
    """
    request = job.request
    to = Destination(result, request.storage_options, overwrite=request.overwrite)
    _refuse_foreign(to)
    to.prepare()
    generation = to.begin()
    runs = split(job.tasks, request.shards or 1)
    save_id = uuid.uuid4().bytes
    of_all = {"save_id": save_id, "generation": generation, "world_size": len(runs)}
    indexes: list[bytes] = []
    try:
        for rank, run in enumerate(runs):
            indexes.append(_write_rank(job, run, to, rank=rank, **of_all))
        job.source.check_again()  # on a store, nothing can be undone after the commit
        index = to.commit(
            indexes,
            save_id=save_id,
            generation=generation,
            planner_data=_planner_data(job),
            fsync=request.write_options.fsync,
        )
    except BaseException as error:
        to.give_up(indexes, error)
        raise
    job.report.files = len(index.files())


def _refuse_foreign(to: Destination) -> None:
    """Raise if a folder on a store holds a checkpoint of another format."""
    files = [] if to.store is None else to.store.list([to.path])[0][0]
    foreign = next((name for name, *_ in files if is_foreign(name)), None)
    if foreign is not None:
        msg = (
            f"{to.path} holds {foreign!r} of another format, and a store cannot replace that in "
            "one step: remove it, or convert to another folder"
        )
        raise CheckpointExistsError(msg, path=to.path)


def _planner_data(job: Job) -> Any:
    """Return the planner data that belongs to no entry."""
    root = job.source.root
    if not job.has_paths:
        return root
    if root is not None and not job.is_whole:
        root = {}
    if job.merged_from:
        root = {**(root or {}), MERGED_FROM: list(job.merged_from)}
    return with_versions(root, job.containers or ())


def _write_rank(job: Job, tasks: list[Task], to: Destination, **how: Any) -> bytes:
    """Write the data files of a rank, and return its index."""
    items: list[_core.SaveItem] = []
    regions: dict[int, Region] = {}
    values: list[tuple[int, bytes]] = []
    for task in tasks:
        name, item = task.name, task.item
        place: dict[str, Any] = {
            "path": task.path if job.has_paths else None,
            "position": item.position,
        }
        if task.dtype is None:
            values.append((len(items), job.value(task)))
            items.append(_core.SaveItem(name, len(values[-1][1]), **place))
            continue
        place |= {"dtype": NAMES[task.dtype], "shape": item.shape, "flags": item.flags}
        for number, offsets, sizes in task.chunks():
            region = task.region(number)
            if region.numel:
                regions[len(items)] = region
            extent: dict[str, Any] = {"offsets": offsets, "sizes": sizes}
            items.append(_core.SaveItem(name, region.nbytes, **place, **extent))
    save = _core.Save.create(
        to.folder, items, store=to.store, token=secrets.randbits(64), **how, **job.engine()
    )
    with aborting(save):
        save.write_values(values)
        job.write(save, regions)
        if job.containers is None:
            return save.finish()
        return save.finish([(c.position, c.path, c.kind) for c in job.containers])
