"""Rectangles of tensors: views, slices, and pieces of bounded size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
R = TypeVar("R")

#: Pieces that share a slab begin at multiples of this many bytes.
ALIGNMENT = 64
#: A digest covers a block of this many bytes. A tensor is written in parts of whole blocks.
BLOCK_BYTES = 1 << 20


def narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return the view of ``sizes`` elements at ``offsets``."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def unflatten(
    sizes: Sequence[int], begin: int, flat: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield a run of elements of a row-major array as the fewest rectangles, in order.

    Args:
        sizes: the sizes of the array.
        begin: the first element of the run.
        flat: one-dimensional memory for the run.

    Yields:
        The offsets of each rectangle, and the view of ``flat`` in its shape.
    """
    count = flat.numel()
    if count == 0:
        return
    if not sizes:
        yield (), flat.view(())
        return
    inner = math.prod(sizes[1:])
    row, at = divmod(begin, inner)
    if at:
        take = min(count, inner - at)
        for offsets, part in unflatten(sizes[1:], at, flat[:take]):
            yield (row, *offsets), part.unsqueeze(0)
        row, flat, count = row + 1, flat[take:], count - take
    rows, rest = divmod(count, inner)
    if rows:
        whole = flat[: rows * inner].view(rows, *sizes[1:])
        yield (row, *[0] * (len(sizes) - 1)), whole
    if rest:
        for offsets, part in unflatten(sizes[1:], 0, flat[rows * inner :]):
            yield (row + rows, *offsets), part.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class Cut:
    """A run of elements of one tensor, and its place in a slab.

    Attributes:
        number: the number of the tensor.
        begin: the first element.
        count: the number of elements.
        at: the byte of the slab where the run begins.
    """

    number: int
    begin: int
    count: int
    at: int


def cut(tensors: Iterable[tuple[int, int, int]], slab_bytes: int) -> Iterator[list[Cut]]:
    """Cut tensors into runs of elements, in order, and yield the runs of one slab after another.

    Args:
        tensors: for each tensor the number of its elements, the bytes of an element, and a number
            of elements. The tensor is cut at multiples of that number.
        slab_bytes: the size of a slab. It has room for the elements between two cuts.
    """
    cuts: list[Cut] = []
    at = 0
    for number, (elements, itemsize, step) in enumerate(tensors):
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
    """Yield each piece with the result of ``read``, while a thread reads the next piece.

    Args:
        pieces: the pieces to read, in order.
        read: a function of a piece and the number of the buffer that is free, 0 or 1.
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
    """Return the bounding rectangle of an index expression, and the index within the rectangle.

    Args:
        key: integers, slices and ``...``.
        shape: the sizes of the tensor.

    Returns:
        Offsets and sizes of the rectangle, and the index to apply to it.

    Raises:
        IndexError: the index is out of range, or has too many dimensions.
        ValueError: a slice has a negative step.
        TypeError: the index is of another kind.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    ellipses = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    given = len(keys) - len(ellipses)
    if given > len(shape):
        msg = f"too many indices for a tensor of {len(shape)} dimensions: {given}"
        raise IndexError(msg)
    at = ellipses[0] if ellipses else len(keys)
    keys[at : at + 1] = [slice(None)] * (len(shape) - given)
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
