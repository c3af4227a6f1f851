"""Tensors as a stream of blocks of bytes, read ahead and cast, in the memory of three slabs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dcp_rs.checkpoint.source import CheckpointReader, Item, Request
from dcp_rs.tensors.regions import BLOCK_BYTES, Cut, cut, read_ahead, unflatten

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


def make_slabs(nbytes: int) -> list[torch.Tensor]:
    """Return memory for :func:`blocks`: two slabs to read into, and one to cast into.

    Args:
        nbytes: the size of each slab. It is raised to the least size that any dtype needs.
    """
    size = max(nbytes, _MIN_SLAB_BYTES)
    return [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(3)]


def blocks(
    source: CheckpointReader, regions: Sequence[Region], slabs: Sequence[torch.Tensor]
) -> Iterator[list[RegionBlock]]:
    """Yield the blocks of all regions in order, while a thread reads the next slab."""
    *read_slabs, cast_slab = slabs

    def read(cuts: list[Cut], turn: int) -> torch.Tensor:
        requests: list[Request] = []
        for part in cuts:
            region = regions[part.number]
            memory = _memory(read_slabs[turn], part, region.source_dtype)
            requests += (
                Request(region.item, region.chunk, offsets, into)
                for offsets, into in unflatten(region.sizes, part.begin, memory)
            )
        source.read(requests)
        return read_slabs[turn]

    for cuts, slab in read_ahead(cut(map(_to_cut, regions), cast_slab.numel()), read):
        yield [_block(regions[part.number], part, slab, cast_slab) for part in cuts]


def _to_cut(region: Region) -> tuple[int, int, int]:
    """Return elements, itemsize and step of a region for :func:`cut`, so that blocks are whole."""
    size = max(region.source_dtype.itemsize, region.dtype.itemsize)  # a cast uses the same places
    return region.numel, size, BLOCK_BYTES // region.dtype.itemsize


def _memory(slab: torch.Tensor, part: Cut, dtype: torch.dtype) -> torch.Tensor:
    return slab[part.at : part.at + part.count * dtype.itemsize].view(dtype)


def _block(region: Region, part: Cut, slab: torch.Tensor, cast_slab: torch.Tensor) -> RegionBlock:
    data = _memory(slab, part, region.source_dtype)
    if region.dtype != data.dtype:
        data = _memory(cast_slab, part, region.dtype).copy_(data)
    return RegionBlock(part.number, part.begin * region.dtype.itemsize, data.view(torch.uint8))
