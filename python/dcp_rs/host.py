"""Copies of state dicts in host memory, for saves that go on while training does."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _torch

__all__ = ["HostStager"]

_ALIGN = 64
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class HostStager:
    """Copies a state dict to host memory, its tensors into one block: pinned where they come from an accelerator.

    Args:
        cache: keep the block for the next state dict; whatever was staged before must have been saved by then.
        shared: make the block one that another process can map, so that the copy travels there without being copied again.
    """

    def __init__(self, *, cache: bool = False, shared: bool = False) -> None:
        self.cache = cache
        self.shared = shared
        self._block: torch.Tensor | None = None

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The copy: dicts, lists and tuples anew, and all tensors in host memory. Once it is there the original may change."""
        found = _Found()
        found.look_at(state_dict)
        block = self._memory(
            found.nbytes, pin=any(source.device.type != "cpu" for _, source, _ in found.places.values())
        )
        staged = {}
        made = found.copy_to(block)
        for key, value in state_dict.items():
            staged[key] = _rebuilt(value, made)
        return _Shared(staged, block, found, made) if self.shared else staged

    def release(self) -> None:
        """Lets go of the memory."""
        self._block = None

    def _memory(self, nbytes: int, *, pin: bool) -> torch.Tensor:
        block = self._block
        if block is None or block.nbytes < nbytes or (pin and not self.shared and not block.is_pinned()):
            block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin and not self.shared)
            if self.shared:
                block.share_memory_()  # type: ignore[no-untyped-call]
        self._block = block if self.cache else None
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_stager, (self.cache, self.shared)


def _new_stager(cache: bool, shared: bool) -> HostStager:
    return HostStager(cache=cache, shared=shared)


class _Found:
    """The tensors of a state dict, each with a place in the block. By identity: tied weights are copied once."""

    def __init__(self) -> None:
        #: The tensor, the memory to copy, and where that goes.
        self.places: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.nbytes = 0

    def look_at(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            source = _memory_of(value)
            if source is not None and id(value) not in self.places:
                self.places[id(value)] = value, source, self.nbytes
                self.nbytes += -(-source.numel() * source.element_size() // _ALIGN) * _ALIGN
        elif isinstance(value, Mapping):
            for entry in value.values():
                self.look_at(entry)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                self.look_at(entry)

    def copy_to(self, block: torch.Tensor) -> dict[int, torch.Tensor]:
        """The copies, by the identity of what they are copies of."""
        made = {}
        devices = set()
        with torch.no_grad():
            for key, (value, source, at) in self.places.items():
                target = _view(block, at, source.dtype, source.shape)
                _copy(target, source, non_blocking=block.is_pinned() if source.device.type != "cpu" else False)
                if source.device.type != "cpu":
                    devices.add(source.device)
                made[key] = _like(value, target)
        for device in devices:
            torch.get_device_module(device).current_stream(device).synchronize()
        return made


def _memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What raw bytes can hold of a tensor; None for kinds that are copied as a whole."""
    local = _torch.wait_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    is_raw = (
        type(local) in _torch.PLAIN_TYPES
        and local.layout == torch.strided
        and not local.is_nested
        and not local.is_quantized
        and local.device.type != "meta"
        and _torch.has_memory(local)
    )
    return local.detach() if is_raw else None


def _view(block: torch.Tensor, at: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    view: torch.Tensor = torch.empty(0, dtype=dtype).set_(block.untyped_storage(), at // dtype.itemsize, shape)  # type: ignore[call-overload]
    return view


def _copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    try:
        target.copy_(source, non_blocking=non_blocking)
    except NotImplementedError:  # some of the youngest dtypes
        _bytes(target).copy_(_bytes(source.contiguous()), non_blocking=non_blocking)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A tensor of the kind of ``value`` with the memory of ``target``."""
    if isinstance(value, DTensor):
        return _torch.dtensor_of(target, _torch.spec_of(value), requires_grad=value.requires_grad)
    _torch.copy_place_in_whole(value, target)
    return target.requires_grad_() if value.requires_grad else target


def _rebuilt(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """The value with copies in place of its tensors, and nothing in it that training could change."""
    if isinstance(value, torch.Tensor):
        copied = made.get(id(value))
        if copied is not None:
            return copied
        if isinstance(value, ShardedTensor):
            return _torch.host_copy_of_sharded(value)
        return value.detach().clone().cpu() if value.device.type != "meta" else value
    if isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, Mapping):
        return {key: _rebuilt(entry, made) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(entry, made) for entry in value)
    return copy.deepcopy(value)


@dataclass(frozen=True)
class _At:
    """A place in the block."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    attributes: dict[str, Any]
    spec: Any  # of a DTensor, else None


class _Shared(dict[str, Any]):
    """A staged state dict that pickles as the block, mapped by the other process, and places in it."""

    def __init__(
        self, staged: dict[str, Any], block: torch.Tensor, found: _Found, made: dict[int, torch.Tensor]
    ) -> None:
        super().__init__(staged)
        self._block = block
        self._places = {}
        for key, (value, source, offset) in found.places.items():
            copied = made[key]
            spec = _torch.spec_of(value) if isinstance(value, DTensor) else None
            place = _At(
                offset, source.dtype, tuple(source.shape), value.requires_grad, _torch.place_in_whole(value), spec
            )
            self._places[id(copied)] = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_block, (self._block, {key: self._placed(value) for key, value in self.items()})

    def _placed(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._places.get(id(value), value)
        if type(value) is dict:
            return {key: self._placed(entry) for key, entry in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._placed(entry) for entry in value)
        return value


def _from_block(block: torch.Tensor, placed: dict[str, Any]) -> dict[str, Any]:
    return {key: _unplaced(value, block) for key, value in placed.items()}


def _unplaced(value: Any, block: torch.Tensor) -> Any:
    if isinstance(value, _At):
        target = _view(block, value.offset, value.dtype, torch.Size(value.shape))
        if value.spec is not None:
            return _torch.dtensor_of(target, value.spec, requires_grad=value.requires_grad)
        target.__dict__.update(value.attributes)
        return target.requires_grad_() if value.requires_grad else target
    if type(value) is dict:
        return {key: _unplaced(entry, block) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unplaced(entry, block) for entry in value)
    return value
