"""What a rank holds for a save that is no plain tensor: pieces of sharded tensors, values, tensors that raw bytes cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _core, _torch
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors.dtypes import NAMES, can_require_grad
from dcp_rs.tensors.shards import Layouts, global_shape, local_pieces
from dcp_rs.transfer.entry import Entry
from dcp_rs.transfer.save import dump, refuse_meta, why_not_raw

__all__ = ["HeldItem", "held_items"]


@dataclass(slots=True)
class HeldItem:
    """An item that is no plain tensor: a tensor of another kind, or a value."""

    fqn: str
    value: Any
    path: tuple[Any, ...] | None
    position: int | None
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # what it is stored as; None for values

    def item(self) -> _core.SaveItem:
        """What of it the coordinator and the engine get to know."""
        if self.dtype is None:
            return _core.SaveItem(self.fqn, 0, path=self.path, position=self.position)
        return _core.SaveItem(
            self.fqn,
            self.value.numel() * self.dtype.itemsize,
            dtype=NAMES[self.dtype],
            shape=self.shape,
            offsets=self.offsets,
            sizes=tuple(self.value.shape),
            flags=1 if self.value.requires_grad else 0,
            path=self.path,
            position=self.position,
        )

    def entry(self, *, strict: bool) -> Entry:
        """What is written; with ``strict``, a value that would not load back is refused."""
        if self.dtype is not None:
            return Entry(self.fqn, self.value.detach(), dtype=self.dtype)
        return Entry(self.fqn, dump(self.fqn, self.value, strict=strict))


def held_items(
    fqn: str,
    value: Any,
    path: tuple[Any, ...] | None,
    position: int | None,
    layouts: Layouts,
    becomes: Callable[[torch.dtype], torch.dtype],
) -> list[HeldItem]:
    """The items of an entry of a state dict.

    Args:
        fqn, value: its name, and what it is.
        path, position: of the entry in the state dict, where that is known.
        layouts: what is known of the layouts of other tensors.
        becomes: what tensors of a dtype are stored as.

    Raises:
        PlanError: a tensor whose pieces torch cannot tell, or that is on ``meta``.
        UnsupportedError: a shard that the format cannot hold.
    """
    if not isinstance(value, torch.Tensor):
        return [HeldItem(fqn, value, path, position)]
    is_sharded = isinstance(value, (DTensor, ShardedTensor)) or hasattr(value, "global_shape")
    if not is_sharded:
        value = _torch.wait_tensor(value)
        refuse_meta(fqn, value)
        if why_not_raw(value) is not None:
            return [HeldItem(fqn, value, path, position)]
    try:
        pieces = local_pieces(fqn, value, layouts)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        msg = f"tensor {fqn!r} cannot be saved: {error}"
        raise PlanError(msg, tensor=fqn) from error
    shape = tuple(global_shape(value))
    others = []
    for piece in pieces:
        tensor = _torch.wait_tensor(piece.tensor)
        refuse_meta(fqn, tensor)
        refusal = why_not_raw(tensor)
        if refusal is not None:
            msg = f"tensor {fqn!r}: a shard of it cannot be saved: {refusal}"
            raise UnsupportedError(msg, tensor=fqn)
        if value.requires_grad and not tensor.requires_grad and can_require_grad(tensor.dtype):
            tensor = tensor.detach().requires_grad_()
        others.append(HeldItem(fqn, tensor, path, position, shape, tuple(piece.offsets), becomes(tensor.dtype)))
    return others
