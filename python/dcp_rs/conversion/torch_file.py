"""Conversion to a file of ``torch.save``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

import torch

from dcp_rs import _torch
from dcp_rs.conversion.job import Job, Task
from dcp_rs.conversion.placeholders import Placeholders
from dcp_rs.errors import UnsafePickleError
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import REQUIRES_GRAD, can_require_grad
from dcp_rs.tensors.flatten import number_parameters
from dcp_rs.tensors.nesting import Container, name_of, nest, shown


def write(job: Job, result: Path) -> None:
    """Write the state dict, nested as it was.

    Raises:
        UnsafePickleError: a ``defaultdict``, with ``weights_only``.
    """
    weights_only = job.request.weights_only
    if weights_only:
        _check_kinds(job.containers or ())
    tied = job.source.tied([task.item for task in job.tasks])
    stored = [t for t in job.tasks if t.dtype is not None and t.item.name not in tied]
    placeholders = Placeholders(task.region() for task in stored)
    names = (task.item.name for task in stored)
    tensors = dict(zip(names, placeholders.tensors, strict=True))

    def value(task: Task) -> Any:
        name = task.item.name
        if task.dtype is None:
            data, path = job.value(task), os.fspath(job.source.path)
            return pickles.load(name, data, weights_only=weights_only, path=path)
        if name in tied:
            job.advance(task.nbytes)
        tensor = tensors[tied.get(name, name)].detach()
        if task.item.flags & REQUIRES_GRAD and can_require_grad(task.dtype):
            # torch.load refuses a plain float8 tensor that requires a gradient.
            return torch.nn.Parameter(tensor)
        return tensor

    leaves = ((task.item.position, task.path, value(task)) for task in job.tasks)
    state_dict = nest(leaves, job.containers or ())
    if job.containers is None:
        number_parameters(state_dict)
    stream = placeholders.stream(result.name)
    with _torch.without_checksums():
        torch.save(state_dict, cast(IO[bytes], stream))
    placeholders.write(job, result.parent, {result.name: [(0, stream.tell())]})
    job.report.files = 1


def _check_kinds(containers: Iterable[Container]) -> None:
    for container in containers:
        if container.kind.startswith("defaultdict"):
            where = shown(container.path) or "the state dict"
            msg = (
                f"{where} is a {container.kind}, which does not load under "
                "torch.load(weights_only=True); pass weights_only=False to write it all the same"
            )
            raise UnsafePickleError(msg, tensor=name_of(container.path))
