"""New tensors in place of those that may not stay as they are: of another dtype, on another device, on ``meta``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _torch
from dcp_rs.errors import PlanError
from dcp_rs.tensors.dtypes import is_counter
from dcp_rs.tensors.flatten import get_at
from dcp_rs.tensors.memory import identity
from dcp_rs.tensors.nesting import TreePath
from dcp_rs.tensors.shards import Layouts, local_pieces

__all__ = ["NewTensors"]


class NewTensors:
    """New tensors for entries of a state dict, by name. Names of one tensor get one new tensor.

    Args:
        dtype: the dtype that floating-point tensors get; None: they keep theirs.
        device: where tensors go. None: they stay, and those on ``meta`` go to the default device.

    Attributes:
        old: the tensors that are replaced.
        new: the tensors that replace them.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        self._dtype = dtype
        self._device = None if device is None else torch.device(device)
        self.old: dict[str, torch.Tensor] = {}
        self.new: dict[str, torch.Tensor] = {}
        self._names: dict[int, list[str]] = {}  # by storage of the old ones

    def dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype that the tensor gets."""
        if self._dtype is None or not tensor.is_floating_point() or is_counter(name, tensor.shape):
            return tensor.dtype
        return self._dtype

    def applies_to(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the tensor cannot stay as it is."""
        if self.dtype_of(name, tensor) != tensor.dtype:
            return True
        is_at, device = tensor.device, self._device_of(tensor)
        return is_at is not device and not (
            is_at.type == device.type and device.index in (None, is_at.index)
        )

    @property
    def reaches_plain(self) -> bool:
        """Return whether tensors in host memory may have to go. Otherwise only those on ``meta`` do."""
        return self._dtype is not None or self._device is not None

    def apply_to_any(self, names: Iterable[str], values: Sequence[Any]) -> bool:
        """Return whether a tensor among the values cannot stay as it is."""
        if self.reaches_plain:
            named = zip(names, values, strict=True)
            return any(
                isinstance(value, torch.Tensor) and self.applies_to(name, value)
                for name, value in named
            )
        kinds = set(map(type, values))
        if not all(issubclass(kind, torch.Tensor) for kind in kinds):
            values = [value for value in values if isinstance(value, torch.Tensor)]
        if any(issubclass(kind, ShardedTensor) for kind in kinds):
            return any(
                value.device.type == "meta" for value in values
            )  # one without shards here has no `is_meta`
        return any(map(attrgetter("is_meta"), values))

    def make(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """Return the new tensor for a name, not filled yet.

        It is an ordinary tensor in inference mode too: autograd can count its changes.
        """
        part = _first_part(old)
        others = self._names.setdefault(
            _torch.storage_id(part) if _has_storage(part) else id(old), []
        )
        same = identity(old) if others else None
        twin = next((other for other in others if identity(self.old[other]) == same), None)
        others.append(name)
        if twin is None:
            with torch.inference_mode(False):
                new = _torch.empty_like(
                    old, dtype=self.dtype_of(name, old), device=self._device_of(old)
                )
        else:
            new = self.new[twin]
        self.old[name], self.new[name] = old, new
        return new

    def make_all(
        self,
        state_dict: Mapping[str, Any],
        values: Mapping[str, Any],
        paths: Mapping[str, TreePath],
        names: Iterable[str],
    ) -> dict[str, torch.Tensor]:
        """Return new tensors for those of the names that cannot stay as they are. Nothing is put anywhere.

        Args:
            state_dict: the caller's.
            values: its entries by name.
            paths: where they are.
            names: of tensors that will be filled.

        Raises:
            PlanError: a tensor is not under its name in the state dict, so it cannot be replaced.
        """
        for name in names:
            value = values[name]
            if self.applies_to(name, value):
                if get_at(state_dict, paths[name]) is not value:
                    msg = f"tensor {name!r} cannot be replaced (it is {value.dtype} on {value.device}): it is not under its name in the state dict"
                    raise PlanError(msg, tensor=name)
                self.make(name, value)
        return self.new

    def copy_old(self, name: str) -> None:
        """Copy the old values to the new tensor of a name. Elements that the checkpoint lacks keep them."""
        layouts: Layouts = {}
        pairs = (local_pieces(name, tensor, layouts) for tensor in (self.old[name], self.new[name]))
        for old, new in zip(*pairs, strict=True):
            new.tensor.copy_(old.tensor)

    def give_up(self, name: str) -> torch.Tensor:
        """Drop the new tensor of a name. Return the old one, which stays."""
        del self.new[name]
        return self.old[name]

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        device = tensor.device if self._device is None else self._device
        return self._default if device.type == "meta" else device

    @cached_property
    def _default(self) -> torch.device:
        return _torch.default_device()


def _first_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of this process that the tensor has; the tensor itself where it has none."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    if isinstance(tensor, ShardedTensor):
        return next((shard.tensor for shard in tensor.local_shards()), tensor)
    return tensor


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in _torch.PLAIN_TYPES and tensor.layout == torch.strided
