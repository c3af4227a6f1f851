"""Tensors as a stream of blocks: read ahead in one thread, cast, and handed to whoever writes. Memory is bounded by three slabs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from dcp_rs.checkpoint.source import Item, Request, Source

__all__ = ["Block", "Region", "Slabs", "blocks", "cut", "rectangles"]

#: Digests cover this many bytes, so all parts of a tensor but its last are multiples of it.
BLOCK_BYTES = 1 << 20
#: A block of the smallest type made of elements of the largest fits in, with room to spare.
MIN_SLAB_BYTES = 16 * BLOCK_BYTES
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Region:
    """All of a tensor, or (``chunk``) of one chunk of it, to become elements of ``dtype``."""

    item: Item
    chunk: int | None
    dtype: torch.dtype

    @property
    def source_dtype(self) -> torch.dtype:
        """As it is stored."""
        if self.item.dtype is None:
            raise TypeError(self.item.name)
        return self.item.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the rectangle."""
        return self.item.shape if self.chunk is None else self.item.chunks[self.chunk].sizes

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes that it becomes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """``count`` elements of a region from element ``begin``, in row-major order, and where in a slab they are read to."""

    region: int
    begin: int
    count: int
    slab_at: int


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a region: those from byte ``at`` on. ``data`` is 1-d, of uint8, and valid until the next blocks are asked for."""

    region: int
    at: int
    data: torch.Tensor


def rectangles(sizes: Sequence[int], begin: int, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """``count`` elements from element ``begin`` of a row-major array, as (offsets, sizes) in order."""
    if count <= 0:
        return
    if not sizes:
        yield (), ()
        return
    inner = 1
    for size in sizes[1:]:
        inner *= size
    row, at = divmod(begin, inner)
    if at:
        take = min(count, inner - at)
        for offsets, extent in rectangles(sizes[1:], at, take):
            yield (row, *offsets), (1, *extent)
        row, count = row + 1, count - take
    rows, rest = divmod(count, inner)
    if rows:
        yield (row, *[0] * (len(sizes) - 1)), (rows, *sizes[1:])
    for offsets, extent in rectangles(sizes[1:], 0, rest):
        yield (row + rows, *offsets), (1, *extent)


def cut(regions: Sequence[Region], slab_bytes: int) -> Iterator[list[Part]]:
    """Slabfuls of parts. The parts of a region come in order; each but its last becomes a multiple of :data:`BLOCK_BYTES`."""
    parts: list[Part] = []
    at = 0
    for number, region in enumerate(regions):
        # What it is cast to takes as much room in a slab of its own.
        size, step = max(region.source_dtype.itemsize, region.dtype.itemsize), BLOCK_BYTES // region.dtype.itemsize
        begin, end = 0, region.numel
        while begin < end:
            room = (slab_bytes - at) // size
            count = end - begin if end - begin <= room else room // step * step
            if count == 0:
                yield parts
                parts, at = [], 0
                continue
            parts.append(Part(number, begin, count, at))
            begin += count
            at += -(-count * size // _ALIGNMENT) * _ALIGNMENT
    if parts:
        yield parts


class Slabs:
    """Memory that is used again and again: two slabs to read into, one to cast into. No larger than what was needed so far."""

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = max(slab_bytes, MIN_SLAB_BYTES)
        self._slabs = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 3

    def get(self, number: int, nbytes: int) -> torch.Tensor:
        """A slab of at least that many bytes."""
        if self._slabs[number].numel() < nbytes:
            # Not a little more each time: what is let go would not come back to the system.
            self._slabs[number] = torch.empty(min(self.slab_bytes, 4 * nbytes), dtype=torch.uint8, device="cpu")
        return self._slabs[number]


_CAST = 2


def blocks(source: Source, regions: Sequence[Region], slabs: Slabs) -> Iterator[list[Block]]:
    """The bytes of all regions, in order. While the caller writes one slabful, the next one is being read."""
    plan = cut(regions, slabs.slab_bytes)
    with ThreadPoolExecutor(1, thread_name_prefix="dcp-rs") as reader:
        turn = 0
        parts = next(plan, None)
        ahead = None if parts is None else reader.submit(_read, source, regions, parts, slabs, turn)
        while parts is not None and ahead is not None:
            slab = ahead.result()
            ready = parts
            turn = 1 - turn
            parts = next(plan, None)
            if parts is not None:
                ahead = reader.submit(_read, source, regions, parts, slabs, turn)
            yield [_block(regions[part.region], part, slab, slabs) for part in ready]


def _read(source: Source, regions: Sequence[Region], parts: Sequence[Part], slabs: Slabs, turn: int) -> torch.Tensor:
    last, region = parts[-1], regions[parts[-1].region]
    slab = slabs.get(turn, last.slab_at + last.count * region.source_dtype.itemsize)
    requests: list[Request] = []
    for part in parts:
        region = regions[part.region]
        dtype = region.source_dtype
        memory = slab[part.slab_at : part.slab_at + part.count * dtype.itemsize].view(dtype)
        at = 0
        for offsets, sizes in rectangles(region.sizes, part.begin, part.count):
            into = memory[at:].as_strided(sizes, _strides(sizes))
            at += into.numel()
            requests.append(Request(region.item, region.chunk, offsets, into))
    source.read(requests)
    return slab


def _strides(sizes: Sequence[int]) -> list[int]:
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return strides


def _block(region: Region, part: Part, slab: torch.Tensor, slabs: Slabs) -> Block:
    dtype, end = region.source_dtype, part.slab_at + part.count * region.dtype.itemsize
    data = slab[part.slab_at : part.slab_at + part.count * dtype.itemsize]
    if region.dtype != dtype:
        cast = slabs.get(_CAST, max(end, slab.numel()))[part.slab_at : end]
        cast.view(region.dtype).copy_(data.view(dtype))
        data = cast
    return Block(part.region, part.begin * region.dtype.itemsize, data)
