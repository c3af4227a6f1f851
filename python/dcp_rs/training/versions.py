"""Versions of modules, which tell ``load_state_dict`` how to read state of older ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dcp_rs import _torch
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.training.names import without_wrappers

__all__ = ["VERSIONS", "gather_versions", "with_versions"]

#: The key of the versions in the checkpoint. It is not below the model, whose entries are tensors.
VERSIONS = "model_versions"
#: The version of a module that does not say its own.
_FIRST = 1


def gather_versions(
    models: Iterable[torch.nn.Module], ranks: RankGroup
) -> tuple[tuple[str, int], ...]:
    """Return the versions of all ranks' modules by name, except for first ones. A collective."""

    def versions() -> list[tuple[str, int]]:
        return [
            (without_wrappers(model, name), version)
            for model in models
            for name, module in model.named_modules()
            if (version := _torch.module_version(module)) not in (None, _FIRST)
        ]

    return tuple(dict(pair for of_rank in ranks.all_gather(versions) for pair in of_rank).items())


def with_versions(
    state: Mapping[str, Any], model: torch.nn.Module, saved: Mapping[str, int] | None
) -> OrderedDict[str, Any]:
    """Return a state dict of a model with the versions that its values are of.

    Args:
        state: the values, by names that the model takes.
        model: the model.
        saved: the saved versions by name; None if they are not known. Then values are taken for
            those of the modules as they are, as DCP does.
    """
    whole = OrderedDict(state)
    versions: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        version = _torch.module_version(module)
        if saved is not None and version is not None:
            version = saved.get(without_wrappers(model, name), _FIRST)
        versions[name] = {"version": version}
    _torch.set_module_versions(whole, versions)
    return whole
