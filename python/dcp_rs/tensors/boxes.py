"""Rectangles of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__ = ["narrow", "runs"]


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
