"""Statistics of tensors, a bounded piece at a time, read while torch counts those before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp_rs import _core
from dcp_rs.checkpoint.elements import ITEMSIZES
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.boxes import runs

if TYPE_CHECKING:
    import torch

__all__ = ["TensorStats", "stats"]

_INTEGERS = frozenset(["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))])
#: Bytes that are read at once, while those before are counted.
_SLAB_BYTES = 32 << 20
#: Bytes that are counted at once, in several passes: as float64 they stay in the cache. A multiple of every element's size.
_COUNTED_BYTES = 256 << 10
#: The values of the 4-bit floats of ``float4_e2m1fn_x2``, two of which are in a byte.
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Complex numbers are counted by their parts, and booleans as numbers.
_COUNTED_AS = {
    "bool": "uint8",
    "bcomplex32": "bfloat16",
    "complex32": "float16",
    "complex64": "float32",
    "complex128": "float64",
    "float4_e2m1fn_x2": "uint8",
}


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
    """Statistics of some elements: the mean, deviation and extremes are of the finite ones."""

    finite: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf
    nan: int = 0
    infinite: int = 0
    zeros: int = 0

    def add(self, other: _Sums) -> None:
        """Add those of other elements (Chan, Golub, LeVeque 1979). Nothing is squared that could overflow."""
        self.nan, self.infinite = self.nan + other.nan, self.infinite + other.infinite
        self.zeros += other.zeros
        if other.finite == 0:
            return
        self.least, self.greatest = min(self.least, other.least), max(self.greatest, other.greatest)
        total = self.finite + other.finite
        own, others = self.finite / total, other.finite / total
        apart = math.sqrt(own * others)
        self.deviation = math.hypot(
            self.deviation * math.sqrt(own),
            other.deviation * math.sqrt(others),
            other.mean * apart - self.mean * apart,
        )
        self.mean = self.mean * own + other.mean * others
        self.finite = total


def _sums(piece: torch.Tensor, dtype: str) -> _Sums:
    """The statistics of a piece of elements as they are stored, given as bytes."""
    import torch  # here and below: commands that count nothing need not wait for it

    stored = piece.view(getattr(torch, _COUNTED_AS.get(dtype, dtype)))
    if dtype == "float4_e2m1fn_x2":
        values = torch.tensor([*_FLOAT4, *(-value for value in _FLOAT4)], dtype=torch.float64, device="cpu")
        numbers = values[torch.cat([stored & 15, stored >> 4]).long()]
    else:
        numbers = stored.double()
    sums = _Sums(zeros=int((numbers == 0).sum()))
    finite = numbers.isfinite()
    count = int(finite.sum())
    if count < numbers.numel():
        sums.nan = int(numbers.isnan().sum())
        sums.infinite = numbers.numel() - count - sums.nan
        numbers = numbers[finite]
    if count == 0:
        return sums
    least, greatest = (float(extreme) for extreme in numbers.aminmax())
    sums.finite, sums.least, sums.greatest = count, least, greatest
    # The sum of large elements, or of their squares, would overflow: they are counted in units of the largest.
    largest = max(-least, greatest)
    unit = largest if largest > 1e100 else 1.0
    deviation, mean = torch.std_mean(numbers / unit if unit != 1.0 else numbers, correction=0)
    sums.mean, sums.deviation = float(mean) * unit, float(deviation) * unit
    if dtype == "int64":
        sums.least, sums.greatest = (int(extreme) for extreme in stored.aminmax())
    elif dtype == "uint64":  # torch compares them as signed ones only
        signed = stored.view(torch.int64) ^ torch.iinfo(torch.int64).min
        sums.least, sums.greatest = (int(extreme) + (1 << 63) for extreme in signed.aminmax())
    return sums


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
        threads: that read; default: the cores of this process. Torch counts with its own.
        progress: called with the bytes counted so far, and all of them.

    Raises:
        CorruptDataError, PlanError: a data file is not as the index says, or no file holds some of the elements.
    """
    import torch

    options = ReadOptions(threads=threads, max_inflight_bytes=_SLAB_BYTES).engine()
    known = [index.tensor(tensor) for tensor in tensors]
    sizes = [(math.prod(entry.shape), ITEMSIZES[entry.dtype or ""]) for entry in known]
    slabs = [torch.empty(_SLAB_BYTES + 64, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def read(parts: Sequence[_Part], slab: torch.Tensor) -> None:
        fills = []
        for part in parts:
            shape, itemsize = known[part.place].shape, sizes[part.place][1]
            address = slab.data_ptr() + part.slab_at
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
            for part in ready:
                end = part.slab_at + (part.end - part.begin) * sizes[part.place][1]
                for at in range(part.slab_at, end, _COUNTED_BYTES):
                    piece = slab[at : min(end, at + _COUNTED_BYTES)]
                    found[part.place].add(_sums(piece, known[part.place].dtype or ""))
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
        sums.deviation if some else None,
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
