"""New tensors for entries that a load does not fill in place: those on ``meta``, or to assign."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _torch
from dcp_rs.errors import PlanError
from dcp_rs.tensors.dtypes import is_counter
from dcp_rs.tensors.flatten import Flat, get_at
from dcp_rs.tensors.memory import check_has_shape, identity, on_meta, parse_device


class NewTensors:
    """New tensors for entries of a state dict, by name. Tied names share a new tensor.

    Args:
        dtype: the dtype of new floating-point tensors; None keeps their dtypes.
        device: the device of new tensors. With None tensors stay, and those on ``meta`` go to the
            default device.
        assign: replace every tensor of another dtype or device. Otherwise only those on ``meta``,
            as a caller may have no other way to the tensors than through their memory.

    Attributes:
        new: the tensors that replace them.
    """

    def __init__(
        self, dtype: torch.dtype | None, device: torch.device | str | None, *, assign: bool
    ) -> None:
        self._dtype = dtype
        self._device = None if device is None else parse_device(device)
        self._assign = assign
        self._default_device = cache(_torch.default_device)
        self.new: dict[str, torch.Tensor] = {}
        self._made: dict[Hashable, torch.Tensor] = {}

    def dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype that an entry has after the load."""
        return self._asked_dtype(name, tensor) if self._may_replace(tensor) else tensor.dtype

    def is_unlike(self, name: str, tensor: torch.Tensor) -> bool:
        """Return true if an entry has another dtype or device than the caller asks for.

        Raises:
            UnsupportedError: the tensor has no shape.
        """
        check_has_shape(name, tensor, "load into")
        if self._asked_dtype(name, tensor) != tensor.dtype:
            return True
        is_at, device = tensor.device, self._device_of(tensor)
        return device.type != is_at.type or device.index not in (None, is_at.index)

    def names_of(self, names: Sequence[str], values: Sequence[Any]) -> dict[str, None]:
        """Return the names of the tensors that need a new one, in order."""
        is_tensor = [isinstance(value, torch.Tensor) for value in values]
        if not self._assign or (self._dtype is None and self._device is None):
            tensors = list(compress(values, is_tensor))
            is_sharded = any(issubclass(cls, ShardedTensor) for cls in set(map(type, tensors)))
            # Only tensors on `meta` need one, and this is faster to ask.
            if not is_sharded and not any(map(attrgetter("is_meta"), tensors)):
                return {}
        return dict.fromkeys(
            name
            for name, value in compress(zip(names, values, strict=True), is_tensor)
            if self._may_replace(value) and self.is_unlike(name, value)
        )

    def make_all(self, state_dict: Mapping[str, Any], flat: Flat, names: Iterable[str]) -> None:
        """Make new tensors, uninitialized. The state dict keeps its own tensors.

        They are ordinary tensors even in inference mode, so that autograd can count their changes.

        Args:
            state_dict: the caller's state dict.
            flat: the same, flattened.
            names: the names of tensors that need a new one.

        Raises:
            PlanError: the tensor at the path of a name is another one, so it cannot be replaced.
        """
        for name in names:
            old = flat.values[name]
            if get_at(state_dict, flat.paths[name]) is not old:
                msg = (
                    f"tensor {name!r} cannot be replaced (it is {old.dtype} on {old.device}): it "
                    "is not under its name in the state dict"
                )
                raise PlanError(msg, tensor=name)
            key = identity(old)
            if key not in self._made:
                dtype, device = self.dtype_of(name, old), self._device_of(old)
                with torch.inference_mode(False):
                    self._made[key] = _torch.empty_like(old, dtype=dtype, device=device)
            self.new[name] = self._made[key]

    def _may_replace(self, tensor: torch.Tensor) -> bool:
        return self._assign or on_meta(tensor)

    def _asked_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if self._dtype is None or not tensor.is_floating_point() or is_counter(name, tensor.shape):
            return tensor.dtype
        return self._dtype

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        device = tensor.device if self._device is None else self._device
        if device.type != "meta":
            return device
        # The group of a job may have a backend for the CPU besides that of its devices.
        mesh_type = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else None
        return self._default_device(mesh_type)
