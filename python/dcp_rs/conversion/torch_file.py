"""Into a file of ``torch.save``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import IO, Any, cast

import torch

from dcp_rs import _core, _torch
from dcp_rs.conversion.job import Job, Task
from dcp_rs.conversion.place import Place
from dcp_rs.conversion.scratch import to_tensors
from dcp_rs.errors import UnsafePickleError
from dcp_rs.tensors import objects
from dcp_rs.tensors.nesting import Container, name_of, nest, shown
from dcp_rs.tensors.trees import number_parameters

__all__ = ["write"]


def write(job: Job, place: Place) -> None:
    """The state dict, nested as it was. Tensors are views of the source, or of a temporary file where they are cast or put together.

    Raises:
        UnsafePickleError: a ``defaultdict``, where ``weights_only`` is set: ``torch.load(weights_only=True)`` refuses it.
    """
    if job.weights_only:
        _check_kinds(job.containers or ())
    flat: dict[str, Any] = {}
    made: list[Task] = []
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
            flat[task.name] = objects.load(task.item.name, data, weights_only=job.weights_only)
            job.advance(len(data))
            continue
        view = job.source.view(task.item, None) if task.dtype == task.item.dtype else None
        if view is None:
            made.append(task)
        else:
            flat[task.name] = view
    copies = to_tensors(job, [task.region() for task in made], place.folder)
    for task, copy in zip(made, copies, strict=True):
        flat[task.name] = copy
    for task, kept in same:
        flat[task.name] = flat[kept].detach()
        job.advance(task.nbytes)
    for task in job.tasks:
        if task.item.flags & 1 and isinstance(flat[task.name], torch.Tensor) and flat[task.name].is_floating_point():
            flat[task.name] = flat[task.name].detach().requires_grad_()
    nested = _state_dict(job, flat)
    written = sum(task.nbytes for task in job.tasks) - job.done
    with place.result.open("xb") as file:
        with _torch.without_checksums():
            torch.save(nested, cast(IO[bytes], _Counted(file, job, written)))
        file.flush()
        _core.seal_archives(os.fspath(place.result), [(0, file.tell())], job.options.threads or 0)
        if job.options.fsync:
            os.fsync(file.fileno())
    job.report.files = 1


def _check_kinds(containers: Iterable[Container]) -> None:
    for container in containers:
        if container.kind.startswith("defaultdict"):
            where = shown(container.path) or "the state dict"
            msg = f"{where} is a {container.kind}, which does not load under torch.load(weights_only=True); pass weights_only=False to write it all the same"
            raise UnsafePickleError(msg, tensor=name_of(container.path))


def _state_dict(job: Job, flat: Mapping[str, Any]) -> dict[Any, Any]:
    nested = nest(((task.item.position, task.path, flat[task.name]) for task in job.tasks), job.containers or ())
    if job.containers is None:
        number_parameters(nested)
    return nested


#: After so many bytes the source is looked at again.
_CHECK_BYTES = 1 << 20


class _Counted:
    """A file that tells the job what is written to it, and looks now and then whether the source is still what it was."""

    def __init__(self, file: Any, job: Job, most: int) -> None:
        self._file = file
        self._job = job
        self._left = most
        self._unchecked = 0

    def write(self, data: Any) -> int:
        """Writes, and counts payload only as often as it is there."""
        written: int = self._file.write(data)
        self._job.advance(min(written, self._left))
        self._left -= min(written, self._left)
        self._unchecked += written
        if self._unchecked >= _CHECK_BYTES:
            self._unchecked = 0
            self._job.source.check_again()
        return written

    def flush(self) -> None:
        self._file.flush()
