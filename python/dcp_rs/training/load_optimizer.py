"""Optimizer state of a checkpoint, loaded by parameter: plain, DDP, FSDP1 and FSDP2 modules."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.checkpoint.names import explain_prefix
from dcp_rs.errors import PlanError
from dcp_rs.options import Rename
from dcp_rs.tensors.flatten import get_at
from dcp_rs.tensors.nesting import Container, TreePath, kind_of, like, nest
from dcp_rs.tensors.shards import global_shape
from dcp_rs.training.extra import EXTRA, RngState
from dcp_rs.training.names import StoredNames
from dcp_rs.training.optimizers import (
    compiler_names,
    fqns_by_parameter,
    fsdp1_group,
    fsdp1_state,
    is_fsdp1,
    is_named,
    names_by_key,
    own_state_dict,
    parameter_names,
    renamed,
    settings_of,
    sharded_state_dicts,
)
from dcp_rs.training.partial_load import PartialLoad
from dcp_rs.training.saved_tree import SavedTree, build_tree, join, path_of
from dcp_rs.training.schedulers import GroupPlaces
from dcp_rs.training.settings import (
    GroupSettings,
    KeepSettings,
    check_kept,
    check_kinds,
    check_stateless,
    is_of_torch,
    match_empty,
    warn_of_replaced,
)
from dcp_rs.training.sources import MODEL

_MISSING: Any = object()
#: The state of a parameter that the checkpoint does not have.
_NOTHING = SavedTree()


@dataclass
class _Slot:
    """State of one parameter, or of one key that belongs to no parameter.

    Attributes:
        fqn: the parameter, or the key.
        key: its key in the checkpoint.
        tree: what the checkpoint has of it.
        param: the parameter, if it is of one.
        shard: the parameter in the state dict of an FSDP1 model.
        made: the state that the optimizer has or, if it has none, makes in its first step, as its
            ``state_dict()`` returns it. Of a parameter of FSDP1 there is none: it is flat.
        own: the state that it has.
        kinds: the kinds of that state, or of what its next step makes; None if they are not known.
        stays: the load leaves it as it is.
    """

    fqn: str
    key: str
    tree: SavedTree
    param: torch.Tensor | None = None
    shard: Any = None
    made: Any = None
    own: Any = None
    kinds: set[str] | None = None
    stays: bool = False


@dataclass
class _Group:
    """A group of an optimizer: its settings, and the state of its parameters."""

    settings: GroupSettings
    slots: list[_Slot]

    @property
    def stays(self) -> bool:
        """True if the state of all of its parameters stays."""
        return all(slot.stays for slot in self.slots)

    def after_load(self) -> dict[str, Any]:
        """Return the parameters and settings of the group after the load."""
        stays = self.slots and self.stays
        settings = self.settings.own if stays else self.settings.chosen()
        return settings | {"params": [slot.fqn for slot in self.slots]}


@dataclass
class _Target:
    """An optimizer to load into.

    Attributes:
        slots: the slots of each parameter, and of each other key. A flat parameter has several.
        own_keys: the keys of its parameters in its own state dict, by FQN; empty for FSDP1.
        groups: the parameters and settings of each of its groups after the load.
        places: the number of the saved group of each of its groups; None if there is none.
        is_converted: its ``state_dict()`` has other dtypes or shapes than its ``state``.
    """

    optimizer: Optimizer
    slots: list[list[_Slot]]
    own_keys: dict[str, Any]
    groups: list[dict[str, Any]]
    places: list[int | None]
    is_converted: bool


def saved_optimizers(
    partial_load: PartialLoad,
    *,
    keep: KeepSettings = False,
    needed: bool = False,
    rename: Rename = None,
) -> SavedOptimizers | None:
    """Return the optimizer state under a key; None if there is none, or the load excludes it.

    Args:
        partial_load: the place of the state, and what is left alone.
        keep: the settings of the optimizers that stay.
        needed: raise if there is no state, in a partial load too.
        rename: as for :func:`dcp_rs.load`, of names of parameters below ``model``.

    Raises:
        PlanError: there is none, and that is an error. Or what is there has no parameter groups.
    """
    part = partial_load.part
    entries, key = part.entries, part.prefix
    base = join(key, "param_groups")
    names = [name for name in entries.below(key) if name != key]
    if not any(map(partial_load.includes, names or [base])):
        partial_load.exclude(names)
        return None
    tree = entries.tree(path_of(base), may_be_flat=True)
    if tree.paths:
        leaves = [
            (tree.positions[name], path, part.read(name)) for name, path in tree.paths.items()
        ]
        groups = _groups(build_tree(leaves, tree.containers), base)
        if not any(map(partial_load.includes, tree.paths)):
            partial_load.report.excluded += tree.paths
            groups = [{"params": group["params"]} for group in groups]
        return SavedOptimizers(groups, partial_load, keep, rename, is_alone=needed)
    if partial_load.is_partial and not needed:
        partial_load.report.missing.append(key)
        return None
    if part.reader.source == "safetensors":
        msg = "the checkpoint holds a model alone: load it without an optimizer"
        raise PlanError(msg, tensor=base)
    msg = f"the checkpoint has no optimizer state under {key!r}: there is no {base!r}"
    above = (f".{name}".partition(".param_groups") for name in entries.names)
    other = next((before.removeprefix(".") for before, found, _ in above if found), None)
    if other is not None and other.startswith(f"{EXTRA}."):
        entry = other.split(".")[1]
        msg += (
            f". There is one under {other!r}: load it as it was saved, in extra={{{entry!r}: ...}}"
        )
    elif other is not None:
        msg += (
            f". There is one under {other!r}: pass names={{'optimizer': {other!r}}}, or "
            f"load_optim_state_dict(..., key={other!r})"
        )
    elif not needed:
        msg += ". To load the rest, pass partial={'optimizer'}, or no optimizer"
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
        groups: the saved parameter groups.
        partial_load: the place of the state, and what is left alone.
        keep: the settings of the optimizers that stay.
        rename: a renaming of parameters.
        is_alone: no model is loaded beside it.

    Attributes:
        part: the place of the state.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        partial_load: PartialLoad,
        keep: KeepSettings,
        rename: Rename,
        *,
        is_alone: bool,
    ) -> None:
        self.part = partial_load.part
        self._is_alone = is_alone
        self._saved = entries = self.part.entries
        self._groups = groups
        self._partial = partial_load
        self._keep = keep
        self._prefix = join(self.part.prefix, "state")
        of_groups = list(map(settings_of, groups))
        #: The number of each saved group, by the id of its settings.
        self._places = {id(settings): place for place, settings in enumerate(of_groups)}
        #: The settings of the group of each saved parameter.
        self._settings: dict[str, dict[str, Any]] = {}
        #: Those of the groups without parameters.
        self._empty: list[dict[str, Any]] = []
        for group, settings in zip(groups, of_groups, strict=True):
            self._settings |= dict.fromkeys(map(str, group["params"]), settings)
            if not group["params"]:
                self._empty.append(settings)
        self._rename = rename
        self._names = StoredNames(self._settings, rename)
        whole = entries.tree(path_of(self._prefix), self._settings, may_be_flat=True)
        #: The state of each parameter, and of each key that belongs to none.
        self._state = whole.by_key()
        self._infos = entries.find(whole.paths)
        self._takes_groups = any(map(settings_of, groups))
        #: The dtypes of the memory for state, by name. The load may cast to another dtype.
        self._dtypes: dict[str, torch.dtype] = {}
        self._model: torch.nn.Module | None = None  # if it is of FSDP1
        self._targets: list[_Target] = []

    def template(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        """Return memory for the state of the optimizers, by name in the checkpoint.

        Raises:
            PlanError: the checkpoint has other parameters, numbers, groups, settings, kinds of
                state or shapes.
        """
        self._model = models[0] if is_fsdp1(models[0]) else None
        check_kept([group for one in optimizers for group in one.param_groups], self._keep)
        fqns_of = fqns_by_parameter(models)
        shards = {} if self._model is None else get_model_state_dict(self._model)
        values: dict[str, Any] = {}
        for number, optimizer in enumerate(optimizers):
            names = parameter_names(fqns_of, optimizer, number)
            is_only = len(optimizers) == 1
            self._targets.append(self._target(optimizer, names, number, shards, is_only=is_only))
            for slots in self._targets[-1].slots:
                spaces = [self._space(slot, optimizer) for slot in slots]
                found = {name: space[name] for space in spaces if space for name in space}
                if None in spaces:
                    # The state of a flat parameter must not come from two steps: all of it stays.
                    for slot in slots:
                        slot.stays = True
                    self._partial.report.excluded += found
                else:
                    values |= found
        return values

    def places(self, optimizer: Any) -> GroupPlaces | None:
        """Return the saved groups of an optimizer's groups.

        It is None if one of them was not saved, or if the load leaves this optimizer alone.
        """
        for target in self._targets:
            if target.optimizer is optimizer and target.places and None not in target.places:
                places = [place for place in target.places if place is not None]
                return GroupPlaces(places, len(self._groups))
        return None

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Put the loaded values, by name in the checkpoint, into the optimizers.

        What was not loaded stays.
        """
        for target in self._targets:
            slots = list(itertools.chain.from_iterable(target.slots))
            if not self._takes_groups and all(slot.stays for slot in slots):
                continue
            state = self._loaded(slots, loaded)
            state |= {slot.fqn: slot.own for slot in slots if slot.stays and slot.own is not None}
            to_load = (
                _plain_state_dict(target, state)
                if self._model is None
                else _fsdp1_state_dict(self._model, target, state)
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

    # --- parameters

    def _target(
        self,
        optimizer: Optimizer,
        names: list[tuple[torch.Tensor, list[str]]],
        number: int,
        shards: Mapping[str, Any],
        *,
        is_only: bool,
    ) -> _Target:
        """Match an optimizer with the saved parameters and groups.

        Args:
            optimizer: the optimizer.
            names: its parameters with their FQNs.
            number: its number, for messages.
            shards: the state dict of an FSDP1 model.
            is_only: there is no other optimizer.

        Raises:
            PlanError: the checkpoint has other parameters, numbers, groups or kinds of state.
        """
        model, is_new = self._model, not optimizer.state
        slots = [
            [_Slot(fqn, fqn, _NOTHING, param, shards.get(fqn)) for fqn in fqns]
            for param, fqns in names
        ]
        of_parameters = iter(slots)
        members = [
            [slot for _ in group["params"] for slot in next(of_parameters)]
            for group in optimizer.param_groups
        ]
        self._find_saved(members, list(shards) if any(several[1:] for several in slots) else [])
        known = {slot.fqn: slot for group in members for slot in group}
        self._check_known(known.values(), number)
        groups = self._match_groups(optimizer, members, number)
        needed = any(slot.tree.paths for slot in known.values())
        needed |= any(group.settings.replaced() for group in groups)
        made: dict[str, Any] = {}
        own_keys: dict[str, Any] = {}
        with _with_state(optimizer, needed=needed) as makes_state:
            state: Mapping[Any, Any] = dict(optimizer.state)
            if model is None:
                osd = own_state_dict(optimizer, number)
                by_key = names_by_key(names, osd, number)
                own_keys = {fqn: key for key, fqn in by_key.items()}
                made = {by_key.get(key, key): value for key, value in osd["state"].items()}
        is_converted = False
        for (param, _), several in zip(names, slots, strict=True):
            for slot in several:
                slot.made = made.get(slot.fqn)
                if param in state or (is_new and makes_state and param.requires_grad):
                    slot.kinds = _kinds(slot.made if model is None else state.get(param))
            is_converted |= _is_other(state.get(param), several[0].made)
        for group in groups:
            self._check_kinds(optimizer, group)
        if self._takes_groups:
            taken = [group.settings for group in groups if not group.stays]
            warn_of_replaced(taken, optimizer)
        after = [group.after_load() for group in groups]
        others = {
            key: value for key, value in made.items() if isinstance(key, str) and key not in known
        }
        slots += [[slot] for slot in self._other_slots(others, known, is_only=is_only)]
        own: Mapping[str, Any] = {}
        if model is not None and self._partial.may_leave:
            own = fsdp1_state(model, optimizer, number)["state"]
        for slot in itertools.chain.from_iterable(slots):
            slot.own = slot.made if model is None and not is_new else own.get(slot.fqn)
        saved = [group.settings.saved for group in groups]
        places = [self._places[id(several[0])] if several else None for several in saved]
        return _Target(optimizer, slots, own_keys, after, places, is_converted)

    def _match_groups(
        self, optimizer: Optimizer, members: list[list[_Slot]], number: int
    ) -> list[_Group]:
        """Return the groups of an optimizer.

        Raises:
            PlanError: nothing tells which saved settings a group gets, and that is an error.
        """
        pairs = list(zip(optimizer.param_groups, members, strict=True))
        empty = [group for group, slots in pairs if not slots]
        of_empty = iter(match_empty(empty, self._empty, self._keep))
        groups: list[_Group] = []
        for place, (group, slots) in enumerate(pairs):
            found = [self._settings[slot.key] for slot in slots if slot.key in self._settings]
            saved = list({id(one): one for one in found}.values()) if slots else next(of_empty)
            shown = f"group {place} of optimizer {number}"
            groups.append(
                _Group(GroupSettings(shown, settings_of(group), saved, self._keep), slots)
            )
        problems = [(group.settings, group.settings.contradiction()) for group in groups]
        first: dict[int, GroupSettings] = {}
        for own in (group.settings for group in groups):
            firsts = [first.setdefault(id(saved), own) for saved in own.saved]
            others = {id(other): other for other in firsts if other is not own}
            problems += [(own, other.differs_from(own)) for other in others.values()]
        for own, problem in problems:
            if problem is not None and not self._partial.is_partial:
                raise PlanError(problem)
            if problem is not None:
                own.saved = []
        return groups

    def _check_kinds(self, optimizer: Optimizer, group: _Group) -> None:
        """Leave the state of parameters of a group that is of other kinds in the checkpoint.

        Raises:
            PlanError: there are some, and that is an error.
        """
        is_stateless = not any(slot.tree.paths for slot in group.slots)
        is_new = not optimizer.state
        # If one side has no state, the settings tell whether the optimizers are of one kind.
        makes_state = is_stateless and any(slot.kinds for slot in group.slots)
        other_kind = check_stateless(group.settings, optimizer, makes_state=makes_state)
        for slot in group.slots:
            saved, own, place = slot.tree.keys(), slot.kinds, f"{self._prefix}.{slot.fqn}"
            if saved and own is not None:
                problem = check_kinds(
                    slot.fqn, saved, own, group.settings, optimizer, is_new=is_new
                )
            else:
                problem = other_kind if saved or is_stateless else None
            if problem is None or not self._partial.includes(place):
                continue
            if not self._partial.is_partial:
                raise PlanError(problem, tensor=slot.fqn)
            slot.stays = True
            lacks = sorted((own or set()) - saved)
            self._partial.report.missing += [f"{place}.{kind}" for kind in lacks]

    def _find_saved(self, groups: list[list[_Slot]], order: list[str]) -> None:
        """Find the keys and the state of an optimizer's parameters in the checkpoint.

        Args:
            groups: the parameters of each of its groups.
            order: the FQNs in the order of the model, if the optimizer has flat parameters.

        Raises:
            PlanError: the keys are numbers, and the saved groups have other sizes.
        """
        saved = [group["params"] for group in self._groups]
        by_number = any(isinstance(key, int) for keys in saved for key in keys)
        if by_number and self._find_by_names(groups):
            return
        if by_number and list(map(len, groups)) != list(map(len, saved)):
            msg = (
                f"the saved optimizer has {_sizes(saved)}, which go by number, "
                f"and this one has {_sizes(groups)}"
            )
            raise PlanError(msg)
        # Numbers are older than flat parameters: group by group, in the order of the model.
        place = {fqn: number for number, fqn in enumerate(order)}
        for number, slots in enumerate(groups):
            in_order = sorted(slots, key=lambda slot: place.get(slot.fqn, len(place)))
            for at, slot in enumerate(in_order):
                slot.key = (
                    str(saved[number][at]) if by_number else self._names.find(slot.fqn) or slot.fqn
                )
                slot.tree = self._state.get(slot.key, _NOTHING)

    def _find_by_names(self, groups: list[list[_Slot]]) -> bool:
        """Find keys that are numbers by the names that an optimizer of named parameters saves.

        Returns:
            Whether it was saved with names, and has one for each of these parameters.
        """
        keys = {
            str(name): str(key)
            for group in self._groups
            for key, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        names = StoredNames(keys, self._rename)
        found = [(slot, names.find(slot.fqn)) for slots in groups for slot in slots]
        if not keys or any(name is None for _, name in found):
            return False
        for slot, name in found:
            slot.key = keys[str(name)]
            slot.tree = self._state.get(slot.key, _NOTHING)
        return True

    def _check_known(self, slots: Iterable[_Slot], number: int) -> None:
        """Leave the state of parameters that no saved optimizer has.

        Raises:
            PlanError: there are some, and that is an error.
        """
        fqns: list[str] = []
        missing: list[str] = []
        for slot in slots:
            fqns.append(slot.fqn)
            if slot.key not in self._settings:
                slot.stays = True
                if self._partial.includes(f"{self._prefix}.{slot.fqn}"):
                    missing.append(slot.fqn)
        if missing and not self._partial.is_partial:
            more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
            msg = (
                f"optimizer {number} has parameter {missing[0]!r}{more}, "
                f"which no saved optimizer has{self._advice(missing, fqns)}"
            )
            raise PlanError(msg, tensor=missing[0])
        self._partial.report.missing += [f"{self._prefix}.{fqn}" for fqn in missing]

    def _advice(self, missing: list[str], fqns: list[str]) -> str:
        """Return the end of a message about parameters that no saved optimizer has."""

        def of_model(names: Iterable[str]) -> list[str]:
            return [join(MODEL, name) for name in names]

        names = of_model(missing)
        if not self._is_alone and not any(name in self._saved for name in names):
            if prefix := explain_prefix(names, of_model(fqns), of_model(self._settings)):
                return f"; {prefix}"
            return (
                ". If the model has new parameters, pass partial={'model', 'optimizer'}: they "
                "keep their values, and have no state"
            )
        return ". To leave the state of such parameters as it is, pass partial={'optimizer'}"

    # --- memory

    def _other_slots(
        self, made: Mapping[str, Any], known: Collection[str], *, is_only: bool
    ) -> list[_Slot]:
        """Return slots for state that belongs to no parameter, such as MADGRAD's ``k``.

        The only optimizer takes what is saved. One of several takes what it has, or makes in its
        first step.

        Args:
            made: the state that the optimizer has or makes of keys that are no parameters.
            known: the parameters of the optimizer.
            is_only: there is no other optimizer.
        """
        # A stock save of a pipeline may list the parameters of one rank alone.
        saved = [
            key
            for key in (self._state if is_only else ())
            if not (key in self._settings or key in known or join(MODEL, key) in self._saved)
        ]
        slots = []
        for key in dict.fromkeys([*saved, *made]):
            slot = _Slot(key, key, self._state.get(key, _NOTHING), made=made.get(key))
            slot.stays = self._partial.is_partial and key not in self._state
            slots.append(slot)
        return slots

    def _space(self, slot: _Slot, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return memory for a slot, by name; None if the state that the optimizer has stays."""
        paths = None if slot.stays else self._included(slot)
        if paths is None:
            return None
        space: dict[str, Any] = {}
        for name, path in paths.items():
            stored = self._infos[name]
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

    def _included(self, slot: _Slot) -> dict[str, TreePath] | None:
        """Return the entries of a slot to load; None if the state that the optimizer has stays.

        Optimizers need a whole state: if the own state lacks an excluded entry, nothing is loaded.
        """
        paths = slot.tree.paths
        if not self._partial.may_leave:
            return paths
        if not paths and not self._partial.includes(f"{self._prefix}.{slot.fqn}"):
            return None
        excluded = self._partial.exclude(paths)
        rest = {name: path for name, path in paths.items() if name not in excluded}
        lacks = any(get_at(slot.own, paths[name], _MISSING) is _MISSING for name in excluded)
        if excluded and (lacks or not rest):
            self._partial.report.excluded += rest
            return None
        return None if self._partial.incomplete(rest) else rest

    def _memory(
        self, slot: _Slot, path: TreePath, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return memory for an entry of which the optimizer has no tensor: like the parameter.

        A scalar, such as a counter, keeps its dtype.
        """
        like = slot.param if slot.shard is None else slot.shard
        if like is not None and shape and path != ("step",):
            model = self._saved.find([join(MODEL, slot.fqn)]).get(join(MODEL, slot.fqn))
            if model is None or model.dtype != like.dtype:
                dtype = like.dtype  # state goes with its parameter
            if global_shape(like) == shape:
                return _torch.empty_like(like.detach(), dtype=dtype, device=like.device)
        return torch.empty(shape, dtype=dtype, device="cpu")

    # --- what was loaded

    def _loaded(self, slots: list[_Slot], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loaded states of an optimizer's parameters, by FQN.

        Args:
            slots: those of the optimizer. An entry that was not loaded is the one that it has.
            values: the loaded values, by name.

        Raises:
            PlanError: paths contradict each other.
        """
        leaves: list[tuple[int | None, TreePath, Any]] = []
        containers: list[Container] = []
        for slot in slots:
            if slot.stays:
                continue
            tree = slot.tree
            for name, path in tree.paths.items():
                value = values[name] if name in values else get_at(slot.own, path)
                dtype = self._dtypes.get(name)
                if name in values and dtype is not None and value.dtype != dtype:
                    value = value.to(dtype)
                # DCP stores every key as text.
                own = path if tree.is_exact else _with_keys_of(slot.made, path)
                leaves.append((tree.positions[name], (slot.fqn, *own), value))
            containers += [
                Container(c.position, (slot.fqn, *c.path), c.kind)
                for c in self._partial.remaining(tree, f"{self._prefix}.{slot.key}")
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


@contextlib.contextmanager
def _with_state(optimizer: Optimizer, *, needed: bool) -> Iterator[bool]:
    """Give an optimizer without state, within this context, the state that its first step makes.

    As in ``get_optimizer_state_dict``, it makes a step with gradients and learning rates of zero.
    Afterwards it is as it was, and so are the random number generators.

    Args:
        optimizer: the optimizer.
        needed: make that state.

    Yields:
        Whether the optimizer has its state: it had some, or could make such a step.
    """
    if optimizer.state or not needed:
        yield needed
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    random_state = RngState().state_dict()
    is_made = False
    try:
        # Any error may come from the code of the optimizer.
        with contextlib.suppress(Exception), _unchanged(optimizer, params):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _make_state(optimizer, params)
            is_made = True
        if not is_made:
            optimizer.state.clear()
        yield is_made
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.state.clear()
        RngState().load_state_dict(random_state)


@contextlib.contextmanager
def _unchanged(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Undo, after this context, what a step changed apart from the state and the gradients.

    The step of an optimizer that is not torch's may change parameters at a learning rate of zero,
    and count in its groups and attributes. No hooks are called: the step is not one of the job.
    """
    groups = [dict(group) for group in optimizer.param_groups]
    attributes = dict(vars(optimizer))
    changing = () if is_of_torch(optimizer) else params
    values = [param.detach().clone() for param in changing]
    _torch.drop_step_hooks(optimizer)
    try:
        yield
    finally:
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(settings)
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        with torch.no_grad():
            for param, value in zip(changing, values, strict=True):
                param.copy_(value)


def _make_state(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """Make the state of an optimizer, by a step with gradients and learning rates of zero."""
    for group in optimizer.param_groups:
        if "lr" in group:
            rate = group["lr"]
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    trained = [param for param in params if param.requires_grad]
    for param in params:
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    try:
        optimizer.step()
    except Exception:  # noqa: BLE001  # any, from the code of the optimizer
        optimizer.state.clear()
        # SparseAdam takes sparse gradients alone.
        for param in trained:
            param.grad = torch.zeros_like(param).to_sparse()
        optimizer.step()


def _kinds(state: Any) -> set[str]:
    return set(map(str, state)) if isinstance(state, Mapping) else set()


def _is_other(state: Any, shown: Any) -> bool:
    """Return whether a parameter's state differs in kind from what ``state_dict()`` has of it."""
    if state is shown or not isinstance(state, Mapping) or not isinstance(shown, Mapping):
        return False
    return state.keys() != shown.keys() or any(
        isinstance(value, torch.Tensor)
        and isinstance(shown[key], torch.Tensor)
        and (value.dtype != shown[key].dtype or value.shape != shown[key].shape)
        for key, value in state.items()
    )


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
