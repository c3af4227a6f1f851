"""Comparison of an optimizer with the saved one: kinds of state, and settings of groups."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import LBFGS, Optimizer

from dcp_rs._warnings import warn_caller
from dcp_rs.errors import PlanError
from dcp_rs.training.optimizers import settings_of, to_bytes

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
#: The longest setting in a message.
_SHOWN = 60


@dataclass
class GroupSettings:
    """Settings of one group of an optimizer, and those that its parameters were saved with.

    Attributes:
        shown: the name of the group for messages.
        own: the settings of the optimizer's group.
        saved: those of each saved group that has parameters of this one.
        keep: the settings that stay as they are.
    """

    shown: str
    own: dict[str, Any]
    saved: Sequence[dict[str, Any]]
    keep: KeepSettings

    def _keeps(self, name: str) -> bool:
        return self.keep is True or (self.keep is not False and name in self.keep)

    def chosen(self) -> dict[str, Any]:
        """Return the settings after the load. Those of several saved groups have to be equal."""
        if not self.saved or self.keep is True:
            return dict(self.own)
        new = {key: value for key, value in self.saved[0].items() if not self._keeps(key)}
        # A copy for each group: a learning rate that is a tensor changes in place.
        return self.own | copy.deepcopy(new)

    def contradiction(self) -> str | None:
        """Return why the saved groups cannot become this group; None if they can."""
        names = self._unlike(self.saved)
        if not names:
            return None
        return (
            f"the parameters of {self.shown} were saved in groups that differ in "
            f"{_list_values(names, self.saved)}. Divide the parameters into groups as they were "
            f"saved, or pass keep_settings={names!r} to keep the settings of this optimizer"
        )

    def differs_from(self, other: GroupSettings) -> str | None:
        """Return why this group and another cannot get equal settings; None if they can.

        Parameters of both were saved in one group.
        """
        names = self._unlike((self.own, other.own))
        if not names:
            return None
        return (
            f"{self.shown} and {other.shown} differ in {_list_values(names, (self.own, other.own))}"
            f", and their parameters were saved in one group. Pass keep_settings={names!r} to keep "
            "the settings of this optimizer"
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

    def unshared(self) -> tuple[set[str], set[str]]:
        """Return the names of settings that only this optimizer has, and only the saved one."""
        saved = self.saved[0].keys() if self.saved else self.own.keys()
        return self.own.keys() - saved - _OF_SCHEDULERS, saved - self.own.keys() - _OF_SCHEDULERS

    def _unlike(self, several: Iterable[Mapping[str, Any]]) -> set[str]:
        """Return the names of settings that stay not, and are not equal in all of these groups."""
        several = list(several)
        return {
            name
            for name in {name for settings in several for name in settings}
            if not self._keeps(name)
            and len({to_bytes(one[name]) if name in one else b"" for one in several}) > 1
        }


def check_kinds(
    name: str,
    saved: Collection[str],
    own: Collection[str],
    group: GroupSettings,
    optimizer: Optimizer,
    *,
    is_new: bool,
) -> str | None:
    """Return why the saved state of a parameter does not fit its optimizer; None if it does.

    State may be made later than in the first step, or from outside. So kinds that only the
    checkpoint has are a reason only if settings differ.

    Args:
        name: the parameter.
        saved: the kinds of state in the checkpoint, such as ``exp_avg``.
        own: the kinds that the optimizer has, or makes in its next step.
        group: the settings of the parameter's group.
        optimizer: the optimizer.
        is_new: it has made no step.
    """
    if set(saved) == set(own):
        return None
    is_exact = is_of_torch(optimizer) and type(optimizer) is not LBFGS
    lacks = is_new and not set(own) <= set(saved)
    # Those of torch make all of it in the first step, so a setting that is kept counts as well.
    if not (lacks or group.replaced(kept=is_exact) or any(group.unshared())):
        return None
    optimizer_type = type(optimizer).__name__
    settings = ""
    if differing := group.replaced(kept=True):
        settings = f"; {group.shown} and the saved one differ in {_list_pairs(differing)}"
    return (
        f"the checkpoint has {_list(saved)} of parameter {name!r}, and this optimizer "
        f"({optimizer_type}) has, or makes in its next step, {_list(own)}{settings}. Make the "
        "optimizer as the saved one was made, or pass partial={'optimizer'} to keep the state that "
        "does not fit as it is"
    )


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether the class of an optimizer is one of torch's own."""
    return type(optimizer).__module__.startswith("torch.")


