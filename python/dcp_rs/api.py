"""``load``, ``save`` and their relatives: DCP's protocol with this package's storage."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
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
from dcp_rs.errors import CheckpointReplacedError, DcpRsError
from dcp_rs.planner import RsLoadPlanner
from dcp_rs.reader import RsReader
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


#: A load that finds the checkpoint replaced under it begins again, so often.
_ATTEMPTS = 10


def _load(load: Callable[[], None]) -> None:
    """Loads, and begins again with the new checkpoint where another save replaced the one that was being read.

    Every rank sees the same failures, so all of them begin again, or none.
    """
    with _typed_errors():
        for _ in range(_ATTEMPTS - 1):
            try:
                return load()
            except CheckpointException as failure:
                errors = [wrapped[0] for wrapped in failure.failures.values()]
                if not any(isinstance(error, CheckpointReplacedError) for error in errors):
                    raise
        return load()


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

    def load() -> None:
        storage_reader.reset()
        _torch.load_state_dict(
            state_dict,
            _deferring(storage_reader),
            process_group=process_group,
            coordinator_rank=coordinator_rank,
            no_dist=no_dist or not dist.is_initialized(),
            planner=planner,
        )

    _load(load)


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
    _load(
        lambda: _torch.load_state_dict(
            values,
            _deferring(RsReader(path, **read_options)),
            process_group=process_group,
            no_dist=no_dist or not dist.is_initialized(),
            planner=RsLoadPlanner() if planner is None else planner,
        )
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
        planner: default: torch's ``DefaultSavePlanner``.
        process_group, no_dist: as in ``dcp.save``.
        write_options: arguments of :class:`RsWriter`.

    Raises:
        As :func:`load_state_dict`.
    """
    writer = RsWriter(path, **write_options)
    with _typed_errors():
        try:
            metadata: Metadata = dcp_save(
                state_dict, storage_writer=writer, planner=planner, process_group=process_group, no_dist=no_dist
            )
        except CheckpointException:
            # All ranks know by now that none commits. (After an error of the process group itself, one may still.)
            writer.discard()
            raise
    return metadata


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
