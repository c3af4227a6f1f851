"""The public functions for training state: models, optimizers and what rides along, saved and resumed. The work is in ``training/``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer

from dcp_rs._arguments import suggest_option
from dcp_rs.api import save
from dcp_rs.dcp import protocol
from dcp_rs.dcp.load_planner import RsLoadPlanner, is_plain
from dcp_rs.dcp.reader import RsReader
from dcp_rs.engine import load as engine
from dcp_rs.engine.metadata import index_of
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import LoadReport
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.training.choice import Choice
from dcp_rs.training.extra import (
    EXTRA,
    PerRank,
    RngState,
    SavedExtra,
    check_values,
    state_of,
    with_buffers_copied,
)
from dcp_rs.training.optimizers import is_fsdp1, optimizer_state
from dcp_rs.training.saved import SavedOptimizers
from dcp_rs.training.saved_state import branch_at, join, tree_of

__all__ = [
    "PerRank",
    "RngState",
    "load_optim_state_dict",
    "load_training_state",
    "save_training_state",
    "training_state",
]

MODEL, OPTIM = "model", "optim"

Models = torch.nn.Module | Iterable[torch.nn.Module]
Optimizers = Optimizer | Iterable[Optimizer]


@suggest_option
def training_state(
    model: Models,
    optimizers: Optimizers = (),
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
        strict_values: raise for values in ``extra`` that would not load under
            ``weights_only=True``.

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
    ranks = RankGroup(
        process_group, no_dist=not dist.is_initialized()
    )  # whether others are missing is for the save to say
    models = _modules(model)
    state = _training_state(models, optimizers, extra, ranks, strict=strict_values)
    state[MODEL] = with_buffers_copied(state[MODEL], models)
    return state


def _training_state(
    models: tuple[torch.nn.Module, ...],
    optimizers: Optimizers,
    extra: Mapping[str, Any] | None,
    ranks: RankGroup,
    *,
    strict: bool,
) -> dict[str, Any]:
    def make() -> dict[str, Any]:
        state: dict[str, Any] = {MODEL: _merged(get_model_state_dict(model) for model in models)}
        several = _several(optimizers)
        # Every rank takes the steps in it, whatever it has: others may have optimizers.
        optim = optimizer_state(models, several, ranks)
        if several:
            state[OPTIM] = optim
        elif optim["param_groups"]:
            state[OPTIM] = {"param_groups": optim["param_groups"]}
        if extra:
            state[EXTRA] = {name: state_of(value) for name, value in extra.items()}
            if strict:
                check_values(EXTRA, state[EXTRA])
        return state

    return ranks.run(make)


@suggest_option
def save_training_state(
    path: str | os.PathLike[str],
    model: Models,
    optimizers: Optimizers = (),
    extra: Mapping[str, Any] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    **write_options: Any,
) -> Metadata:
    """Save a training job to the folder ``path``. Every rank of ``process_group`` calls it.

    The model may be plain, or wrapped by DDP, FSDP1 or ``fully_shard``, with or without tensor
    parallelism.

    Args:
        path: the folder.
        model: its parameters and persistent buffers are saved. Or several modules with different
            names, such as the stages of a pipeline on this rank.
        optimizers: one, or several for different parameters. One that has not made a step is saved
            as such. Ranks that train nothing have none.
        extra: what else to restore, by name: objects with ``state_dict`` and ``load_state_dict``
            (schedulers, gradient scalers, data loaders), tensors and plain values. Wrap values
            that differ between ranks in :class:`PerRank`; use :class:`RngState` for random
            numbers. NumPy numbers are saved as Python numbers, which load under
            ``weights_only=True``.
        process_group, no_dist: as in ``dcp.save``.
        planner: as for :func:`dcp_rs.save`.
        write_options: arguments of :class:`dcp_rs.RsWriter`. For values in ``extra``,
            ``strict_values`` is true by default.

    Returns:
        The metadata, as :func:`dcp_rs.save`.

    Raises:
        PlanError: an optimizer has a parameter that is not in the model.
        UnsafePickleError: a value in ``extra`` would not load under ``weights_only=True``.
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
    state = _training_state(
        _modules(model), optimizers, extra, RankGroup(process_group, no_dist=no_dist), strict=strict
    )
    return save(
        state, path, planner=planner, process_group=process_group, no_dist=no_dist, **write_options
    )


