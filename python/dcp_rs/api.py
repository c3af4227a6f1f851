"""``load``, ``save`` and their relatives: DCP's protocol with this package's storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Never, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader

from dcp_rs import _torch
from dcp_rs._arguments import check_arguments
from dcp_rs._log import log as _log
from dcp_rs._progress import Progress
from dcp_rs._tracebacks import short_traceback, shorten
from dcp_rs._url import location
from dcp_rs.checkpoint.locate import warn_of_a_foreign_model
from dcp_rs.checkpoint.renaming import Rename
from dcp_rs.dcp import protocol
from dcp_rs.dcp.load_planner import RsLoadPlanner, is_plain
from dcp_rs.dcp.reader import RsReader
from dcp_rs.dcp.save_planner import is_plain as is_plain_save
from dcp_rs.engine import background
from dcp_rs.engine import load as engine
from dcp_rs.engine.arguments import (
    check_planner,
    check_reader,
    check_stager,
    check_state_dict,
)
from dcp_rs.engine.background import SaveFuture
from dcp_rs.engine.local_plan import PlanOptions
from dcp_rs.engine.ranks import Ranks
from dcp_rs.engine.reads import LoadOptions
from dcp_rs.engine.reports import LoadReport, SavedMetadata
from dcp_rs.engine.reuse import Frozen
from dcp_rs.engine.save import SaveOptions, SaveRequest
from dcp_rs.engine.save import save as engine_save
from dcp_rs.tensors.nesting import like
from dcp_rs.tensors.trees import stateful_values
from dcp_rs.transfer.stage import HostStager, Staging

__all__ = ["async_save", "load", "load_state_dict", "save"]


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
        state_dict: its tensors are filled in place, other values are replaced.
        storage_reader: an :class:`RsReader`, or any reader of torch.
        process_group, coordinator_rank, no_dist: as in ``dcp.load``.
        planner: default: :class:`RsLoadPlanner` with an :class:`RsReader`, else torch's.

    Returns:
        What the load found and took on this rank, if the reader is an :class:`RsReader`.

    Raises:
        Exception: on every rank, what a rank raised: one of :mod:`dcp_rs.errors`, an :class:`OSError`, or what a planner or a reader of your own
            did. A note says on which rank.
        RankLostError: a rank is gone.

    Example:
        ```python
        state = {"model": model.state_dict()}
        report = dcp_rs.load_state_dict(state, dcp_rs.RsReader("ckpt"))
        ```
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
        report = engine.load(state_dict, storage_reader._source_of_load(), planner._options(), ranks)
        storage_reader.report = report
        planner._end_load(report, storage_reader.path)
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
    verify: Literal["auto"] | bool = False,
    replicas: Literal["each", "node", "all"] = "each",
    io: Literal["auto", "mmap", "direct", "buffered"] = "auto",
    threads: int | None = None,
    shared: bool | None = None,
    max_inflight_bytes: int | None = None,
    allow_external: bool = False,
    storage_options: Mapping[str, Any] | Any | None = None,
    progress: Progress = None,
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
        TypeError: an unknown option, even on one rank only; the message names the one that is meant.

    Example:
        ```python
        state = {"model": model, "step": 0}
        report = dcp_rs.load(state, "ckpt")
        weights = {"weight": torch.zeros(3, 2)}
        dcp_rs.load(weights, "ckpt", rename={"model": ""}, verify=True)
        ```
    """
    ranks = Ranks(process_group, no_dist=no_dist)
    with _failing_on_all(ranks):
        check_state_dict(state_dict, path)
        check_arguments(load, unknown)
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
        return engine.load(state_dict, reader._source_of_load(), given, ranks, stateful=True)
    if is_plain(planner):
        options = planner._options()
        report = engine.load(state_dict, reader._source_of_load(), options, ranks, stateful=True)
        planner._end_load(report, reader.path)
        return report
    protocol.load(ranks, state_dict, reader, planner, stateful=True)
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
    overwrite: bool = True,
    strict_values: bool = False,
    parent: str | os.PathLike[str] | None = None,
    reuse: str | Iterable[str] | torch.nn.Module | Frozen | None = None,
    verify_reuse: bool = False,
    storage_options: Mapping[str, Any] | Any | None = None,
    progress: Progress = None,
    io: Literal["auto", "direct", "buffered"] = "auto",
    threads: int | None = None,
    fsync: bool = True,
    max_inflight_bytes: int | None = None,
    save_id: str | None = None,
    guard: Callable[[], AbstractContextManager[object]] | None = None,
    **unknown: Never,
) -> SavedMetadata:
    """Save ``state_dict`` to the folder ``path``, from all ranks.

    The old checkpoint at ``path``, if there is one, stays whole until the new one is complete; then one rename replaces it. No file that
    dcp-rs did not write is touched. On a store, of two saves at a time one wins, and the other raises.

    Args:
        state_dict: as for ``dcp.save``.
        path: the folder; it is created where it does not exist. Or the URL of one on a store: ``s3://``, ``gs://``, ``az://``.
        planner: options of an :class:`RsSavePlanner`; or a planner of your own, which is called as ``dcp.save`` calls it.
        process_group, no_dist: as in ``dcp.save``.
        overwrite: ``False`` refuses to replace a checkpoint.
        strict_values: refuse values that would not load back under ``weights_only=True``, and keys that come back as text. Without it they
            are saved, with a warning.
        parent, reuse, verify_reuse: what is taken over from another checkpoint; see :class:`RsWriter`.
        storage_options: for a URL, as for :class:`RsReader`.
        progress: ``True`` draws a bar on the first rank; a callable hears, on its rank, of the bytes that it has written and of all that it is to write.
        io, threads, fsync, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.
        save_id: what is to identify the save, as a UUID; the coordinator's counts. Default: a random one.
        guard: called once on the coordinator. The commit happens within what it returns, and what that raises when it is entered stops the commit.

    Returns:
        What ``dcp.save`` does, with a ``report`` of what the save took on this rank (:class:`SaveReport`). The log ``dcp_rs`` has it as a line.

    Raises:
        Exception: as :func:`load_state_dict`. Then no rank has left data files behind, and the checkpoint that was there is whole. Only after a
            ``RankLostError``, or a ``StorageUnclearError``, files may be left, for :func:`dcp_rs.clean`, and the new checkpoint may be there.

    Example:
        ```python
        metadata = dcp_rs.save({"model": model, "step": 7}, "ckpt")
        print(metadata.report)
        ```
    """
    ranks = Ranks(process_group, no_dist=no_dist)

    def ask() -> SaveRequest:
        check_state_dict(state_dict, path)
        background.check_free(path)
        check_arguments(save, unknown)
        check_planner("save", planner)
        options = SaveOptions(
            overwrite=overwrite,
            strict_values=strict_values,
            parent=parent,
            reuse=reuse,
            verify_reuse=verify_reuse,
            storage_options=storage_options,
            progress=progress,
            io=io,
            threads=threads,
            fsync=fsync,
            max_inflight_bytes=max_inflight_bytes,
            save_id=save_id,
            guard=guard,
        )
        where = location(path)
        if ranks.is_coordinator:
            warn_of_a_foreign_model(where)
        return SaveRequest(state_dict=_without_stateful(state_dict), path=where, options=options)

    return _save(ranks, planner, ask)


