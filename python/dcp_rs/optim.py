"""Save and load training state: models, optimizers and extra entries."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.optim import Optimizer

from dcp_rs._arguments import check_arguments, suggest_option
from dcp_rs.api import save
from dcp_rs.checkpoint.names import repeatable
from dcp_rs.dcp import protocol
from dcp_rs.dcp.load_planner import RsLoadPlanner, is_plain
from dcp_rs.dcp.reader import RsReader
from dcp_rs.engine import load as engine
from dcp_rs.engine.metadata import index_of
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.engine.reports import LoadReport
from dcp_rs.errors import UnsupportedError
from dcp_rs.training.extra import (
    EXTRA,
    PerRank,
    RngState,
    SavedExtra,
    SavedValue,
    check_values,
    split_extra_state,
    state_of,
    with_buffers_copied,
    without_tensors,
)
from dcp_rs.training.load_optimizer import SavedOptimizers, saved_optimizers
from dcp_rs.training.names import without_wrappers
from dcp_rs.training.optimizers import is_fsdp1, joined, model_state, optimizer_state
from dcp_rs.training.partial_load import PartialLoad
from dcp_rs.training.saved_tree import SavedEntries, join
from dcp_rs.training.settings import KeepSettings
from dcp_rs.training.versions import VERSIONS, gather_versions, with_versions

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
    optimizers: Optimizers | None = (),
    extra: Mapping[str, Any] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    strict_values: bool = True,
) -> dict[str, Any]:
    """Return the state dict that :func:`save_training_state` saves, for other functions that save.

    It has ``"model"`` and ``"optim"`` as torch's ``get_state_dict`` returns them, ``"extra"``, and
    ``"model_versions"``: the versions of modules.
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
            check_values(OPTIM, without_tensors(state[OPTIM]))
        state[VERSIONS] = gather_versions(models, ranks)
        if extra:
            state[EXTRA] = {name: state_of(value) for name, value in extra.items()}
            if strict:
                check_values(EXTRA, state[EXTRA])
        return state

    return ranks.run(make)


