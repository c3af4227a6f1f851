"""Optimizer state of a checkpoint, loaded by parameter: plain, DDP, FSDP1 and FSDP2 modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.tensors.flatten import get_at
from dcp_rs.tensors.nesting import TreePath, kind_of, like
from dcp_rs.tensors.shards import global_shape
from dcp_rs.training.match_optimizer import OptimizerMatcher, Target
from dcp_rs.training.optimizers import (
    compiler_names,
    fsdp1_group,
    fsdp1_state,
    is_fsdp1,
    is_named,
    renamed,
    settings_of,
    sharded_state_dicts,
)
from dcp_rs.training.saved_optimizers import SavedOptimizers
from dcp_rs.training.saved_tree import as_in, join
from dcp_rs.training.schedulers import GroupPlaces
from dcp_rs.training.settings import KeepSettings, Slot, check_kept
from dcp_rs.training.sources import MODEL


class OptimizerLoad:
    """A load of saved optimizer state into optimizers.

    Args:
        saved: the saved state.
        models: the modules that have the parameters.
        optimizers: the optimizers.
        keep: the settings of the optimizers that stay.

    Attributes:
        template: memory for the state, by name in the checkpoint.

    Raises:
        PlanError: the checkpoint has other parameters, numbers, groups, settings, kinds of state or
            shapes.
    """

    def __init__(
        self,
        saved: SavedOptimizers,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Optimizer],
        keep: KeepSettings = False,
    ) -> None:
        self._saved, self._partial = saved, saved.partial_load
        self._fsdp1 = models[0] if is_fsdp1(models[0]) else None
        check_kept([group for one in optimizers for group in one.param_groups], keep)
        matcher = OptimizerMatcher(saved, keep, models, self._fsdp1)
        self._targets: list[Target] = []
        #: The dtypes of the memory for state, by name. The load may cast to another dtype.
        self._dtypes: dict[str, torch.dtype] = {}
        self.template: dict[str, Any] = {}
        for number, optimizer in enumerate(optimizers):
            target = matcher.match(optimizer, number, is_only=len(optimizers) == 1)
            self._targets.append(target)
            for slots in target.slots:
                spaces = [self._space(slot, optimizer) for slot in slots]
                found = {name: space[name] for space in spaces if space for name in space}
                if None in spaces:
                    # The state of a flat parameter must not come from two steps: all of it stays.
                    for slot in slots:
                        slot.stays = True
                    self._partial.report.excluded += found
                else:
                    self.template |= found

    def places(self, optimizer: Any) -> GroupPlaces | None:
        """Return the saved groups of an optimizer's groups.

        It is None if one of them was not saved, or if the load leaves this optimizer alone.
        """
        for target in self._targets:
            if target.optimizer is optimizer and target.places and None not in target.places:
                places = [place for place in target.places if place is not None]
                return GroupPlaces(places, len(self._saved.groups))
        return None

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Put the loaded values, by name in the checkpoint, into the optimizers.

        What was not loaded stays.
        """
        for target in self._targets:
            slots = list(itertools.chain.from_iterable(target.slots))
            if not any(self._saved.groups) and all(slot.stays for slot in slots):
                continue
            state = {
                slot.fqn: self._state(slot, loaded)
                for slot in slots
                if not slot.stays and (slot.tree.paths or slot.tree.containers)
            }
            kept = [slot.fqn for slot in slots if slot.stays]
            to_load = (
                _plain_state_dict(target, state, kept)
                if self._fsdp1 is None
                else self._fsdp1_state_dict(self._fsdp1, target, state, kept)
            )
            if _torch.loads_by_itself(target.optimizer):
                # It looks in them for the parameter of each tensor, which is slow in a list. In the
                # end it keeps its own lists.
                for group in to_load["param_groups"]:
                    group["params"] = dict.fromkeys(group["params"])
            target.optimizer.load_state_dict(to_load)
            if target.is_converted:
                continue
            for number, (slot, *_) in enumerate(target.slots):
                if slot.param is not None and number in to_load["state"]:
                    _undo_casts(target.optimizer.state[slot.param], to_load["state"][number])

    def _space(self, slot: Slot, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return memory for a slot, by name; None if the state that the optimizer has stays."""
        paths, place = slot.tree.paths, f"{self._saved.prefix}.{slot.fqn}"
        usual = [".".join((place, *map(str, path))) for path in paths.values()]
        if slot.stays or not self._partial.takes(list(paths), usual or [place]):
            return None
        space: dict[str, Any] = {}
        for name, path in paths.items():
            stored = self._saved.infos[name]
            if stored.dtype is None:
                space[name] = None
                continue
            shape = stored.shape
            memory = expected = _tensor_at(slot.made, path)
            if shape and slot.shard is not None and type(slot.shard) not in _torch.PLAIN_TYPES:
                expected = slot.shard
            if expected is not None and tuple(global_shape(expected)) != shape:
                shown = tuple(global_shape(expected))
                self._partial.refuse_shape(name, shown, shape, "the optimizer")
                return None
            if memory is None:
                memory = self._memory(slot, path, shape, stored.dtype)
            if path == ("step",) and not shape and _places_steps(optimizer):
                # The saved settings tell where it belongs. load_state_dict only moves it from here.
                memory = torch.empty((), dtype=memory.dtype, device="cpu")
            space[name], self._dtypes[name] = memory, memory.dtype
        return space

    def _memory(
        self, slot: Slot, path: TreePath, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return memory for an entry of which the optimizer has no tensor: like the parameter.

        A scalar, such as a counter, keeps its dtype.
        """
        like = slot.param if slot.shard is None else slot.shard
        if like is not None and shape and path != ("step",):
            model = self._partial.part.entries.find([join(MODEL, slot.fqn)]).get(
                join(MODEL, slot.fqn)
            )
            if model is None or model.dtype != like.dtype:
                dtype = like.dtype  # state goes with its parameter
            if global_shape(like) == shape:
                return _torch.empty_like(like.detach(), dtype=dtype, device=like.device)
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _state(self, slot: Slot, loaded: Mapping[str, Any]) -> Any:
        """Return the loaded state of a slot.

        Raises:
            PlanError: paths contradict each other.
        """
        values = {
            name: loaded[name].to(self._dtypes[name]) if name in self._dtypes else loaded[name]
            for name in slot.tree.paths
        }
        state = slot.tree.build(values)
        return state if slot.tree.is_exact else as_in(slot.made, state)

    def _fsdp1_state_dict(
        self,
        model: torch.nn.Module,
        target: Target,
        state: Mapping[str, Any],
        kept: Iterable[str],
    ) -> dict[str, Any]:
        """Return the state, by FQN, as an optimizer of an FSDP1 model takes it. A collective."""
        own: dict[str, Any] = {}
        if self._partial.may_leave:
            own = fsdp1_state(model, target.optimizer, target.number)["state"]
        state = {fqn: own[fqn] for fqn in kept if fqn in own} | {**state}
        names = compiler_names(model)
        osd = renamed(
            {"state": state, "param_groups": target.groups}, lambda fqn: names.get(fqn, fqn)
        )
        with sharded_state_dicts(model):
            flat: dict[str, Any] = FullyShardedDataParallel.optim_state_dict_to_load(
                model,
                target.optimizer,
                osd,
                is_named_optimizer=is_named(target.optimizer.state_dict()),
                group=fsdp1_group(model),
            )
        return flat


def _plain_state_dict(
    target: Target, state: Mapping[str, Any], kept: Iterable[str]
) -> dict[str, Any]:
    """Return the state, by FQN, and what stays as an optimizer's ``load_state_dict`` takes them."""
    osd, keys = target.optimizer.state_dict(), target.own_keys
    groups = zip(target.groups, osd["param_groups"], strict=True)
    new = renamed(
        {"state": state, "param_groups": [old | settings_of(group) for group, old in groups]},
        lambda fqn: keys.get(fqn, fqn),
    )
    own = (keys.get(fqn, fqn) for fqn in kept)
    new["state"] |= {key: osd["state"][key] for key in own if key in osd["state"]}
    return new


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
