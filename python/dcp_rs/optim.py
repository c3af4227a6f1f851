"""The public functions for training state: models, optimizers and what rides along, saved and resumed. The work is in ``training/``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from operator import not_
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from dcp_rs._warnings import formerly
from dcp_rs.api import save
from dcp_rs.dcp import protocol
from dcp_rs.dcp.arguments import check_state_dict
from dcp_rs.dcp.load_planner import RsLoadPlanner
from dcp_rs.dcp.reader import RsReader
from dcp_rs.dcp.reports import LoadReport
from dcp_rs.dcp.together import Ranks
from dcp_rs.errors import PlanError
from dcp_rs.tensors.trees import is_stateful
from dcp_rs.training.extra import PerRank, RngState, merge, rank_key, state_of, unpack
from dcp_rs.training.optimizers import SavedOptimizers, nest, optimizer_state, stored_paths

__all__ = [
    "PerRank",
    "RngState",
    "load_optim_state_dict",
    "load_training_state",
    "save_training_state",
    "training_state",
]

MODEL, OPTIM, EXTRA = "model", "optim", "extra"

Optimizers = Optimizer | Iterable[Optimizer]


def training_state(
    model: torch.nn.Module,
    optimizers: Optimizers = (),
    extra: Mapping[str, Any] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state dict that :func:`save_training_state` saves, for ``dcp_rs.async_save`` and for ``dcp.save``.

    It has ``"model"`` and ``"optim"`` as torch's ``get_state_dict`` gives them, and ``"extra"``. Its tensors are those of the model
    and the optimizers, not copies.

    Raises:
        PlanError: an optimizer has a parameter that is not in the model.
    """
    return _training_state(model, optimizers, extra, Ranks(process_group))


def _training_state(
    model: torch.nn.Module, optimizers: Optimizers, extra: Mapping[str, Any] | None, ranks: Ranks
) -> dict[str, Any]:
    def make() -> dict[str, Any]:
        state: dict[str, Any] = {MODEL: get_model_state_dict(model)}
        several = _several(optimizers)
        if several:
            state[OPTIM] = optimizer_state(model, several, ranks)
        if extra:
            state[EXTRA] = {name: state_of(value) for name, value in extra.items()}
        return state

    return ranks.together(make)


def save_training_state(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: Optimizers = (),
    extra: Mapping[str, Any] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    **write_options: Any,
) -> Metadata:
    """Saves a training job to the folder ``path``. Every rank of ``process_group`` calls it.

    The model may be plain, or wrapped by DDP, FSDP1 or ``fully_shard``, with or without tensor parallelism.

    Args:
        path: the folder.
        model: its parameters and persistent buffers.
        optimizers: one, or several for different parameters of the model. One that has made no step yet is saved as such.
        extra: by name, whatever else is to be there after a restart: objects with ``state_dict`` and ``load_state_dict`` (learning rate
            schedulers, gradient scalers, data loaders, EMA models), tensors and plain values. What differs from rank to rank goes into
            :class:`PerRank`; :class:`RngState` is for random numbers.
        process_group, no_dist: as in ``dcp.save``.
        planner: default: that of :func:`dcp_rs.save`.
        write_options: arguments of :class:`dcp_rs.RsWriter`.

    Raises:
        PlanError: an optimizer has a parameter that is not in the model.
        DcpRsError: as :func:`dcp_rs.save`.
    """
    state = _training_state(model, optimizers, extra, Ranks(process_group, no_dist=no_dist))
    return save(state, path, planner=planner, process_group=process_group, no_dist=no_dist, **write_options)


@formerly(strict=("allow_partial_load", not_))
def load_training_state(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: Optimizers = (),
    extra: dict[str, Any] | None = None,
    *,
    allow_partial_load: bool = False,
    process_group: dist.ProcessGroup | None = None,
    planner: LoadPlanner | None = None,
    no_dist: bool = False,
    **read_options: Any,
) -> LoadReport | None:
    """Resumes a training job from ``path``, on any number of ranks and with any sharding. Every rank of ``process_group`` calls it.

    Checkpoints of ``dcp.save({"model": ..., "optim": ...})`` by torch's ``get_state_dict`` load as well.

    Args:
        path: a checkpoint.
        model: filled in place.
        optimizers: as in the save, in any order: parameters are found by name. Their state before the load does not matter.
        extra: as in the save. Objects get their state; tensors are filled in place; other values are replaced in ``extra``.
        allow_partial_load: leave alone what model, optimizers and ``extra`` have and the checkpoint lacks. Otherwise that is an error.
        process_group, no_dist: as in ``dcp.load``.
        planner: default: :class:`dcp_rs.RsLoadPlanner`, with the same ``allow_partial_load``.
        read_options: arguments of :class:`dcp_rs.RsReader`.

    Returns:
        What the planner reports, if it does. ``missing`` also names the parameters that no saved optimizer has
        (``optim.state.<fqn>``, or ``optim`` where none was saved), and the entries of ``extra`` that the checkpoint lacks.

    Raises (on every rank):
        PlanError: something is missing, or of another shape; an optimizer has parameters that the saved ones had not.
        DcpRsError: as :func:`dcp_rs.load`.
    """
    several, extra = _several(optimizers), {} if extra is None else extra
    planner = RsLoadPlanner(allow_partial_load=allow_partial_load) if planner is None else planner
    ranks = Ranks(process_group, no_dist=no_dist)

    def load() -> None:
        _load_training_state(path, model, several, extra, planner, ranks, read_options, partial=allow_partial_load)

    protocol.again_where_replaced(ranks, load)
    return planner.report if isinstance(planner, RsLoadPlanner) else None


