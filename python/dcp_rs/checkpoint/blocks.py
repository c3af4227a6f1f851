"""Tensors as a stream of blocks: read ahead in one thread, cast, and handed to whoever writes. Memory is bounded by three slabs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dcp_rs.checkpoint.source import Item, Request, Source
from dcp_rs.tensors.regions import Cut, cut, read_ahead, rectangles

__all__ = ["Block", "Region", "Slabs", "blocks"]

#: Digests cover this many bytes, so all parts of a tensor but its last are multiples of it.
BLOCK_BYTES = 1 << 20
#: A block of the smallest type made of elements of the largest fits in, with room to spare.
MIN_SLAB_BYTES = 16 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Region:
    """All of a tensor, or (``chunk``) of one chunk of it, to become elements of ``dtype``."""

    item: Item
    chunk: int | None
    dtype: torch.dtype

    @property
    def source_dtype(self) -> torch.dtype:
        """The type that elements are read as."""
        dtype = self.item.read_as or self.item.dtype
        if dtype is None:
            raise TypeError(self.item.name)
        return dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the rectangle."""
        return self.item.shape if self.chunk is None else self.item.chunks[self.chunk].sizes

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes that it becomes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a region: those from byte ``at`` on. ``data`` is 1-d, of uint8, and valid until the next blocks are asked for."""

    region: int
    at: int
    data: torch.Tensor


class Slabs:
    """Memory that is used again and again: two slabs to read into, one to cast into. No larger than what was needed so far."""

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = max(slab_bytes, MIN_SLAB_BYTES)
        self._slabs = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 3

    def get(self, number: int, nbytes: int) -> torch.Tensor:
        """A slab of at least that many bytes."""
        if self._slabs[number].numel() < nbytes:
            # Not a little more each time: what is let go would not come back to the system.
            self._slabs[number] = torch.empty(
                min(self.slab_bytes, 4 * nbytes), dtype=torch.uint8, device="cpu"
            )
        return self._slabs[number]


_CAST = 2


def blocks(source: Source, regions: Sequence[Region], slabs: Slabs) -> Iterator[list[Block]]:
    """The bytes of all regions, in order. While the caller writes one slabful, the next one is being read."""

    def read(cuts: list[Cut], turn: int) -> torch.Tensor:
        last = cuts[-1]
        slab = slabs.get(turn, last.at + last.count * regions[last.number].source_dtype.itemsize)
        requests: list[Request] = []
        for part in cuts:
            region = regions[part.number]
            dtype, at = region.source_dtype, 0
            memory = slab[part.at : part.at + part.count * dtype.itemsize].view(dtype)
            for offsets, sizes in rectangles(region.sizes, part.begin, part.count):
                into = memory[at : at + math.prod(sizes)].view(sizes)
                at += into.numel()
                requests.append(Request(region.item, region.chunk, offsets, into))
        source.read(requests)
        return slab

    for cuts, slab in read_ahead(cut(map(_row, regions), slabs.slab_bytes), read):
        yield [_block(regions[part.number], part, slab, slabs) for part in cuts]


def _row(region: Region) -> tuple[int, int, int]:
    """What of a region is cut. What it is cast to takes as much room in a slab of its own; parts but the last become whole blocks."""
    size = max(region.source_dtype.itemsize, region.dtype.itemsize)
    return region.numel, size, BLOCK_BYTES // region.dtype.itemsize


def _block(region: Region, part: Cut, slab: torch.Tensor, slabs: Slabs) -> Block:
    dtype, end = region.source_dtype, part.at + part.count * region.dtype.itemsize
    data = slab[part.at : part.at + part.count * dtype.itemsize]
    if region.dtype != dtype:
        cast = slabs.get(_CAST, max(end, slab.numel()))[part.at : end]
        cast.view(region.dtype).copy_(data.view(dtype))
        data = cast
    return Block(part.number, part.begin * region.dtype.itemsize, data)
