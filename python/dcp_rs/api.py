"""``load``, ``save`` and their relatives: DCP's protocol with this package's storage."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader

from dcp_rs import _torch
from dcp_rs.errors import DcpRsError
from dcp_rs.planner import RsLoadPlanner
from dcp_rs.reader import RsReader
from dcp_rs.save_planner import RsSavePlanner
from dcp_rs.tree import is_stateful
from dcp_rs.writer import RsWriter

__all__ = ["async_save", "load", "load_state_dict", "save"]


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Raises the error of this package that made DCP fail, with its rank, in place of DCP's collection of errors.

    DCP's own exception stays as the cause. It is left alone when any rank failed with something else.
    """
    with warnings.catch_warnings():
        # The caller said `no_dist`, or has no process group: that is not worth a warning.
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        try:
            yield
        except CheckpointException as failure:
            errors = {rank: wrapped[0] for rank, wrapped in sorted(failure.failures.items())}
            if not all(isinstance(error, DcpRsError) for error in errors.values()):
                raise
            rank, error = next(iter(errors.items()))
            ranks = ", ".join(map(str, errors))
            error.add_note(
                f"raised on rank {rank}" if len(errors) == 1 else f"raised on ranks {ranks}; this is rank {rank}'s"
            )
            raise error from failure


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Loads into ``state_dict`` in place: ``torch.distributed.checkpoint.load_state_dict``, without its deprecation warning.

    Every rank of ``process_group`` calls it, with the same keys. As there, ``Stateful`` values are not called: see :func:`load`.

    Raises:
        DcpRsError: one of :mod:`dcp_rs.errors`, on every rank, when a rank failed with it.
        CheckpointException: torch's own, when a rank failed with something else.
    """
    with _typed_errors():
        storage_reader.reset()
        _torch.load_state_dict(
            state_dict,
            _deferring(storage_reader),
            process_group=process_group,
            coordinator_rank=coordinator_rank,
            no_dist=no_dist or not dist.is_initialized(),
            planner=planner,
        )


def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **read_options: Any,
) -> None:
    """Loads the checkpoint at ``path`` into ``state_dict``: ``dcp.load`` with an :class:`RsReader`.

    Args:
        state_dict: tensors are filled in place, ``Stateful`` objects are loaded, other values are replaced.
        path: a checkpoint folder.
        planner: default: :class:`RsLoadPlanner`.
        process_group, no_dist: as in ``dcp.load``.
        read_options: arguments of :class:`RsReader`.

    Raises:
        As :func:`load_state_dict`.
    """
    stateful = {key: value for key, value in state_dict.items() if is_stateful(value)}
    values = {key: stateful[key].state_dict() if key in stateful else state_dict[key] for key in sorted(state_dict)}
    with _typed_errors():
        _torch.load_state_dict(
            values,
            _deferring(RsReader(path, **read_options)),
            process_group=process_group,
            no_dist=no_dist or not dist.is_initialized(),
            planner=RsLoadPlanner() if planner is None else planner,
        )
    for key, value in values.items():
        if key in stateful:
            stateful[key].load_state_dict(value)
        else:
            state_dict[key] = value


def save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **write_options: Any,
) -> Metadata:
    """Saves ``state_dict`` to the folder ``path``: ``dcp.save`` with an :class:`RsWriter`.

    Args:
        state_dict: as for ``dcp.save``.
        path: the folder.
        planner: default: :class:`RsSavePlanner`.
        process_group, no_dist: as in ``dcp.save``.
        write_options: arguments of :class:`RsWriter`.

    Raises:
        As :func:`load_state_dict`. Then no rank has left data files behind, and the checkpoint that was there is whole.
    """
    with _typed_errors():
        return _save(_without_stateful(state_dict), RsWriter(path, **write_options), planner, process_group, no_dist)


def _save(
    state_dict: dict[str, Any],
    writer: RsWriter,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,  # noqa: FBT001  # not public
) -> Metadata:
    try:
        return _torch.save_state_dict(
            state_dict,
            writer,
            process_group=process_group,
            no_dist=no_dist or not dist.is_initialized(),
            planner=RsSavePlanner() if planner is None else planner,
        )
    except CheckpointException:
        # Every rank gets this one, so nobody commits. After any other error the coordinator still may.
        writer.discard()
        raise
    finally:
        writer.close()


def _without_stateful(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state_dict.items()}


def async_save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    **write_options: Any,
) -> Future[Metadata]:
    """Saves in the background: ``dcp.async_save`` with an :class:`RsWriter`. Returns once ``state_dict`` has been copied to host memory.

    With a process group, that group needs a CPU backend.
    """
    with _typed_errors():
        future: Future[Metadata] = dcp_async_save(
            state_dict, storage_writer=RsWriter(path, **write_options), planner=planner, process_group=process_group
        )
    return future


def _deferring(reader: StorageReader) -> StorageReader:
    """The reader, set to raise what goes wrong in ``read_metadata`` one call later, where torch does not swallow it."""
    if isinstance(reader, RsReader):
        reader.defer_errors = True
    return reader
