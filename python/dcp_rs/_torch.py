"""The private names of torch that this package touches, all of them here, with the versions they were seen in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # 2.8, 2.11, 2.15
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # 2.8, 2.11, 2.15
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # 2.8, 2.11, 2.15
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # 2.8, 2.11, 2.15

__all__ = ["PLAIN_TYPES", "has_memory", "is_wrapper_subclass", "load_state_dict", "unflatten", "wait_tensor"]

#: Tensors whose operations are torch's own.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, once the collective that makes it is done."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return cast(torch.Tensor, tensor.wait())
    return tensor


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether the values are somewhere else than in the tensor's own memory."""
    return bool(is_traceable_wrapper_subclass(tensor))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is anything behind the tensor's address: not so for some subclasses, nor after ``storage.resize_(0)``."""
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def load_state_dict(state_dict: dict[str, Any], storage_reader: Any, **kwargs: Any) -> None:
    """DCP's load protocol, without the deprecation warning of its public name."""
    _load_state_dict(state_dict, storage_reader, **kwargs)


def unflatten(flat: dict[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """A flat state dict, nested again along ``paths``."""
    return cast(dict[str, Any], unflatten_state_dict(flat, dict(paths)))
