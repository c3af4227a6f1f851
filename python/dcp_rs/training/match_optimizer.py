"""An optimizer beside the saved ones: its parameters, groups and kinds of state in theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import LBFGS, Optimizer

from dcp_rs.checkpoint.names import explain_prefix
from dcp_rs.errors import PlanError
from dcp_rs.training.first_step import with_state
from dcp_rs.training.optimizers import (
    fqns_by_parameter,
    names_by_key,
    own_state_dict,
    parameter_names,
    settings_of,
)
from dcp_rs.training.saved_optimizers import SavedOptimizers
from dcp_rs.training.saved_tree import SavedTree, join
from dcp_rs.training.settings import (
    GroupSettings,
    KeepSettings,
    check_kinds,
    check_stateless,
    match_empty,
    warn_of_replaced,
)
from dcp_rs.training.sources import MODEL

#: The state of a parameter that the checkpoint does not have.
_NOTHING = SavedTree()
#: The most parameters in a message.
_NAMED = 8


@dataclass
class Slot:
    """State of one parameter, or of one key that belongs to no parameter.

    Attributes:
        fqn: the parameter, or the key.
        key: its key in the checkpoint.
        tree: what the checkpoint has of it.
        param: the parameter, if it is of one.
        shard: the parameter in the state dict of an FSDP1 model.
        made: the state that the optimizer has or, if it has none, makes in its first step, as its
            ``state_dict()`` returns it. Of a parameter of FSDP1 there is none: it is flat.
        kinds: the kinds of that state; None if they are not known.
        stays: the load leaves it as it is.
    """

    fqn: str
    key: str
    tree: SavedTree
    param: torch.Tensor | None = None
    shard: Any = None
    made: Any = None
    kinds: set[str] | None = None
    stays: bool = False


@dataclass
class _Group(GroupSettings):
    """A group of an optimizer: its settings, and the state of its parameters."""

    slots: list[Slot]

    @property
    def stays(self) -> bool:
        """True if the state of all of its parameters stays."""
        return all(slot.stays for slot in self.slots)

    def after_load(self) -> dict[str, Any]:
        """Return the parameters and settings of the group after the load."""
        settings = self.own if self.slots and self.stays else self.chosen()
        return settings | {"params": [slot.fqn for slot in self.slots]}


@dataclass
class Target:
    """An optimizer to load into.

    Attributes:
        number: its number, for messages.
        slots: the slots of each parameter, and of each other key. A flat parameter has several.
        groups: the parameters and settings of each of its groups after the load.
        places: the number of the saved group of each of its groups; None if there is none.
        own_keys: the keys of its parameters in its own state dict, by FQN; empty for FSDP1.
        is_converted: its ``state_dict()`` has other dtypes or shapes than its ``state``.
    """

    optimizer: Optimizer
    number: int
    slots: list[list[Slot]]
    groups: list[dict[str, Any]]
    places: list[int | None]
    own_keys: dict[str, Any]
    is_converted: bool


@dataclass
class _State:
    """The state of an optimizer that has some, or made that of its first step.

    Attributes:
        by_param: as the optimizer has it.
        by_name: as its ``state_dict()`` returns it, by FQN or other key; empty for FSDP1.
        own_keys: the keys of its parameters in that state dict, by FQN.
        is_made: it is that of the first step.
    """

    by_param: Mapping[Any, Any]
    by_name: dict[str, Any]
    own_keys: dict[str, Any]
    is_made: bool


class OptimizerMatcher:
    """Matches optimizers with the saved ones.

    Args:
        saved: the saved ones.
        keep: the settings of the optimizers that stay.
        models: the modules that have the parameters.
        fsdp1: the only one of them, if it is of FSDP1.
    """

    def __init__(
        self,
        saved: SavedOptimizers,
        keep: KeepSettings,
        models: Sequence[torch.nn.Module],
        fsdp1: torch.nn.Module | None,
    ) -> None:
        self._saved, self._partial = saved, saved.partial_load
        self._keep, self._fsdp1 = keep, fsdp1
        self._fqns_of = fqns_by_parameter(models)
        self._shards = {} if fsdp1 is None else get_model_state_dict(fsdp1)

    def match(self, optimizer: Optimizer, number: int, *, is_only: bool) -> Target:
        """Match an optimizer with the saved parameters and groups.

        Args:
            optimizer: the optimizer.
            number: its number, for messages.
            is_only: there is no other optimizer.

        Raises:
            PlanError: the checkpoint has other parameters, numbers, groups or kinds of state.
        """
        names = parameter_names(self._fqns_of, optimizer, number)
        slots = self._slots(optimizer, names)
        of_parameters = iter(slots)
        members = [
            [slot for _ in group["params"] for slot in next(of_parameters)]
            for group in optimizer.param_groups
        ]
        known = {slot.fqn: slot for group in members for slot in group}
        self._check_known(known.values(), number)
        if isinstance(optimizer, LBFGS):
            self._check_order(list(known.values()))
        groups = self._match_groups(optimizer, members, number)
        needed = any(slot.tree.paths for slot in known.values())
        needed |= any(group.replaced() for group in groups)
        state = self._state(optimizer, names, number, needed=needed)
        is_converted = self._note_state(names, slots, state)
        for group in groups:
            self._check_kinds(optimizer, group)
        if any(self._saved.groups):
            warn_of_replaced([group for group in groups if not group.stays], optimizer)
        after = [group.after_load() for group in groups]
        slots += [[slot] for slot in self._other_slots(state.by_name, known, is_only=is_only)]
        places = [self._saved.place(group.saved[0]) if group.saved else None for group in groups]
        return Target(optimizer, number, slots, after, places, state.own_keys, is_converted)

    def _slots(
        self, optimizer: Optimizer, names: Sequence[tuple[torch.Tensor, list[str]]]
    ) -> list[list[Slot]]:
        """Return the slots of each parameter of an optimizer, with its state in the checkpoint.

        Raises:
            PlanError: the keys there are numbers, and the saved groups have other sizes.
        """
        of_parameters = iter(names)
        groups = [
            [fqn for _ in group["params"] for fqn in next(of_parameters)[1]]
            for group in optimizer.param_groups
        ]
        is_flat = any(fqns[1:] for _, fqns in names)
        keys = self._saved.keys(groups, list(self._shards) if is_flat else [])
        state = self._saved.state
        return [
            [
                Slot(fqn, key, state.get(key, _NOTHING), param, self._shards.get(fqn))
                for fqn in fqns
                for key in (keys[fqn],)
            ]
            for param, fqns in names
        ]

    def _check_known(self, slots: Iterable[Slot], number: int) -> None:
        """Leave the state of parameters that no saved optimizer has.

        Raises:
            PlanError: there are some, and that is an error.
        """
        fqns: list[str] = []
        missing: list[str] = []
        for slot in slots:
            fqns.append(slot.fqn)
            if slot.key not in self._saved.settings:
                slot.stays = True
                if self._partial.includes(f"{self._saved.prefix}.{slot.fqn}"):
                    missing.append(slot.fqn)
        if missing and not self._partial.is_partial:
            lacks, wants, stored = (
                [join(MODEL, name) for name in names]
                for names in (missing, fqns, self._saved.settings)
            )
            more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
            is_in_model = any(name in self._partial.part.entries for name in lacks)
            rename = None if is_in_model else explain_prefix(lacks, wants, stored)
            advice = rename or (
                "to keep the state of such parameters as it is, pass partial={'optimizer'}, or "
                "partial={'model', 'optimizer'} if they are new"
            )
            msg = (
                f"optimizer {number} has parameter {missing[0]!r}{more}, which no saved optimizer "
                f"has; {advice}"
            )
            raise PlanError(msg, tensor=missing[0])
        self._partial.report.missing += [f"{self._saved.prefix}.{fqn}" for fqn in missing]

    def _check_order(self, slots: Sequence[Slot]) -> None:
        """Leave the state of LBFGS, which is one of all its parameters, if their order is another.

        Raises:
            PlanError: it is another, and that is an error.
        """
        known = self._saved.settings
        groups = {id(known[slot.key]) for slot in slots if slot.key in known}
        saved = [key for key, settings in known.items() if id(settings) in groups]
        if [slot.key for slot in slots] == saved or not self._saved.state:
            return
        if not self._partial.is_partial:
            msg = (
                "LBFGS keeps the state of all parameters in one vector, in their order, and it was "
                f"saved for {_shown(saved)}, and not for {_shown([slot.key for slot in slots])}. "
                "Pass the parameters in the saved order, or pass partial={'optimizer'} to keep the "
                "state as it is"
            )
            raise PlanError(msg)
        for slot in slots:
            slot.stays = True
            self._partial.report.missing.append(f"{self._saved.prefix}.{slot.fqn}")

    def _match_groups(
        self, optimizer: Optimizer, members: list[list[Slot]], number: int
    ) -> list[_Group]:
        """Return the groups of an optimizer.

        Raises:
            PlanError: nothing tells which saved settings a group gets, and that is an error.
        """
        pairs = list(zip(optimizer.param_groups, members, strict=True))
        empty = [group for group, slots in pairs if not slots]
        of_empty = iter(match_empty(empty, self._saved.empty, self._keep))
        groups: list[_Group] = []
        for place, (group, slots) in enumerate(pairs):
            known = self._saved.settings
            found = [known[slot.key] for slot in slots if slot.key in known]
            saved = list({id(one): one for one in found}.values()) if slots else next(of_empty)
            shown = f"group {place} of optimizer {number}"
            groups.append(_Group(shown, settings_of(group), saved, self._keep, slots))
        problems = [(own, own.contradiction()) for own in groups]
        first: dict[int, _Group] = {}
        for own in groups:
            firsts = [first.setdefault(id(saved), own) for saved in own.saved]
            others = {id(other): other for other in firsts if other is not own}
            problems += [(own, other.differs_from(own)) for other in others.values()]
        for own, problem in problems:
            if problem is not None and not self._partial.is_partial:
                raise PlanError(problem)
            if problem is not None:
                own.saved = []
        return groups

    def _state(
        self,
        optimizer: Optimizer,
        names: list[tuple[torch.Tensor, list[str]]],
        number: int,
        *,
        needed: bool,
    ) -> _State:
        """Return the state of an optimizer. One without state makes it, if it is needed."""
        is_new = not optimizer.state
        with with_state(optimizer, needed=needed) as has_state:
            state = _State(dict(optimizer.state), {}, {}, is_made=is_new and has_state)
            if self._fsdp1 is None:
                osd = own_state_dict(optimizer, number)
                by_key = names_by_key(names, osd, number)
                state.own_keys = {fqn: key for key, fqn in by_key.items()}
                state.by_name = {by_key.get(key, key): own for key, own in osd["state"].items()}
            return state

    def _note_state(
        self,
        names: Sequence[tuple[torch.Tensor, list[str]]],
        slots: Sequence[list[Slot]],
        state: _State,
    ) -> bool:
        """Note the state of each parameter, and its kinds.

        Returns:
            Whether ``state_dict()`` has any of it in other dtypes or shapes.
        """
        is_converted = False
        for (param, _), several in zip(names, slots, strict=True):
            own = state.by_param.get(param)
            for slot in several:
                slot.made = state.by_name.get(slot.fqn)
                if param in state.by_param or (state.is_made and param.requires_grad):
                    slot.kinds = _kinds(slot.made if self._fsdp1 is None else own)
            is_converted |= _is_other(own, several[0].made)
        return is_converted

    def _check_kinds(self, optimizer: Optimizer, group: _Group) -> None:
        """Leave the state of parameters of a group that is of other kinds in the checkpoint.

        Raises:
            PlanError: there are some, and that is an error.
        """
        is_stateless = not any(slot.tree.paths for slot in group.slots)
        is_new = not optimizer.state
        # If one side has no state, the settings tell whether the optimizers are of one kind.
        has_other_kind = False
        makes_state = is_stateless and any(slot.kinds for slot in group.slots)
        other_kind = check_stateless(group, optimizer, makes_state=makes_state)
        for slot in group.slots:
            saved, own, place = slot.tree.keys(), slot.kinds, f"{self._saved.prefix}.{slot.fqn}"
            if saved and own is not None:
                problem = check_kinds(slot.fqn, saved, own, group, optimizer, is_new=is_new)
            else:
                problem = other_kind if saved or is_stateless else None
            if problem is None or not self._partial.includes(place):
                continue
            if not self._partial.is_partial:
                raise PlanError(problem, tensor=slot.fqn)
            slot.stays = has_other_kind = True
            lacks = sorted((own or set()) - saved)
            self._partial.report.missing += [f"{place}.{kind}" for kind in lacks]
        for slot in group.slots:  # one without state, since it is frozen, is like the others
            slot.stays |= has_other_kind and slot.kinds is None

    def _other_slots(
        self, made: Mapping[Any, Any], known: Collection[str], *, is_only: bool
    ) -> list[Slot]:
        """Return slots for state that belongs to no parameter, such as MADGRAD's ``k``.

        The only optimizer takes what is saved. One of several takes what it has, or makes in its
        first step.

        Args:
            made: the state that the optimizer has or makes.
            known: the parameters of the optimizer.
            is_only: there is no other optimizer.
        """
        saved, entries = self._saved, self._partial.part.entries
        own = [key for key in made if isinstance(key, str) and key not in known]
        # A stock save of a pipeline may list the parameters of one rank alone.
        stored = [
            key
            for key in (saved.state if is_only else ())
            if not (key in saved.settings or key in known or join(MODEL, key) in entries)
        ]
        slots = []
        for key in dict.fromkeys([*stored, *own]):
            slot = Slot(key, key, saved.state.get(key, _NOTHING), made=made.get(key))
            slot.stays = self._partial.is_partial and key not in saved.state
            slots.append(slot)
        return slots


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


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
