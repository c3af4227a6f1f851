"""The optimizer state in a checkpoint: groups, and state by parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dcp_rs.errors import PlanError
from dcp_rs.options import Rename
from dcp_rs.training.names import StoredNames
from dcp_rs.training.optimizers import settings_of
from dcp_rs.training.partial_load import PartialLoad
from dcp_rs.training.saved_tree import join, path_of
from dcp_rs.training.sources import Part


def saved_optimizers(
    partial_load: PartialLoad, fqns: Iterable[str], rename: Rename = None
) -> SavedOptimizers | None:
    """Return the optimizer state under a key; None if there is none, or the load excludes it.

    Args:
        partial_load: the place of the state, and what is left alone.
        fqns: the parameters of the models.
        rename: as for :func:`dcp_rs.load`, of names of parameters below ``model``.

    Raises:
        PlanError: there is none, and that is an error. Or what is there has no parameter groups.
    """
    part = partial_load.part
    base = join(part.prefix, "param_groups")
    names = [name for name in part.entries.below(part.prefix) if name != part.prefix]
    # Globs are of the names that parameters have now, and not of numbers or older names.
    kinds = {name.rpartition(".")[2] for name in names if not name.startswith(f"{base}.")}
    usual = (f"{join(part.prefix, 'state')}.{fqn}.{kind}" for fqn in fqns for kind in kinds)
    if not any(map(partial_load.includes, itertools.chain(names or [base], usual))):
        partial_load.report.excluded += names
        return None
    tree = part.entries.tree(path_of(base), may_be_flat=True)
    if not tree.paths:
        if not partial_load.is_partial:
            raise _not_there(part, base)
        partial_load.report.missing.append(part.prefix)
        return None
    groups = _groups(tree.build({name: part.read(name) for name in tree.paths}), base)
    if not any(map(partial_load.includes, tree.paths)):
        partial_load.report.excluded += tree.paths
        groups = [{"params": group["params"]} for group in groups]
    return SavedOptimizers(partial_load, groups, rename)


def _not_there(part: Part, base: str) -> PlanError:
    """Return the error for a checkpoint without optimizer state."""
    if part.reader.source == "safetensors":
        msg = "the checkpoint holds a model alone: load it without an optimizer"
        return PlanError(msg, tensor=base)
    above = (f".{name}".partition(".param_groups") for name in part.entries.names)
    other = next((before.removeprefix(".") for before, found, _ in above if found), None)
    advice = (
        "To load the rest, pass partial={'optimizer'}, or no optimizer"
        if other is None
        else f"There is one under {other!r}: pass names={{'optimizer': {other!r}}}, or "
        f"load_optim_state_dict(..., key={other!r}); or load it in extra= if it was saved there"
    )
    msg = f"the checkpoint has no optimizer state under {part.prefix!r}: there is no {base!r}. "
    return PlanError(msg + advice, tensor=base)


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
    """The optimizer state in a checkpoint.

    Args:
        partial_load: the place of the state, and what is left alone.
        groups: the saved parameter groups.
        rename: a renaming of parameters.

    Attributes:
        partial_load: as given.
        prefix: the name of the place of the states.
        groups: the settings of each group.
        settings: those of the group of each parameter, by the parameter's key.
        empty: those of the groups without parameters.
        state: the state of each parameter, and of each key that belongs to none.
        infos: the entries of all states, by name.
    """

    def __init__(
        self, partial_load: PartialLoad, groups: Sequence[dict[str, Any]], rename: Rename
    ) -> None:
        self.partial_load, part = partial_load, partial_load.part
        self.prefix = join(part.prefix, "state")
        self.groups = list(map(settings_of, groups))
        self.settings: dict[str, dict[str, Any]] = {}
        self.empty: list[dict[str, Any]] = []
        for group, settings in zip(groups, self.groups, strict=True):
            self.settings |= dict.fromkeys(map(str, group["params"]), settings)
            if not group["params"]:
                self.empty.append(settings)
        tree = part.entries.tree(path_of(self.prefix), self.settings, may_be_flat=True)
        self.state = tree.by_key()
        self.infos = part.entries.find(tree.paths)
        self._with_params, self._rename = groups, rename
        self._names = StoredNames(self.settings, rename)

    def place(self, settings: dict[str, Any]) -> int:
        """Return the number of the group that has these very settings."""
        return next(at for at, of_group in enumerate(self.groups) if of_group is settings)

    def keys(self, groups: Sequence[Sequence[str]], order: Sequence[str]) -> dict[str, str]:
        """Return the keys of an optimizer's parameters in the checkpoint, by FQN.

        The key of a parameter that was not saved is its FQN.

        Args:
            groups: the parameters of each of its groups.
            order: the FQNs in the order of the model, if the optimizer has flat parameters.

        Raises:
            PlanError: the keys are numbers, and the saved groups have other sizes.
        """
        saved = [group["params"] for group in self._with_params]
        fqns = [fqn for group in groups for fqn in group]
        if not any(isinstance(key, int) for keys in saved for key in keys):
            return {fqn: self._names.find(fqn) or fqn for fqn in fqns}
        if (named := self._keys_by_name(fqns)) is not None:
            return named
        sizes, own_sizes = list(map(len, saved)), list(map(len, groups))
        if sizes != own_sizes:
            msg = (
                f"the saved optimizer has groups of {sizes} parameters, which go by number, and "
                f"this one has groups of {own_sizes}"
            )
            raise PlanError(msg)
        # Numbers are older than flat parameters: group by group, in the order of the model.
        place = {fqn: number for number, fqn in enumerate(order)}
        return {
            fqn: str(key)
            for group, keys in zip(groups, saved, strict=True)
            for fqn, key in zip(
                sorted(group, key=lambda fqn: place.get(fqn, len(place))), keys, strict=True
            )
        }

    def _keys_by_name(self, fqns: Sequence[str]) -> dict[str, str] | None:
        """Return keys that are numbers by the names that an optimizer of named parameters saves.

        It is None unless it was saved with names, and has one for each of these parameters.
        """
        keys = {
            str(name): str(key)
            for group in self._with_params
            for key, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        names = StoredNames(keys, self._rename)
        found = {fqn: keys[name] for fqn in fqns if (name := names.find(fqn)) is not None}
        return found if keys and len(found) == len(fqns) else None
