"""The tests' own comparison of states, by bytes and NumPy.

It imports nothing of the package under test, so a mistake in the package's comparison cannot hide
here. Torch only tells where a tensor's memory is, and its dtype, shape and strides. NaN payloads
and negative zeros count, and so do the types of containers.
"""

from __future__ import annotations

import ctypes
import io
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

#: Types whose ``==`` compares everything.
_EXACT = (type(None), bool, int, str, bytes, bytearray)
#: Types that are compared by identity: pickle stores these by name.
_BY_NAME = (type, FunctionType, BuiltinFunctionType, ModuleType)
#: The unsigned integer as wide as a number.
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def assert_state_equal(got: Any, want: Any) -> None:
    """Fail with a line for each place where ``got`` is not bit for bit ``want``."""
    differences = state_differences(got, want)
    if differences:
        shown = "\n".join(f"  {line}" for line in differences[:20])
        more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
        raise AssertionError(f"{len(differences)} differences:\n{shown}{more}")


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two tensors, or other values, agree in type, shape and every bit."""
    return not state_differences(left, right)


def state_differences(got: Any, want: Any, path: str = "state") -> list[str]:
    """Return one line for each place where the two differ; none when they are the same.

    A dense tensor may be on another device, be a parameter, or have other strides. Everything else
    has to be of the same type. The order of a mapping counts for an ``OrderedDict`` only.
    Attributes of containers do not count: no checkpoint of DCP holds them.
    """
    return list(_walk(got, want, path, {}))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a dense tensor in row-major order, with a lazy conjugate or negation carried out."""
    local = tensor.detach()
    if local.device.type != "cpu":
        local = local.cpu()
    size = local.element_size()
    start, strides = local.storage_offset() * size, [step * size for step in local.stride()]
    memory = memory_of(local)
    if local.numel() == 0:
        return b""
    end = (
        start
        + sum(step * (count - 1) for step, count in zip(strides, local.shape, strict=True))
        + size
    )
    if end > len(memory):
        raise ValueError(f"a tensor of {end} bytes has memory of {len(memory)}")
    elements = np.ndarray(
        tuple(local.shape), np.dtype((np.void, size)), memory.data, start, strides
    )
    data = elements.tobytes()
    if local.is_conj() or local.is_neg():
        data = _with_signs(data, local)
    return data


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the whole storage of a tensor on the CPU, as bytes that can be written."""
    storage = tensor.untyped_storage()
    length = storage.nbytes()
    if length == 0:
        return np.empty(0, np.uint8)
    buffer = (ctypes.c_uint8 * length).from_address(storage.data_ptr())
    buffer.owner = storage  # the array keeps the buffer, and the buffer the storage
    return np.frombuffer(buffer, np.uint8)


def _with_signs(data: bytes, tensor: torch.Tensor) -> bytes:
    """Flip the signs that a lazy conjugate or negation stands for."""
    width = tensor.element_size() // (2 if tensor.is_complex() else 1)
    numbers = np.frombuffer(data, _UNSIGNED[width]).copy()
    sign = numbers.dtype.type(1 << (8 * width - 1))
    if tensor.is_neg():
        numbers = numbers ^ sign if tensor.is_complex() or tensor.is_floating_point() else -numbers
    if tensor.is_conj():
        numbers[1::2] ^= sign
    return numbers.tobytes()


def _walk(got: Any, want: Any, path: str, seen: dict[tuple[int, int], Any]) -> Iterator[str]:
    # A cycle ends where it began. The entries keep the objects, so that no id is given twice.
    if (id(got), id(want)) in seen:
        return
    seen[id(got), id(want)] = got, want
    if isinstance(want, torch.Tensor):
        yield from _walk_tensor(got, want, path, seen)
    elif type(got) is not type(want):
        yield f"{path}: got a {type(got).__name__}, want a {type(want).__name__}"
    elif isinstance(want, Mapping):
        yield from _walk_mapping(got, want, path, seen)
    elif isinstance(want, list | tuple):
        if len(got) != len(want):
            yield f"{path}: got {len(got)} items, want {len(want)}"
            return
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            yield from _walk(g, w, f"{path}[{i}]", seen)
    else:
        yield from _walk_value(got, want, path, seen)


def _walk_mapping(
    got: Mapping[Any, Any], want: Mapping[Any, Any], path: str, seen: dict[tuple[int, int], Any]
) -> Iterator[str]:
    left, right = (
        {_token(key): (key, value) for key, value in mapping.items()} for mapping in (got, want)
    )
    yield from (f"{path}: missing {right[key][0]!r}" for key in right if key not in left)
    yield from (f"{path}: unexpected {left[key][0]!r}" for key in left if key not in right)
    for key in right:
        if key in left:
            yield from _walk(left[key][1], right[key][1], f"{path}[{right[key][0]!r}]", seen)
    if isinstance(want, OrderedDict) and left.keys() == right.keys() and list(left) != list(right):
        yield f"{path}: the same keys in another order"
    if isinstance(want, defaultdict) and got.default_factory is not want.default_factory:
        yield f"{path}: got the factory {got.default_factory}, want {want.default_factory}"


def _walk_value(got: Any, want: Any, path: str, seen: dict[tuple[int, int], Any]) -> Iterator[str]:
    """Compare what is neither a tensor nor a mapping nor a sequence."""
    parts = None
    if isinstance(want, _BY_NAME):
        equal = got is want
    elif isinstance(want, set | frozenset):
        equal = set(map(_token, got)) == set(map(_token, want))
    elif isinstance(want, np.ndarray) and want.dtype.hasobject:
        equal, parts = got.shape == want.shape, (got.tolist(), want.tolist())
    elif isinstance(want, np.ndarray | np.generic):
        equal = (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
    elif isinstance(want, io.BytesIO):
        equal = (got.getvalue(), got.tell()) == (want.getvalue(), want.tell())
    elif isinstance(want, torch.UntypedStorage):
        equal = bytes(got) == bytes(want)
    elif isinstance(want, (float, complex, *_EXACT)):
        equal = _token(got) == _token(want)
    elif got is want:
        equal = True
    else:
        equal, parts = _reduced(got, want)
    if not equal:
        yield f"{path}: got {got!r}, want {want!r}"
    elif parts is not None:
        yield from _walk(*parts, path, seen)


def _reduced(got: Any, want: Any) -> tuple[bool, tuple[Any, Any] | None]:
    """Return what pickle would store of two objects of one class; where it cannot, whether they are equal."""
    try:
        left, right = (
            part
            if isinstance(part, str)
            else [list(p) if isinstance(p, Iterator) else p for p in part]
            for part in (value.__reduce_ex__(4) for value in (got, want))
        )
    except Exception:  # noqa: BLE001 - of whatever type
        try:
            return bool(got == want), None
        except Exception:  # noqa: BLE001
            return False, None
    return True, (left, right)


def _token(value: Hashable) -> Hashable:
    """Return what is equal for the same keys only: to Python 1, 1.0 and True are one key, 0.0 and -0.0 as well."""
    kind = type(value)
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, complex):
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, tuple):
        return kind, tuple(map(_token, value))
    if isinstance(value, frozenset):
        return kind, frozenset(map(_token, value))
    return kind, bytes(value) if isinstance(value, bytearray) else value


def _walk_tensor(
    got: Any, want: torch.Tensor, path: str, seen: dict[tuple[int, int], Any]
) -> Iterator[str]:
    if not isinstance(got, torch.Tensor):
        yield f"{path}: got a {type(got).__name__}, want a tensor"
        return
    if isinstance(got, DTensor) or isinstance(want, DTensor):
        yield from _walk_dtensor(got, want, path, seen)
        return
    if got.dtype != want.dtype:
        yield f"{path}: got {got.dtype}, want {want.dtype}"
        return
    if got.shape != want.shape:
        yield f"{path}: got shape {tuple(got.shape)}, want {tuple(want.shape)}"
        return
    parts, others = _parts(got), _parts(want)
    if parts is not None or others is not None:
        facts = [
            (type(t), t.layout, t.device, t.requires_grad, t.is_quantized) for t in (got, want)
        ]
        if facts[0] != facts[1] or any(_walk(parts, others, path, seen)):
            yield f"{path}: {type(want).__name__}s of {want.dtype} {tuple(want.shape)} differ"
        return
    if (got.device.type == "meta") != (want.device.type == "meta"):
        yield f"{path}: got a tensor on {got.device}, want one on {want.device}"
    elif want.device.type != "meta":
        yield from _walk_memory(got, want, path)


def _walk_dtensor(
    got: Any, want: Any, path: str, seen: dict[tuple[int, int], Any]
) -> Iterator[str]:
    if not isinstance(got, DTensor):
        yield f"{path}: got a plain tensor, want a DTensor"
    elif not isinstance(want, DTensor):
        yield f"{path}: got a DTensor, want a plain tensor"
    elif got.placements != want.placements or got.shape != want.shape:
        shapes = tuple(got.shape), tuple(want.shape)
        yield f"{path}: got {got.placements}, want {want.placements}; shapes {shapes}"
    elif got.device_mesh.mesh.tolist() != want.device_mesh.mesh.tolist():
        yield f"{path}: got the mesh {got.device_mesh}, want {want.device_mesh}"
    else:
        yield from _walk_tensor(got.to_local(), want.to_local(), path + " (local)", seen)


def _walk_memory(got: torch.Tensor, want: torch.Tensor, path: str) -> Iterator[str]:
    one, other = raw_bytes(got), raw_bytes(want)
    if one != other:
        places = np.nonzero(np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8))[0]
        what = f"{len(places)} bytes of {want.dtype} {tuple(want.shape)} differ"
        yield f"{path}: {what}, the first in element {places[0] // want.element_size()}"


def _parts(tensor: torch.Tensor) -> Any:
    """Return what a tensor that has no plain memory of its own is made of; None for one that has."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names], context
    if hasattr(tensor, "local_shards"):
        return tensor.metadata(), [
            (shard.metadata, shard.tensor) for shard in tensor.local_shards()
        ]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return _quantized_parts(tensor)
    match tensor.layout:
        case torch.sparse_coo:
            return tensor._indices(), tensor._values(), tensor.is_coalesced()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return None


def _quantized_parts(tensor: torch.Tensor) -> Any:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return str(scheme), tensor.q_scale(), tensor.q_zero_point(), tensor.int_repr()
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return str(scheme), scales, zeros, tensor.q_per_channel_axis(), tensor.int_repr()
