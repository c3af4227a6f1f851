"""The parameters of an optimizer: what they are called, in the model and by the optimizer itself, and what FSDP1 makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.api import ShardingStrategy
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.errors import PlanError

__all__ = [
    "compiler_names",
    "fsdp1_group",
    "is_fsdp1",
    "is_named",
    "names_by_key",
    "parameter_names",
    "sharded_state_dicts",
    "without_compiler",
]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)  # noqa: SLF001  # as torch names it


def is_fsdp1(model: torch.nn.Module) -> bool:
    """Whether any module of the model is one of FSDP1."""
    return bool(FullyShardedDataParallel.fsdp_modules(model))


def fsdp1_group(model: torch.nn.Module) -> dist.ProcessGroup | None:
    """The group that the optimizer state is sharded over, as torch's ``get_state_dict`` chooses it."""
    module = FullyShardedDataParallel.fsdp_modules(model)[0]
    group = None if module.sharding_strategy in _HYBRID else module.process_group
    return None if isinstance(group, tuple) else group


@contextmanager
def sharded_state_dicts(model: torch.nn.Module) -> Iterator[None]:
    """State dicts of FSDP1 modules hold shards, whatever the caller has set."""
    with (
        _torch.without_fsdp1_warnings(),
        FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        ),
    ):
        yield


def parameter_names(
    models: Sequence[torch.nn.Module], optimizer: Optimizer, number: int
) -> list[tuple[torch.Tensor, list[str]]]:
    """The parameters of an optimizer, and the FQNs of each: one, but for a flat parameter of FSDP1."""
    fqns_of: dict[int, list[str]] = {}
    for model in models:
        for key, param in model.named_parameters():
            fqns_of.setdefault(id(param), [without_compiler(fqn) for fqn in _torch.fqns(model, key)])
    names = []
    for at, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            fqns = fqns_of.get(id(param))
            if fqns is None:
                msg = (
                    f"optimizer {number} has a parameter that is not in the model: "
                    f"number {place} of group {at}, of shape {tuple(param.shape)}"
                )
                raise PlanError(msg)
            names.append((param, fqns))
    return names


def names_by_key(
    models: Sequence[torch.nn.Module], optimizer: Optimizer, osd: dict[str, Any], number: int
) -> dict[Any, str]:
    """The keys of an optimizer's own state dict, and the FQNs of the parameters they stand for."""
    keys = list(itertools.chain.from_iterable(group["params"] for group in osd["param_groups"]))
    names = parameter_names(models, optimizer, number)
    if is_named(osd):
        known = {fqn for _, fqns in names for fqn in fqns}
        stranger = next((key for key in keys if key not in known), None)
        if stranger is not None:
            msg = f"optimizer {number} calls a parameter {stranger!r}, which no parameter of the model is called"
            raise PlanError(msg, tensor=stranger)
        return {key: key for key in keys}
    return {key: fqns[0] for key, (_, fqns) in zip(keys, names, strict=True)}


def is_named(osd: Mapping[str, Any]) -> bool:
    """Whether an optimizer's own state dict goes by name (torch's ``_NamedOptimizer``, TorchRec's ``KeyedOptimizer``)."""
    return any(isinstance(param, str) for group in osd["param_groups"] for param in group["params"])


def without_compiler(fqn: str) -> str:
    """The name without what a compiled module puts into it."""
    return fqn.replace("_orig_mod.", "")


def compiler_names(model: torch.nn.Module) -> dict[str, str]:
    """Where a compiled module is inside, FSDP1's own names have its prefix."""
    names = {}
    for key, _ in model.named_parameters():
        for fqn in _torch.fqns(model, key, skip_compiler_prefix=False):
            if without_compiler(fqn) != fqn:
                names[without_compiler(fqn)] = fqn
    return names
