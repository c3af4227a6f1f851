"""One item of a save: a chunk of a tensor, or a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs.tensors.dtypes import NAMES

__all__ = ["Entry"]


@dataclass(slots=True)
class Entry:
    """One chunk or value to write.

    Attributes:
        fqn: its name.
        data: a strided tensor on any device, or the bytes of a non-tensor value.
        shape, offsets, sizes: of the whole tensor, and of this chunk in it.
        flags: section 3.3 of the format.
        path, position: in the state dict, where the planner gave them.
        dtype: what the tensor is cast to while it is written; None: it stays what it is.
    """

    fqn: str
    data: torch.Tensor | bytes
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    flags: int = 0
    path: tuple[Any, ...] | None = None
    position: int | None = None
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        if not isinstance(self.data, torch.Tensor):
            return len(self.data)
        return self.data.numel() * (self.dtype or self.data.dtype).itemsize

    @property
    def is_in_place(self) -> bool:
        """Whether the payload lies in host memory as it is written."""
        data = self.data
        return (
            isinstance(data, torch.Tensor)
            and data.device.type == "cpu"
            and self.dtype in (None, data.dtype)
            and data.is_contiguous()
            and not data.is_conj()
            and not data.is_neg()
        )

    def head(self, nbytes: int) -> Entry:
        """The first ``nbytes`` of a tensor's payload, or all of it where there is no more; a value as it is."""
        data = self.data
        if not isinstance(data, torch.Tensor) or self.nbytes <= nbytes:
            return self
        count = nbytes // (self.dtype or data.dtype).itemsize
        while data.dim() > 1 and data[0].numel() >= count:
            data = data[0]
        rows = -(-count // max(1, data[0].numel()))
        return replace(self, data=data[:rows].reshape(-1)[:count])

    def item(self) -> _core.SaveItem:
        """As the engine has it."""
        dtype = NAMES[self.dtype or self.data.dtype] if isinstance(self.data, torch.Tensor) else None
        return _core.SaveItem(
            self.fqn,
            self.nbytes,
            dtype=dtype,
            shape=self.shape,
            offsets=self.offsets,
            sizes=self.sizes,
            flags=self.flags,
            path=self.path,
            position=self.position,
        )
