"""What a planner of others resolves, kept as it is until it is written: all items are resolved before the first is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_rs import _torch
from dcp_rs.tensors.memory import parts
from dcp_rs.transfer.save import why_not_raw

__all__ = ["Resolved"]


class Resolved:
    """Keeps apart what a planner resolves: it may make the next item in the memory of this one, as stock's writer lets it.

    What lies in the memory of the state dict stays there, and is not copied.

    Args:
        planner: it, or one that wraps it. Where none of them has a ``state_dict``, everything counts as made for the save.
    """

    def __init__(self, planner: object) -> None:
        self._held = [value for state_dict in _state_dicts(planner, set()) for value in state_dict.values()]
        self._storages = {_torch.storage_id(tensor) for value in self._held for tensor in _memory(value)}

    def apart(self, data: Any) -> Any:
        """A tensor in memory that the planner does not have: a copy, where it is not the state dict's. Anything else as it is."""
        if not isinstance(data, torch.Tensor) or data.device.type == "meta" or self.is_passing(data):
            return data
        tensor = _torch.wait_tensor(data)
        if _torch.storage_id(tensor) in self._storages:
            return data
        return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)

    def is_passing(self, data: Any) -> bool:
        """Whether it is a tensor that raw bytes cannot hold: what is stored of it is made at once, and there is nothing to keep."""
        return isinstance(data, torch.Tensor) and why_not_raw(_torch.wait_tensor(data)) is not None


def _state_dicts(planner: object, seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Those of a planner and of the planners that it wraps."""
    seen.add(id(planner))
    state_dict = getattr(planner, "state_dict", None)
    if isinstance(state_dict, Mapping):
        yield state_dict
    for inner in getattr(planner, "__dict__", {}).values():
        if isinstance(inner, SavePlanner) and id(inner) not in seen:
            yield from _state_dicts(inner, seen)


def _memory(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in whose memory a value of a state dict lies, as far as that is known."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield from _memory(shard.tensor)
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        with torch.no_grad():
            yield from (part.tensor for part in parts(value))
