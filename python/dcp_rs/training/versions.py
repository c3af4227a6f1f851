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

#: The key of the versions in the checkpoint. It is not below the model, whose entries are tensors.
VERSIONS = "model_versions"
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
    if VERSIONS in part.entries:
        saved = dict(part.read(VERSIONS))
        return lambda name: saved.get(name, _FIRST)
    if part.reader.source != "torch":
        return None
    # torch takes state without versions for that of old modules.
    moved = moved_versions(part.entries.versions(part.path), names)
    return lambda name: moved.get(name, {}).get("version")


def gather_versions(
    models: Iterable[torch.nn.Module], ranks: RankGroup
) -> tuple[tuple[str, int], ...]:
    """Return the versions of all ranks' modules by name, except for first ones. A collective."""

    def versions() -> list[tuple[str, int]]:
        return [
            (unwrap(name), version)
            for model in models
            for unwrap in (unwrapper(model),)
            for name, module in model.named_modules()
            if (version := _torch.module_version(module)) not in (None, _FIRST)
        ]

    return tuple(dict(pair for of_rank in ranks.all_gather(versions) for pair in of_rank).items())


def noted(
    state: Mapping[str, Any],
    models: Iterable[torch.nn.Module],
    gathered: Iterable[tuple[str, int]],
) -> OrderedDict[str, Any]:
    """Return a state dict of models that notes the versions of modules as torch's does.

    Args:
        state: the values, by names without wrappers.
        models: the modules of this rank.
        gathered: the versions of all ranks' modules.
    """
    whole = OrderedDict(state)
    versions = dict[str, int]()
    for model in models:
        versions |= dict.fromkeys(map(unwrapper(model), dict(model.named_modules())), _FIRST)
    versions |= gathered
    _torch.set_module_versions(whole, {name: {"version": v} for name, v in versions.items()})
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
