"""Optimizer state of a checkpoint, loaded by parameter: plain, DDP, FSDP1 and FSDP2 modules."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.dcp.reader import RsReader
from dcp_rs.errors import PlanError
from dcp_rs.tensors.flatten import get_at
from dcp_rs.tensors.nesting import Container, TreePath, kind_of, like, nest
from dcp_rs.tensors.shards import global_shape
from dcp_rs.training.optimizers import (
    compiler_names,
    fsdp1_group,
    fsdp1_state,
    is_fsdp1,
    is_named,
    names_by_key,
    parameter_names,
    renamed,
    settings_of,
    sharded_state_dicts,
    to_bytes,
)
from dcp_rs.training.partial_load import PartialLoad
from dcp_rs.training.saved_tree import build_tree, join, saved_tree

__all__ = ["SavedOptimizers", "saved_optimizers"]

#: The key of the model in the checkpoint.
_MODEL = "model"
_MISSING: Any = object()


@dataclass
class _Target:
    """An optimizer to load into.

    State that belongs to no parameter goes by its own key in place of an FQN.

    Attributes:
        names: its parameters with their FQNs.
        own_keys: the keys of its parameters in its own state dict, by FQN; empty for FSDP1.
        keys: the keys of its parameters in the checkpoint, by FQN.
        groups: the parameters and settings of each of its groups.
        own: the state that it has, by FQN.
        made: that state or, if it has none, the state that its first step makes. Of parameters of
            FSDP1 there is none: they are flat.
        kept: the FQNs of parameters whose own state stays.
    """

    optimizer: Optimizer
    names: list[tuple[torch.Tensor, list[str]]]
    own_keys: dict[str, Any]
    keys: dict[str, str]
    groups: list[dict[str, Any]]
    own: dict[str, Any]
    made: dict[str, Any]
    kept: set[str]


def saved_optimizers(
    reader: RsReader, metadata: Metadata, key: str, partial_load: PartialLoad, *, needed: bool
) -> SavedOptimizers | None:
    """Return the optimizer state under a key; None if there is none, or the load excludes it.

    Raises:
        PlanError: there is none, and that is an error; with ``needed``, in a partial load too. Or
            what is there has no parameter groups.
    """
    start, base = f"{key}." if key else "", join(key, "param_groups")
    names = [name for name in metadata.state_dict_metadata if name.startswith(start)]
    if not any(map(partial_load.includes, names or [base])):
        partial_load.exclude(names)
        return None
    tree = saved_tree(metadata, tuple(base.split(".")), may_be_flat=True)
    if tree.paths:
        leaves = [
            (tree.positions[name], path, reader._read_value(name))
            for name, path in tree.paths.items()
        ]
        groups = _groups(build_tree(leaves, tree.containers), base)
        if not any(map(partial_load.includes, tree.paths)):
            partial_load.report.excluded += tree.paths
            groups = [{"params": group["params"]} for group in groups]
        return SavedOptimizers(metadata, key, groups, partial_load)
    if partial_load.is_partial and not needed:
        partial_load.report.missing.append(key)
        return None
    msg = f"the checkpoint has no optimizer state under {key!r}: there is no {base!r}"
    above = (f".{name}".partition(".param_groups") for name in metadata.state_dict_metadata)
    other = next((before.removeprefix(".") for before, found, _ in above if found), None)
    if other is not None:
        msg += f". There is one under {other!r}: load_optim_state_dict(..., key={other!r}) takes it"
    raise PlanError(msg, tensor=base)


def _groups(saved: Any, base: str) -> list[dict[str, Any]]:
    """Return the saved parameter groups as a list.

    Raises:
        PlanError: they are none.
    """
    groups = saved
    if isinstance(saved, Mapping):  # by parameter, from `flatten_optimizer_state_dict`
        groups = [
            {**settings, "params": [fqn]} if isinstance(settings, Mapping) else settings
            for fqn, settings in saved.items()
        ]
    if not isinstance(groups, list) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
        for group in groups
    ):
        raise PlanError(f"{base!r} holds no parameter groups", tensor=base)
    return groups


class SavedOptimizers:
    """The optimizer state in a checkpoint, and its way into optimizers.

    Args:
        metadata: the metadata of the checkpoint.
        key: the entry that holds it; empty if the checkpoint holds nothing else.
        groups: the saved parameter groups.
        partial_load: what is left alone.
    """

    def __init__(
        self, metadata: Metadata, key: str, groups: list[dict[str, Any]], partial_load: PartialLoad
    ) -> None:
        self._metadata = metadata
        self._groups = groups
        self._partial = partial_load
        self._prefix = join(key, "state")
        #: The settings of the group of each saved parameter.
        self._settings: dict[str, dict[str, Any]] = {}
        #: Those of the groups without parameters.
        self._empty = [settings_of(group) for group in groups if not group["params"]]
        for group in groups:
            self._settings |= dict.fromkeys(map(str, group["params"]), settings_of(group))
        whole = saved_tree(
            metadata, tuple(self._prefix.split(".")), self._settings, may_be_flat=True
        )
        #: The state of each parameter, and of each key that belongs to none.
        self._state = whole.by_key()
        self._takes_groups = any(map(settings_of, groups))
        #: The dtypes of the memory for state, by name. A planner may load in another dtype.
        self._dtypes: dict[str, torch.dtype] = {}
        self._models: Sequence[torch.nn.Module] = ()
        self._targets: list[_Target] = []

    def template(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        """Return memory for the state of the optimizers, by name in the checkpoint.

        Raises:
            PlanError: the checkpoint has other parameters, numbers, groups or shapes.
        """
        self._models = models
        shards = get_model_state_dict(models[0]) if is_fsdp1(models[0]) else {}
        values: dict[str, Any] = {}
        for number, optimizer in enumerate(optimizers):
            target = self._target(optimizer, number, shards)
            self._targets.append(target)
            others = self._other_keys(target, is_only=len(optimizers) == 1)
            for param, fqns in [*target.names, *((None, [key]) for key in others)]:
                spaces = [self._space(target, fqn, param, shards.get(fqn)) for fqn in fqns]
                found = {name: space[name] for space in spaces if space for name in space}
                if None in spaces:
                    # The state of a flat parameter must not come from two steps: all of it stays.
                    target.kept.update(fqns)
                    self._partial.report.excluded += found
                else:
                    values |= found
        return values

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Put the loaded values, by name in the checkpoint, into the optimizers.

        What was not loaded stays.
        """
        for target in self._targets:
            if not self._takes_groups and target.kept.issuperset(target.keys):
                continue
            state = self._loaded(target, loaded)
            state |= {fqn: target.own[fqn] for fqn in target.kept if fqn in target.own}
            to_load = (
                _fsdp1_state_dict(self._models[0], target, state)
                if is_fsdp1(self._models[0])
                else _plain_state_dict(target, state)
            )
            if _torch.loads_by_itself(target.optimizer):
                # It looks in them for the parameter of each tensor, which is slow in a list. In the
                # end it keeps its own lists.
                for group in to_load["param_groups"]:
                    group["params"] = dict.fromkeys(group["params"])
            target.optimizer.load_state_dict(to_load)
            for number, (param, _) in enumerate(target.names):
                if number in to_load["state"]:
                    _undo_casts(target.optimizer.state[param], to_load["state"][number])

    # --- parameters

    def _target(self, optimizer: Optimizer, number: int, shards: Mapping[str, Any]) -> _Target:
        """Match an optimizer with the saved parameters and groups.

        Raises:
            PlanError: the checkpoint has other parameters, numbers or groups.
        """
        fsdp1 = is_fsdp1(self._models[0])
        names = parameter_names(self._models, optimizer, number)
        by_key = {} if fsdp1 else names_by_key(names, optimizer.state_dict(), number)
        fqns_of = {id(param): fqns for param, fqns in names}
        own_groups = [
            [fqn for param in group["params"] for fqn in fqns_of[id(param)]]
            for group in optimizer.param_groups
        ]
        is_flat = any(len(fqns) > 1 for _, fqns in names)
        keys = self._saved_keys(own_groups, list(shards) if is_flat else [])
        kept = set(self._unknown_params(keys, number))
        groups = [
            self._matching_group(group, fqns, keys, f"group {place} of optimizer {number}")
            for place, (group, fqns) in enumerate(
                zip(optimizer.param_groups, own_groups, strict=True)
            )
        ]
        state: Mapping[Any, Any] = optimizer.state
        if not fsdp1 and any(self._entries(key) for key in keys.values()):
            state = optimizer.state or new_state(optimizer)
        made = {key: value for key, value in state.items() if isinstance(key, str)}
        if not fsdp1:
            made |= {fqns[0]: state[param] for param, fqns in names if param in state}
        own = made if optimizer.state else {}
        if fsdp1 and self._partial.may_leave:
            own = fsdp1_state(self._models[0], optimizer)["state"] | own
        own_keys = {fqn: key for key, fqn in by_key.items()}
        return _Target(optimizer, names, own_keys, keys, groups, own, made, kept)

    def _saved_keys(self, groups: list[list[str]], order: list[str]) -> dict[str, str]:
        """Return the keys of an optimizer's parameters in the checkpoint, by FQN.

        Args:
            groups: the FQNs of each of its groups.
            order: the FQNs in the order of the model, if the optimizer has flat parameters.

        Raises:
            PlanError: the keys are numbers, and the saved groups have other sizes.
        """
        saved = [group["params"] for group in self._groups]
        if not any(isinstance(key, int) for keys in saved for key in keys):
            return {fqn: fqn for fqns in groups for fqn in fqns}
        if list(map(len, groups)) != list(map(len, saved)):
            msg = (
                f"the saved optimizer has {_sizes(saved)}, which go by number, "
                f"and this one has {_sizes(groups)}"
            )
            raise PlanError(msg)
        # Numbers are older than flat parameters: group by group, in the order of the model.
        place = {fqn: number for number, fqn in enumerate(order)}
        return {
            fqn: str(key)
            for fqns, keys in zip(groups, saved, strict=True)
            for fqn, key in zip(
                sorted(fqns, key=lambda fqn: place.get(fqn, len(place))), keys, strict=True
            )
        }

    def _unknown_params(self, keys: dict[str, str], number: int) -> list[str]:
        """Return the parameters that no saved optimizer has.

        Raises:
            PlanError: there are some, and that is an error.
        """
        unknown = [fqn for fqn, key in keys.items() if key not in self._settings]
        missing = [fqn for fqn in unknown if self._partial.includes(f"{self._prefix}.{fqn}")]
        if missing and not self._partial.is_partial:
            more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
            msg = (
                f"optimizer {number} has parameter {missing[0]!r}{more}, "
                "which no saved optimizer has"
            )
            raise PlanError(msg, tensor=missing[0])
        self._partial.report.missing += [f"{self._prefix}.{fqn}" for fqn in missing]
        return unknown

    def _matching_group(
        self, group: Mapping[str, Any], fqns: list[str], keys: dict[str, str], shown: str
    ) -> dict[str, Any]:
        """Return the parameters and the saved settings of a group of an optimizer.

        Raises:
            PlanError: its parameters were saved with different settings, and that is an error.
        """
        found = [self._settings[keys[fqn]] for fqn in fqns if keys[fqn] in self._settings]
        settings = list({id(one): one for one in found}.values())
        if not fqns:
            settings = self._empty[:1]
        if not self._partial.is_partial and len(set(map(to_bytes, settings))) > 1:
            msg = f"the parameters of {shown} were saved in groups with different settings"
            raise PlanError(msg, tensor=fqns[0])
        # A copy for each group: a learning rate that is a tensor changes in place.
        new = copy.deepcopy(settings[0]) if settings else {}
        return settings_of(group) | new | {"params": fqns}

    # --- memory

    def _other_keys(self, target: _Target, *, is_only: bool) -> list[str]:
        """Add state that belongs to no parameter, such as MADGRAD's ``k``, to a target.

        The only optimizer takes what is saved. One of several takes what it has, or makes in its
        first step.

        Returns:
            The keys of that state.
        """
        # A stock save of a pipeline may list the parameters of one rank alone.
        saved = [
            key
            for key in self._state
            if is_only
            and key not in self._settings
            and join(_MODEL, key) not in self._metadata.state_dict_metadata
        ]
        keys = [key for key in dict.fromkeys([*saved, *target.made]) if key not in target.keys]
        target.keys |= {key: key for key in keys}
        if self._partial.is_partial:
            target.kept.update(key for key in keys if key not in self._state)
        return keys

    def _space(
        self, target: _Target, fqn: str, param: torch.Tensor | None, shard: Any
    ) -> dict[str, Any] | None:
        """Return memory for a parameter's state, by name; None if the state that it has stays.

        Args:
            target: the optimizer.
            fqn: the name of the parameter.
            param: the parameter, if the state is of one.
            shard: the parameter in the state dict of an FSDP1 model.
        """
        entries = None if fqn in target.kept else self._included(target, fqn)
        if entries is None:
            return None
        space: dict[str, Any] = {}
        for name, path in entries.items():
            stored = self._metadata.state_dict_metadata[name]
            if not isinstance(stored, TensorStorageMetadata):
                space[name] = None
                continue
            shape = tuple(stored.size)
            memory = expected = _tensor_at(target.made.get(fqn), path)
            if shape and shard is not None and type(shard) not in _torch.PLAIN_TYPES:
                expected = shard
            if expected is not None and tuple(global_shape(expected)) != shape:
                self._partial.refuse_shape(name, tuple(global_shape(expected)), shape)
                return None
            if memory is None:
                memory = self._memory(fqn, path, stored, param if shard is None else shard)
            if path == ("step",) and not shape and _places_steps(target.optimizer):
                # The saved settings tell where it belongs. load_state_dict only moves it from here.
                memory = torch.empty((), dtype=memory.dtype, device="cpu")
            space[name], self._dtypes[name] = memory, memory.dtype
        return space

    def _included(self, target: _Target, fqn: str) -> dict[str, TreePath] | None:
        """Return the entries of a parameter's state to load; None if the state that it has stays.

        Optimizers need a whole state: if the own state lacks an excluded entry, nothing is loaded.
        """
        entries = self._entries(target.keys[fqn])
        if not entries and not self._partial.includes(f"{self._prefix}.{fqn}"):
            return None
        excluded = self._partial.exclude(entries)
        rest = {name: path for name, path in entries.items() if name not in excluded}
        own = target.own.get(fqn)
        lacks = any(get_at(own, entries[name], _MISSING) is _MISSING for name in excluded)
        if excluded and (lacks or not rest):
            self._partial.report.excluded += rest
            return None
        return None if self._partial.incomplete(rest) else rest

    def _entries(self, key: str) -> dict[str, TreePath]:
        """Return the paths of a parameter's entries, by name."""
        return self._state[key].paths if key in self._state else {}

    def _memory(
        self, fqn: str, path: TreePath, stored: TensorStorageMetadata, like: torch.Tensor | None
    ) -> torch.Tensor:
        """Return memory for an entry of which the optimizer has no tensor: like the parameter.

        A scalar, such as a counter, keeps its dtype.
        """
        shape, dtype = tuple(stored.size), stored.properties.dtype
        if like is not None and shape and path != ("step",):
            saved = self._metadata.state_dict_metadata.get(join(_MODEL, fqn))
            if not isinstance(saved, TensorStorageMetadata) or saved.properties.dtype != like.dtype:
                dtype = like.dtype  # state goes with its parameter
            if global_shape(like) == shape:
                return _torch.empty_like(like.detach(), dtype=dtype, device=like.device)
        return torch.empty(shape, dtype=dtype, device="cpu")

    # --- what was loaded

    def _loaded(self, target: _Target, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loaded states of an optimizer's parameters, by FQN.

        Args:
            target: the optimizer. An entry that was not loaded is the one that it has.
            values: the loaded values, by name.

        Raises:
            PlanError: paths contradict each other.
        """
        leaves: list[tuple[int | None, TreePath, Any]] = []
        containers: list[Container] = []
        for fqn, key in target.keys.items():
            if fqn in target.kept or key not in self._state:
                continue
            tree = self._state[key]
            for name, path in tree.paths.items():
                value = values[name] if name in values else get_at(target.own[fqn], path)
                if name in values and name in self._dtypes:
                    value = value.to(self._dtypes[name])
                # DCP stores every key as text.
                own = path if tree.is_exact else _with_keys_of(target.made.get(fqn), path)
                leaves.append((tree.positions[name], (fqn, *own), value))
            containers += [
                Container(c.position, (fqn, *c.path), c.kind)
                for c in self._partial.remaining(tree, f"{self._prefix}.{key}")
            ]
        return nest(leaves, containers)


def _plain_state_dict(target: _Target, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state, by FQN, as an optimizer's ``load_state_dict`` takes it."""
    own = target.optimizer.state_dict()["param_groups"]
    groups = [old | settings_of(group) for group, old in zip(target.groups, own, strict=True)]
    osd = {"state": state, "param_groups": groups}
    return renamed(osd, lambda fqn: target.own_keys.get(fqn, fqn))


def _fsdp1_state_dict(
    model: torch.nn.Module, target: _Target, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state, by FQN, as an optimizer of an FSDP1 model takes it. A collective."""
    names = compiler_names(model)
    osd = renamed({"state": state, "param_groups": target.groups}, lambda fqn: names.get(fqn, fqn))
    with sharded_state_dicts(model):
        flat: dict[str, Any] = FullyShardedDataParallel.optim_state_dict_to_load(
            model,
            target.optimizer,
            osd,
            is_named_optimizer=is_named(target.optimizer.state_dict()),
            group=fsdp1_group(model),
        )
    return flat


def new_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the state that an optimizer without state creates, by parameter or key of its own.

    As in ``get_optimizer_state_dict``, the optimizer makes a step with gradients and learning rates
    of zero. Afterwards it is as it was. For an optimizer that cannot make such a step, the result
    is empty.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    state: dict[Any, Any] = {}
    # Any error may come from the code of the optimizer.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for param in params:
            param.grad = None
        _torch.init_optimizer_state(optimizer)
        state = dict(optimizer.state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    optimizer.state.clear()
    return state


def _with_keys_of(state: Any, path: TreePath) -> TreePath:
    """Return the path with the keys of the state in place of their text."""
    found: list[Any] = []
    for part in path:
        key = part
        if isinstance(state, Mapping) and type(part) is str and part not in state:
            key = next(((key,) for key in state if str(key) == part), part)
        found.append(key)
        state = get_at(state, (key,))
    return tuple(found)


def _places_steps(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has counters of steps on the device of the parameters."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _tensor_at(state: Any, path: TreePath) -> torch.Tensor | None:
    """Return a tensor of a state that can be loaded into; None if there is none."""
    found = get_at(state, path)
    if not isinstance(found, torch.Tensor):
        return None
    # Values that ranks have yet to sum up cannot be loaded.
    is_partial = isinstance(found, DTensor) and any(p.is_partial() for p in found.placements)
    return None if is_partial else found


def _undo_casts(cast: Any, value: Any) -> Any:
    """Return ``cast`` with what ``Optimizer.load_state_dict`` broke taken from ``value``.

    It casts tensors to the dtype of their parameter, so float32 master weights lose bits. It makes
    a ``dict`` of every kind of dict, and text becomes the text of a generator. Dicts change in
    place, but for those that have to be of another kind.
    """
    if isinstance(cast, torch.Tensor) and isinstance(value, torch.Tensor):
        return cast if cast.dtype == value.dtype else value.to(cast.device)
    if isinstance(cast, dict) and isinstance(value, Mapping):
        for key in cast.keys() & value.keys():
            cast[key] = _undo_casts(cast[key], value[key])
        return cast if kind_of(value) == kind_of(cast) else like(value, cast.items())
    if isinstance(cast, list | tuple) and len(cast) == len(value):
        return type(cast)(map(_undo_casts, cast, value))
    return value if isinstance(value, str | bytes) else cast


def _sizes(groups: list[list[Any]]) -> str:
    counts = ", ".join(str(len(group)) for group in groups)
    return f"{len(groups)} group{'s' if groups[1:] else ''} of {counts} parameters"