def _load_training_state(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: tuple[Optimizer, ...],
    extra: dict[str, Any],
    planner: LoadPlanner,
    ranks: Ranks,
    read_options: dict[str, Any],
    *,
    partial: bool,
) -> None:
    """Loads what the path holds when it begins, all of one save."""
    reader, metadata = ranks.together(lambda: _opened(path, read_options))
    state: dict[str, Any] = {}
    extras: dict[str, tuple[bool, dict[str, Any], dict[str, tuple[Any, ...]]]] = {}

    def begin() -> SavedOptimizers | None:
        state[MODEL] = get_model_state_dict(model)
        saved = _saved_optimizers(reader, metadata, OPTIM, partial=partial) if optimizers else None
        if saved is not None:
            state.update(saved.template(model, optimizers, partial=partial))
        for name, value in extra.items():
            extras[name] = _extra_template(metadata, name, value, partial=partial)
            state.update(extras[name][1])
        return saved

    def end() -> None:
        if saved is not None:
            saved.fill(state)
            saved.apply(model, optimizers, partial=partial)
        set_model_state_dict(model, state[MODEL], options=StateDictOptions(strict=not partial))
        for name, (found, template, paths) in extras.items():
            if found:
                loaded = unpack(nest({path: state[key] for key, path in paths.items()}) if template else {})
                _put_extra(extra, name, loaded)

    saved = ranks.together(begin)
    _load(ranks, state, reader, metadata, planner)
    ranks.together(end)
    if not isinstance(planner, RsLoadPlanner):
        return
    if optimizers:
        planner.report.missing += [OPTIM] if saved is None else [f"{OPTIM}.state.{fqn}" for fqn in saved.missing]
    planner.report.missing += [_extra_name(name, extra[name]) for name, (found, *_) in extras.items() if not found]
    # What was read before there was a plan, or is there for other ranks.
    beside = [f"{OPTIM}.param_groups"] if saved is not None else []
    beside += [f"{EXTRA}.{name}" for name, value in extra.items() if isinstance(value, PerRank)]
    planner.report.unexpected = [
        name
        for name in planner.report.unexpected
        if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in beside)
    ]


@formerly(strict=("allow_partial_load", not_))
def load_optim_state_dict(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizer,
    *,
    key: str = OPTIM,
    allow_partial_load: bool = False,
    process_group: dist.ProcessGroup | None = None,
    planner: LoadPlanner | None = None,
    no_dist: bool = False,
    **read_options: Any,
) -> None:
    """Loads an optimizer's state alone.

    It may be what ``FSDP.optim_state_dict``, ``get_optimizer_state_dict`` or ``optimizer.state_dict()`` gave, saved under ``key``.

    It does not matter whether the state was saved in shards or whole from one rank, by name or by number, or how the model was sharded
    then. For FSDP1 each rank reads its shard of every parameter's state, which ``FSDP.optim_state_dict_to_load`` then turns into that of
    the flat parameters: no template has to be made with ``FSDP.optim_state_dict``, which would gather all of it once more.

    Args:
        path: a checkpoint.
        model: the model whose parameters ``optimizer`` has; it is not loaded.
        optimizer: any state that it has is replaced.
        key: the entry of the saved state dict; dots go deeper; ``""`` if the optimizer's state dict was all that was saved.
        allow_partial_load: leave alone the parameters of ``optimizer`` that are not among those saved. Otherwise that is an error.
        process_group, no_dist: as in ``dcp.load``.
        planner: default: :class:`dcp_rs.RsLoadPlanner`.
        read_options: arguments of :class:`dcp_rs.RsReader`.

    Raises (on every rank):
        PlanError: there is no optimizer state under ``key``, or it is of other parameters.
        DcpRsError: as :func:`dcp_rs.load`.
    """
    ranks = Ranks(process_group, no_dist=no_dist)

    def load() -> None:
        reader, metadata = ranks.together(lambda: _opened(path, read_options))

        def begin() -> tuple[SavedOptimizers, dict[str, Any]]:
            saved = _saved_optimizers(reader, metadata, key, partial=False)
            assert saved is not None  # noqa: S101  # where nothing may be missing
            return saved, saved.template(model, (optimizer,), partial=allow_partial_load)

        def end() -> None:
            saved.fill(state)
            saved.apply(model, (optimizer,), partial=allow_partial_load)

        saved, state = ranks.together(begin)
        _load(ranks, state, reader, metadata, RsLoadPlanner() if planner is None else planner)
        ranks.together(end)

    protocol.again_where_replaced(ranks, load)


