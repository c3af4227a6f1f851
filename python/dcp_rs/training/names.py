"""Names of modules and parameters without the prefixes of wrappers."""

from __future__ import annotations

import re

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = ["without_prefixes", "without_wrappers"]

#: What torch.compile, activation checkpointing and FSDP1 put into names.
_PREFIXES = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?:\.|$)"
)


def without_prefixes(name: str) -> str:
    """Return a name without the prefixes that wrappers put anywhere into it."""
    return _PREFIXES.sub("", name).removesuffix(".")


def without_wrappers(model: torch.nn.Module, name: str) -> str:
    """Return the name of a module or parameter of a model as without wrappers."""
    name = without_prefixes(name)
    while isinstance(model, DataParallel | DistributedDataParallel):
        model, name = model.module, name.removeprefix("module").removeprefix(".")
    return name
