"""Rectangles of tensors: narrowing to one, what an index expression selects, and tensors cut into pieces of bounded size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "Cut", "cut", "narrow", "read_ahead", "rectangles", "selection"]

T = TypeVar("T")
R = TypeVar("R")

#: What shares a slab begins at multiples of this many bytes.
ALIGNMENT = 64


def narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The view of ``sizes`` at ``offsets``; the tensor itself where that is all of it."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def rectangles(
    sizes: Sequence[int], begin: int, count: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield ``count`` elements from element ``begin`` of a row-major array, as (offsets, sizes) in order: as few as can be."""
    if count <= 0:
        return
    if not sizes:
        yield (), ()
        return
    inner = math.prod(sizes[1:])
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


@dataclass(frozen=True, slots=True)
class Cut:
    """``count`` elements from element ``begin`` of the row ``number``, and the byte of a slab that they begin at."""

    number: int
    begin: int
    count: int
    at: int


def cut(rows: Iterable[tuple[int, int, int]], slab_bytes: int) -> Iterator[list[Cut]]:
    """Cut rows of elements, in order, and pack them into slabs.

    Args:
        rows: for each its elements, the bytes of one, and the number of elements that it is cut at
            multiples of.
        slab_bytes: the size of a slab, of which the elements between two cuts fill no more than
            one.
    """
    cuts: list[Cut] = []
    at = 0
    for number, (elements, itemsize, step) in enumerate(rows):
        begin = 0
        while begin < elements:
            left, room = elements - begin, (slab_bytes - at) // itemsize
            count = left if left <= room else room // step * step
            if count <= 0:
                yield cuts
                cuts, at = [], 0
                continue
            cuts.append(Cut(number, begin, count, at))
            begin += count
            at += -(-count * itemsize // ALIGNMENT) * ALIGNMENT
    if cuts:
        yield cuts


def read_ahead(pieces: Iterable[T], read: Callable[[T, int], R]) -> Iterator[tuple[T, R]]:
    """Yield each piece and what ``read`` returns for it, which is called for the next one meanwhile, in a thread.

    Args:
        pieces: what to read, one after another.
        read: is given a piece, and which of two buffers is free: 0 or 1.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="dcp-rs") as reader:
        before: tuple[T, Future[R]] | None = None
        for number, piece in enumerate(pieces):
            following = piece, reader.submit(read, piece, number % 2)
            if before is not None:
                yield before[0], before[1].result()
            before = following
        if before is not None:
            yield before[0], before[1].result()


def selection(
    key: Any, shape: Sequence[int]
) -> tuple[list[int], list[int], tuple[int | slice, ...]]:
    """The bounding rectangle (offsets, sizes) of what ``key`` selects by integers, slices and ``...``, and the selection within it.

    Raises:
        IndexError: out of range, or too many indices.
        ValueError: a slice with a negative step.
        TypeError: another kind of index.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    ellipses = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    given = len(keys) - len(ellipses)
    if given > len(shape):
        msg = f"too many indices for a tensor of {len(shape)} dimensions: {given}"
        raise IndexError(msg)
    fill = [slice(None)] * (len(shape) - given)
    at = ellipses[0] if ellipses else len(keys)
    keys[at : at + 1] = fill
    offsets: list[int] = []
    sizes: list[int] = []
    local: list[int | slice] = []
    for dim, (k, size) in enumerate(zip(keys, shape, strict=True)):
        if isinstance(k, slice):
            start, stop, step = k.indices(size)
            if step < 0:
                raise ValueError("step must be greater than zero")
            extent = max(0, stop - start)
            offsets.append(start if extent else 0)
            sizes.append(extent)
            local.append(slice(None, None, step))
        elif hasattr(k, "__index__") and not isinstance(k, bool):
            position = k.__index__()
            if not -size <= position < size:
                msg = f"index {position} is out of bounds for dimension {dim} with size {size}"
                raise IndexError(msg)
            offsets.append(position % size)
            sizes.append(1)
            local.append(0)
        else:
            msg = f"indices are integers, slices and '...', not {type(k).__name__}"
            raise TypeError(msg)
    return offsets, sizes, tuple(local)