def save_training_state(
    path: str | os.PathLike[str],
    model: Models,
    optimizers: Optimizers | None = (),
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
        optimizers: one, or several for different parameters. An optimizer that has not made a step
            is saved as such. Ranks that train nothing have none.
        extra: other entries to restore, by name: objects with ``state_dict`` and
            ``load_state_dict`` (schedulers, gradient scalers, data loaders), tensors and plain
            values. Wrap values that differ between ranks in :class:`PerRank`; use
            :class:`RngState` for random numbers. NumPy numbers are saved as Python numbers, which
            load under ``weights_only=True``.
        process_group, no_dist: as in ``dcp.save``.
        planner: as for :func:`dcp_rs.save`.
        write_options: arguments of :class:`dcp_rs.RsWriter`. For values in ``extra`` and of
            optimizers, ``strict_values`` is true by default.

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
    state = _training_state(model, optimizers, extra, ranks, strict=strict)
    return save(
        state, path, planner=planner, process_group=process_group, no_dist=no_dist, **write_options
    )


def load_training_state(
    path: str | os.PathLike[str],
    model: Models,
    optimizers: Optimizers | None = (),
    extra: dict[str, Any] | None = None,
    *,
    allow_partial_load: bool = False,
    keep_settings: bool | Collection[str] = False,
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
            replaced. An optimizer without state creates it as under torch's ``get_state_dict``, by
            a step with gradients and learning rates of zero.
        extra: as in the save. Objects get their state, tensors are filled in place, and other
            values are replaced in ``extra``. A dict stays the same object, with the saved entries
            alone. A partial or selective load keeps its other entries, and so does a load of a
            checkpoint that DCP's own planners wrote.
        allow_partial_load: leave alone what the checkpoint lacks, and state that is incomplete
            there, has another shape, or is of another kind of optimizer. By default that is an
            error.
        keep_settings: settings of the optimizers that stay, such as ``{"lr", "weight_decay"}``;
            True for all. By default the saved ones replace them, and a warning names those that
            differ, except for what schedulers change.
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
    return _load(
        path,
        model,
        optimizers,
        planner,
        RankGroup(process_group, no_dist=no_dist),
        read_options,
        partial=allow_partial_load,
        keep=keep_settings,
        extra={} if extra is None else extra,
    )


def load_optim_state_dict(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizer,
    *,
    key: str = OPTIM,
    allow_partial_load: bool = False,
    keep_settings: bool | Collection[str] = False,
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
            shape, is not complete, or is of another kind. By default that is an error.
        keep_settings: as for :func:`load_training_state`.
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
    _load(
        path,
        model,
        optimizer,
        planner,
        RankGroup(process_group, no_dist=no_dist),
        read_options,
        partial=allow_partial_load,
        keep=keep_settings,
        key=key,
    )


def _load(
    path: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers | None,
    planner: LoadPlanner | None,
    ranks: RankGroup,
    read_options: dict[str, Any],
    *,
    partial: bool,
    keep: KeepSettings,
    key: str = OPTIM,
    extra: dict[str, Any] | None = None,
) -> LoadReport | None:
    """Load training state; without ``extra``, the optimizers alone.

    A whole load that a save overtakes begins again with the new checkpoint.
    """
    planner = RsLoadPlanner(allow_partial_load=partial) if planner is None else planner
    called = load_optim_state_dict if extra is None else load_training_state
    partial = partial or bool(getattr(planner, "allow_partial_load", False))
    models, optimizers = ranks.run(lambda: _checked(model, optimizer, extra))
    if "views" in read_options:  # a load that begins again iterates again
        read_options["views"] = repeatable(read_options["views"])

    def open_source() -> _Load:
        check_arguments(called, read_options, RsReader.__init__)
        reader = RsReader(path, **read_options)
        return _Load(reader, planner, models, optimizers, extra, key, partial=partial, keep=keep)

    engine.retry(ranks, lambda: ranks.run(open_source).run(ranks), lambda: not partial)
    return planner.report if isinstance(planner, RsLoadPlanner) else None


class _Load:
    """A load of everything from the one save that a path holds now.

    Args:
        reader: the checkpoint.
        planner: the planner of the load.
        models, optimizers: what is loaded.
        extra: the caller's entries; None to load the optimizers alone.
        key: the entry of the optimizers' state.
        partial: leave alone what the checkpoint lacks.
        keep: the settings of the optimizers that stay.
    """

    def __init__(
        self,
        reader: RsReader,
        planner: LoadPlanner,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Optimizer],
        extra: dict[str, Any] | None,
        key: str,
        *,
        partial: bool,
        keep: KeepSettings,
    ) -> None:
        self._reader, self._planner = reader, planner
        self._models, self._optimizers, self._extra = models, optimizers, extra
        self._key, self._keep = key, keep
        self._metadata = reader.read_metadata()
        index = index_of(self._metadata)
        assert index is not None  # noqa: S101  # an RsReader read it
        self._entries = SavedEntries(index)
        self._partial = PartialLoad(self._entries, planner, partial=partial)
        self._state: dict[str, Any] = {}
        self._puts: list[Callable[[Mapping[str, Any]], None]] = []

    def run(self, ranks: RankGroup) -> None:
        """Load. Every rank calls it."""
        # A step of its own: it reads, which may fail on one rank, and the next has collectives.
        saved = ranks.run(self._read_optimizers)
        owners = self._gather_owners(ranks)
        ranks.run(lambda: self._begin(saved, owners))
        self._read(ranks)
        ranks.run(self._end)

    def _read_optimizers(self) -> SavedOptimizers | None:
        if not self._optimizers:
            return None
        return saved_optimizers(
            self._entries,
            self._reader._read_value,
            self._key,
            self._partial,
            keep=self._keep,
            needed=self._extra is None,
        )

    def _gather_owners(self, ranks: RankGroup) -> dict[str, dict[str, Any]]:
        """Return the keys of the values of all ranks, by the names of their entries."""
        owners: dict[str, dict[str, Any]] = {}
        extra = self._extra or {}
        for of_rank in ranks.all_gather(
            lambda: {
                name: (value._saved_key, value._owner)
                for name, value in extra.items()
                if isinstance(value, PerRank)
            }
        ):
            for name, (key, owner) in of_rank.items():
                owners.setdefault(name, {})[key] = owner
        return owners

    def _begin(
        self, saved: SavedOptimizers | None, owners: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Make the templates. Nothing of the caller's changes."""
        if saved is not None:
            self._state.update(saved.template(self._models, self._optimizers))
            self._puts.append(saved.put)
        if self._extra is None:
            return
        parts = list(map(model_state, self._models))
        joined(parts, "modules")
        values = [split_extra_state(self._entries, part, MODEL, self._partial) for part in parts]
        self._state[MODEL] = joined(parts, "modules")
        for one in (one for of_part in values for one in of_part.values()):
            self._state.update(one.template)
        versions = None
        if VERSIONS in self._entries:
            versions = dict(self._reader._read_value(VERSIONS))

        def put(loaded: Mapping[str, Any]) -> None:
            partial = self._partial.is_partial
            _load_models(self._models, parts, values, loaded, versions, partial=partial)

        self._puts.append(put)
        for name in self._extra:
            entry = SavedExtra(
                *(self._entries, self._extra, name, owners.get(name, {}), self._partial)
            )
            self._state.update(entry.template)
            self._puts.append(entry.put)

    def _read(self, ranks: RankGroup) -> None:
        """Fill the templates. A planner of another class is called by torch's protocol."""
        reader, planner = self._reader, self._planner
        if not is_plain(planner):
            state, metadata = self._state, self._metadata
            protocol.load(ranks, lambda: (state, reader, planner), metadata=metadata)
            return
        request = engine.LoadRequest(self._state, reader._source, planner._options())
        report = engine.load(ranks, lambda: request, index=self._entries.index)
        planner._end_load(report, reader._source)

    def _end(self) -> None:
        """Hand over what was read."""
        for put in self._puts:
            put(self._state)
        before = [VERSIONS, join(self._key, "param_groups")][: 2 if self._optimizers else 1]
        extra = self._extra or {}
        per_rank = [name for name, value in extra.items() if isinstance(value, PerRank)]
        self._partial.complete_report(before + [f"{EXTRA}.{name}" for name in per_rank])


def _load_models(
    models: Iterable[torch.nn.Module],
    parts: Iterable[Mapping[str, Any]],
    values: Iterable[Mapping[str, SavedValue]],
    loaded: Mapping[str, Any],
    versions: Mapping[str, int] | None,
    *,
    partial: bool,
) -> None:
    """Load the modules, whose state dicts had the names of ``parts`` and ``values``."""
    for module, part, extra in zip(models, parts, values, strict=True):
        own = {name: loaded[MODEL][name] for name in part}
        own |= {name: value.build(loaded) for name, value in extra.items()}
        if is_fsdp1(module):
            own = with_versions(own, module, versions)
            set_model_state_dict(module, own, options=StateDictOptions(strict=not partial))
            continue
        names = {key: without_wrappers(module, key) for key in module.state_dict()}
        found = {key: own[name] for key, name in names.items() if name in own}
        module.load_state_dict(with_versions(found, module, versions), strict=not partial)


def _checked(
    model: Models, optimizers: Optimizers | None, extra: Any
) -> tuple[tuple[torch.nn.Module, ...], tuple[Optimizer, ...]]:
    """Return the modules and the optimizers of a job.

    Raises:
        TypeError: an argument is of another type.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra is of type {type(extra).__name__}: pass a dict of entries by name")
    return _modules(model), _several(optimizers)


def _modules(model: Models) -> tuple[torch.nn.Module, ...]:
    if isinstance(model, torch.nn.Module):
        return (model,)
    kind = type(model).__name__
    if isinstance(model, Mapping):
        raise TypeError(f"model is a state dict ({kind}): pass the module that it is of")
    models = tuple(model) if isinstance(model, Iterable) else ()
    if not models or not all(isinstance(one, torch.nn.Module) for one in models):
        kinds = ", ".join(sorted({type(one).__name__ for one in models})) or kind
        raise TypeError(f"model is of type {kinds}: pass a torch.nn.Module, or several")
    if models[1:] and any(map(is_fsdp1, models)):
        msg = (
            "several modules, of which one is of FSDP1 (FullyShardedDataParallel): "
            "wrap them in one, or use fully_shard"
        )
        raise UnsupportedError(msg)
    return models


def _several(optimizers: Optimizers | None) -> tuple[Optimizer, ...]:
    if optimizers is None or isinstance(optimizers, Optimizer):
        return () if optimizers is None else (optimizers,)
    if isinstance(optimizers, Mapping):
        raise TypeError("optimizers is a state dict in place of an optimizer")
    several = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    other = next((one for one in several if not isinstance(one, Optimizer)), None)
    if other is not None:
        msg = (
            f"an optimizer is of type {type(other).__name__}, which is no torch.optim.Optimizer: "
            "pass the optimizer that it wraps, and its own state in extra="
        )
        raise TypeError(msg)
    return several
