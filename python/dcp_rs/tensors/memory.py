"""What memory a tensor is, and who else holds it: the one answer for loads, saves and staging."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.errors import PlanError, UnsupportedError

__all__ = [
    "Part",
    "changes_seen",
    "check_fillable",
    "check_made",
    "identity",
    "is_opaque",
    "is_plain",
    "parts",
    "space_of",
    "twins",
]


@dataclass(slots=True)
class Part:
    """Memory of one device.

    Attributes:
        space: of two parts of different spaces, none shares a byte.
        tensor: where its elements lie.
    """

    space: int
    tensor: torch.Tensor


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes of ``dtype`` in host memory are all there is to ``tensor``. The core asks the same of a whole state dict."""
    return (
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and type(tensor) in PLAIN_TYPES
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
    )


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether only the tensor's own class knows where its values are, as that of a wrapper of other tensors does."""
    return type(tensor) not in PLAIN_TYPES and (
        _torch.is_wrapper_subclass(tensor) or not _torch.has_memory(tensor)
    )


def parts(tensor: torch.Tensor) -> list[Part]:
    """The memory of a tensor on any device; of an opaque one, that of the tensors in it, as far as they can be asked for."""
    if is_opaque(tensor):
        return [part for inner in _torch.inner_tensors(tensor) for part in parts(inner)]
    return [Part(space_of(tensor.device), tensor)] if _torch.has_memory(tensor) else []


#: Numbers of devices. 0 is host memory, of which every process has one.
_SPACES: dict[torch.device, int] = {torch.device("cpu"): 0}


def space_of(device: torch.device) -> int:
    """The number of a device in this process."""
    return _SPACES.setdefault(device, len(_SPACES))


def identity(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same elements of the same memory, as tied weights are; both are held meanwhile.

    Tensors of a DTensor or ShardedTensor are the same where the whole is cut alike, and the shards
    of this rank are the same.
    """
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return DTensor, _torch.spec_of(tensor), identity(_torch.wait_tensor(tensor.to_local()))
    if isinstance(tensor, ShardedTensor):
        shards = [
            (tuple(s.metadata.shard_offsets), identity(s.tensor)) for s in tensor.local_shards()
        ]
        return ShardedTensor, tuple(tensor.size()), *shards
    if is_opaque(tensor):
        inner = [identity(inner) for inner in _torch.inner_tensors(tensor)] or [id(tensor)]
        return type(tensor), tensor.dtype, tensor.shape, *inner
    if tensor.layout != torch.strided:
        return id(tensor)
    place: Hashable = tensor.data_ptr() or (_torch.storage_id(tensor), tensor.storage_offset())
    view = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.device, place, *view, *map(tuple, _torch.place_in_whole(tensor).values())


def twins(names: Iterable[str], others: Iterable[str], values: Mapping[str, Any]) -> dict[str, str]:
    """For those of ``names`` whose tensor is the same memory as one of ``others``: which."""
    tensors = {name: values[name] for name in names if isinstance(values[name], torch.Tensor)}
    shapes = {tensor.shape for tensor in tensors.values() if 0 not in tensor.shape}
    known: dict[Hashable, str] = {}
    for other in others:
        value = values[other]
        if isinstance(value, torch.Tensor) and value.shape in shapes:
            known.setdefault(identity(value), other)
    found = {
        name: known.get(identity(tensor))
        for name, tensor in tensors.items()
        if tensor.shape in shapes
    }
    return {name: other for name, other in found.items() if other is not None}


def check_fillable(name: str, tensor: torch.Tensor) -> None:
    """Raises for a tensor that copies cannot fill.

    Raises:
        PlanError: it has no memory.
        UnsupportedError: it is no strided tensor.
    """
    if tensor.device.type == "meta":
        msg = f"tensor {name!r} is on the meta device, where there is nothing to fill"
        raise PlanError(msg, tensor=name)
    if tensor.layout != torch.strided:
        msg = f"tensor {name!r} has layout {tensor.layout}; only strided tensors can be filled"
        raise UnsupportedError(msg, tensor=name)
    if not is_opaque(tensor) and not _torch.has_memory(tensor):
        msg = f"tensor {name!r} has no memory to fill: its storage was freed"
        raise PlanError(msg, tensor=name)


def check_made(memory: torch.Tensor) -> torch.Tensor:
    """Memory that torch just made, for the engine to read to or write from by its address.

    Raises:
        UnsupportedError: it is none: a mode of the caller's makes something else.
    """
    if type(memory) is not torch.Tensor:
        msg = f"there is no memory to copy through: torch makes a {type(memory).__name__} where it is asked for some, as under FakeTensorMode"
        raise UnsupportedError(msg)
    return memory


def changes_seen(tensor: torch.Tensor) -> int | None:
    """How often torch has seen its memory change: autograd counts for its own sake. None: it does not count (tensors of inference)."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001  # torch's notes on autograd describe it
