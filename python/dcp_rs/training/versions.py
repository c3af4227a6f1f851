"""Versions of modules, which tell ``load_state_dict`` how to read state of older ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dcp_rs import _torch
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.tensors.nesting import moved_versions
from dcp_rs.training.names import unwrapper
from dcp_rs.training.sources import Part

#: The version of a module that does not say its own.
_FIRST = 1

#: The saved version of a module, by its name.
Versions = Callable[[str], int | None]


def saved_versions(part: Part, names: Iterable[tuple[str, str]]) -> Versions | None:
    """Return the saved versions of modules; None for a checkpoint that has none.

    Args:
        part: the checkpoint, and the place of the model in it.
        names: the stored name of each entry of the model, and the name that it has now.
    """
    saved = part.entries.versions(part.path)
    # torch takes state in its files without versions for that of old modules.
    if not saved and part.reader.source != "torch":
        return None
    moved, other = moved_versions(saved, names), {"version": _FIRST} if saved else {}
    return lambda name: moved.get(name, other).get("version")


def noted(
    state: Mapping[str, Any], models: Iterable[torch.nn.Module], ranks: RankGroup
) -> OrderedDict[str, Any]:
    """Return a state dict of models that notes the versions of modules as torch's does.

    It notes those of all ranks, since the state dict of one rank tells them. A collective.

    Args:
        state: the values, by names without wrappers.
        models: the modules of this rank.
        ranks: the ranks that save.
    """
    own = {
        unwrap(name): _torch.module_version(module) or _FIRST
        for model in models
        for unwrap in (unwrapper(model),)
        for name, module in model.named_modules()
    }
    # Most are first ones, which are taken for granted.
    later = {name: version for name, version in own.items() if version != _FIRST}
    for of_rank in ranks.all_gather(lambda: later):
        own |= of_rank
    whole = OrderedDict(state)
    _torch.set_module_versions(whole, {name: {"version": v} for name, v in own.items()})
    return whole


def with_versions(
    state: Mapping[str, Any], model: torch.nn.Module, saved: Versions | None
) -> OrderedDict[str, Any]:
    """Return a state dict of a model with the versions that its values are of.

    Args:
        state: the values, by names that the model takes.
        model: the model.
        saved: returns the saved version of the module with a name, None if it is not known.
            Without it, values are taken for those of the modules as they are, as DCP does.
    """
    whole, unwrap = OrderedDict(state), unwrapper(model)
    versions: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        version = _torch.module_version(module)
        if saved is not None and version is not None:
            version = saved(unwrap(name))
        versions[name] = {"version": version}
    _torch.set_module_versions(whole, versions)
    return whole