@suggest_option
def load_training_state(
    path: str | os.PathLike[str],
    model: Models,
    optimizers: Optimizers = (),
    extra: dict[str, Any] | None = None,
    *,
    allow_partial_load: bool = False,
    process_group: dist.ProcessGroup | None = None,
    planner: LoadPlanner | None = None,
    no_dist: bool = False,
    **read_options: Any,
) -> LoadReport | None:
    """Resume a training job from ``path``, on any number of ranks and with any sharding.

    Every rank of ``process_group`` calls it. Checkpoints of ``dcp.save({"model": ..., "optim":
    ...})`` with torch's ``get_state_dict`` load as well.

    Args:
        path: a checkpoint.
        model: filled in place.
        optimizers: as in the save, in any order: parameters are matched by name. Their state is
            replaced. One without state makes it as under torch's ``get_state_dict``, by a step with
            gradients and learning rates of zero.
        extra: as in the save. Objects get their state, tensors are filled in place, and other
            values are replaced in ``extra``.
        allow_partial_load: leave alone what the checkpoint lacks, and the state of parameters that
            it has in another shape or not complete. By default that is an error.
        process_group, no_dist: as in ``dcp.load``.
        planner: default: :class:`dcp_rs.RsLoadPlanner`, with the same ``allow_partial_load``.
            Entries that it does not include stay as they are.
        read_options: arguments of :class:`dcp_rs.RsReader`.

    Returns:
        The report of an :class:`dcp_rs.RsLoadPlanner`. ``missing`` also names parameters that no
        saved optimizer has (``optim.state.<fqn>``, or ``optim`` if none was saved), and entries of
        ``extra`` that the checkpoint lacks.

    Raises:
        PlanError: something is missing, or has another shape; an optimizer has parameters that the
            saved ones lack; or groups differ and state was saved by number. Nothing was read.
        DcpRsError: as :func:`dcp_rs.load`.

    Example:
        ```python
        dcp_rs.optim.save_training_state("training", model, optimizer, extra={"step": 7})
        extra = {"step": 0}
        dcp_rs.optim.load_training_state("training", model, optimizer, extra)
        assert extra["step"] == 7
        ```
    """
    models, several, extra = _modules(model), _several(optimizers), {} if extra is None else extra
    planner = RsLoadPlanner(allow_partial_load=allow_partial_load) if planner is None else planner
    ranks = RankGroup(process_group, no_dist=no_dist)
    partial = allow_partial_load or (
        isinstance(planner, RsLoadPlanner) and planner.allow_partial_load
    )

    def load() -> None:
        _load_into(
            path, models, several, planner, ranks, read_options, partial=partial, extra=extra
        )

    engine.again_where_replaced(ranks, load, tries=1 if partial else engine.TRIES)
    return planner.report if isinstance(planner, RsLoadPlanner) else None


def _load_into(
    path: str | os.PathLike[str],
    models: tuple[torch.nn.Module, ...],
    optimizers: tuple[Optimizer, ...],
    planner: LoadPlanner,
    ranks: RankGroup,
    read_options: dict[str, Any],
    *,
    partial: bool,
    key: str = OPTIM,
    extra: dict[str, Any] | None = None,
) -> None:
    """Load what the path holds when it begins, all of one save. Without ``extra``, it is the optimizers alone."""
    reader, metadata = ranks.run(lambda: _opened(path, read_options))
    state: dict[str, Any] = {}
    parts: list[dict[str, Any]] = []
    extras: list[SavedExtra] = []

    def begin() -> tuple[Choice, SavedOptimizers | None]:
        choice = Choice(metadata, planner, partial=partial)
        if extra is not None:
            parts.extend(get_model_state_dict(model) for model in models)
            state[MODEL] = _merged(parts)
        saved = (
            _saved_optimizers(reader, metadata, key, choice, needed=extra is None)
            if optimizers
            else None
        )
        if saved is not None:
            state.update(saved.template(models, optimizers))
        extras.extend(
            SavedExtra(metadata, name, value, choice) for name, value in (extra or {}).items()
        )
        for one in extras:
            state.update(one.template)
        return choice, saved

    def end() -> None:
        if saved is not None:
            saved.fill(state)
            saved.apply(models)
        for model, part in zip(models, parts, strict=False):
            loaded = {name: state[MODEL][name] for name in part if name in state[MODEL]}
            set_model_state_dict(model, loaded, options=StateDictOptions(strict=not partial))
        if extra is not None:
            for one in extras:
                one.put(extra, state)

    choice, saved = ranks.run(begin)
    _load(ranks, state, reader, metadata, planner)
    ranks.run(end)
    beside = [join(key, "param_groups")] if saved is not None else []
    per_rank = [name for name, value in (extra or {}).items() if isinstance(value, PerRank)]
    choice.tell(beside + [f"{EXTRA}.{name}" for name in per_rank])


