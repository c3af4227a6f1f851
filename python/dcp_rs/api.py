"""``load``, ``save`` and their relatives: DCP's protocol with this package's storage."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, Unpack

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader

from dcp_rs import _torch
from dcp_rs.checkpoint.values import unwrap_in
from dcp_rs.dcp import plan_cache
from dcp_rs.dcp.arguments import check_options, check_state_dict
from dcp_rs.dcp.load_planner import RsLoadPlanner
from dcp_rs.dcp.load_report import LoadReport
from dcp_rs.dcp.reader import RsReader
from dcp_rs.dcp.save_planner import RsSavePlanner
from dcp_rs.dcp.writer import RsWriter
from dcp_rs.errors import CheckpointReplacedError, DcpRsError
from dcp_rs.options import ReaderArguments, WriterArguments
from dcp_rs.tensors.trees import is_stateful, stateful_values
from dcp_rs.transfer.stage import HostStager

__all__ = ["async_save", "load", "load_state_dict", "save"]


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Raises the error of this package, or of the system, that made DCP fail, with its rank, in place of DCP's collection of errors.

    DCP's own exception stays as the cause. It is left alone when any rank failed with something else, or several and one of them with an
    error of the system.
    """
    with warnings.catch_warnings():
        # The caller said `no_dist`, or has no process group: that is not worth a warning.
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        try:
            yield
        except CheckpointException as failure:
            _raise_typed(failure)


def _raise_typed(failure: CheckpointException) -> NoReturn:
    errors = {rank: wrapped[0] for rank, wrapped in sorted(failure.failures.items())}
    one_of_the_system = len(errors) == 1 and all(isinstance(error, OSError) for error in errors.values())
    if not one_of_the_system and not all(isinstance(error, DcpRsError) for error in errors.values()):
        raise failure
    rank, error = next(iter(errors.items()))
    ranks = ", ".join(map(str, errors))
    error.add_note(f"raised on rank {rank}" if len(errors) == 1 else f"raised on ranks {ranks}; this is rank {rank}'s")
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
) -> LoadReport | None:
    """Loads into ``state_dict`` in place: ``torch.distributed.checkpoint.load_state_dict``, without its deprecation warning.

    Every rank of ``process_group`` calls it, with the same keys. As there, ``Stateful`` values are not called: see :func:`load`.

    Returns:
        What the load found and took on this rank, if the reader is an :class:`RsReader`.

    Raises:
        DcpRsError: one of :mod:`dcp_rs.errors`, on every rank, when a rank failed with it.
        OSError: on every rank, when one rank failed with it, and only that rank failed.
        CheckpointException: torch's own, when a rank failed with something else, or several failed with errors of the system.
    """
    check_state_dict(state_dict)

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
    return storage_reader.report if isinstance(storage_reader, RsReader) else None


def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **read_options: Unpack[ReaderArguments],
) -> LoadReport:
    """Loads the checkpoint at ``path`` into ``state_dict``: ``dcp.load`` with an :class:`RsReader`.

    Args:
        state_dict: tensors are filled in place, ``Stateful`` objects are loaded, other values are replaced.
        path: a checkpoint: a folder of this package, of Hugging Face, of stock DCP, a ``.safetensors`` file, or a file of ``torch.save``.
        planner: default: :class:`RsLoadPlanner`.
        process_group, no_dist: as in ``dcp.load``.
        read_options: arguments of :class:`RsReader`.

    Returns:
        What the load found and took on this rank. The log ``dcp_rs`` has it as a line.

    Raises:
        As :func:`load_state_dict`.
    """
    check_state_dict(state_dict, path)
    check_options("load", read_options, RsReader)
    stateful = stateful_values(state_dict)
    values = {key: stateful[key].state_dict() if key in stateful else state_dict[key] for key in sorted(state_dict)}
    reader = RsReader(path, **read_options)

    def load() -> None:
        reader.reset()
        _torch.load_state_dict(
            values,
            _deferring(reader),
            process_group=process_group,
            no_dist=no_dist or not dist.is_initialized(),
            planner=RsLoadPlanner() if planner is None else planner,
        )

    _load(load)
    for key, value in unwrap_in(values).items():
        if key in stateful:
            stateful[key].load_state_dict(value)
        else:
            state_dict[key] = value
    return reader.report or LoadReport()


