"""Public functions that load and save."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import ismethod
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs._arguments import suggest_option, type_of
from dcp_rs._url import StrPath, absolute, location
from dcp_rs.checkpoint.folders import warn_of_foreign_model
from dcp_rs.checkpoint.locate import LoadSource
from dcp_rs.checkpoint.open import Checkpoint
from dcp_rs.dcp.load_planner import RsLoadPlanner
from dcp_rs.dcp.load_planner import is_plain as is_plain_load_planner
from dcp_rs.dcp.reader import RsReader
from dcp_rs.engine import load as engine
from dcp_rs.engine.background import MAX_COPIES, SaveFuture, saves
from dcp_rs.engine.load import LoadRequest
from dcp_rs.engine.matching import LoadOptions
from dcp_rs.engine.ranks import RankGroup, has_group
from dcp_rs.engine.reports import LoadReport, SavedMetadata
from dcp_rs.engine.save import SaveOptions, SaveRequest
from dcp_rs.engine.save import save as engine_save
from dcp_rs.engine.writes import Selected, select
from dcp_rs.options import LoadArguments, SaveArguments, split_options, take_options
from dcp_rs.tensors.flatten import is_stateful
from dcp_rs.tensors.memory import clone
from dcp_rs.tensors.nesting import like
from dcp_rs.transfer.buffers import shared_blocks
from dcp_rs.transfer.stage import Staging


@suggest_option
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> LoadReport | None:
    """Load into ``state_dict`` in place, as ``torch.distributed.checkpoint.load_state_dict`` does.

    It gives no deprecation warning. Every rank of ``process_group`` calls it with the same keys.
    ``Stateful`` values are not called: :func:`load` calls them.

    Args:
        state_dict: its tensors are filled in place; other values are replaced.
        storage_reader: an :class:`RsReader`, or any reader of torch.
        process_group, coordinator_rank, no_dist: as in ``dcp.load``.
        planner: default: :class:`RsLoadPlanner` with an :class:`RsReader`, else torch's planner. A
            subclass of either, or another planner or reader, is run by torch's own driver. Give
            all ranks the same kind.

    Returns:
        A report of the load on this rank; None if the reader is not an :class:`RsReader`.

    Raises:
        Exception: on every rank, what any rank raised: one of :mod:`dcp_rs.errors`, or an
            :class:`OSError`. A note names the rank. Torch's driver raises its
            ``CheckpointException``, which holds the errors by rank.
        RankLostError: a rank is gone.

    Example:
        ```python
        state = {"model": model.state_dict()}
        report = dcp_rs.load_state_dict(state, dcp_rs.RsReader("ckpt"))
        ```
    """
    if type(storage_reader) is RsReader and (planner is None or is_plain_load_planner(planner)):
        own = RsLoadPlanner() if planner is None else planner

        def make_request() -> LoadRequest:
            _check_state_dict(state_dict)
            storage_reader.reset()
            return LoadRequest(state_dict, storage_reader._source, own._options())

        ranks = RankGroup(process_group, no_dist=no_dist, coordinator=coordinator_rank)
        load_once = partial(engine.load, ranks, make_request)
        report = engine.retry(ranks, load_once, lambda: not own.allow_partial_load)
        storage_reader.report = report
        own._end_load(report, storage_reader._source)
        return report

    _check_state_dict(state_dict)
    _check_reader(storage_reader)
    storage_reader.reset()
    if planner is None and isinstance(storage_reader, RsReader):
        planner = RsLoadPlanner()
    no_dist = no_dist or not has_group()
    _torch.load_state_dict(
        state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner
    )
    return storage_reader.report if isinstance(storage_reader, RsReader) else None


@suggest_option
def load(
    state_dict: dict[str, Any],
    path: StrPath,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **options: Unpack[LoadArguments],
) -> LoadReport:
    """Load the checkpoint at ``path`` into ``state_dict``.

    Every rank of ``process_group`` calls it. If another save replaces the checkpoint meanwhile,
    the load starts again with the new one. A partial load (``allow_partial_load``) raises instead.

    Args:
        state_dict: its tensors are filled in place, ``Stateful`` objects are loaded, and other
            values are replaced.
        path: a folder of dcp-rs, Hugging Face or stock DCP, a ``.safetensors`` file, a file of
            ``torch.save``, or the URL of one on a store.
        rename: maps stored names to names of the state dict. Either a callable, or a mapping of
            names or of prefixes that end before a dot. ``{"model": ""}`` loads the stored
            ``model.x`` into ``x``. Names that the mapping lacks stay as they are.
        include, exclude: globs over names of the state dict. Entries that are not included, or are
            excluded, stay as they are.
        allow_partial_load: leave entries alone that the checkpoint lacks, has in another shape, or
            has only a part of.
        dtype: the dtype of new floating-point tensors, or its name (``"bf16"``). Tensors on
            ``meta`` are replaced by new ones in the state dict, once every rank has read.
        device: the device of new tensors. Default: that of the process group, or the CPU.
        assign: replace every tensor of another ``dtype`` or ``device``, and give the new tensors
            to modules, as ``Module.load_state_dict(assign=True)`` does. By default tensors that
            have memory are filled, and cast to their own dtype.
        dtype_policy: what to do if a tensor's dtype differs from the stored one and ``dtype`` is
            not given: ``"warn"`` (the default) casts and warns, ``"error"`` raises, ``"cast"``
            casts.
        process_group, no_dist: as in ``dcp.load``.
        weights_only: unpickle values as ``torch.load(weights_only=True)`` does. That is the
            default. Pass ``False`` only for checkpoints that you wrote yourself.
        verify, io, threads, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.
        replicas, allow_external, storage_options, tiers, dequantize, views, progress: see
            :class:`RsReader`. ``rename`` comes after them.

    Returns:
        A report of the load on this rank. The log ``dcp_rs`` has it as one line.

    Raises:
        Exception: as :func:`load_state_dict`.
        CheckpointReplacedError: another save replaced the checkpoint during a partial load.
        TypeError: an unknown option, even on one rank only. The message names the one that is
            meant.

    Example:
        ```python
        state = {"model": model, "step": 0}
        report = dcp_rs.load(state, "ckpt")
        weights = {"weight": torch.zeros(3, 2)}
        dcp_rs.load(weights, "ckpt", rename={"model": ""}, verify=True)
        ```
    """
    ranks = RankGroup(process_group, no_dist=no_dist)

    def make_request() -> LoadRequest:
        _check_state_dict(state_dict)
        of_load, of_reader = split_options(take_options(load, options), LoadOptions)
        source, chosen = LoadSource.of(path, of_reader), LoadOptions.of(of_load)
        return LoadRequest(state_dict, source, chosen, stateful=True)

    load_once = partial(engine.load, ranks, make_request)
    return engine.retry(ranks, load_once, lambda: not options.get("allow_partial_load"))


@suggest_option
def save(
    state_dict: dict[str, Any],
    path: StrPath,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **options: Unpack[SaveArguments],
) -> SavedMetadata:
    """Save ``state_dict`` to the folder ``path``. Every rank of ``process_group`` calls it.

    A checkpoint that is at ``path`` already stays whole until the new one is complete. Then one
    rename replaces it. Files that dcp-rs did not write stay. If two jobs save to one URL at the
    same time, one wins and the other raises.

    Args:
        state_dict: as for ``dcp.save``.
        path: the folder, which is created if needed; or its URL: ``s3://``, ``gs://``, ``az://``.
        include, exclude: globs over names. Entries that are not included, or are excluded, are not
            saved.
        dtype: store floating-point tensors of 16 bits and more in this dtype. They are cast while
            they are written, in bounded memory. Tensors of 8 bits and fewer keep their dtype, as
            their scales are elsewhere. So does the ``step`` of an optimizer's state.
        process_group, no_dist: as in ``dcp.save``.
        overwrite: ``False`` raises if there is a checkpoint already. ``True`` (the default) warns
            if this process has neither opened nor saved it.
        strict_values: raise for values that do not load under ``weights_only=True``, and for keys
            that would come back as text. By default they are saved with a warning.
        parent, reuse, verify_reuse: take unchanged tensors from another checkpoint; see
            :class:`RsWriter`.
        storage_options: for a URL, see :class:`RsReader`.
        progress: ``True`` draws a bar on the first rank. A callable is called on its rank with the
            bytes written so far and the bytes to write.
        io, threads, fsync, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.
        save_id: a UUID for the save; the coordinator's counts. Default: a random one.
        guard: called once on the coordinator. It returns a context manager, in which the commit
            runs. If entering that raises, nothing is committed.
        publish: called on the coordinator with the bytes of the index, in place of the commit. The
            caller stores them beside the data files, which may be in a folder of each rank.

    Returns:
        The metadata, as ``dcp.save`` returns it. Its ``report`` is this rank's
        :class:`SaveReport`, which the log ``dcp_rs`` has as one line.

    Raises:
        Exception: as :func:`load_state_dict`. The old checkpoint is whole then, and no rank left
            data files. After a ``RankLostError`` or a ``StorageUnclearError`` there may be files
            for :func:`dcp_rs.clean`, and the new checkpoint may be there.
        TypeError: an unknown option, even on one rank only. The message names the one that is
            meant.

    Example:
        ```python
        metadata = dcp_rs.save({"model": model, "step": 7}, "ckpt")
        print(metadata.report)
        ```
    """
    ranks = RankGroup(process_group, no_dist=no_dist)

    def make_request() -> SaveRequest:
        _check_state_dict(state_dict)
        where = location(path)
        saves.check_path(where)
        checked = SaveOptions.of(take_options(save, options))
        if ranks.is_coordinator:
            warn_of_foreign_model(where)
        entries = select(
            state_dict,
            checked.include,
            checked.exclude,
            strict=checked.strict_values,
            state_of=_state_of,
        )
        return SaveRequest(entries=entries, path=where, options=checked)

    return engine_save(ranks, make_request)


def _state_of(holder: Any) -> Any:
    return holder.state_dict()


def _state_of_copied_buffers(holder: Any) -> Any:
    """Return the state of an object. Copy buffers, which the next forward pass may write to."""
    state = holder.state_dict()
    if not isinstance(holder, torch.nn.Module):
        return state
    buffers = {name for name, _ in holder.named_buffers(remove_duplicate=False)}
    copied = ((key, clone(value) if key in buffers else value) for key, value in state.items())
    return like(state, copied)


@suggest_option
def async_save(
    state_dict: dict[str, Any],
    path: StrPath,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    async_staging: bool = False,
    max_copies: int = MAX_COPIES,
    **options: Unpack[SaveArguments],
) -> SaveFuture:
    """Save in the background. Training may change ``state_dict`` once this returns.

    By default it returns when the state is copied to host memory. With ``async_staging=True`` it
    returns when the copy has begun, which goes on beside the next forward and backward pass. Do
    not change the tensors then before ``future.staged`` is done:

    ```python
    future = dcp_rs.async_save(state, path, async_staging=True)
    loss = model(batch).sum()
    loss.backward()
    future.staged.result()
    optimizer.step()
    ```

    Saves of one process run one after another, in the order of the calls. At most two copies exist
    at a time (``max_copies``): a third call waits until the first save is over. The memory of a
    copy is kept for the next one; :func:`dcp_rs.release_pinned_memory` frees it. If a rank fails
    before the call returns, the call raises on that rank, and the futures of the other ranks raise
    the same error.

    Args:
        state_dict, path, include, exclude, dtype, no_dist: as for :func:`save`.
        process_group: a group with a CPU backend that nothing else uses meanwhile. Default: a gloo
            group of all ranks, made by the first call and kept.
        async_staging: do not wait for the copy. Accelerators copy on streams of their own, and a
            thread copies host memory. Values, and sparse or quantized tensors, are copied before
            this returns. If a tensor changed too early and torch counted the change, the save
            fails with a ``StateChangedError``. Torch does not count those of fused and ``foreach``
            optimizers.
        max_copies: the copies that there may be at a time, this one included.
        overwrite, strict_values, parent, reuse, verify_reuse, storage_options: as for
            :func:`save`.
        progress, io, threads, fsync, max_inflight_bytes, save_id, guard, publish: as for
            :func:`save`.

    Returns:
        A future of the metadata, done when the checkpoint is committed. It raises what
        :func:`save` would have raised. See :class:`SaveFuture` for its ``report`` and ``staged``.

    Raises:
        SaveInProgressError: another save of this process to ``path`` is not over.
        StateChangedError: from the future, on every rank: a tensor changed before it was copied.
        TypeError: an unknown option, even on one rank only. The message names the one that is
            meant.
        Exception: whatever prevents the copy. The futures of the other ranks raise it too.

    Example:
        ```python
        future = dcp_rs.async_save({"model": model, "step": 7}, "ckpt")
        model(torch.ones(2)).sum().backward()  # training goes on
        future.result()
        ```
    """
    ranks = RankGroup(process_group, no_dist=no_dist)
    if not ranks.is_alone:  # one rank alone sends nothing, whatever its backend
        if process_group is None:
            # Training goes on in the default group meanwhile, and collectives of two threads in one
            # group do not match.
            process_group = _torch.background_group()
            ranks = RankGroup(process_group)
        _torch.require_cpu_backend(process_group)
    where: Path
    checked: SaveOptions
    entries: Selected

    def locate() -> Path:
        nonlocal where
        _check_state_dict(state_dict)
        where = absolute(location(path))  # until the save begins, the current folder may change
        return where

    def stage() -> Staging:
        nonlocal checked, entries
        checked = SaveOptions.of(take_options(async_save, options))
        if ranks.is_coordinator:
            warn_of_foreign_model(where)
        selected = select(
            state_dict,
            checked.include,
            checked.exclude,
            strict=checked.strict_values,
            state_of=_state_of_copied_buffers if async_staging else _state_of,
        )
        entries = replace(selected, values={})  # the save keeps no tensor of the caller
        return Staging(selected.values, shared_blocks, watched=async_staging)

    def save_copy(take: Callable[[], Staging]) -> SavedMetadata:
        def make_request() -> SaveRequest:
            staging = take()
            copied = replace(entries, values=staging.values)
            return SaveRequest(entries=copied, path=where, options=checked)

        return engine_save(ranks, make_request)

    return saves.submit(
        locate,
        stage,
        save_copy,
        max_copies=max_copies,
        async_staging=async_staging,
        is_alone=ranks.is_alone,
    )


def _check_reader(reader: Any) -> None:
    """Raise a ``TypeError`` with advice unless this is a storage reader."""
    if isinstance(reader, StorageReader):
        return
    if isinstance(reader, str | os.PathLike):
        msg = (
            f"storage_reader= is a path: pass RsReader({os.fspath(reader)!r}), "
            "or call dcp_rs.load(state_dict, path)"
        )
    else:
        msg = f"storage_reader= takes a reader such as RsReader(path), not {type_of(reader)}"
    raise TypeError(msg)


def _check_state_dict(state_dict: Any) -> None:
    """Raise a ``TypeError`` with advice unless this is a state dict."""
    if isinstance(state_dict, Mapping) and not isinstance(state_dict, Checkpoint):
        return
    type_name = type(state_dict).__name__
    if isinstance(state_dict, str | os.PathLike):
        msg = f"{state_dict!r} is not a state dict: the state dict comes first, then the path"
    elif isinstance(state_dict, Checkpoint):
        msg = f"a {type_name} is read only: pass a dict of tensors to fill"
    elif ismethod(state_dict):
        msg = f"{state_dict.__name__} is a method: call it, as in model.state_dict()"
    elif is_stateful(state_dict):
        name = "optim" if isinstance(state_dict, Optimizer) else "model"
        msg = f"{type_name} is not a state dict: pass {{{name!r}: {name}}}, or {name}.state_dict()"
    else:
        msg = (
            f"{type_name} is not a state dict: pass a dict of names to tensors, to values, "
            "or to objects with state_dict() and load_state_dict()"
        )
    raise TypeError(msg)
