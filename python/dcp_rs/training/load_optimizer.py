"""Optimizer state of a checkpoint, loaded by parameter: plain, DDP, FSDP1 and FSDP2 modules."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.errors import PlanError
from dcp_rs.tensors.flatten import get_at
from dcp_rs.tensors.nesting import Container, TreePath, name_of, nest, remaining
from dcp_rs.tensors.shards import global_shape
from dcp_rs.training.optimizers import (
    PARAMETER_KEYS,
    compiler_names,
    fsdp1_group,
    fsdp1_state,
    is_fsdp1,
    is_named,
    names_by_key,
    parameter_names,
    settings_of,
    sharded_state_dicts,
    to_bytes,
)
from dcp_rs.training.partial_load import PartialLoad
from dcp_rs.training.saved_tree import join, saved_tree

__all__ = ["SavedOptimizers"]

#: The key of the model in the checkpoint.
_MODEL = "model"
_MISSING: Any = object()


@dataclass
class _Target:
    """An optimizer to load into.

    Attributes:
        keys: the keys of its parameters in the checkpoint, by FQN. State that belongs to no
            parameter goes by its own key, here and below.
        groups: the parameters and settings of each of its groups.
        own: the state that it has, by FQN.
        kept: the FQNs of parameters whose state stays.
    """

    optimizer: Optimizer
    number: int
    keys: dict[str, str]
    groups: list[dict[str, Any]]
    own: dict[str, Any]
    kept: set[str]


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
        params = [param for group in groups for param in group["params"]]
        self._known = set(map(str, params))
        self._is_by_number = any(isinstance(param, int) for param in params)
        self._state = _SavedState(metadata, self._prefix, self._known, partial_load)
        base = join(key, "param_groups")
        names = [
            name
            for name in metadata.state_dict_metadata
            if name == base or name.startswith(f"{base}.")
        ]
        self._takes_groups = any(map(partial_load.includes, names))
        if not self._takes_groups:
            partial_load.report.excluded += names
        self._targets: list[_Target] = []
        #: What is loaded, by name in the checkpoint.
        self._values: dict[str, Any] = {}

    def template(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        """Return memory for the state of the optimizers, by name in the checkpoint.

        Raises:
            PlanError: the checkpoint has other parameters, numbers, groups or shapes.
        """
        fsdp1 = is_fsdp1(models[0])
        shards = get_model_state_dict(models[0]) if fsdp1 else {}
        self._values, self._targets = {}, []
        for number, optimizer in enumerate(optimizers):
            names = parameter_names(models, optimizer, number)
            if not fsdp1:
                names_by_key(models, optimizer, optimizer.state_dict(), number)
            keys = self._saved_keys(optimizer, names, shards)
            kept = set(self._unknown_params(keys, number))
            groups = self._matching_groups(optimizer, names, keys, number)
            own: dict[str, Any] = {}
            if not fsdp1:
                own = {fqns[0]: optimizer.state.get(param, {}) for param, fqns in names}
            elif self._partial.may_leave:
                own = fsdp1_state(models[0], optimizer)["state"]
            target = _Target(optimizer, number, keys, groups, own, kept)
            self._targets.append(target)
            # FSDP1 gives an optimizer flat parameters: its own state tells no shapes.
            is_saved = any(map(self._state.entries, keys.values()))
            new = new_state(optimizer) if is_saved and not fsdp1 else {}
            places: list[tuple[Any, torch.Tensor, list[str]]] = [
                (param, param, fqns) for param, fqns in names
            ]
            places += self._other_places(target, new, is_only=not optimizers[1:])
            for place, like, fqns in places:
                spaces = {
                    fqn: self._space(target, fqn, shards, like, new.get(place, {})) for fqn in fqns
                }
                if None in spaces.values():
                    # The state of a flat parameter must not come from two steps: all of it stays.
                    kept.update(spaces)
                    unused = [name for space in spaces.values() for name in space or ()]
                    self._partial.report.excluded += unused
                else:
                    for space in spaces.values():
                        self._values.update(space or {})
        return self._values

    def fill(self, values: Mapping[str, Any]) -> None:
        """Take the loaded values, by name in the checkpoint."""
        self._values = {name: values[name] for name in self._values}

    def apply(self, models: Sequence[torch.nn.Module]) -> None:
        """Put the loaded values into the optimizers. What was not loaded stays."""
        for target in self._targets:
            if not self._takes_groups and target.kept.issuperset(target.keys):
                continue
            loaded = {
                fqn: key
                for fqn, key in target.keys.items()
                if key in self._state and fqn not in target.kept
            }
            state = self._state.trees(loaded, partial(self._value, target.own))
            if is_fsdp1(models[0]):
                stays = {fqn: target.own[fqn] for fqn in target.kept if fqn in target.own}
                self._apply_fsdp1(models[0], target, state | stays)
            else:
                self._apply_plain(models, target, state)

    def _value(self, own: Mapping[str, Any], fqn: str, path: TreePath, name: str) -> Any:
        """Return the loaded value of an entry; the optimizer's own if it was not loaded."""
        return self._values[name] if name in self._values else get_at(own[fqn], path)

    def _apply_plain(
        self, models: Sequence[torch.nn.Module], target: _Target, state: dict[str, Any]
    ) -> None:
        optimizer, osd = target.optimizer, target.optimizer.state_dict()
        names = names_by_key(models, optimizer, osd, target.number)
        names |= {key: key for key in target.keys.keys() - set(names.values())}
        loaded = {key: state[fqn] for key, fqn in names.items() if fqn in state}
        kept = {
            key: osd["state"][key]
            for key, fqn in names.items()
            if fqn in target.kept and key in osd["state"]
        }
        groups = [
            group | {key: own[key] for key in PARAMETER_KEYS if key in own}
            for group, own in zip(target.groups, osd["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": loaded | kept, "param_groups": groups})
        self._undo_casts(models, target, loaded | kept)

    def _undo_casts(
        self, models: Sequence[torch.nn.Module], target: _Target, state: Mapping[Any, Any]
    ) -> None:
        """Give state the dtypes that it had before ``load_state_dict``.

        That casts it to the dtype of its parameter. If the parameter was saved in another dtype,
        the loaded state stays cast.

        Args:
            state: what was passed to ``load_state_dict``, by number of the parameter.
        """
        names = parameter_names(models, target.optimizer, target.number)
        for number, (param, fqns) in enumerate(names):
            if number in state and all(
                fqn in target.kept or self._has_dtype_of(fqn, param) for fqn in fqns
            ):
                _restore_dtypes(target.optimizer.state[param], state[number])

    def _has_dtype_of(self, fqn: str, param: torch.Tensor) -> bool:
        """Return whether the parameter has the same dtype in the checkpoint."""
        stored = self._metadata.state_dict_metadata.get(join(_MODEL, fqn))
        return isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == param.dtype

    def _apply_fsdp1(self, model: torch.nn.Module, target: _Target, state: dict[str, Any]) -> None:
        names = compiler_names(model)
        osd = {
            "state": {names.get(fqn, fqn): value for fqn, value in state.items()},
            "param_groups": [
                group | {"params": [names.get(fqn, fqn) for fqn in group["params"]]}
                for group in target.groups
            ],
        }
        with sharded_state_dicts(model):
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                model,
                target.optimizer,
                osd,
                is_named_optimizer=is_named(target.optimizer.state_dict()),
                group=fsdp1_group(model),
            )
        target.optimizer.load_state_dict(flat)
        self._undo_casts([model], target, flat["state"])

    # --- parameters

    def _saved_keys(
        self,
        optimizer: Optimizer,
        names: list[tuple[torch.Tensor, list[str]]],
        shards: Mapping[str, Any],
    ) -> dict[str, str]:
        """Return the keys of an optimizer's parameters in the checkpoint, by FQN.

        Raises:
            PlanError: the keys are numbers, and the saved groups have other sizes.
        """
        if not self._is_by_number:
            return {fqn: fqn for _, fqns in names for fqn in fqns}
        own = _group_names(optimizer, names)
        if any(len(fqns) > 1 for _, fqns in names):
            # Numbers are older than flat parameters: group by group, in the order of the model.
            order = {fqn: place for place, fqn in enumerate(shards)}
            for fqns in own:
                fqns.sort(key=lambda fqn: order.get(fqn, len(order)))
        saved = [group["params"] for group in self._groups]
        if list(map(len, own)) != list(map(len, saved)):
            msg = (
                f"the saved optimizer has {_sizes(saved)}, which go by number, "
                f"and this one has {_sizes(own)}"
            )
            raise PlanError(msg)
        return {
            fqn: str(key)
            for fqns, keys in zip(own, saved, strict=True)
            for fqn, key in zip(fqns, keys, strict=True)
        }

    def _unknown_params(self, keys: dict[str, str], number: int) -> list[str]:
        """Return the parameters that no saved optimizer has.

        Raises:
            PlanError: there are some, and that is an error.
        """
        unknown = [fqn for fqn, key in keys.items() if key not in self._known]
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

    def _matching_groups(
        self,
        optimizer: Optimizer,
        names: list[tuple[torch.Tensor, list[str]]],
        keys: dict[str, str],
        number: int,
    ) -> list[dict[str, Any]]:
        """Return the parameters and the saved settings of each group of the optimizer.

        Raises:
            PlanError: parameters of one group were saved with different settings, and that is an
                error.
        """
        group_of = {str(param): group for group in self._groups for param in group["params"]}
        empty = [group for group in self._groups if not group["params"]]
        matched = []
        for place, (group, fqns) in enumerate(
            zip(optimizer.param_groups, _group_names(optimizer, names), strict=True)
        ):
            found = {id(g): g for g in (group_of.get(keys[fqn]) for fqn in fqns) if g is not None}
            saved = list(found.values()) or ([] if fqns else empty[:1])
            settings = [settings_of(one) for one in saved] if self._takes_groups else []
            if not self._partial.is_partial and any(
                to_bytes(other) != to_bytes(settings[0]) for other in settings[1:]
            ):
                msg = (
                    f"the parameters of group {place} of optimizer {number} were saved in groups "
                    "with different settings"
                )
                raise PlanError(msg, tensor=fqns[0])
            # A copy for each group: a learning rate that is a tensor changes in place.
            new = copy.deepcopy(settings[0]) if settings else {}
            matched.append(settings_of(group) | new | {"params": fqns})
        return matched

    # --- memory

    def _other_places(
        self, target: _Target, new: Mapping[Any, Any], *, is_only: bool
    ) -> list[tuple[str, torch.Tensor, list[str]]]:
        """Add state that belongs to no parameter, such as MADGRAD's ``k``, to a target.

        The only optimizer takes what is saved. One of several takes what it has, or makes in its
        first step.

        Returns:
            For each key the key, a tensor on its device, and the key in a list, as if it was the
            FQN of a parameter.
        """
        own: Mapping[Any, Any] = target.optimizer.state
        saved = self._state.others if is_only else []
        places = []
        for key in (*saved, *own, *new):
            if not isinstance(key, str) or key in target.keys:
                continue
            target.keys[key] = key
            if key in own:
                target.own[key] = own[key]
            if key not in self._state and self._partial.is_partial:
                target.kept.add(key)
            like = _tensor_at(own.get(key, new.get(key)), ())
            places.append((key, torch.empty((), device="cpu") if like is None else like, [key]))
        return places

    def _space(
        self,
        target: _Target,
        fqn: str,
        shards: Mapping[str, Any],
        param: torch.Tensor,
        new: Any,
    ) -> dict[str, Any] | None:
        """Return memory for a parameter's state, by name; None if the state that it has stays."""
        if fqn in target.kept:
            return None
        own, key = target.own.get(fqn, {}), target.keys[fqn]
        self._state.restore_keys(key, own, new)
        entries = self._included(fqn, key, own)
        if entries is None:
            return None
        space: dict[str, Any] = {}
        for path, name in entries.items():
            stored = self._metadata.state_dict_metadata[name]
            if not isinstance(stored, TensorStorageMetadata):
                space[name] = None
                continue
            shape, dtype = tuple(stored.size), stored.properties.dtype
            like, mine, expected = shards.get(fqn, param), None, None
            if shards:  # FSDP1
                if shape != () and type(like) not in _torch.PLAIN_TYPES:
                    expected = like
            else:
                mine = expected = _tensor_at(own, path)
                if mine is None and path != ("step",):
                    expected = _tensor_at(new, path)
            if expected is not None and tuple(global_shape(expected)) != shape:
                self._partial.refuse_shape(name, tuple(global_shape(expected)), shape)
                return None
            space[name] = mine if mine is not None else _memory(shape, dtype, path, like, expected)
        return space

    def _included(self, fqn: str, key: str, own: Any) -> dict[TreePath, str] | None:
        """Return the entries of a parameter's state to load; None if the state that it has stays.

        Optimizers need a whole state: if the own state lacks an excluded entry, nothing is loaded.
        """
        entries = self._state.entries(key)
        if not entries and not self._partial.includes(f"{self._prefix}.{fqn}"):
            return None
        excluded = self._partial.exclude(entries.values())
        rest = {path: name for path, name in entries.items() if name not in excluded}
        lacks = any(
            get_at(own, path, _MISSING) is _MISSING
            for path, name in entries.items()
            if name in excluded
        )
        if excluded and (lacks or not rest):
            self._partial.report.excluded += rest.values()
            return None
        return None if self._partial.incomplete(rest.values()) else rest


