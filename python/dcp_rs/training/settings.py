"""Comparison of an optimizer with the saved one: kinds of state, and settings of groups."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from dcp_rs._warnings import warn_caller
from dcp_rs.errors import PlanError
from dcp_rs.training.optimizers import settings_of, to_bytes
from dcp_rs.training.saved_tree import SavedTree

#: The settings of an optimizer to keep in a load: True for all of them.
KeepSettings = bool | Collection[str]

#: Settings that a scheduler changes at each step, so that other values are expected.
_RATES = {"lr", "initial_lr"}
#: Settings that ``OneCycleLR`` and ``CyclicLR`` change as well.
_MOMENTA = {"momentum", "betas"}
#: Settings that schedulers of torch add to groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
#: Settings that choose another implementation of the same algorithm.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


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
class Group:
    """A group of an optimizer, and the groups that its parameters were saved in.

    Attributes:
        shown: the name of the group for messages.
        optimizer: its optimizer.
        slots: the state of its parameters.
        own: its settings.
        saved: the settings of each saved group that has parameters of this one.
        keep: the settings that stay as they are.
    """

    shown: str
    optimizer: Optimizer
    slots: Sequence[Slot]
    own: dict[str, Any]
    saved: Sequence[dict[str, Any]]
    keep: KeepSettings

    @property
    def stays(self) -> bool:
        """True if the state of all of its parameters stays."""
        return all(slot.stays for slot in self.slots)

    def after_load(self) -> dict[str, Any]:
        """Return the parameters and settings of the group after the load."""
        settings = dict(self.own)
        if self.saved and not (self.slots and self.stays):
            new = {key: value for key, value in self.saved[0].items() if not self._keeps(key)}
            # A copy for each group: a learning rate that is a tensor changes in place.
            settings |= copy.deepcopy(new)
        return settings | {"params": [slot.fqn for slot in self.slots]}

    def contradiction(self, what: str, several: Sequence[Mapping[str, Any]]) -> str | None:
        """Return why groups cannot become one, or stay one; None if they can.

        Args:
            what: says of the groups that they differ.
            several: their settings.
        """
        names = {
            name
            for name in {name for settings in several for name in settings}
            if not self._keeps(name)
            and len({to_bytes(one[name]) if name in one else b"" for one in several}) > 1
        }
        if not names:
            return None
        values = {name: [one.get(name) for one in several] for name in names}
        return (
            f"{what} in {_list_pairs(values)}. Pass keep_settings={names!r} to keep the settings "
            "of this optimizer"
        )

    def replaced(self, *, kept: bool = False) -> dict[str, tuple[Any, Any]]:
        """Return the own and the saved value of each setting that the load changes.

        What a scheduler changes at each step is left out.

        Args:
            kept: add the settings that differ and stay.
        """
        saved = self.saved[0] if self.saved else {}
        scheduled = _RATES | (_MOMENTA if "max_momentum" in saved else set())
        return {
            name: (value, saved[name])
            for name, value in self.own.items()
            if name in saved
            and name not in scheduled
            and (kept or not self._keeps(name))
            and to_bytes(value) != to_bytes(saved[name])
        }

    def fits(self, slot: Slot, *, is_stateless: bool) -> bool:
        """Return whether the saved state of a parameter is of the kinds of the optimizer.

        State may be made later than in the first step, or from outside. So kinds that only the
        checkpoint has are a reason against it only if settings differ.

        Args:
            slot: the parameter.
            is_stateless: the checkpoint has no state of the group. Then only settings tell.
        """
        saved, own = slot.tree.keys(), slot.kinds
        if (saved and saved == own) or not (saved or is_stateless):
            return True
        only_own, only_saved = self._unshared()
        if saved and own is not None:
            lacks = not self.optimizer.state and not own <= saved
            # Those of torch make all of it in the first step, so a setting that is kept counts too.
            is_exact = is_of_torch(self.optimizer) and type(self.optimizer) is not LBFGS
            return not (lacks or self.replaced(kept=is_exact) or only_own or only_saved)
        # An optimizer around another one has no defaults.
        only_own &= getattr(self.optimizer, "defaults", {}).keys()
        is_changed = bool(own) and bool(self.replaced().keys() - _IMPLEMENTATION)
        return not (is_changed or (only_own and only_saved))

    def why_not_fits(self, slot: Slot) -> str:
        """Return the message for saved state that does not fit."""
        saved = self.saved[0] if self.saved else {}
        unshared = set[str]().union(*self._unshared())
        differing: Mapping[str, Sequence[Any]] = self.replaced(kept=True) or {
            name: (self.own.get(name), saved.get(name)) for name in unshared
        }
        settings = (
            f"; {self.shown} and the saved one differ in {_list_pairs(differing)}"
            if differing
            else ""
        )
        return (
            f"the checkpoint has {_list(slot.tree.keys())} of parameter {slot.fqn!r}, and this "
            f"optimizer ({type(self.optimizer).__name__}) has, or makes in its next step, "
            f"{_list(slot.kinds or ())}{settings}. Make the optimizer as the saved one was made, "
            "or pass partial={'optimizer'} to keep the state that does not fit as it is"
        )

    def _unshared(self) -> tuple[set[str], set[str]]:
        """Return the names of settings that only this group has, and only the saved one."""
        saved = self.saved[0].keys() if self.saved else self.own.keys()
        return self.own.keys() - saved - _OF_SCHEDULERS, saved - self.own.keys() - _OF_SCHEDULERS

    def _keeps(self, name: str) -> bool:
        return self.keep is True or (self.keep is not False and name in self.keep)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether the class of an optimizer is one of torch's own."""
    return type(optimizer).__module__.startswith("torch.")


def warn_of_replaced(groups: Iterable[Group]) -> None:
    """Warn of settings of an optimizer that the load replaces."""
    changes: dict[str, list[str]] = {}
    for group in groups:
        for name, (own, saved) in group.replaced().items():
            changes.setdefault(f"{name} {own!r} -> {saved!r}", []).append(group.shown)
    if changes:
        named = "; ".join(f"{change} ({', '.join(of)})" for change, of in changes.items())
        warn_caller(
            f"the saved settings replace those of the optimizer: {named}. To keep some of yours, "
            "pass their names as keep_settings=, or True for all"
        )


def check_kept(groups: Sequence[Mapping[str, Any]], keep: KeepSettings) -> None:
    """Raise unless the groups of an optimizer have the settings to keep.

    Raises:
        TypeError: ``keep`` is neither a bool nor a collection of names.
        PlanError: no group has a setting of that name.
    """
    if isinstance(keep, bool):
        return
    if isinstance(keep, str) or not isinstance(keep, Collection):
        raise TypeError(f"keep_settings={keep!r}: pass True, or a set of names of settings")
    known = {name for group in groups for name in settings_of(group)}
    unknown = [name for name in keep if name not in known]
    if unknown and groups:
        msg = f"keep_settings: no optimizer has a setting {unknown[0]!r}; they have {_list(known)}"
        raise PlanError(msg)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "none"


def _list_pairs(values: Mapping[str, Sequence[Any]]) -> str:
    """Return names with their values."""
    return ", ".join(f"{name} ({' and '.join(map(repr, values[name]))})" for name in sorted(values))