@suggest_option
def load_optim_state_dict(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizer,
    *,
    key: str = OPTIM,
    allow_partial_load: bool = False,
    process_group: dist.ProcessGroup | None = None,
    planner: LoadPlanner | None = None,
    no_dist: bool = False,
    **read_options: Any,
) -> None:
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
        allow_partial_load: leave the state of a parameter alone if it is not saved, has another
            shape, or is not complete. By default that is an error.
        process_group, no_dist: as in ``dcp.load``.
        planner: default: :class:`dcp_rs.RsLoadPlanner`, as in :func:`load_training_state`. Its
            ``report`` names what was left alone.
        read_options: arguments of :class:`dcp_rs.RsReader`.

    Raises:
        PlanError: there is no optimizer state under ``key``, or it has other parameters, groups or
            shapes. Nothing was read.
        DcpRsError: as :func:`dcp_rs.load`.

    Example:
        ```python
        dcp_rs.save({"optim": optimizer.state_dict()}, "optimizer")
        dcp_rs.optim.load_optim_state_dict("optimizer", model, optimizer)
        ```
    """
    models, ranks = _modules(model), RankGroup(process_group, no_dist=no_dist)
    own_planner = RsLoadPlanner() if planner is None else planner
    partial = allow_partial_load or bool(getattr(own_planner, "allow_partial_load", False))

    def load() -> None:
        _load_into(
            path, models, (optimizer,), own_planner, ranks, read_options, partial=partial, key=key
        )

    engine.again_where_replaced(ranks, load, tries=1 if partial else engine.TRIES)


def _opened(
    path: str | os.PathLike[str], read_options: dict[str, Any]
) -> tuple[RsReader, Metadata]:
    reader = RsReader(path, **read_options)
    return reader, reader.read_metadata()


def _load(
    ranks: RankGroup,
    state: dict[str, Any],
    reader: RsReader,
    metadata: Metadata,
    planner: LoadPlanner,
) -> None:
    """Load from the save that was opened before: what was read of it then goes with what is read now."""
    if not is_plain(planner):
        protocol.load(ranks, state, reader, planner, metadata=metadata)
        return
    report = engine.load(state, reader._source, planner._options(), ranks, index=index_of(metadata))
    planner._end_load(report, reader.path)


def _modules(model: Models) -> tuple[torch.nn.Module, ...]:
    models = (model,) if isinstance(model, torch.nn.Module) else tuple(model)
    if not models or not all(isinstance(one, torch.nn.Module) for one in models):
        msg = f"model is {model!r}: a module, or several"
        raise TypeError(msg)
    if models[1:] and any(map(is_fsdp1, models)):
        msg = "several modules, of which one is of FSDP1 (FullyShardedDataParallel): wrap them in one, or use fully_shard"
        raise UnsupportedError(msg)
    return models


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dicts of several modules as one.

    Raises:
        PlanError: two have the same name.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        twice = next((name for name in part if name in merged), None)
        if twice is not None:
            msg = f"two of the modules have a {twice!r}: names of what they hold have to differ"
            raise PlanError(msg, tensor=twice)
        merged.update(part)
    return merged


def _several(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def _saved_optimizers(
    reader: RsReader, metadata: Metadata, key: str, choice: Choice, *, needed: bool = False
) -> SavedOptimizers | None:
    """The optimizer state under a key; None where there is none, or the load leaves out all of it.

    Raises:
        PlanError: there is none, and that is an error: with ``needed`` in a partial load, too.
    """
    start = f"{key}." if key else ""
    names = [name for name in metadata.state_dict_metadata if name.startswith(start)]
    if not any(map(choice.wants, names or [join(key, "param_groups")])):
        choice.left_out(names)
        return None
    groups = _saved_groups(reader, metadata, key)
    if groups is None:
        if choice.is_partial and not needed:
            choice.report.missing.append(key)
            return None
        msg = f"the checkpoint has no optimizer state under {key!r}: there is no {join(key, 'param_groups')!r}"
        dotted = (f".{name}" for name in metadata.state_dict_metadata)
        groups_of = (
            name.split(".param_groups")[0].removeprefix(".")
            for name in dotted
            if ".param_groups" in name
        )
        if (other := next(groups_of, None)) is not None:
            msg += f". There is one under {other!r}: load_optim_state_dict(..., key={other!r}) takes it"
        raise PlanError(msg, tensor=join(key, "param_groups"))
    return SavedOptimizers(metadata, key, groups, choice)


def _saved_groups(reader: RsReader, metadata: Metadata, key: str) -> list[dict[str, Any]] | None:
    """The parameter groups in the checkpoint: one value, or, where they hold tensors, a list that was flattened."""
    name = join(key, "param_groups")
    if name in metadata.state_dict_metadata:
        groups: list[dict[str, Any]] = reader._read_value(name)
        return groups
    branch = branch_at(metadata, tuple(name.split(".")))
    if not branch.paths:
        return None
    leaves = [
        (branch.positions[leaf], path, reader._read_value(leaf))
        for leaf, path in branch.paths.items()
    ]
    groups = tree_of(leaves, branch.containers)
    if isinstance(groups, Mapping):
        # By parameter, as `flatten_optimizer_state_dict` has it.
        return [{**settings, "params": [fqn]} for fqn, settings in groups.items()]
    return groups
