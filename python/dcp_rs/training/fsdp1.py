"""What is particular to FSDP1 (``FullyShardedDataParallel``): whether a model is that, in which group, and state dicts of shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.api import ShardingStrategy

from dcp_rs import _torch

__all__ = ["fsdp1_group", "is_fsdp1", "sharded_state_dicts"]

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
