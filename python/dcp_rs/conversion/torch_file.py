"""Conversion to a file of ``torch.save``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any, cast

import torch

from dcp_rs import _torch
from dcp_rs.conversion.job import Job
from dcp_rs.conversion.output import Output
from dcp_rs.conversion.placeholders import Placeholders
from dcp_rs.errors import UnsafePickleError
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import REQUIRES_GRAD, can_require_grad
from dcp_rs.tensors.flatten import number_parameters
from dcp_rs.tensors.nesting import Container, name_of, nest, shown

__all__ = ["write"]

#: The name of the file while it is written. The final name need not be text.
_NAME = "data"


def write(job: Job, output: Output) -> None:
    """Write the state dict, nested as it was.

    Raises:
        UnsafePickleError: a ``defaultdict``, with ``weights_only``.
    """
    if job.weights_only:
        _check_kinds(job.containers or ())
    tied = job.source.tied([task.item for task in job.tasks])
    names = {task.item.name: task.name for task in job.tasks}
    tensors = [t for t in job.tasks if t.dtype is not None and t.item.name not in tied]
    placeholders = Placeholders(job, [task.region() for task in tensors])
    flat: dict[str, Any] = {t.name: placeholders.tensor(n) for n, t in enumerate(tensors)}
    for task in job.tasks:
        if task.item.name in tied:
            flat[task.name] = flat[names[tied[task.item.name]]].detach()
            job.advance(task.nbytes)
        elif task.dtype is None:
            data = job.source.value(task.item)
            flat[task.name] = pickles.load(task.item.name, data, weights_only=job.weights_only)
            job.advance(len(data))
    for task in job.tasks:
        requires_grad = task.dtype is not None and task.item.flags & REQUIRES_GRAD
        if requires_grad and task.dtype is not None and can_require_grad(task.dtype):
            flat[task.name] = flat[task.name].detach().requires_grad_()
    state_dict = nest(
        ((task.item.position, task.path, flat[task.name]) for task in job.tasks),
        job.containers or (),
    )
    if job.containers is None:
        number_parameters(state_dict)
    stream = placeholders.stream(_NAME)
    with _torch.without_checksums():
        torch.save(state_dict, cast(IO[bytes], stream))
    placeholders.write(output.folder, {_NAME: [(0, stream.tell())]})
    (output.folder / _NAME).rename(output.result)
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
