"""The optimizer state of a checkpoint: by parameter, into optimizers, for plain, DDP, FSDP1 and FSDP2 modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.errors import PlanError
from dcp_rs.tensors.flatten import get_at
from dcp_rs.tensors.nesting import TreePath
from dcp_rs.tensors.shards import global_shape
from dcp_rs.training.choice import Choice
from dcp_rs.training.optimizers import (
    WHO,
    compiler_names,
    fsdp1_group,
    fsdp1_state,
    is_fsdp1,
    is_named,
    names_by_key,
    parameter_names,
    sharded_state_dicts,
    text_of,
)
from dcp_rs.training.saved_state import Made, SavedState, join, made_state

__all__ = ["SavedOptimizers"]

#: The key of the parameters in the checkpoint.
_MODEL = "model"
#: Stands for what is not in a state.
_MISSING: Any = object()


@dataclass
class _Part:
    """One of the optimizers, and what of the checkpoint is for it.

    Attributes:
        keys: what its parameters, by FQN, go by in the checkpoint.
        groups: for each of its groups the parameters and settings.
        own: the state that it has, by FQN.
        kept: parameters whose state stays.
    """

    optimizer: Optimizer
    number: int
    keys: dict[str, str]
    groups: list[dict[str, Any]]
    own: dict[str, Mapping[Any, Any]]
    kept: set[str]


class SavedOptimizers:
    """The optimizer state in a checkpoint: what is there, memory to load it into, and the way of it into optimizers.

    Args:
        metadata: of the checkpoint.
        key: of the entry that holds it; empty where the checkpoint holds nothing else.
        groups: the parameter groups that were saved.
        choice: what of it is loaded.
    """

    def __init__(
        self, metadata: Metadata, key: str, groups: list[dict[str, Any]], choice: Choice
    ) -> None:
        self._metadata = metadata
        self._groups = groups
        self._choice = choice
        self._prefix = join(key, "state")
        known = {str(param) for group in groups for param in group["params"]}
        self._state = SavedState(metadata, self._prefix, known, choice)
        #: Whether parameters go by their number among those of the optimizer.
        self.by_id = any(isinstance(param, int) for group in groups for param in group["params"])
        base = join(key, "param_groups")
        names = [
            name
            for name in metadata.state_dict_metadata
            if name == base or name.startswith(f"{base}.")
        ]
        self._takes_groups = any(map(choice.wants, names))
        if not self._takes_groups:
            choice.report.excluded += names
        self._parts: list[_Part] = []
        # What was loaded: name in the checkpoint to value.
        self._values: dict[str, Any] = {}

    def template(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        """Memory for all state of the parameters of these optimizers, by name in the checkpoint. To be filled, and kept by the caller.

        Raises:
            PlanError: what is saved is not for these optimizers: other parameters, numbers, groups
                or shapes.
        """
        fsdp1 = is_fsdp1(models[0])
        shards = get_model_state_dict(models[0]) if fsdp1 else {}
        self._values = {}
        self._parts = []
        for number, optimizer in enumerate(optimizers):
            names = parameter_names(models, optimizer, number)
            if not fsdp1:
                names_by_key(models, optimizer, optimizer.state_dict(), number)
            keys = self._saved_keys(optimizer, names, shards)
            kept = set(self._unknown_params(keys, number))
            groups = self._matching_groups(optimizer, names, keys, number)
            own: dict[str, Mapping[Any, Any]] = {}
            if not fsdp1:
                own = {fqns[0]: optimizer.state.get(param, {}) for param, fqns in names}
            elif self._choice.leaves_some:
                own = fsdp1_state(models[0], optimizer)["state"]
            part = _Part(optimizer, number, keys, groups, own, kept)
            self._parts.append(part)
            # A flat parameter stands for several, of which an optimizer knows nothing.
            made = (
                {}
                if fsdp1 or not any(map(self._state.of, keys.values()))
                else made_state(optimizer)
            )
            for param, fqns in names:
                makes = made.get(param, Made())
                rooms: dict[str, dict[str, Any] | None] = {}
                for fqn in fqns:
                    if fqn not in kept:
                        self._state.take_keys(keys[fqn], part.own.get(fqn, {}), makes)
                    entries = (
                        None if fqn in kept else self._chosen(fqn, keys[fqn], part.own.get(fqn, {}))
                    )
                    rooms[fqn] = (
                        None
                        if entries is None
                        else self._room(entries, fqn, shards, param, part, makes)
                    )
                self._take(rooms, kept)
        self._state.warn()
        return self._values

    def fill(self, values: Mapping[str, Any]) -> None:
        """Takes what was loaded, by name in the checkpoint."""
        self._values = {name: values[name] for name in self._values}

    def apply(self, models: Sequence[torch.nn.Module]) -> None:
        """Puts what was loaded into the optimizers that :meth:`template` was given. What was not stays."""
        fsdp1 = is_fsdp1(models[0])
        for part in self._parts:
            if not self._takes_groups and part.kept.issuperset(part.keys):
                continue
            loaded = {
                fqn: key
                for fqn, key in part.keys.items()
                if key in self._state and fqn not in part.kept
            }
            state = self._state.trees(loaded, partial(self._value, part.own))
            if fsdp1:
                stays = {fqn: part.own[fqn] for fqn in part.kept if fqn in part.own}
                self._apply_fsdp1(models[0], part.optimizer, state | stays, part.groups)
            else:
                self._apply_plain(models, part, state)

    def _value(
        self, own: Mapping[str, Mapping[Any, Any]], fqn: str, path: TreePath, name: str
    ) -> Any:
        """What an entry of a parameter's state becomes: what was loaded, else it stays."""
        return self._values[name] if name in self._values else get_at(own[fqn], path)

    def _apply_plain(
        self, models: Sequence[torch.nn.Module], part: _Part, state: dict[str, Any]
    ) -> None:
        osd = part.optimizer.state_dict()
        by_key = names_by_key(models, part.optimizer, osd, part.number)
        kept = {
            key: osd["state"][key]
            for key, fqn in by_key.items()
            if fqn in part.kept and key in osd["state"]
        }
        loaded = {key: state[fqn] for key, fqn in by_key.items() if fqn in state}
        part.optimizer.load_state_dict(
            {
                "state": loaded | kept,
                "param_groups": [
                    group | {who: mine[who] for who in WHO if who in mine}
                    for group, mine in zip(part.groups, osd["param_groups"], strict=True)
                ],
            }
        )

        for number, param in enumerate(
            param for group in part.optimizer.param_groups for param in group["params"]
        ):
            if number in loaded and self._is_of_dtype(by_key[number], param):
                _as_it_was(part.optimizer.state[param], loaded[number])

    def _is_of_dtype(self, fqn: str, param: torch.Tensor) -> bool:
        """Return whether the checkpoint has the parameter in the dtype that it has here."""
        stored = self._metadata.state_dict_metadata.get(join(_MODEL, fqn))
        return isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == param.dtype

    def _apply_fsdp1(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        groups: list[dict[str, Any]],
    ) -> None:
        names = compiler_names(model)
        osd = {
            "state": {names.get(fqn, fqn): value for fqn, value in state.items()},
            "param_groups": [
                group | {"params": [names.get(fqn, fqn) for fqn in group["params"]]}
                for group in groups
            ],
        }
        with sharded_state_dicts(model):
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                model,
                optimizer,
                osd,
                is_named_optimizer=is_named(optimizer.state_dict()),
                group=fsdp1_group(model),
            )
        optimizer.load_state_dict(flat)

    # --- which of the saved parameters are which
    # ----------------------------------------------------

    def _saved_keys(
        self,
        optimizer: Optimizer,
        names: list[tuple[torch.Tensor, list[str]]],
        shards: Mapping[str, Any],
    ) -> dict[str, str]:
        """The names of an optimizer's parameters, and what they go by in the checkpoint.

        Raises:
            PlanError: they go by number, and were in other groups.
        """
        if not self.by_id:
            return {fqn: fqn for _, fqns in names for fqn in fqns}
        fqns_of = {id(param): fqns for param, fqns in names}
        mine = [
            [fqn for p in group["params"] for fqn in fqns_of[id(p)]]
            for group in optimizer.param_groups
        ]
        if any(len(fqns) > 1 for _, fqns in names):
            # Flat parameters: numbers were given before they were flattened, group by group, in the
            # order of the model.
            order = {fqn: place for place, fqn in enumerate(shards)}
            for fqns in mine:
                fqns.sort(key=lambda fqn: order.get(fqn, len(order)))
        saved = [group["params"] for group in self._groups]
        if list(map(len, mine)) != list(map(len, saved)):
            msg = f"the saved optimizer has {_sizes(saved)}, which go by number, and this one has {_sizes(mine)}"
            raise PlanError(msg)
        return {
            fqn: str(key)
            for fqns, ids in zip(mine, saved, strict=True)
            for fqn, key in zip(fqns, ids, strict=True)
        }

    def _unknown_params(self, keys: dict[str, str], number: int) -> list[str]:
        """The parameters that no saved optimizer has.

        Raises:
            PlanError: there are some, and that is an error.
        """
        saved = {str(param) for group in self._groups for param in group["params"]}
        unknown = [fqn for fqn, key in keys.items() if key not in saved]
        missing = [fqn for fqn in unknown if self._choice.wants(f"{self._prefix}.{fqn}")]
        if missing and not self._choice.is_partial:
            more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
            msg = f"optimizer {number} has parameter {missing[0]!r}{more}, which no saved optimizer has"
            raise PlanError(msg, tensor=missing[0])
        self._choice.report.missing += [f"{self._prefix}.{fqn}" for fqn in missing]
        return unknown

    def _matching_groups(
        self,
        optimizer: Optimizer,
        names: list[tuple[torch.Tensor, list[str]]],
        keys: dict[str, str],
        number: int,
    ) -> list[dict[str, Any]]:
        """For each group of the optimizer its parameters, and the settings that they were saved with.

        Raises:
            PlanError: parameters of one group were saved in groups that differ, and that is an
                error.
        """
        group_of = {str(param): group for group in self._groups for param in group["params"]}
        fqns_of = {id(param): fqns for param, fqns in names}
        empty = [group for group in self._groups if not group["params"]]
        matched = []
        for place, group in enumerate(optimizer.param_groups):
            fqns = [fqn for param in group["params"] for fqn in fqns_of[id(param)]]
            own = {k: v for k, v in group.items() if k not in WHO}
            if not self._takes_groups:
                matched.append(own | {"params": fqns})
                continue
            found = {id(g): g for g in (group_of.get(keys[fqn]) for fqn in fqns) if g is not None}
            saved = list(found.values()) or ([] if fqns else empty[:1])
            settings = [{k: v for k, v in g.items() if k not in WHO} for g in saved]
            if not self._choice.is_partial and any(
                text_of(other) != text_of(settings[0]) for other in settings[1:]
            ):
                msg = f"the parameters of group {place} of optimizer {number} were saved in groups with different settings"
                raise PlanError(msg, tensor=fqns[0])
            # Each has settings of its own: a learning rate that is a tensor is changed in place.
            matched.append(
                own | (copy.deepcopy(settings[0]) if settings else {}) | {"params": fqns}
            )
        return matched

    # --- memory
    # -------------------------------------------------------------------------------------

    def _chosen(self, fqn: str, key: str, own: Mapping[Any, Any]) -> dict[TreePath, str] | None:
        """The entries of a parameter's state that are loaded; None where the state that it has is to stay, or that it has none.

        Optimizers take a state for a whole one. So what is left out has to be there, or nothing is
        loaded.
        """
        entries = self._state.of(key)
        if not entries and not self._choice.wants(f"{self._prefix}.{fqn}"):
            return None
        left = self._choice.left_out(entries.values())
        whole = any(
            name in left and get_at(own, path, _MISSING) is _MISSING
            for path, name in entries.items()
        )
        if left and (whole or left.issuperset(entries.values())):
            self._choice.report.excluded += [name for name in entries.values() if name not in left]
            return None
        if self._choice.held_in_part(name for name in entries.values() if name not in left):
            return None
        return {path: name for path, name in entries.items() if name not in left}

    def _take(self, rooms: dict[str, dict[str, Any] | None], kept: set[str]) -> None:
        """Takes the memory for the parameters that are one tensor of the optimizer: several of a flat one, else one.

        The state of a flat parameter cannot come from two steps: if that of one of its parameters
        stays, that of all does.
        """
        if None not in rooms.values():
            for room in rooms.values():
                self._values.update(room or {})
            return
        kept.update(rooms)
        self._choice.report.excluded += [name for room in rooms.values() for name in room or ()]

    def _room(
        self,
        entries: dict[TreePath, str],
        fqn: str,
        shards: Mapping[str, Any],
        param: torch.Tensor,
        part: _Part,
        makes: Made,
    ) -> dict[str, Any] | None:
        """What the state of a parameter is loaded into, by name in the checkpoint; None where it does not fit, and that is no error."""
        room: dict[str, Any] = {}
        for path, name in entries.items():
            stored = self._metadata.state_dict_metadata[name]
            if not isinstance(stored, TensorStorageMetadata):
                room[name] = None
                continue
            shape, dtype = tuple(stored.size), stored.properties.dtype
            if shards:
                like = shards.get(fqn, param)
                is_shard = (
                    shape != () and type(like) not in _torch.PLAIN_TYPES
                )  # of the parameter's shape, in FSDP1
                expected, own = (like if is_shard else None), None
            else:
                like = param
                own = get_at(part.own.get(fqn, {}), path)
                own = expected = own if isinstance(own, torch.Tensor) else None
                if expected is None and path != ("step",):
                    expected = makes.tensors.get(path)
            if expected is not None and tuple(global_shape(expected)) != shape:
                self._choice.refuse(name, tuple(global_shape(expected)), shape)
                return None
            room[name] = own if own is not None else _memory(shape, dtype, path, like, expected)
        return room


