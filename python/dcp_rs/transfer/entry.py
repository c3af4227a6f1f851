"""One item of a save, a chunk of a tensor or a value, and the parts that it is cut into to fit memory of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from dcp_rs import _core
from dcp_rs.tensors.dtypes import AS_INTEGERS, NAMES
from dcp_rs.tensors.regions import ALIGNMENT, cut, narrow, rectangles

__all__ = ["ALIGNMENT", "BLOCK_BYTES", "Entry", "Part", "flat", "gathered", "pack"]


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


#: Digests cover blocks of this many bytes, so a tensor that is written in parts is cut at multiples of it.
BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class Part:
    """Bytes of the payload of a tensor, and where they go.

    Attributes:
        item: the number of the entry in its save.
        entry: whose payload it is.
        begin, end: bytes of the payload.
        at: where the first goes, in memory that holds several parts.
    """

    item: int
    entry: Entry
    begin: int
    end: int
    at: int

    @property
    def stop(self) -> int:
        """Where the last has gone."""
        return self.at + self.end - self.begin

    def write_from(self, address: int) -> _core.Part:
        """What ``_core.Save.write`` takes, with the memory at ``address``."""
        return _core.Part(self.item, self.begin, address + self.at, self.end - self.begin)


def pack(entries: Sequence[tuple[int, Entry]], max_bytes: int) -> Iterator[list[Part]]:
    """Cuts tensors at multiples of a block, and packs the parts: so many as ``max_bytes`` hold, which is a block at least."""
    for cuts in cut(((entry.nbytes, 1, BLOCK_BYTES) for _, entry in entries), max_bytes):
        yield [Part(*entries[part.number], part.begin, part.begin + part.count, part.at) for part in cuts]


def flat(entry: Entry) -> torch.Tensor | None:
    """All bytes of a tensor that lies in memory as it is written; None: it does not."""
    tensor = cast(torch.Tensor, entry.data)
    if entry.dtype not in (None, tensor.dtype) or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    # Not view(-1): a tensor of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def gathered(part: Part, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(destination, source) for each rectangle of the part: together its elements in row-major order, in one run of memory."""
    tensor = cast(torch.Tensor, part.entry.data)
    dtype = part.entry.dtype or tensor.dtype
    if dtype == tensor.dtype and dtype in AS_INTEGERS and not tensor.is_conj():
        dtype = AS_INTEGERS[dtype]
        tensor = tensor.view(dtype)
    elements, at = memory.view(dtype), 0
    begin, end = part.begin // dtype.itemsize, part.end // dtype.itemsize
    for offsets, sizes in rectangles(tensor.shape, begin, end - begin):
        source = narrow(tensor, offsets, sizes).resolve_conj().resolve_neg()
        yield elements[at : at + source.numel()].view(source.shape), source
        at += source.numel()
