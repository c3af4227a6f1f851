"""Save and load training state: models, optimizers and extra entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from dcp_rs._arguments import suggest_option, type_of
from dcp_rs._url import StrPath
from dcp_rs.api import save
from dcp_rs.dcp.reader import RsReader
from dcp_rs.engine import load as engine
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import LoadReport, SavedMetadata
from dcp_rs.errors import UnsupportedError
from dcp_rs.options import (
    OptimizerArguments,
    SaveArguments,
    TrainingArguments,
    split_options,
    take_options,
)
from dcp_rs.tensors.dtypes import parse_dtype
from dcp_rs.tensors.flatten import is_stateful
from dcp_rs.training.extra import (
    EXTRA,
    PerRank,
    RngState,
    check_values,
    state_of,
    with_buffers_copied,
)
from dcp_rs.training.load import TrainingLoad, TrainingOptions
from dcp_rs.training.optimizers import is_fsdp1, joined, model_state, optimizer_state
from dcp_rs.training.partial_load import parts_of
from dcp_rs.training.sources import MODEL, OPTIM
from dcp_rs.training.versions import noted

__all__ = [
    "PerRank",
    "RngState",
    "load_optim_state_dict",
    "load_training_state",
    "save_training_state",
    "training_state",
]

T = TypeVar("T")
Models = torch.nn.Module | Iterable[torch.nn.Module]
Optimizers = Optimizer | Iterable[Optimizer]


@suggest_option
def training_state(
    model: Models,
    optimizers: Optimizers | None = (),
    extra: Mapping[str, Any] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    strict_values: bool = True,
) -> dict[str, Any]:
    """Return the state dict that :func:`save_training_state` saves, for other functions that save.

    It has ``"model"`` and ``"optim"`` as torch's ``get_state_dict`` returns them, and ``"extra"``.
    Tensors are those of the model and the optimizers. Buffers are copies, so that a forward pass
    may write to them while ``async_staging=True`` copies the rest.

    Args:
        model, optimizers, extra: as for :func:`save_training_state`.
        process_group: the process group of the save.
        strict_values: raise for values in ``extra``, and in the state and settings of optimizers,
            that would not load under ``weights_only=True``.

    Returns:
        A state dict for :func:`dcp_rs.save`, :func:`dcp_rs.async_save` or
        ``CheckpointManager.save``.

    Raises:
        PlanError: an optimizer has a parameter that is not in the model.
        UnsafePickleError: with ``strict_values``, a value would not load.

    Example:
        ```python
        dcp_rs.save(dcp_rs.optim.training_state(model, optimizer, extra={"step": 7}), "training")
        ```
    """
    # The save raises if other ranks are missing.
    ranks = RankGroup(process_group, no_dist=not dist.is_initialized())
    return _training_state(model, optimizers, extra, ranks, strict=strict_values, copy_buffers=True)


def _training_state(
    model: Models,
    optimizers: Optimizers | None,
    extra: Mapping[str, Any] | None,
    ranks: RankGroup,
    *,
    strict: bool,
    copy_buffers: bool = False,
) -> dict[str, Any]:
    # A step of its own: what follows contains collectives.
    models, several = ranks.run(lambda: _checked(model, optimizers, extra))

    def make() -> dict[str, Any]:
        parts = map(model_state, models)
        state: dict[str, Any] = {MODEL: joined(parts, "modules")}
        if copy_buffers:
            state[MODEL] = with_buffers_copied(state[MODEL], models)
        # A collective: other ranks may have optimizers.
        optim = optimizer_state(models, several, ranks)
        if several:
            state[OPTIM] = optim
        elif optim["param_groups"]:
            state[OPTIM] = {"param_groups": optim["param_groups"]}
        if strict and OPTIM in state:
            check_values(OPTIM, state[OPTIM])
        state[MODEL] = noted(state[MODEL], models, ranks)
        if extra:
            state[EXTRA] = {name: state_of(value) for name, value in extra.items()}
            if strict:
                check_values(EXTRA, state[EXTRA])
        return state

    return ranks.run(make)


@suggest_option
def save_training_state(
    path: StrPath,
    model: Models,
    optimizers: Optimizers | None = (),
    extra: Mapping[str, Any] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **write_options: Unpack[SaveArguments],
) -> SavedMetadata:
    """Save a training job to the folder ``path``. Every rank of ``process_group`` calls it.

    The model may be plain, or wrapped by DDP, FSDP1 or ``fully_shard``, with or without tensor
    parallelism.

    Args:
        path: the folder.
        model: its parameters and persistent buffers are saved. Or several modules with different
            names, such as the stages of a pipeline on this rank.
        optimizers: one, or several for different parameters. An optimizer that has not made a step
            is saved as such. Ranks that train nothing have none.
        extra: other entries to restore, by name: objects with ``state_dict`` and
            ``load_state_dict`` (schedulers, gradient scalers, data loaders), tensors and plain
            values. Wrap values that differ between ranks in :class:`PerRank`; use
            :class:`RngState` for random numbers. NumPy numbers are saved as Python numbers, which
            load under ``weights_only=True``.
        process_group, no_dist: as in ``dcp.save``.
        include, exclude, dtype: as for :func:`dcp_rs.save`.
        strict_values: as for :func:`dcp_rs.save`. For values in ``extra`` and of optimizers it is
            true by default.
        io, threads, fsync, max_inflight_bytes: see :class:`dcp_rs.options.WriteOptions`.
        overwrite, progress, save_id, parent, reuse, verify_reuse: as for :func:`dcp_rs.save`.
        storage_options, guard, publish: as for :func:`dcp_rs.save`.

    Returns:
        The metadata, as :func:`dcp_rs.save`.

    Raises:
        PlanError: an optimizer has a parameter that is not in the model.
        UnsafePickleError: a value in ``extra``, or of an optimizer, would not load under
            ``weights_only=True``.
        TypeError: an optimizer is no ``torch.optim.Optimizer``.
        DcpRsError: as :func:`dcp_rs.save`.

    Example:
        ```python
        dcp_rs.optim.save_training_state("training", model, optimizer, extra={"step": 7})
        extra = {"step": 0}
        dcp_rs.optim.load_training_state("training", model, optimizer, extra)
        assert extra["step"] == 7
        ```
    """
    strict = write_options.get("strict_values", True)
    ranks = RankGroup(process_group, no_dist=no_dist)
    ranks.run(lambda: take_options(save_training_state, write_options))
    state = _training_state(model, optimizers, extra, ranks, strict=strict)
    return save(state, path, process_group=process_group, no_dist=no_dist, **write_options)


@suggest_option
def load_training_state(
    path: StrPath,
    model: Models,
    optimizers: Optimizers | None = (),
    extra: dict[str, Any] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **options: Unpack[TrainingArguments],
) -> LoadReport:
    """Resume a training job from ``path``, on any number of ranks and with any sharding.

    Every rank of ``process_group`` calls it. Before anything of the job changes, the names, shapes,
    kinds of state and settings of all parts are compared with the checkpoint.

    An error that comes later is raised on all ranks, and leaves the job partly loaded: a read that
    fails, or an object that refuses its state. Load again, or begin anew.

    Args:
        path: a checkpoint of :func:`save_training_state`; one of stock DCP or one file of
            ``torch.save`` with model and optimizer under any keys; a folder of accelerate's
            ``save_state``; or, for the model alone, a Hugging Face or ``.safetensors`` checkpoint.
        model: filled in place.
        optimizers: as in the save, in any order: parameters are matched by name. Their state is
            replaced. An optimizer without state creates it as under torch's ``get_state_dict``, by
            a step with gradients and learning rates of zero.
        extra: as in the save. Objects get their state as it was saved, tensors are filled in place,
            and other values are replaced in ``extra``. A dict stays the same object, with the saved
            entries alone. A partial or selective load keeps its other entries, and so does a load
            of a checkpoint that DCP's own planners wrote.
        names: the keys of entries in the checkpoint, with dots for deeper ones, by ``"model"``,
            ``"optimizer"`` or the name of an extra entry: ``{"model": "state.model"}``. Usual keys
            are found without.
        rename: maps stored names to names of the training state, as for :func:`dcp_rs.load`:
            ``{"model.encoder": "model.backbone"}``. Optimizer state follows its parameter.
        include, exclude: globs over names such as ``model.<fqn>``, ``optim.state.<fqn>.exp_avg``
            and ``extra.step``. Entries that are not included, or are excluded, stay as they are.
            The state of a parameter, and an entry of ``extra``, is loaded whole: if a part of it is
            left out, all of it stays.
        dtype: cast floating-point tensors to it as they are read, except the ``step`` of
            optimizers.
        partial: True, or a set of ``"model"``, ``"optimizer"`` and ``"extra"``: leave alone what
            the checkpoint lacks of these parts, and state that is incomplete there, has another
            shape, or is of another kind of optimizer. By default that is an error.
        keep_settings: settings of the optimizers that stay, such as ``{"lr", "weight_decay"}``;
            True for all. By default the saved ones replace them, and a warning names those that
            differ, except for what schedulers change.
        process_group, no_dist: as in ``dcp.load``.
        io, threads, verify, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.
        weights_only, allow_external, storage_options, tiers, dequantize, views: see
            :class:`dcp_rs.RsReader`.
        replicas, progress: see :class:`dcp_rs.RsReader`.

    Returns:
        A report of the load on this rank. ``missing`` also names parameters that no saved optimizer
        has (``optim.state.<fqn>``, or ``optim`` if none was saved), and entries of ``extra`` that
        the checkpoint lacks.

    Raises:
        PlanError: something is missing, or has another shape; an optimizer has parameters that the
            saved ones lack, or other kinds of state; or nothing tells which saved settings a group
            gets. Nothing was read.
        DcpRsError: as :func:`dcp_rs.load`.

    Example:
        ```python
        dcp_rs.optim.save_training_state("training", model, optimizer, extra={"step": 7})
        extra = {"step": 0}
        dcp_rs.optim.load_training_state("training", model, optimizer, extra)
        assert extra["step"] == 7
        ```
    """
    extra = {} if extra is None else extra
    ranks = RankGroup(process_group, no_dist=no_dist)
    check = partial(take_options, load_training_state, options)
    return _load(path, model, optimizers, extra, ranks, check)


@suggest_option
def load_optim_state_dict(
    path: StrPath,
    model: Models,
    optimizer: Optimizer,
    *,
    key: str = OPTIM,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **options: Unpack[OptimizerArguments],
) -> LoadReport:
    """Load the state of an optimizer alone.

    It may be saved by ``FSDP.optim_state_dict``, ``get_optimizer_state_dict`` or
    ``optimizer.state_dict()``, in shards or whole, by name or by number, and under any sharding of
    the model. With FSDP1 each rank reads its shard of each parameter's state, and passes it to
    ``FSDP.optim_state_dict_to_load``. So you need no template of ``FSDP.optim_state_dict``, which
    would gather the whole state.

    Args:
        path: a checkpoint.
        model: the model whose parameters ``optimizer`` has; it is not loaded.
        optimizer: its state is replaced.
        key: the entry of the saved state dict, with dots for deeper ones; ``""`` if the
            optimizer's state dict is the whole checkpoint.
        rename, include, exclude, dtype, keep_settings: as for :func:`load_training_state`.
        partial: leave the state of a parameter alone if it is not saved, has another shape, is not
            complete, or is of another kind. By default that is an error.
        process_group, no_dist: as in ``dcp.load``.
        io, threads, verify, shared, max_inflight_bytes: see :class:`dcp_rs.options.ReadOptions`.
        weights_only, allow_external, storage_options, tiers, dequantize, views: see
            :class:`dcp_rs.RsReader`.
        replicas, progress: see :class:`dcp_rs.RsReader`.

    Returns:
        A report of the load on this rank.

    Raises:
        PlanError: there is no optimizer state under ``key``, or it has other parameters, groups,
            kinds or shapes. Nothing was read.
        DcpRsError: as :func:`dcp_rs.load`.

    Example:
        ```python
        dcp_rs.save({"optim": optimizer.state_dict()}, "optimizer")
        dcp_rs.optim.load_optim_state_dict("optimizer", model, optimizer)
        ```
    """
    ranks = RankGroup(process_group, no_dist=no_dist)
    check = partial(take_options, load_optim_state_dict, options)
    return _load(path, model, optimizer, None, ranks, check, key)


def _load(
    path: StrPath,
    model: Models,
    optimizer: Optimizers | None,
    extra: dict[str, Any] | None,
    ranks: RankGroup,
    take: Callable[[], dict[str, Any]],
    key: str | None = None,
) -> LoadReport:
    """Load training state; without ``extra``, the optimizers alone.

    A whole load that a save overtakes begins again with the new checkpoint.
    """
    models, optimizers = ranks.run(lambda: _checked(model, optimizer, extra))

    def make_options() -> tuple[TrainingOptions, dict[str, Any]]:
        own, of_reader = split_options(take(), TrainingOptions)
        own["dtype"] = parse_dtype(own.get("dtype"))
        own["partial"] = parts_of(own.get("partial", False))
        own["names"] = own.get("names") or {}
        return TrainingOptions(**own, key=key), of_reader

    options, read_options = ranks.run(make_options)

    def begin() -> TrainingLoad:
        open_reader = partial(RsReader, **read_options)
        return TrainingLoad(path, open_reader, models, optimizers, extra, options)

    def load() -> LoadReport:
        job = ranks.run(begin)
        job.run(ranks)
        return job.report

    return engine.retry(ranks, load, lambda: not options.partial)


def _checked(
    model: Models, optimizers: Optimizers | None, extra: Any
) -> tuple[tuple[torch.nn.Module, ...], tuple[Optimizer, ...]]:
    """Return the modules and the optimizers of a job.

    Raises:
        TypeError: an argument is of another type.
    """
    if extra is not None and not isinstance(extra, Mapping):
        msg = f"extra is of type {type(extra).__name__}: pass a dict of entries by name"
        if is_stateful(extra):
            msg += ", such as {'scheduler': scheduler}"
        raise TypeError(msg)
    models = _several(model, torch.nn.Module, "model", "pass a torch.nn.Module, or several")
    if not models:
        raise TypeError("model is empty: pass a torch.nn.Module, or several")
    if models[1:] and any(map(is_fsdp1, models)):
        msg = (
            "several modules, of which one is of FSDP1 (FullyShardedDataParallel): "
            "wrap them in one, or use fully_shard"
        )
        raise UnsupportedError(msg)
    advice = (
        "pass a torch.optim.Optimizer, or several. If it wraps one, pass that, and its own state "
        "in extra=; if it trains copies of the parameters, all of it in extra="
    )
    several = () if optimizers is None else optimizers
    return models, _several(several, Optimizer, "an optimizer", advice)


def _several(value: Any, cls: type[T], what: str, advice: str) -> tuple[T, ...]:
    """Return an argument that is of a class, or its items, which are.

    Raises:
        TypeError: one is of another class.
    """
    has_items = isinstance(value, Iterable) and not isinstance(value, cls | str | Mapping)
    several = tuple(value) if has_items else (value,)
    wrong = [one for one in several if not isinstance(one, cls)]
    if wrong:
        raise TypeError(f"{what} is {type_of(wrong[0])}: {advice}")
    return several
