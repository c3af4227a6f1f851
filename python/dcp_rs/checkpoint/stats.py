"""Statistics of tensors, a bounded piece at a time, read while those before are counted. Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_rs import _core
from dcp_rs.checkpoint.elements import ITEMSIZES
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.boxes import runs

__all__ = ["TensorStats", "stats"]

_INTEGERS = frozenset(["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))])
#: Bytes that are read at once, while those before are counted.
_SLAB_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What the elements of a tensor are. Of complex tensors, of the real and the imaginary parts as one.

    Attributes:
        name: FQN.
        dtype: by the format's name.
        shape: of the whole tensor.
        min, max: of the finite elements; None where there are none.
        mean, std: of the finite elements, counted in float64; the standard deviation is that of the population.
        nan, inf, zeros: how many elements are that.
        elements: how many there are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    nan: int
    inf: int
    zeros: int
    elements: int


@dataclass(slots=True)
class _Sums:
    """A ``_core.Tally`` that grows."""

    finite: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf
    nan: int = 0
    infinite: int = 0
    zeros: int = 0

    def add(self, other: _core.Tally) -> None:
        """Adds what was found of other elements (Chan, Golub, LeVeque 1979)."""
        self.nan, self.infinite = self.nan + other.nan, self.infinite + other.infinite
        self.zeros += other.zeros
        if other.finite == 0:
            return
        self.least, self.greatest = min(self.least, other.least), max(self.greatest, other.greatest)
        total, apart = self.finite + other.finite, other.mean - self.mean
        self.mean += apart * other.finite / total
        self.squares += other.squares + apart * apart * self.finite * other.finite / total
        self.finite = total


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements ``begin`` to ``end`` of the tensor at ``place`` in the list, and where in the slab they are read to."""

    place: int
    begin: int
    end: int
    slab_at: int


def _slabs(sizes: Sequence[tuple[int, int]]) -> Iterator[list[_Part]]:
    """(elements, bytes of one) of each tensor, cut into slabs."""
    parts: list[_Part] = []
    at = 0
    for place, (elements, itemsize) in enumerate(sizes):
        begin = 0
        while begin < elements:
            end = min(elements, begin + (_SLAB_BYTES - at) // itemsize)
            if end <= begin:
                yield parts
                parts, at = [], 0
                continue
            parts.append(_Part(place, begin, end, at))
            at += -(-(end - begin) * itemsize // 64) * 64
            begin = end
    if parts:
        yield parts


def stats(
    index: _core.Index,
    tensors: Sequence[int],
    *,
    threads: int | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Iterator[TensorStats]:
    """The statistics of tensors of an index, each when the last of its elements was read.

    Args:
        tensors: their numbers.
        threads: that count and that read; default: the cores of this process.
        progress: called with the bytes counted so far, and all of them.

    Raises:
        CorruptDataError, PlanError: a data file is not as the index says, or no file holds some of the elements.
    """
    options = ReadOptions(threads=threads, max_inflight_bytes=_SLAB_BYTES).engine()
    known = [index.tensor(tensor) for tensor in tensors]
    sizes = [(math.prod(entry.shape), ITEMSIZES[entry.dtype or ""]) for entry in known]
    slabs = [np.empty(_SLAB_BYTES + 64, np.uint8) for _ in range(2)]

    def read(parts: Sequence[_Part], slab: np.ndarray[Any, Any]) -> None:
        fills = []
        for part in parts:
            shape, itemsize = known[part.place].shape, sizes[part.place][1]
            address = slab.ctypes.data + part.slab_at
            for box in runs(shape, part.begin, part.end):
                extent = [piece.stop - piece.start for piece in box]
                offsets = [piece.start for piece in box]
                fills.append(_core.Fill(tensors[part.place], offsets, extent, address, _strides(extent)))
                address += math.prod(extent) * itemsize
        index.read_regions(fills, **options)

    total, done = sum(elements * itemsize for elements, itemsize in sizes), 0
    found = [_Sums() for _ in known]
    first = 0
    with ThreadPoolExecutor(1, "dcp-rs-stats") as reader:
        cuts = _slabs(sizes)
        parts, turn = next(cuts, None), 0
        ahead = None if parts is None else reader.submit(read, parts, slabs[turn])
        while parts is not None and ahead is not None:
            ahead.result()
            ready, slab = parts, slabs[turn]
            parts, turn = next(cuts, None), 1 - turn
            if parts is not None:
                ahead = reader.submit(read, parts, slabs[turn])
            pieces = [
                (
                    slab.ctypes.data + part.slab_at,
                    (part.end - part.begin) * sizes[part.place][1],
                    known[part.place].dtype or "",
                )
                for part in ready
            ]
            for part, tally in zip(ready, _core.tally(pieces, options["threads"]), strict=True):
                found[part.place].add(tally)
            done += sum((part.end - part.begin) * sizes[part.place][1] for part in ready)
            if progress is not None:
                progress(done, total)
            whole = ready[-1].place + (ready[-1].end == sizes[ready[-1].place][0])
            for place in range(first, whole):
                yield _finished(known[place], found[place])
            first = max(first, whole)
    for place in range(first, len(known)):  # empty ones
        yield _finished(known[place], found[place])


def _finished(entry: _core.TensorEntry, sums: _Sums) -> TensorStats:
    dtype, some = entry.dtype or "", sums.finite > 0
    if dtype in _INTEGERS and some:
        sums.least, sums.greatest = int(sums.least), int(sums.greatest)
    return TensorStats(
        entry.name,
        dtype,
        entry.shape,
        sums.least if some else None,
        sums.greatest if some else None,
        sums.mean if some else None,
        math.sqrt(sums.squares / sums.finite) if some else None,
        sums.nan,
        sums.infinite,
        sums.zeros,
        math.prod(entry.shape),
    )


def _strides(sizes: Sequence[int]) -> list[int]:
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return strides
