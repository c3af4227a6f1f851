"""Into a file of ``torch.save``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import IO, Any, cast

import torch

from dcp_rs import _torch
from dcp_rs.conversion.job import Job, Task
from dcp_rs.conversion.place import Place
from dcp_rs.conversion.stand_ins import StandIns
from dcp_rs.errors import UnsafePickleError
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import REQUIRES_GRAD, can_require_grad
from dcp_rs.tensors.flatten import number_parameters
from dcp_rs.tensors.nesting import Container, name_of, nest, shown

__all__ = ["write"]

#: Of the file while it is made: what it becomes may be called what is no text.
_NAME = "data"


def write(job: Job, place: Place) -> None:
    """The state dict, nested as it was.

    Raises:
        UnsafePickleError: a ``defaultdict``, where ``weights_only`` is set:
            ``torch.load(weights_only=True)`` refuses it.
    """
    if job.weights_only:
        _check_kinds(job.containers or ())
    flat: dict[str, Any] = {}
    tensors: list[Task] = []
    tied = job.source.tied([task.item for task in job.tasks])
    names = {task.item.name: task.name for task in job.tasks}
    same: list[tuple[Task, str]] = []
    for task in job.tasks:
        flat[task.name] = None  # for the order
        if task.item.name in tied:
            same.append((task, names[tied[task.item.name]]))
            continue
        if task.dtype is None:
            data = job.source.value(task.item)
            flat[task.name] = pickles.load(task.item.name, data, weights_only=job.weights_only)
            job.advance(len(data))
            continue
        tensors.append(task)
    stand_ins = StandIns(job, [task.region() for task in tensors])
    for number, task in enumerate(tensors):
        flat[task.name] = stand_ins.tensor(number)
    for task, kept in same:
        flat[task.name] = flat[kept].detach()
        job.advance(task.nbytes)
    for task in job.tasks:
        if (
            task.dtype is not None
            and can_require_grad(task.dtype)
            and task.item.flags & REQUIRES_GRAD
        ):
            flat[task.name] = flat[task.name].detach().requires_grad_()
    nested = _state_dict(job, flat)
    stream = stand_ins.stream(_NAME)
    with _torch.without_checksums():
        torch.save(nested, cast(IO[bytes], stream))
    stand_ins.write(place.folder, {_NAME: [(0, stream.tell())]})
    (place.folder / _NAME).rename(place.result)
    job.report.files = 1


def _check_kinds(containers: Iterable[Container]) -> None:
    for container in containers:
        if container.kind.startswith("defaultdict"):
            where = shown(container.path) or "the state dict"
            msg = f"{where} is a {container.kind}, which does not load under torch.load(weights_only=True); pass weights_only=False to write it all the same"
            raise UnsafePickleError(msg, tensor=name_of(container.path))


def _state_dict(job: Job, flat: Mapping[str, Any]) -> dict[Any, Any]:
    nested = nest(
        ((task.item.position, task.path, flat[task.name]) for task in job.tasks),
        job.containers or (),
    )
    if job.containers is None:
        number_parameters(nested)
    return nested
