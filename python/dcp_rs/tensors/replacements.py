"""New tensors for some of a state dict, which take the place of the old ones once they hold what was read."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import cached_property
from operator import attrgetter
from typing import Any
from weakref import WeakMethod

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from dcp_rs import _torch
from dcp_rs.tensors.memory import identity

__all__ = ["Replacements"]

_Place = tuple[MetadataIndex, tuple[int, ...], tuple[int, ...]]


class Replacements:
    """What takes the place of tensors that are of another dtype or elsewhere.

    Until it is filled, nobody but the planner gets to see it: whatever fails, the state dict holds the old tensors or full new ones.

    Args:
        dtype: what floating-point tensors become.
        device: where tensors come into being; None: where they are, or on the default device if they are nowhere (on ``meta``).
        put: puts a new tensor into the caller's state dict, under a name: a method of the planner, which has this, and is not kept alive by it.
        spared: tensors that keep their dtype, by ``id``.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        device: torch.device | None,
        put: Callable[[str, torch.Tensor], None],
        spared: Container[int] = (),
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._put = WeakMethod(put)
        self._spared = spared
        # By name, and no object for each: the garbage collector looks at those of a large model again and again.
        self._old: dict[str, torch.Tensor] = {}
        self._new: dict[str, torch.Tensor] = {}
        self._names: dict[int, list[str] | str] = {}  # by storage of the old ones
        self._waiting: dict[str, set[_Place]] = {}
        self._followers: dict[str, list[str]] = {}

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """What ``tensor`` becomes."""
        if self._dtype is None or not tensor.is_floating_point() or id(tensor) in self._spared:
            return tensor.dtype
        return self._dtype

    def applies_to(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor cannot stay as it is."""
        if self._dtype is not None and self.dtype_of(tensor) != tensor.dtype:
            return True
        is_at, device = tensor.device, self._device_of(tensor)
        return is_at is not device and not (is_at.type == device.type and device.index in (None, is_at.index))

    @property
    def reaches_plain(self) -> bool:
        """Whether tensors in host memory are among those that may not stay as they are; else it is those on ``meta`` alone."""
        return self._dtype is not None or self._device is not None

    def apply_to_any(self, values: Iterable[Any]) -> bool:
        """Whether any of the tensors among the values cannot stay as it is."""
        if self.reaches_plain:
            return any(isinstance(value, torch.Tensor) and self.applies_to(value) for value in values)
        values = list(values)
        kinds = set(map(type, values))
        if not all(issubclass(kind, torch.Tensor) for kind in kinds):
            values = [value for value in values if isinstance(value, torch.Tensor)]
        if any(issubclass(kind, ShardedTensor) for kind in kinds):
            return any(value.device.type == "meta" for value in values)  # one without shards here has no `is_meta`
        return any(map(attrgetter("is_meta"), values))

    def make(self, name: str, old: torch.Tensor, *, tied: bool = False) -> torch.Tensor:
        """The new tensor for ``old``, not filled yet; the same one for all names of the same memory.

        A name that is ``tied`` is not read itself: it goes into the state dict with the one before it.

        Not to be called in inference mode, whose tensors do not tell whether they were written to.
        """
        twin = self._twin(name, old)
        if twin is None:
            new = _torch.empty_like(old, dtype=self.dtype_of(old), device=self._device_of(old))
        else:
            new = self._new[twin]
            if tied:
                self._followers.setdefault(twin, []).append(name)
        self._old[name], self._new[name] = old, new
        return new

    def keep(self, name: str) -> torch.Tensor:
        """Gives up the new tensor of this name: the old one stays, and is returned."""
        del self._new[name]
        return self._old[name]

    def old(self, name: str) -> torch.Tensor | None:
        """The tensor that is to be replaced, if it is one."""
        return self._old[name] if name in self._new else None

    def wait_for(self, items: Iterable[ReadItem]) -> None:
        """Puts each tensor into the state dict when all of these items were read, and not before."""
        self._waiting = {}
        for item in items:
            if item.dest_index.fqn in self._new:
                self._waiting.setdefault(item.dest_index.fqn, set()).add(_place(item))

    def item_is_read(self, item: ReadItem) -> None:
        """Says that an item was read, and may be said again."""
        waiting = self._waiting.get(item.dest_index.fqn)
        if waiting is not None and _place(item) in waiting:
            waiting.remove(_place(item))
            if not waiting:
                self._publish([item.dest_index.fqn, *self._followers.get(item.dest_index.fqn, ())])

    def put_unfilled(self) -> None:
        """Puts all into the state dict before they are filled, where nobody will tell when they are."""
        for name, new in self._new.items():
            self._show(name, new)
        self._new = {}

    def put_empty(self) -> None:
        """Puts those tensors into the state dict that have nothing to be filled with."""
        self._publish([name for name, new in self._new.items() if not any(part.numel() for part in _parts(new))])

    def put_all(self) -> None:
        """Puts all that are filled into the state dict."""
        self._publish(list(self._new))

    def _publish(self, names: Iterable[str]) -> None:
        for name in names:
            new = self._new.get(name)
            if new is not None and _is_filled(new):
                del self._new[name]
                self._show(name, new)

    def _show(self, name: str, new: torch.Tensor) -> None:
        put = self._put()
        assert put is not None  # noqa: S101  # its planner publishes
        put(name, new)

    def _twin(self, name: str, old: torch.Tensor) -> str | None:
        """Another name of the same tensor."""
        part = old if type(old) in _torch.PLAIN_TYPES else next(iter(_parts(old)), old)
        is_plain = type(part) in _torch.PLAIN_TYPES and part.layout == torch.strided
        storage = _torch.storage_id(part) if is_plain else id(old)
        others = self._names.setdefault(storage, name)
        if others is name:
            return None
        others = [others] if isinstance(others, str) else others
        self._names[storage] = [*others, name]
        same = identity(old)
        return next((other for other in others if other in self._new and identity(self._old[other]) == same), None)

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        device = tensor.device if self._device is None else self._device
        return self._default if device.type == "meta" else device

    @cached_property
    def _default(self) -> torch.device:
        return _torch.default_device()


def _place(item: ReadItem) -> _Place:
    """What an item fills, wherever that is read from."""
    return item.dest_index, tuple(item.dest_offsets), tuple(item.lengths)


def _is_filled(tensor: torch.Tensor) -> bool:
    """Whether it was written to, which its version counts: a planner may have read what was for it to somewhere else."""
    if type(tensor) in _torch.PLAIN_TYPES:
        return tensor._version > 0 or tensor.numel() == 0  # noqa: SLF001  # public in all but name
    return all(part._version > 0 or part.numel() == 0 for part in _parts(tensor))  # noqa: SLF001


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The memory that is filled."""
    if type(tensor) in _torch.PLAIN_TYPES:
        return [tensor]
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return [tensor.to_local()]
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]