def check_stateless(
    group: GroupSettings, optimizer: Optimizer, *, makes_state: bool = False
) -> str | None:
    """Return why a group is of another kind of optimizer than the saved one; None if it is not.

    Only settings tell, since one of the two has no state.

    Args:
        group: the group.
        optimizer: its optimizer.
        makes_state: it has state, or makes some in its next step, and the saved one has none.
    """
    advice = "Make the optimizer as the saved one was made, or pass partial={'optimizer'}"
    optimizer_type = type(optimizer).__name__
    own, saved = group.unshared()
    own &= getattr(optimizer, "defaults", {}).keys()  # an optimizer around another one lacks it
    if own and saved:
        return (
            f"{group.shown} has the settings {_list(own)} ({optimizer_type}), and the saved one "
            f"{_list(saved)} in their place: it was an optimizer of another kind. {advice}"
        )
    changed = {name: pair for name, pair in group.replaced().items() if name not in _IMPLEMENTATION}
    if not makes_state or not changed:
        return None
    return (
        f"{group.shown} ({optimizer_type}) has state, or makes some in its next step, and the "
        f"checkpoint has none of it; they differ in {_list_pairs(changed)}. {advice}; "
        f"keep_settings={set(changed)!r} keeps these settings"
    )


def warn_of_replaced(groups: Sequence[GroupSettings], optimizer: Optimizer) -> None:
    """Warn of settings of an optimizer that the load replaces."""
    changes: dict[str, list[str]] = {}
    for group in groups:
        for name, (own, saved) in group.replaced().items():
            changes.setdefault(f"{name} {_text(own)} -> {_text(saved)}", []).append(group.shown)
    if changes:
        named = "; ".join(f"{change} ({', '.join(of)})" for change, of in changes.items())
        warn_caller(
            f"the saved settings replace those of the optimizer: {named}. To keep some of yours, "
            "pass their names as keep_settings=, or True for all"
        )
    for group in groups:
        if (message := check_stateless(group, optimizer)) is not None:
            warn_caller(message.partition(". Make")[0])
            return


def match_empty(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[dict[str, Any]], keep: KeepSettings
) -> list[list[dict[str, Any]]]:
    """Return the saved settings of each group without parameters. Nothing but order tells them.

    Args:
        groups: the groups of the optimizer without parameters.
        saved: the settings of the saved groups without parameters.
        keep: the settings that stay.

    Raises:
        PlanError: there is another number of saved groups, and their settings differ.
    """
    if not saved:
        return [[] for _ in groups]
    if len(saved) == len(groups):
        return [[settings] for settings in saved]
    if groups and keep is not True and len(set(map(to_bytes, saved))) > 1:
        msg = (
            f"the optimizer has {len(groups)} groups without parameters, and {len(saved)} with "
            "different settings were saved: nothing tells which is which. Pass keep_settings=True"
        )
        raise PlanError(msg)
    return [[saved[0]] for _ in groups]


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


def _list_values(names: Iterable[str], several: Sequence[Mapping[str, Any]]) -> str:
    """Return names with the values that each of several groups has."""
    return _list_pairs({name: [one.get(name) for one in several] for name in names})


def _list_pairs(values: Mapping[str, Sequence[Any]]) -> str:
    """Return names with their values."""
    return ", ".join(
        f"{name} ({' and '.join(map(_text, values[name]))})" for name in sorted(values)
    )


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