def save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **write_options: Unpack[WriterArguments],
) -> Metadata:
    """Saves ``state_dict`` to the folder ``path``: ``dcp.save`` with an :class:`RsWriter`.

    Args:
        state_dict: as for ``dcp.save``.
        path: the folder.
        planner: default: :class:`RsSavePlanner`.
        process_group, no_dist: as in ``dcp.save``.
        write_options: arguments of :class:`RsWriter`.

    Returns:
        What ``dcp.save`` does. What the save took is in the log ``dcp_rs``; an object of it is :attr:`RsWriter.report`, after ``dcp.save``.

    Raises:
        As :func:`load_state_dict`. Then no rank has left data files behind, and the checkpoint that was there is whole.
    """
    check_state_dict(state_dict, path)
    check_options("save", write_options, RsWriter)
    with _typed_errors():
        return _save(_without_stateful(state_dict), RsWriter(path, **write_options), planner, process_group, no_dist)


def _save(
    state_dict: dict[str, Any],
    writer: RsWriter,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
) -> Metadata:
    no_dist = no_dist or not dist.is_initialized()
    try:
        with plan_cache.saving_in(None if no_dist else process_group or dist.group.WORLD):
            return _torch.save_state_dict(
                state_dict,
                writer,
                process_group=process_group,
                no_dist=no_dist,
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
    no_dist: bool = False,
    executor: Literal["thread", "process"] = "thread",
    stager: HostStager | None = None,
    **write_options: Unpack[WriterArguments],
) -> Future[Metadata]:
    """Saves in the background. Returns once ``state_dict`` has been copied to host memory: training may go on and change it.

    Saves of one process follow each other, in the order of the calls, so that their collectives do not mix. A save to a path that
    another one has not finished with is refused.

    Args:
        state_dict, path, planner, process_group, no_dist, write_options: as for :func:`save`. A process group needs a CPU backend, and is
            best one that nothing else uses meanwhile.
        executor: ``"thread"``, or ``"process"``: another process, which torch starts at the first such save and keeps; it needs an
            initialised process group.
        stager: keep one, made with ``cache=True``, to stage the next save to the same memory. It must not be staged to again before the
            future is done.

    Returns:
        The metadata, once the checkpoint is committed; or what :func:`save` would have raised.

    Raises:
        SaveInProgressError: another save to ``path`` is not over.
    """
    check_state_dict(state_dict, path)
    check_options("async_save", write_options, RsWriter)
    if executor not in ("thread", "process"):
        msg = f"executor={executor!r}: one of 'thread', 'process'"
        raise ValueError(msg)
    is_dist = dist.is_initialized() and not no_dist
    if is_dist:
        _torch.require_cpu_backend(process_group)
    elif executor == "process":
        msg = "executor='process' needs an initialised process group: torch sets up one like it in the other process"
        raise ValueError(msg)
    writer = RsWriter(path, **write_options)
    writer.stage_with(stager or HostStager(shared=executor == "process"))
    planner = RsSavePlanner() if planner is None else planner
    try:
        staged = writer.stage(_without_stateful(state_dict), queued=True)
        save_staged = _save_there if executor == "process" else _save_staged
        info = _torch.process_group_info(process_group) if executor == "process" else None
        return _background().submit(save_staged, staged, writer, planner, process_group, not is_dist, info)
    except BaseException:
        writer.close()
        raise


def _save_staged(
    state_dict: dict[str, Any],
    writer: RsWriter,
    planner: SavePlanner,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    _info: None,
) -> Metadata:
    try:
        return _save(state_dict, writer, planner, process_group, no_dist)
    except CheckpointException as failure:
        _raise_typed(failure)


def _save_there(
    state_dict: dict[str, Any],
    writer: RsWriter,
    planner: SavePlanner,
    process_group: dist.ProcessGroup | None,
    _no_dist: bool,
    info: Any,
) -> Metadata:
    """As ``_save_staged``, in torch's checkpoint process."""
    try:
        return _torch.save_in_process(state_dict, writer, planner, process_group, info)
    except CheckpointException as failure:
        _raise_typed(failure)
    finally:
        writer.close()


_executor: ThreadPoolExecutor | None = None


def _background() -> ThreadPoolExecutor:
    """One thread, so that saves follow each other. What it was given is finished before the interpreter ends."""
    global _executor  # noqa: PLW0603
    if _executor is None:
        _executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dcp_rs.async_save")
        os.register_at_fork(after_in_child=_forget_background)
    return _executor


def _forget_background() -> None:
    global _executor  # noqa: PLW0603
    _executor = None


def _deferring(reader: StorageReader) -> StorageReader:
    """The reader, set to raise what goes wrong in ``read_metadata`` one call later, where torch does not swallow it."""
    if isinstance(reader, RsReader):
        reader.defer_errors = True
    return reader
