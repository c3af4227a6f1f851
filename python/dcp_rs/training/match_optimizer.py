"""An optimizer beside the saved ones: its parameters, groups and kinds of state in theirs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from dcp_rs.checkpoint.names import explain_prefix, some
from dcp_rs.errors import PlanError
from dcp_rs.training.first_step import with_state
from dcp_rs.training.optimizers import (
    Names,
    fqns_by_parameter,
    model_state,
    names_by_key,
    own_state_dict,
    parameter_names,
    settings_of,
)
from dcp_rs.training.saved_optimizers import SavedOptimizers
from dcp_rs.training.saved_tree import SavedTree, join
from dcp_rs.training.settings import Group, KeepSettings, Slot, warn_of_replaced
from dcp_rs.training.sources import MODEL

#: The state of a parameter that the checkpoint does not have.
_NOTHING = SavedTree()


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
    groups: list[dict[str, Any]] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)
    own_keys: dict[str, Any] = field(default_factory=dict)
    is_converted: bool = False


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
        self._shards = {} if fsdp1 is None else model_state(fsdp1)

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
        slots = self._slots(names)
        target = Target(optimizer, number, list(itertools.chain.from_iterable(slots)))
        members = [list(itertools.chain.from_iterable(group)) for group in slots]
        known = {slot.fqn: slot for group in members for slot in group}
        self._check_known(known.values(), number)
        if isinstance(optimizer, LBFGS):
            self._check_order([slot.key for slot in known.values()])
        groups = self._match_groups(optimizer, members, number)
        needed = any(slot.tree.paths for slot in known.values())
        needed |= any(group.replaced() for group in groups)
        made = self._note_state(target, names, needed=needed)
        for group in groups:
            self._check_kinds(group)
        if any(self._saved.groups):
            warn_of_replaced(group for group in groups if not group.stays)
        target.groups = [group.after_load() for group in groups]
        target.places = [
            self._saved.place(group.saved[0]) if group.saved else None for group in groups
        ]
        target.slots += [[slot] for slot in self._other_slots(made, known, is_only=is_only)]
        return target

    def _slots(self, names: Names) -> list[list[list[Slot]]]:
        """Return the slots of each parameter of an optimizer's groups.

        Raises:
            PlanError: the keys there are numbers, and the saved groups have other sizes.
        """
        groups = [[fqn for _, fqns in group for fqn in fqns] for group in names]
        is_flat = any(fqns[1:] for group in names for _, fqns in group)
        keys = self._saved.keys(groups, list(self._shards) if is_flat else [])
        state = self._saved.state

        def slot(param: torch.Tensor, fqn: str) -> Slot:
            key = keys[fqn]
            return Slot(fqn, key, state.get(key, _NOTHING), param, self._shards.get(fqn))

        return [[[slot(param, fqn) for fqn in fqns] for param, fqns in group] for group in names]

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

    def _check_order(self, keys: Sequence[str]) -> None:
        """Compare the order of the parameters of LBFGS, whose state is one of all of them.

        Raises:
            PlanError: it is another.
        """
        known = self._saved.settings
        saved = [key for key, settings in known.items() if settings is known.get(keys[0])]
        if keys != saved and self._saved.state:
            msg = (
                "LBFGS keeps the state of all parameters in one vector, in their order, and it was "
                f"saved for {some(saved)}, and not for {some(keys)}. Pass the parameters in the "
                "saved order, or load without the optimizer"
            )
            raise PlanError(msg)

    def _match_groups(
        self, optimizer: Optimizer, members: list[list[Slot]], number: int
    ) -> list[Group]:
        """Return the groups of an optimizer.

        Raises:
            PlanError: nothing tells which saved settings a group gets, and that is an error.
        """
        known, empty = self._saved.settings, iter(self._saved.empty)
        # Nothing but their order tells groups without parameters.
        are_matched = len(self._saved.empty) == sum(not slots for slots in members)
        groups: list[Group] = []
        for place, (group, slots) in enumerate(zip(optimizer.param_groups, members, strict=True)):
            found = [known[slot.key] for slot in slots if slot.key in known]
            if not slots and are_matched:
                found = [next(empty)]
            saved = list({id(one): one for one in found}.values())
            shown = f"group {place} of optimizer {number}"
            groups.append(Group(shown, optimizer, slots, settings_of(group), saved, self._keep))
        first: dict[int, Group] = {}
        for own in groups:
            what = f"the parameters of {own.shown} were saved in groups that differ"
            problems = [own.contradiction(what, own.saved)]
            firsts = [first.setdefault(id(saved), own) for saved in own.saved]
            for other in {id(other): other for other in firsts if other is not own}.values():
                what = f"{other.shown} and {own.shown} were saved in one group, and differ"
                problems.append(own.contradiction(what, (other.own, own.own)))
            for problem in filter(None, problems):
                if not self._partial.is_partial:
                    raise PlanError(problem)
                own.saved = []
        return groups

    def _note_state(self, target: Target, names: Names, *, needed: bool) -> dict[str, Any]:
        """Note the state of each parameter of an optimizer, and its kinds.

        An optimizer without state makes it, if it is needed.

        Returns:
            The state as ``state_dict()`` returns it, by FQN or other key; empty for FSDP1.
        """
        optimizer, by_name = target.optimizer, dict[str, Any]()
        with with_state(optimizer, needed=needed) as is_made:
            if self._fsdp1 is None:
                osd = own_state_dict(optimizer, target.number)
                by_key = names_by_key(names, osd, target.number)
                target.own_keys = {fqn: key for key, fqn in by_key.items()}
                by_name = {by_key.get(key, key): state for key, state in osd["state"].items()}
            params = itertools.chain.from_iterable(names)
            for (param, _), slots in zip(params, target.slots, strict=True):
                own = optimizer.state.get(param)
                for slot in slots:
                    slot.made = by_name.get(slot.fqn)
                    if own is not None or (is_made and param.requires_grad):
                        slot.kinds = _kinds(slot.made if self._fsdp1 is None else own)
                    target.is_converted |= _is_other(own, slot.made)
        return by_name

    def _check_kinds(self, group: Group) -> None:
        """Leave the state of parameters of a group that is of other kinds in the checkpoint.

        Raises:
            PlanError: there are some, and that is an error.
        """
        is_stateless = not any(slot.tree.paths for slot in group.slots)
        has_other_kind = False
        for slot in group.slots:
            place = f"{self._saved.prefix}.{slot.fqn}"
            if group.fits(slot, is_stateless=is_stateless) or not self._partial.includes(place):
                continue
            if not self._partial.is_partial:
                raise PlanError(group.why_not_fits(slot), tensor=slot.fqn)
            slot.stays = has_other_kind = True
            lacks = sorted((slot.kinds or set()) - slot.tree.keys())
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
