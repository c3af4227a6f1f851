"""Tensors as a stream of blocks of bytes, read ahead and cast, in the memory of three slabs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dcp_rs.checkpoint.source import Item, Request, Source
from dcp_rs.tensors.regions import BLOCK_BYTES, Cut, cut, read_ahead, unflatten

__all__ = ["Region", "RegionBlock", "Slabs", "blocks"]

#: Room for a block of the smallest dtype, made of elements of the largest.
_MIN_SLAB_BYTES = 16 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor to read, or a chunk of it, and the dtype that its elements become.

    Attributes:
        item: the entry of the source.
        chunk: the number of the chunk; None for the whole tensor.
        dtype: the new dtype.
    """

    item: Item
    chunk: int | None
    dtype: torch.dtype

    @property
    def source_dtype(self) -> torch.dtype:
        """The dtype of the elements that the source delivers."""
        dtype = self.item.read_as or self.item.dtype
        if dtype is None:
            raise TypeError(self.item.name)
        return dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the region."""
        return self.item.shape if self.chunk is None else self.item.chunks[self.chunk].sizes

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """The number of bytes in the new dtype."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RegionBlock:
    """Bytes of a region, valid until the next blocks are asked for.

    Attributes:
        region: the number of the region.
        at: the first byte of the region.
        data: the bytes, as a row of uint8.
    """

    region: int
    at: int
    data: torch.Tensor


class Slabs:
    """Reusable memory: two slabs to read into, and one to cast into.

    Args:
        slab_bytes: the bound on each slab. Slabs grow as they are needed.
    """

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = max(slab_bytes, _MIN_SLAB_BYTES)
        self._slabs = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 3

    def get(self, number: int, nbytes: int) -> torch.Tensor:
        """Return a slab of at least ``nbytes``."""
        if self._slabs[number].numel() < nbytes:
            # Slabs that grew in small steps would fragment the heap.
            self._slabs[number] = torch.empty(
                min(self.slab_bytes, 4 * nbytes), dtype=torch.uint8, device="cpu"
            )
        return self._slabs[number]


_CAST = 2


def blocks(source: Source, regions: Sequence[Region], slabs: Slabs) -> Iterator[list[RegionBlock]]:
    """Yield the blocks of all regions in order, while a thread reads the next slab."""

    def read(cuts: list[Cut], turn: int) -> torch.Tensor:
        last = cuts[-1]
        slab = slabs.get(turn, last.at + last.count * regions[last.number].source_dtype.itemsize)
        requests: list[Request] = []
        for part in cuts:
            region = regions[part.number]
            dtype = region.source_dtype
            memory = slab[part.at : part.at + part.count * dtype.itemsize].view(dtype)
            requests += (
                Request(region.item, region.chunk, offsets, into)
                for offsets, into in unflatten(region.sizes, part.begin, memory)
            )
        source.read(requests)
        return slab

    for cuts, slab in read_ahead(cut(map(_to_cut, regions), slabs.slab_bytes), read):
        yield [_block(regions[part.number], part, slab, slabs) for part in cuts]


def _to_cut(region: Region) -> tuple[int, int, int]:
    """Return elements, itemsize and step of a region for :func:`cut`, so that blocks are whole."""
    size = max(region.source_dtype.itemsize, region.dtype.itemsize)  # a cast uses the same places
    return region.numel, size, BLOCK_BYTES // region.dtype.itemsize


def _block(region: Region, part: Cut, slab: torch.Tensor, slabs: Slabs) -> RegionBlock:
    dtype, end = region.source_dtype, part.at + part.count * region.dtype.itemsize
    data = slab[part.at : part.at + part.count * dtype.itemsize]
    if region.dtype != dtype:
        cast = slabs.get(_CAST, max(end, slab.numel()))[part.at : end]
        cast.view(region.dtype).copy_(data.view(dtype))
        data = cast
    return RegionBlock(part.number, part.begin * region.dtype.itemsize, data)