def _save(ranks: Ranks, planner: SavePlanner | None, ask: Callable[[], SaveRequest]) -> SavedMetadata:
    """Save as the options of the planner say; or by torch's protocol, where the planner is the caller's own and has to be called."""
    if planner is None:
        return engine_save(ranks, PlanOptions(), ask)
    if is_plain_save(planner):
        return engine_save(ranks, planner._options(), ask)
    return protocol.save(ranks, planner, ask)


def _without_stateful(state_dict: dict[str, Any], *, copy_buffers: bool = False) -> dict[str, Any]:
    """Return the state dict with their states in place of ``Stateful`` objects."""
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
    overwrite: bool = True,
    strict_values: bool = False,
    parent: str | os.PathLike[str] | None = None,
    reuse: str | Iterable[str] | torch.nn.Module | Frozen | None = None,
    verify_reuse: bool = False,
    storage_options: Mapping[str, Any] | Any | None = None,
    progress: Progress = None,
    io: Literal["auto", "direct", "buffered"] = "auto",
    threads: int | None = None,
    fsync: bool = True,
    max_inflight_bytes: int | None = None,
    save_id: str | None = None,
    guard: Callable[[], AbstractContextManager[object]] | None = None,
    **unknown: Never,
) -> SaveFuture:
    """Save in the background. Return once ``state_dict`` has been copied to host memory: training may go on and change it.

    With ``async_staging=True`` it returns when the copy has begun, and the copy goes on beside the next forward and backward pass. Then nothing may
    change the tensors before ``future.staged`` is done:

    ```python
    future = dcp_rs.async_save(state, path, async_staging=True)
    loss = model(batch).sum()
    loss.backward()
    future.staged.result()
    optimizer.step()
    ```

    Saves of one process follow each other, in the order of the calls, so that their collectives do not mix. At most two copies are there at a time, one that is being written
    and one more: a third call waits until the first save is over. The memory of copies is kept for the next (:func:`dcp_rs.release_pinned_memory` lets go of it).
    A save to a path that another one has not finished with is refused. What fails on one rank before this returns
    is raised there, as soon as the others know; on those the future raises it.

    Args:
        state_dict, path, planner, process_group, no_dist: as for :func:`save`. A process group needs a CPU backend, and
            nothing else may use it meanwhile. Default: a gloo group of all ranks, made at the first such call and kept for the next.
        stager: one made with ``cache=True`` keeps memory of its own. The next call with it waits until the save of this one is over.
        async_staging: do not wait for the copy. Of accelerators it is made on streams of its own, of host memory by a thread. What is no tensor, and what raw bytes cannot
            hold (sparse or quantized tensors), is copied before this returns in any case. Where torch counts changes of a tensor, one that came too early is a
            ``StateChangedError`` in place of a checkpoint; it does not count those of its fused and ``foreach`` optimizers.
        overwrite, strict_values, parent, reuse, verify_reuse, storage_options, progress, io, threads, fsync, max_inflight_bytes, save_id, guard: as for :func:`save`.

    Returns:
        A future: of the metadata, once the checkpoint is committed, or what :func:`save` would have raised. Its ``report`` says what the save took, its
        ``staged`` when the copy is made.

    Raises:
        SaveInProgressError: another save to ``path`` is not over.
        StateChangedError: from the future, on every rank: a tensor was changed before it was copied.
        Exception: whatever else prevents the copy. What fails before this returns is raised here, and by
            the futures of the other ranks.

    Example:
        ```python
        future = dcp_rs.async_save({"model": model, "step": 7}, "ckpt")
        model(torch.ones(2)).sum().backward()  # training goes on
        future.result()
        ```
    """
    is_dist = dist.is_initialized() and not no_dist
    if is_dist:
        if process_group is None and dist.get_world_size() > 1:
            # Training goes on in the default group meanwhile, and collectives of two threads in one group do not match.
            process_group = _torch.background_group()
        _torch.require_cpu_backend(process_group)
    ranks = Ranks(process_group, no_dist=no_dist)
    future = SaveFuture()
    give_room = background.no_room
    staging: Staging | None = None
    copied: Future[None]
    try:
        check_state_dict(state_dict, path)
        background.enter(path, future)
        give_room = background.take_room()
        check_arguments(async_save, unknown)
        check_planner("save", planner)
        check_stager(stager)
        options = SaveOptions(
            overwrite=overwrite,
            strict_values=strict_values,
            parent=parent,
            reuse=reuse,
            verify_reuse=verify_reuse,
            storage_options=storage_options,
            progress=progress,
            io=io,
            threads=threads,
            fsync=fsync,
            max_inflight_bytes=max_inflight_bytes,
            save_id=save_id,
            guard=guard,
        )
        where = location(path)
        if ranks.is_coordinator:
            warn_of_a_foreign_model(where)
        state = _without_stateful(state_dict, copy_buffers=async_staging)
        options.parent = options.parent.looked_up(state)
        # In a callback of a save, what it would wait for may come after it.
        may_wait = not background.saving.is_current
        staging = (stager or HostStager())._begin(state, watched=async_staging, wait=may_wait)
        if async_staging:
            copied = background.copying.submit(staging.finish)
            copied.add_done_callback(lambda _: future.staged.set_result(None))
        else:
            staging.finish()
            copied = Future()
            copied.set_result(None)
            future.staged.set_result(None)
        background.saving.submit(_save_copy, future, ranks, planner, staging, copied, where, options)
    except BaseException as error:
        give_room()
        background.leave(future)
        if staging is not None:
            staging.release()
        if not ranks.is_alone:
            # The others save: there they are told. Meanwhile nothing else of this rank may use the group.
            told = background.saving.submit(_save, ranks, planner, _raising(error))
            if not background.saving.is_current:  # in a callback of a save: what it would wait for comes after it
                told.exception()
        raise
    else:
        future.add_done_callback(lambda _: give_room())
        future.add_done_callback(lambda _: background.leave(future))
        return future


def _save_copy(
    future: SaveFuture,
    ranks: Ranks,
    planner: SavePlanner | None,
    staging: Staging,
    copied: Future[None],
    where: Path,
    options: SaveOptions,
) -> None:
    """Save a copy once it is made, in the thread that saves. Give its memory back, and the future what comes of it."""

    def ask() -> SaveRequest:
        copied.result()
        return SaveRequest(state_dict=staging.state_dict, path=where, options=options)

    try:
        try:
            saved = _save(ranks, planner, ask)
        finally:
            copied.exception()  # nothing writes to the memory any more
            staging.release()
    except BaseException as error:  # noqa: BLE001  # it is the future's
        shorten(error)
        future.set_exception(error)
        # Its words alone: who keeps records of the log would keep what was staged, by the frames of the error.
        _log.error("the save in the background to %s failed: %s", os.fspath(where), str(error))
    else:
        future.report = saved.report
        future.set_result(saved)


def _raising(error: BaseException) -> Callable[[], SaveRequest]:
    def ask() -> SaveRequest:
        raise error

    return ask
