"""The memory of tensors: its kind, its identity, and whether it can be read or filled as bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.nn.parameter import is_lazy

from dcp_rs import _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors.dtypes import NAMES


@dataclass(slots=True)
class DeviceMemory:
    """Memory of one device.

    Attributes:
        space: the number of the device. Two devices share no bytes.
        tensor: a tensor over the memory.
    """

    space: int
    tensor: torch.Tensor


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor is a strided CPU tensor of ``dtype`` and nothing more.

    The core asks the same of a whole state dict.
    """
    return (
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and type(tensor) in PLAIN_TYPES
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
    )


def why_not_raw(tensor: torch.Tensor) -> str | None:
    """Return why raw bytes cannot hold a tensor, or None if they can."""
    if tensor.is_quantized:
        return "it is quantized"
    if not has_shape(tensor):
        return "it has no shape"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"its layout is {tensor.layout}"
    if _torch.is_wrapper_subclass(tensor) or not _torch.has_memory(tensor):
        cls = type(tensor)
        return "its memory has been freed" if cls in PLAIN_TYPES else f"it is a {cls.__name__}"
    if tensor.dtype not in NAMES:
        return f"its dtype is {tensor.dtype}"
    return None


def has_shape(tensor: torch.Tensor) -> bool:
    """Return false for parameters of lazy modules, and for nested tensors of the strided layout."""
    return not (is_lazy(tensor) or _is_strided_nested(tensor))


def check_has_shape(name: str, tensor: torch.Tensor, verb: str) -> None:
    """Check that a tensor has a shape.

    Args:
        name: the name of the tensor.
        tensor: the tensor.
        verb: what to do with the parts of a nested tensor, such as ``"save"``.

    Raises:
        UnsupportedError: it has none.
    """
    if is_lazy(tensor):
        msg = f"tensor {name!r} has no shape yet: run a forward pass of its lazy module first"
        raise UnsupportedError(msg, tensor=name)
    if _is_strided_nested(tensor):
        msg = (
            f"tensor {name!r} is a nested tensor of the strided layout, which has no shape: "
            f"{verb} the tensors of its unbind()"
        )
        raise UnsupportedError(msg, tensor=name)


def _is_strided_nested(tensor: torch.Tensor) -> bool:
    # ShardedTensor refuses the question whether it is nested.
    return type(tensor) in PLAIN_TYPES and tensor.is_nested and tensor.layout == torch.strided


def _has_values(tensor: torch.Tensor) -> bool:
    """Return false for tensors on ``meta``, of lazy modules, and with a freed local storage."""
    if is_lazy(tensor) or tensor.is_meta:
        return False
    local = _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor
    is_memory = type(local) in PLAIN_TYPES and local.layout == torch.strided and not local.is_nested
    return not is_memory or _torch.has_memory(local)


def clone(tensor: torch.Tensor, *, to_host: bool = False) -> torch.Tensor:
    """Clone a tensor, with its place in a larger one. What a save refuses is returned as it is."""
    if not _has_values(tensor):
        return tensor
    source = tensor.detach()
    is_native = tensor.dtype in NAMES or tensor.is_quantized
    if not is_native:  # torch cannot copy every dtype
        if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided:
            return tensor
        source = source.view(torch.uint8 if tensor.itemsize == 1 else torch.int16)
    copied = source.clone().cpu() if to_host else source.clone()
    if not is_native:
        copied = copied.view(tensor.dtype)
    _torch.copy_place_in_whole(tensor, copied)
    return copied


def is_opaque(tensor: torch.Tensor) -> bool:
    """Return whether only the tensor's class can access its values, as for wrapper subclasses."""
    return type(tensor) not in PLAIN_TYPES and (
        _torch.is_wrapper_subclass(tensor) or not _torch.has_memory(tensor)
    )