def _opened(path: str | os.PathLike[str], read_options: dict[str, Any]) -> tuple[RsReader, Metadata]:
    reader = RsReader(path, **read_options)
    return reader, reader.read_metadata()


def _load(ranks: Ranks, state: dict[str, Any], reader: RsReader, metadata: Metadata, planner: LoadPlanner) -> None:
    """Loads of the save that was opened before: what was read of it then goes with what is read now."""

    def begin() -> tuple[dict[str, Any], StorageReader, LoadPlanner]:
        check_state_dict(state)
        reader.keep(metadata)
        return state, reader, planner

    protocol.load(ranks, begin)


def _several(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def _saved_optimizers(reader: RsReader, metadata: Metadata, key: str, *, partial: bool) -> SavedOptimizers | None:
    groups = _saved_groups(reader, metadata, key)
    if groups is None:
        if partial:
            return None
        msg = f"the checkpoint has no optimizer state under {key!r}: there is no {_join(key, 'param_groups')!r}"
        names = (f".{name}" for name in metadata.state_dict_metadata)
        groups_of = (name.split(".param_groups")[0].removeprefix(".") for name in names if ".param_groups" in name)
        if (other := next(groups_of, None)) is not None:
            msg += f". There is one under {other!r}: load_optim_state_dict(..., key={other!r}) takes it"
        raise PlanError(msg, tensor=_join(key, "param_groups"))
    return SavedOptimizers(metadata, key, groups)


def _saved_groups(reader: RsReader, metadata: Metadata, key: str) -> list[dict[str, Any]] | None:
    """The parameter groups in the checkpoint: one value, or, where they hold tensors, a list that was flattened."""
    name = _join(key, "param_groups")
    if name in metadata.state_dict_metadata:
        groups: list[dict[str, Any]] = reader.read_value(name)
        return groups
    prefix = tuple(name.split("."))
    leaves = {path[len(prefix) :]: stored for stored, path in stored_paths(metadata, prefix)}
    if not leaves:
        return None
    groups = nest({path: reader.read_value(stored) for path, stored in leaves.items()})
    if isinstance(groups, Mapping):
        # By parameter, as `flatten_optimizer_state_dict` has it.
        return [{**settings, "params": [fqn]} for fqn, settings in groups.items()]
    return groups


def _extra_template(
    metadata: Metadata, name: str, value: Any, *, partial: bool
) -> tuple[bool, dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Whether there is a state for an entry of ``extra``; memory for it by name in the checkpoint; and where in it that belongs."""
    prefix = (EXTRA, name, rank_key()) if isinstance(value, PerRank) else (EXTRA, name)
    stored = {key: path[len(prefix) :] for key, path in stored_paths(metadata, prefix)}
    if ".".join(prefix) in metadata.state_dict_metadata:
        stored = {".".join(prefix): ()}
    if isinstance(value, PerRank) and not stored:  # this rank was not there
        return False, {}, {}
    empty = not stored and state_of(value) in ({}, [])
    if not stored and not empty and not partial:
        msg = f"the checkpoint has no {EXTRA}.{name}"
        raise PlanError(msg, tensor=f"{EXTRA}.{name}")
    own = _leaves(value.state_dict() if is_stateful(value) else value)
    template: dict[str, Any] = {}
    for key, path in stored.items():
        entry = metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            mine = own.get(tuple(map(str, path)))
            template[key] = mine if mine is not None else torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            template[key] = None
    return bool(stored) or empty, template, stored


def _extra_name(name: str, value: Any) -> str:
    """Where the state of an entry of ``extra`` is in the checkpoint."""
    return f"{EXTRA}.{name}.{rank_key()}" if isinstance(value, PerRank) else f"{EXTRA}.{name}"


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], torch.Tensor]:
    """The tensors of a tree by path."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    return {leaf: tensor for key, value in pairs for leaf, tensor in _leaves(value, (*path, str(key))).items()}


def _put_extra(extra: dict[str, Any], name: str, loaded: Any) -> None:
    value = extra[name]
    if is_stateful(value):
        value.load_state_dict(loaded)
    else:
        extra[name] = merge(value, loaded)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
