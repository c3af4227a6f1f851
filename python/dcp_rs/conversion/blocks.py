"""Tensors as a stream of blocks: read ahead in one thread, cast, and handed to whoever writes. Memory is bounded by two slabs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from dcp_rs.conversion.source import Item, Request, Source

__all__ = ["Block", "Region", "blocks", "cut", "rectangles"]

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
        source_size, step = region.source_dtype.itemsize, BLOCK_BYTES // region.dtype.itemsize
        begin, end = 0, region.numel
        while begin < end:
            room = (slab_bytes - at) // source_size
            count = end - begin if end - begin <= room else room // step * step
            if count == 0:
                yield parts
                parts, at = [], 0
                continue
            parts.append(Part(number, begin, count, at))
            begin += count
            at += -(-count * source_size // _ALIGNMENT) * _ALIGNMENT
    if parts:
        yield parts


def blocks(source: Source, regions: Sequence[Region], slab_bytes: int) -> Iterator[list[Block]]:
    """The bytes of all regions, in order. While the caller writes one slabful, the next one is being read."""
    plan = cut(regions, max(slab_bytes, MIN_SLAB_BYTES) if regions else 1)
    slabs = [torch.empty(0, dtype=torch.uint8)] * 2
    with ThreadPoolExecutor(1, thread_name_prefix="dcp-rs") as reader:
        turn = 0
        parts = next(plan, None)
        ahead = None if parts is None else reader.submit(_read, source, regions, parts, slabs, turn)
        while parts is not None and ahead is not None:
            ahead.result()
            ready, slab = parts, slabs[turn]
            turn = 1 - turn
            parts = next(plan, None)
            if parts is not None:
                ahead = reader.submit(_read, source, regions, parts, slabs, turn)
            yield [_block(regions[part.region], part, slab) for part in ready]


def _read(
    source: Source, regions: Sequence[Region], parts: Sequence[Part], slabs: list[torch.Tensor], turn: int
) -> None:
    last = parts[-1]
    needed = last.slab_at + last.count * regions[last.region].source_dtype.itemsize
    if slabs[turn].numel() < needed:  # no more memory than a small tensor takes
        slabs[turn] = torch.empty(needed, dtype=torch.uint8)
    slab = slabs[turn]
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


def _strides(sizes: Sequence[int]) -> list[int]:
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return strides


def _block(region: Region, part: Part, slab: torch.Tensor) -> Block:
    dtype = region.source_dtype
    data = slab[part.slab_at : part.slab_at + part.count * dtype.itemsize]
    if region.dtype != dtype:
        data = data.view(dtype).to(region.dtype).view(torch.uint8)
    return Block(part.region, part.begin * region.dtype.itemsize, data)