class _SavedState:
    """The entries below ``state`` in a checkpoint, by parameter.

    Args:
        metadata: the metadata of the checkpoint.
        prefix: the name of ``state``.
        parameters: the keys of the parameters.
        partial_load: what is left alone.

    Attributes:
        others: the keys that belong to no parameter.
    """

    def __init__(
        self,
        metadata: Metadata,
        prefix: str,
        parameters: Collection[str],
        partial_load: PartialLoad,
    ) -> None:
        tree = saved_tree(metadata, tuple(prefix.split(".")), parameters, may_be_flat=True)
        self._prefix = prefix
        self._partial = partial_load
        self._positions, self._is_exact = tree.positions, tree.is_exact
        self._entries: dict[str, dict[TreePath, str]] = {}
        self._containers: dict[str, list[Container]] = {}
        for name, path in tree.paths.items():
            self._entries.setdefault(name_of(path[:1]), {})[path[1:]] = name
        for container in tree.containers:
            if container.path:
                key = name_of(container.path[:1])
                self._entries.setdefault(key, {})
                below = Container(container.position, container.path[1:], container.kind)
                self._containers.setdefault(key, []).append(below)
        # A stock save of a pipeline may list the parameters of one rank alone.
        self.others = [
            key
            for key in self._entries
            if key not in parameters and join(_MODEL, key) not in metadata.state_dict_metadata
        ]

    def __contains__(self, key: str) -> bool:
        """Return whether the parameter has a state, which may be empty."""
        return key in self._entries

    def entries(self, key: str) -> dict[TreePath, str]:
        """Return the names of a parameter's entries, by path."""
        return self._entries.get(key, {})

    def restore_keys(self, key: str, *states: Any) -> None:
        """Replace text in the paths of a parameter's entries by the keys of its states.

        DCP stores every key as text.
        """
        if self._is_exact:
            return
        entries = self.entries(key)
        for state in states:
            entries = {_with_keys_of(state, path): name for path, name in entries.items()}
        if entries:
            self._entries[key] = entries

    def trees(
        self, keys: Mapping[str, str], value: Callable[[str, TreePath, str], Any]
    ) -> dict[str, Any]:
        """Return the states of parameters, by FQN.

        Args:
            keys: the keys of the parameters in the checkpoint, by FQN.
            value: returns the value of an entry, given its FQN, path and name.

        Raises:
            PlanError: paths contradict each other.
        """
        leaves: list[tuple[int | None, TreePath, Any]] = []
        containers: list[Container] = []
        for fqn, key in keys.items():
            entries = self.entries(key)
            leaves += [
                (self._positions[name], (fqn, *path), value(fqn, path, name))
                for path, name in entries.items()
            ]
            above = f"{self._prefix}.{key}"
            containers += [
                Container(c.position, (fqn, *c.path), c.kind)
                for c in remaining(
                    self._containers.get(key, ()), entries, partial(self._includes, above)
                )
            ]
        return nest(leaves, containers)

    def _includes(self, above: str, name: str) -> bool:
        return self._partial.includes(join(above, name))


