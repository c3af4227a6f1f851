"""New tensors for entries that a load cannot fill as they are: other dtype, device, or ``meta``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dcp_rs import _torch
from dcp_rs.errors import PlanError
from dcp_rs.tensors.dtypes import is_counter
from dcp_rs.tensors.flatten import get_at
from dcp_rs.tensors.memory import identity
from dcp_rs.tensors.nesting import TreePath
from dcp_rs.tensors.shards import Layouts, local_pieces

__all__ = ["NewTensors"]


class NewTensors:
    """New tensors for entries of a state dict, by name. Tied names share a new tensor.

    Args:
        dtype: the new dtype of floating-point tensors; None keeps their dtypes.
        device: the new device. With None tensors stay, and those on ``meta`` go to the default
            device.

    Attributes:
        old: the tensors that are replaced.
        new: the tensors that replace them.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        self._dtype = dtype
        self._device = None if device is None else torch.device(device)
        self.old: dict[str, torch.Tensor] = {}
        self.new: dict[str, torch.Tensor] = {}

    def dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """Return the new dtype of an entry."""
        if self._dtype is None or not tensor.is_floating_point() or is_counter(name, tensor.shape):
            return tensor.dtype
        return self._dtype

    def applies_to(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether an entry needs a new tensor."""
        if self.dtype_of(name, tensor) != tensor.dtype:
            return True
        is_at, device = tensor.device, self._device_of(tensor)
        return device.type != is_at.type or device.index not in (None, is_at.index)

    def apply_to_any(self, names: Iterable[str], values: Sequence[Any]) -> bool:
        """Return whether any tensor among the values needs a new one."""
        if self._dtype is None and self._device is None:
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            if not any(issubclass(kind, ShardedTensor) for kind in set(map(type, tensors))):
                # Only tensors on `meta` do, and this is faster to ask.
                return any(map(attrgetter("is_meta"), tensors))
        return any(
            isinstance(value, torch.Tensor) and self.applies_to(name, value)
            for name, value in zip(names, values, strict=True)
        )

    def make_all(
        self,
        state_dict: Mapping[str, Any],
        values: Mapping[str, Any],
        paths: Mapping[str, TreePath],
        names: Iterable[str],
    ) -> dict[str, torch.Tensor]:
        """Make the new tensors of a load, uninitialized. The state dict keeps its own tensors.

        They are ordinary tensors even in inference mode, so that autograd can count their changes.

        Args:
            state_dict: the caller's state dict.
            values: its entries by name.
            paths: their paths by name.
            names: the names of the tensors to fill.

        Returns:
            The new tensors by name.

        Raises:
            PlanError: the tensor at the path of a name is another one, so it cannot be replaced.
        """
        made: dict[Hashable, torch.Tensor] = {}
        for name in names:
            old = values[name]
            if not self.applies_to(name, old):
                continue
            if get_at(state_dict, paths[name]) is not old:
                msg = (
                    f"tensor {name!r} cannot be replaced (it is {old.dtype} on {old.device}): it "
                    "is not under its name in the state dict"
                )
                raise PlanError(msg, tensor=name)
            key = identity(old)
            if key not in made:
                dtype, device = self.dtype_of(name, old), self._device_of(old)
                with torch.inference_mode(False):
                    made[key] = _torch.empty_like(old, dtype=dtype, device=device)
            self.old[name], self.new[name] = old, made[key]
        return self.new

    def copy_old(self, name: str) -> None:
        """Copy the old values of an entry, for the elements that the checkpoint lacks."""
        layouts: Layouts = {}
        pairs = (local_pieces(name, tensor, layouts) for tensor in (self.old[name], self.new[name]))
        for old, new in zip(*pairs, strict=True):
            new.tensor.copy_(old.tensor)

    def give_up(self, name: str) -> torch.Tensor:
        """Drop the new tensor of an entry, and return the old one."""
        del self.new[name]
        return self.old[name]

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        device = tensor.device if self._device is None else self._device
        return self._default if device.type == "meta" else device

    @cached_property
    def _default(self) -> torch.device:
        return _torch.default_device()