def memory_of(tensor: torch.Tensor) -> list[DeviceMemory]:
    """Return the memory of a tensor; of an opaque one, that of the tensors it names as inner."""
    if is_opaque(tensor):
        return [part for inner in _torch.inner_tensors(tensor) for part in memory_of(inner)]
    return [DeviceMemory(space_of(tensor.device), tensor)] if _torch.has_memory(tensor) else []


def on_meta(tensor: torch.Tensor) -> bool:
    """Return true if a tensor is on ``meta``. A ShardedTensor is where its first shard is.

    A tensor without local shards is nowhere. torch 2.8 says ``meta`` of it.
    """
    if tensor.device.type != "meta":  # `is_meta` of a ShardedTensor needs a single shard
        return False
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return not isinstance(local, LocalShardsWrapper) or bool(local.local_shards())


#: Numbers of devices in this process. Host memory is 0.
_SPACES: dict[torch.device, int] = {torch.device("cpu"): 0}


def space_of(device: torch.device) -> int:
    """Return the number of a device in this process."""
    return _SPACES.setdefault(device, len(_SPACES))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a row of bytes."""
    # view(-1) would keep the stride of a tensor of one element, which may be any.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def identity(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors of the same elements, as tied weights are.

    Two DTensors or ShardedTensors are equal if they are sharded alike and this rank's shards are
    the same memory. Keep the tensors alive while you compare their keys.
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
    # As text, because the attributes may be lists.
    return tensor.device, place, *view, *map(str, _torch.place_in_whole(tensor).values())


def find_tied(
    names: Iterable[str], others: Iterable[str], values: Mapping[str, Any]
) -> dict[str, str]:
    """Return which of ``names`` is the same tensor as one of ``others``, and which one.

    Args:
        names: the names to look up.
        others: the names to look among.
        values: the state dict.
    """
    tensors = {name: values[name] for name in names if isinstance(values[name], torch.Tensor)}
    shapes = {tensor.shape for tensor in tensors.values() if 0 not in tensor.shape}
    known: dict[Hashable, str] = {}
    for other in others:
        value = values[other]
        if isinstance(value, torch.Tensor) and value.shape in shapes:
            known.setdefault(identity(value), other)
    return {
        name: twin
        for name, tensor in tensors.items()
        if tensor.shape in shapes and (twin := known.get(identity(tensor))) is not None
    }


def check_fillable(name: str, tensor: torch.Tensor) -> None:
    """Check that a copy can fill a tensor.

    Raises:
        PlanError: the tensor has no memory.
        UnsupportedError: the tensor is not strided.
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


def parse_device(device: torch.device | str | int) -> torch.device:
    """Return a device by its name.

    Raises:
        ValueError: torch has no such device.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        msg = f"device={device!r}: must be a device of torch, such as 'cpu', 'cuda' or 'cuda:0'"
        raise ValueError(msg) from None
    # Devices of other packages may have no such module, and meta has none.
    module: Any = getattr(torch, found.type, None)
    if found.type == "cpu" or not hasattr(module, "device_count"):
        return found
    count = int(module.device_count())
    if (found.index or 0) >= count:
        msg = (
            f"device={device!r}: torch {torch.__version__} sees {count} devices of type "
            f"{found.type}. Check the driver, CUDA_VISIBLE_DEVICES, and that torch is built for it"
        )
        raise ValueError(msg)
    return found


def require_real_memory(memory: torch.Tensor) -> torch.Tensor:
    """Return new memory that the engine will use by its address, if it is real.

    Raises:
        UnsupportedError: a mode such as ``FakeTensorMode`` made something else.
    """
    if type(memory) is not torch.Tensor:
        msg = (
            f"there is no memory to copy through: torch makes a {type(memory).__name__} "
            "where it is asked for some, as under FakeTensorMode"
        )
        raise UnsupportedError(msg)
    return memory


def changes_seen(tensor: torch.Tensor) -> int | None:
    """Return autograd's version counter of a tensor, or None for tensors of inference mode."""
    # torch's notes on autograd document the attribute.
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001
