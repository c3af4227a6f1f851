"""``load``, ``save`` and their relatives: DCP's protocol with this package's storage."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Never, NoReturn, Unpack

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader

from dcp_rs import _torch
from dcp_rs._progress import Progress
from dcp_rs._tracebacks import short_traceback, shorten
from dcp_rs.checkpoint.renaming import Rename
from dcp_rs.dcp import plan_cache, protocol
from dcp_rs.dcp.load_planner import RsLoadPlanner, is_plain
from dcp_rs.dcp.reader import RsReader
from dcp_rs.dcp.save_planner import RsSavePlanner
from dcp_rs.dcp.stock_arguments import say_ignored
from dcp_rs.dcp.writer import RsWriter
from dcp_rs.engine import background
from dcp_rs.engine import load as engine
from dcp_rs.engine.arguments import (
    check_options,
    check_planner,
    check_reader,
    check_stager,
    check_state_dict,
    check_unknown,
)
from dcp_rs.engine.attempts import Attempts
from dcp_rs.engine.background import SaveFuture
from dcp_rs.engine.ranks import Ranks
from dcp_rs.engine.reads import LoadOptions
from dcp_rs.engine.reports import LoadReport, SavedMetadata
from dcp_rs.engine.unclear import apart, unclear
from dcp_rs.options import WriterArguments
from dcp_rs.tensors.nesting import like
from dcp_rs.tensors.trees import stateful_values
from dcp_rs.transfer.stage import HostStager

__all__ = ["async_save", "load", "load_state_dict", "save"]

_log = logging.getLogger("dcp_rs")

#: What a save needs: made in a step, so that what fails there fails on all ranks.
BeginSave = Callable[[], tuple[dict[str, Any], RsWriter, SavePlanner]]


@short_traceback
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> LoadReport | None:
    """Load into ``state_dict`` in place: ``torch.distributed.checkpoint.load_state_dict``, without its deprecation warning.

    Every rank of ``process_group`` calls it, with the same keys. As there, ``Stateful`` values are not called: see :func:`load`.

    Args:
        state_dict: what to fill.
        storage_reader: an :class:`RsReader`, or any other reader.
        process_group: of the ranks that load; default: all.
        coordinator_rank: the rank that compares the plans of all.
        no_dist: this process loads alone.
        planner: default: :class:`RsLoadPlanner` with an :class:`RsReader`, else torch's. A reader or planner of a class of your own is
            called as torch calls it.

    Returns:
        What the load found and took on this rank, if the reader is an :class:`RsReader`.

    Raises:
        Exception: on every rank, what a rank raised: one of :mod:`dcp_rs.errors`, an :class:`OSError`, or what a planner or a reader of your own
            did. A note says on which rank.
        RankLostError: a rank is gone.
    """
    ranks = Ranks(process_group, no_dist=no_dist, coordinator=coordinator_rank)
    with _failing_on_all(ranks):
        check_state_dict(state_dict)
        check_reader(storage_reader)
        check_planner("load", planner)
        storage_reader.reset()
        if planner is None:
            planner = RsLoadPlanner() if isinstance(storage_reader, RsReader) else DefaultLoadPlanner()
    if type(storage_reader) is RsReader and is_plain(planner):
        report = engine.load(state_dict, storage_reader.source_of_load(), planner.options(), ranks)
        storage_reader.report = report
        planner.end_load(report, storage_reader.path)
    else:
        protocol.load(ranks, state_dict, storage_reader, planner)
    return storage_reader.report if isinstance(storage_reader, RsReader) else None


@short_traceback
def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    rename: Rename = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    allow_partial_load: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    dtype_policy: Literal["warn", "error", "cast"] = "warn",
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    weights_only: bool | None = True,
    verify: bool = False,
    replicas: Literal["each", "node", "all"] = "each",
    io: Literal["auto", "mmap", "direct", "buffered"] = "auto",
    threads: int | None = None,
    shared: bool | None = None,
    max_inflight_bytes: int | None = None,
    allow_external: bool = False,
    storage_options: Mapping[str, Any] | Any | None = None,
    progress: Progress = None,
    _attempts: Attempts | None = None,
    **unknown: Never,
) -> LoadReport:
    """Load the checkpoint at ``path`` into ``state_dict``. Every rank of ``process_group`` calls it.

    A load that another save overtakes begins again with the new checkpoint, unless it is partial.

    Args:
        state_dict: its tensors are filled in place, ``Stateful`` objects are loaded, other values are replaced.
        path: a checkpoint: a folder of this package, of Hugging Face, of stock DCP, a ``.safetensors`` file, a file of ``torch.save``, or
            the URL of one on a store.
        rename: from stored names to those of the state dict: a mapping of names, or of what names begin with up to a dot, or a callable.
            With ``{"model": ""}`` what is stored as ``model.x`` goes to ``x``; what a mapping lacks keeps its name.
        include, exclude: globs over names of the state dict. What is not included, or excluded, is left alone.
        allow_partial_load: leave alone what the checkpoint lacks or has in another shape, and fill what it holds of the rest.
        dtype: what floating-point tensors become. Those of another dtype are replaced in the state dict, once every rank has read.
        device: where tensors go. Those elsewhere are replaced in the same way. Tensors on ``meta`` always are.
        dtype_policy: what to do where state dict and checkpoint differ in dtype and ``dtype`` is not given: ``"warn"`` casts and says so,
            ``"error"`` refuses, ``"cast"`` casts.
        planner: an :class:`RsLoadPlanner` in place of these options, or a planner of your own, which is called as torch calls it.
        process_group, no_dist: as in ``dcp.load``.
        weights_only: unpickle values as ``torch.load(weights_only=True)`` does. ``False`` is for checkpoints that you wrote yourself.
        verify, io, threads, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.
        replicas, allow_external, storage_options, progress: see :class:`RsReader`.

    Returns:
        What the load found and took on this rank. The log ``dcp_rs`` has it as a line.

    Raises:
        Exception: as :func:`load_state_dict`.
        CheckpointReplacedError: another save replaced the checkpoint while a partial load was reading it.
        TypeError: an unknown option; the message names the one that is meant.

    Example::

        model = {"model.weight": torch.zeros(3, 2)}
        report = dcp_rs.load(model, "ckpt/", rename={"": "model"}, verify=True)
    """
    ranks = Ranks(process_group, no_dist=no_dist)
    with _failing_on_all(ranks):
        check_state_dict(state_dict, path)
        check_unknown("load", unknown, load)
        check_planner("load", planner)
        given = LoadOptions(
            rename=rename,
            include=include,
            exclude=exclude,
            allow_partial_load=allow_partial_load,
            dtype=dtype,
            device=device,
            dtype_policy=dtype_policy,
        )
        if planner is not None and given != LoadOptions():
            msg = "give the planner the options of the load, or no planner: RsLoadPlanner takes the same ones"
            raise TypeError(msg)
        reader = RsReader(
            path,
            io=io,
            threads=threads,
            verify=verify,
            shared=shared,
            max_inflight_bytes=max_inflight_bytes,
            weights_only=weights_only,
            allow_external=allow_external,
            replicas=replicas,
            storage_options=storage_options,
            progress=progress,
        )
    if planner is None:
        return engine.load(state_dict, reader.source_of_load(), given, ranks, stateful=True, attempts=_attempts)
    if is_plain(planner):
        options = planner.options()
        report = engine.load(state_dict, reader.source_of_load(), options, ranks, stateful=True, attempts=_attempts)
        planner.end_load(report, reader.path)
        return report
    protocol.load(ranks, state_dict, reader, planner, stateful=True, attempts=_attempts)
    return reader.report or LoadReport()


@contextmanager
def _failing_on_all(ranks: Ranks) -> Iterator[None]:
    """Around what comes before the first step of a load: what fails here fails on all ranks, in that step."""
    try:
        yield
    except BaseException as error:
        ranks.divided(partial(_raise, error), list)
        raise


def _raise(error: BaseException) -> NoReturn:
    raise error


@short_traceback
def save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **write_options: Unpack[WriterArguments],
) -> SavedMetadata:
    """Saves ``state_dict`` to the folder ``path``: ``dcp.save`` with an :class:`RsWriter`.

    Args:
        state_dict: as for ``dcp.save``.
        path: the folder, or its URL on a store.
        planner: default: :class:`RsSavePlanner`.
        process_group, no_dist: as in ``dcp.save``.
        write_options: arguments of :class:`RsWriter`.

    Returns:
        What ``dcp.save`` does, with a ``report`` of what the save took on this rank (:class:`SaveReport`). The log ``dcp_rs`` has it as a line; after ``dcp.save`` it
        is :attr:`RsWriter.report`.

    Raises:
        Exception: as :func:`load_state_dict`. Then no rank has left data files behind, and the checkpoint that was there is whole. Only after a
            ``RankLostError``, or a ``StorageUnclearError``, files may be left, for :func:`dcp_rs.clean`, and the new checkpoint may be there.
    """
    writer: RsWriter | None = None

    def begin() -> tuple[dict[str, Any], RsWriter, SavePlanner]:
        nonlocal writer
        check_state_dict(state_dict, path)
        background.check_free(path)
        check_options("save", write_options, RsWriter)
        check_planner("save", planner)
        _say_what_is_ignored("save", write_options)
        writer = RsWriter(path, **write_options)
        return _without_stateful(state_dict), writer, RsSavePlanner() if planner is None else planner

    metadata = _save(Ranks(process_group, no_dist=no_dist), begin)
    return SavedMetadata.of(metadata, None if writer is None else writer.report)


def _say_what_is_ignored(called: str, options: WriterArguments) -> None:
    """Warns, once, of what is for a writer that is used again: here each save has one of its own."""
    if options.get("cache_staged_state_dict"):
        why = "each save has a writer of its own, which is where that memory would stay; async_save(stager=HostStager(cache=True)) keeps it"
        say_ignored(f"dcp_rs.{called}", "cache_staged_state_dict=True", why)


@apart()
def _save(ranks: Ranks, begin: BeginSave) -> Metadata:
    writer: RsWriter | None = None

    def begin_here() -> tuple[dict[str, Any], RsWriter, SavePlanner]:
        nonlocal writer
        state_dict, writer, planner = begin()
        return state_dict, writer, planner

    try:
        with plan_cache.saving_in(ranks.group):
            return protocol.save(ranks, begin_here)
    except BaseException:
        if writer is not None and ranks.failures and not any(map(unclear, ranks.failures.values())):
            writer.discard()  # all ranks know that it failed, so nobody commits
        raise
    finally:
        if writer is not None:
            writer.close()


def _without_stateful(state_dict: dict[str, Any], *, copy_buffers: bool = False) -> dict[str, Any]:
    stateful = stateful_values(state_dict)
    if not stateful:
        return like(state_dict, state_dict.items())

    def state_of(holder: Any) -> Any:
        state = holder.state_dict()
        if copy_buffers and isinstance(holder, torch.nn.Module):
            # The next forward pass may write to them while the rest is still being copied.
            buffers = {name for name, _ in holder.named_buffers(remove_duplicate=False)}
            state = like(state, ((key, value.clone() if key in buffers else value) for key, value in state.items()))
        return state

    return like(
        state_dict,
        ((key, state_of(stateful[key]) if key in stateful else value) for key, value in state_dict.items()),
    )


@short_traceback
def async_save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    stager: HostStager | None = None,
    async_staging: bool = False,
    **write_options: Unpack[WriterArguments],
) -> SaveFuture:
    """Saves in the background. Returns once ``state_dict`` has been copied to host memory: training may go on and change it.

    With ``async_staging=True`` it returns when the copy has begun, and the copy goes on beside the next forward and backward pass. Then nothing may
    change the tensors before ``future.staged`` is done::

        future = dcp_rs.async_save(state, path, async_staging=True)
        loss = model(batch).sum()
        loss.backward()
        future.staged.result()
        optimizer.step()

    Saves of one process follow each other, in the order of the calls, so that their collectives do not mix. At most two copies are there at a time, one that is being written
    and one more: a third call waits until the first save is over. A save to a path that
    another one has not finished with is refused. What fails on one rank before this returns
    is raised there, as soon as the others know; on those the future raises it.

    Args:
        state_dict, path, planner, process_group, no_dist, write_options: as for :func:`save`. A process group needs a CPU backend, and
            nothing else may use it meanwhile. Default: a gloo group of all ranks, made at the first such call and kept for the next.
        stager: keep one, made with ``cache=True``, to stage the next save to the same memory. The next call with it waits until the save of this one is over.
        async_staging: do not wait for the copy. Of accelerators it is made on streams of its own, of host memory by a thread. What is no tensor, and what raw bytes cannot
            hold (sparse or quantized tensors), is copied before this returns in any case. Where torch counts changes of a tensor, one that came too early is a
            ``StateChangedError`` in place of a checkpoint; it does not count those of its fused and ``foreach`` optimizers.

    Returns:
        A future: of the metadata, once the checkpoint is committed, or what :func:`save` would have raised. Its ``report`` says what the save took, its
        ``staged`` when the copy is made.

    Raises:
        SaveInProgressError: another save to ``path`` is not over.
        Exception: whatever else prevents the copy, as far as it is made here.

    Raises (from the future, on every rank):
        StateChangedError: a tensor was changed before it was copied.
        Exception: whatever else prevents the copy.
    """
    is_dist = dist.is_initialized() and not no_dist
    if is_dist:
        if process_group is None and dist.get_world_size() > 1:
            # Training goes on in the default group meanwhile, and collectives of two threads in one group do not match.
            process_group = _torch.background_group()
        _torch.require_cpu_backend(process_group)
    ranks = Ranks(process_group, no_dist=no_dist)
    writer: RsWriter | None = None
    future = SaveFuture()
    give_room = background.no_room
    try:
        check_state_dict(state_dict, path)
        background.enter(path, future)
        give_room = background.take_room()
        check_options("async_save", write_options, RsWriter)
        check_planner("save", planner)
        check_stager(stager)
        _say_what_is_ignored("async_save", write_options)
        writer = RsWriter(path, **write_options)
        writer.stage_with(stager or HostStager())
        planner = RsSavePlanner() if planner is None else planner
        staging = writer.begin_staging(
            _without_stateful(state_dict, copy_buffers=async_staging),
            under_way=background.may_wait(lambda: not future.done()),
            watched=async_staging,
        )
        copied: Future[None] | None = None
        if async_staging:
            copied = background.copying.submit(staging.finish)
            copied.add_done_callback(lambda _: future.staged.set_result(None))
        else:
            staging.finish()
            future.staged.set_result(None)
        begin = _giving((staging.state_dict, writer, planner), copied)
        background.saving.submit(_fulfil, future, ranks, begin, writer)
    except BaseException as error:
        give_room()
        background.leave(future)
        if writer is not None:
            writer.close()
        if not ranks.is_alone:
            # The others save: there they are told. Meanwhile nothing else of this rank may use the group.
            told = background.saving.submit(_save, ranks, _raising(error))
            if not background.saving.is_current:  # in a callback of a save: what it would wait for comes after it
                told.exception()
        raise
    else:
        future.add_done_callback(lambda _: give_room())
        future.add_done_callback(lambda _: background.leave(future))
        return future


def _fulfil(
    future: SaveFuture,
    ranks: Ranks,
    begin: BeginSave,
    writer: RsWriter,
) -> None:
    """Saves, and gives the future what comes of it."""
    try:
        metadata = _save(ranks, begin)
    except BaseException as error:  # noqa: BLE001  # it is the future's
        try:
            writer.close()  # where the copy failed, nobody did
        finally:
            shorten(error)
            future.set_exception(error)
            # Its words alone: who keeps records of the log would keep what was staged, by the frames of the error.
            _log.error("the save in the background to %s failed: %s", os.fspath(writer.path), str(error))
    else:
        future.report = writer.report
        future.set_result(metadata)


def _giving(values: tuple[dict[str, Any], RsWriter, SavePlanner], copied: Future[None] | None) -> BeginSave:
    """Gives them once they are copied, and once: what was staged is not kept any longer than the save takes."""
    held = [values]

    def begin() -> tuple[dict[str, Any], RsWriter, SavePlanner]:
        try:
            if copied is not None:
                copied.result()
            return held.pop()
        finally:
            held.clear()

    return begin


def _raising(error: BaseException) -> BeginSave:
    def begin() -> tuple[dict[str, Any], RsWriter, SavePlanner]:
        raise error

    return begin