def _as_it_was(state: dict[Any, Any], loaded: Mapping[Any, Any]) -> None:
    """Give a parameter's state the dtypes that were saved: ``load_state_dict`` casts it to that of the parameter.

    Fp32 master weights of a parameter in bf16 would lose the bits for which they are there.
    """
    for key, value in loaded.items():
        cast = state.get(key)
        if (
            isinstance(value, torch.Tensor)
            and isinstance(cast, torch.Tensor)
            and cast.dtype != value.dtype
        ):
            state[key] = value.to(cast.device)


def _memory(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    path: TreePath,
    like: Any,
    expected: torch.Tensor | None,
) -> torch.Tensor:
    """New memory for an entry of a parameter's state: as the optimizer makes it (``expected``), if that is known, else as the parameter is."""
    device = _torch.default_device() if like.device.type == "meta" else like.device
    if expected is None and path != ("step",) and global_shape(like) == shape:
        expected = like
    if expected is None or shape == ():
        return torch.empty(shape, dtype=dtype, device="cpu")
    if expected is not like and expected.dtype == dtype and expected.device == device:
        return expected
    return _torch.empty_like(expected.detach(), dtype=dtype, device=device)


def _sizes(groups: list[list[Any]]) -> str:
    """How many parameters are in groups."""
    return f"{len(groups)} group{'s' if groups[1:] else ''} of {', '.join(str(len(group)) for group in groups)} parameters"
