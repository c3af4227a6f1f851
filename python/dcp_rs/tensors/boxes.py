"""Rectangles of tensors: narrowing to one, cutting one out of a run of elements, and what an index expression selects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["narrow", "runs", "selection"]


def narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The view of ``sizes`` at ``offsets``; the tensor itself where that is all of it."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def runs(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[slice, ...]]:
    """The rectangles, as few as can be, that hold elements ``first`` to ``last`` in row-major order, one after another in that order."""
    if first >= last:
        return
    if not shape:
        yield ()
        return
    row = 1
    for size in shape[1:]:
        row *= size
    begin, end = -(-first // row), last // row  # whole rows
    if begin > end:  # all within one
        yield from ((slice(end, begin), *box) for box in runs(shape[1:], first - end * row, last - end * row))
        return
    if first < begin * row:
        yield from ((slice(begin - 1, begin), *box) for box in runs(shape[1:], first - (begin - 1) * row, row))
    if begin < end:
        yield (slice(begin, end), *(slice(0, size) for size in shape[1:]))
    if end * row < last:
        yield from ((slice(end, end + 1), *box) for box in runs(shape[1:], 0, last - end * row))


def selection(key: Any, shape: Sequence[int]) -> tuple[list[int], list[int], tuple[int | slice, ...]]:
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