def new_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the state that an optimizer without state creates, by parameter or key of its own.

    As in ``get_optimizer_state_dict``, the optimizer makes a step with gradients and learning rates
    of zero. Afterwards it is as it was. For an optimizer that cannot make such a step, the result
    is empty.
    """
    if optimizer.state:
        return {}
    rates = [group.get("lr") for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    # Any error may come from the code of the optimizer.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for param in params:
            param.grad = None
        _torch.init_optimizer_state(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    state: dict[Any, Any] = dict(optimizer.state)
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


def _tensor_at(state: Any, path: TreePath) -> torch.Tensor | None:
    """Return a tensor of a state that can be loaded into; None if there is none."""
    found = get_at(state, path)
    if not isinstance(found, torch.Tensor):
        return None
    # Values that ranks have yet to sum up cannot be loaded.
    is_partial = isinstance(found, DTensor) and any(p.is_partial() for p in found.placements)
    return None if is_partial else found


def _restore_dtypes(cast: Any, value: Any) -> Any:
    """Return ``cast`` with the tensors of ``value`` where dtypes differ. Dicts change in place.

    Float32 master weights of a bfloat16 parameter would lose bits.
    """
    if isinstance(cast, torch.Tensor) and isinstance(value, torch.Tensor):
        return cast if cast.dtype == value.dtype else value.to(cast.device)
    if isinstance(cast, dict) and isinstance(value, Mapping):
        for key in cast.keys() & value.keys():
            cast[key] = _restore_dtypes(cast[key], value[key])
    elif isinstance(cast, list | tuple) and len(cast) == len(value):
        return type(cast)(map(_restore_dtypes, cast, value))
    return cast


def _memory(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    path: TreePath,
    like: Any,
    expected: torch.Tensor | None,
) -> torch.Tensor:
    """Return memory for an entry: like ``expected``, if that is known, else like the parameter."""
    device = _torch.default_device() if like.device.type == "meta" else like.device
    if expected is None and path != ("step",) and global_shape(like) == shape:
        expected = like
    if expected is None or shape == ():
        return torch.empty(shape, dtype=dtype, device="cpu")
    if expected is not like and expected.dtype == dtype and expected.device == device:
        return expected
    return _torch.empty_like(expected.detach(), dtype=dtype, device=device)


def _group_names(
    optimizer: Optimizer, names: list[tuple[torch.Tensor, list[str]]]
) -> list[list[str]]:
    """Return the FQNs of the parameters of each group."""
    fqns_of = {id(param): fqns for param, fqns in names}
    return [
        [fqn for param in group["params"] for fqn in fqns_of[id(param)]]
        for group in optimizer.param_groups
    ]


def _sizes(groups: list[list[Any]]) -> str:
    counts = ", ".join(str(len(group)) for group in groups)
    return f"{len(groups)} group{'s' if groups[1:] else ''} of {counts} parameters"
