"""Statistics of tensors, in pieces of bounded size that are read ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp_rs import _core
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.elements import ITEMSIZES
from dcp_rs.tensors.regions import ALIGNMENT, Cut, cut, read_ahead

if TYPE_CHECKING:
    import torch

__all__ = ["TensorStats", "stats"]

_INTEGERS = frozenset(
    ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
)
#: Bytes that are read at once.
_SLAB_BYTES = 32 << 20
#: Bytes that several passes count at once, a multiple of all itemsizes. As float64 they stay in the
#: cache.
_COUNTED_BYTES = 256 << 10
#: The values of the 4-bit floats of ``float4_e2m1fn_x2``. A byte has two of them.
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
#: By the bytes of an element.
_OF_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of a tensor; of a complex one, of its real and imaginary parts together.

    Attributes:
        name: its FQN.
        dtype: the format's name of its dtype.
        shape: its shape.
        min, max: the extremes of the finite elements; None if there are none.
        mean, std: their mean and population standard deviation in float64; None likewise.
        nan, inf, zeros: the numbers of such elements.
        elements: the number of all elements.
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
    """Statistics of some elements. Mean, deviation and extremes are those of the finite ones."""

    finite: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf
    nan: int = 0
    infinite: int = 0
    zeros: int = 0

    def add(self, other: _Sums) -> None:
        """Add other elements (Chan, Golub, LeVeque 1979), without squares that could overflow."""
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
    """Return the statistics of the elements in some bytes."""
    import torch  # here and below, as most commands do not need it

    stored = piece.view(getattr(torch, _COUNTED_AS.get(dtype, dtype)))
    if dtype == "float4_e2m1fn_x2":
        values = torch.tensor(
            [*_FLOAT4, *(-value for value in _FLOAT4)], dtype=torch.float64, device="cpu"
        )
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
    # Sums of large elements would overflow, so they are counted in units of the largest.
    largest = max(-least, greatest)
    unit = largest if largest > 1e100 else 1.0
    deviation, mean = torch.std_mean(numbers / unit if unit != 1.0 else numbers, correction=0)
    sums.mean, sums.deviation = float(mean) * unit, float(deviation) * unit
    if dtype == "int64":
        sums.least, sums.greatest = (int(extreme) for extreme in stored.aminmax())
    elif dtype == "uint64":  # torch cannot compare them
        signed = stored.view(torch.int64) ^ torch.iinfo(torch.int64).min
        sums.least, sums.greatest = (int(extreme) + (1 << 63) for extreme in signed.aminmax())
    return sums


def stats(
    index: _core.Index,
    tensors: Sequence[int],
    *,
    threads: int | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Iterator[TensorStats]:
    """Yield the statistics of tensors, each after its last element was read.

    Args:
        index: the checkpoint.
        tensors: the numbers of the tensors.
        threads: the number of threads that read; default: the cores of this process.
        progress: called with the bytes counted so far, and all of them.

    Raises:
        CorruptDataError: a data file is missing or damaged.
        PlanError: no chunk holds some of the elements.
    """
    import torch

    from dcp_rs.transfer.target import fills

    options = ReadOptions(threads=threads, max_inflight_bytes=_SLAB_BYTES).engine()
    known = [index.tensor(tensor) for tensor in tensors]
    sizes = [(math.prod(entry.shape), ITEMSIZES[entry.dtype or ""]) for entry in known]
    slabs = [
        torch.empty(_SLAB_BYTES + ALIGNMENT, dtype=torch.uint8, device="cpu") for _ in range(2)
    ]

    def memory_of(part: Cut, slab: torch.Tensor) -> torch.Tensor:
        return slab[part.at : part.at + part.count * sizes[part.number][1]]

    def read(cuts: list[Cut], turn: int) -> torch.Tensor:
        slab = slabs[turn]
        requests = []
        for part in cuts:
            # This torch may lack the dtype, so the elements are read as another one of its size.
            elements = memory_of(part, slab).view(getattr(torch, _OF_SIZE[sizes[part.number][1]]))
            requests += fills(tensors[part.number], known[part.number].shape, part.begin, elements)
        index.read_regions(requests, **options)
        return slab

    total, done = sum(elements * itemsize for elements, itemsize in sizes), 0
    found = [_Sums() for _ in known]
    first = 0
    for cuts, slab in read_ahead(cut(((*size, 1) for size in sizes), _SLAB_BYTES), read):
        for part in cuts:
            memory = memory_of(part, slab)
            for at in range(0, memory.numel(), _COUNTED_BYTES):
                found[part.number].add(
                    _sums(memory[at : at + _COUNTED_BYTES], known[part.number].dtype or "")
                )
            done += memory.numel()
        if progress is not None:
            progress(done, total)
        last = cuts[-1]
        whole = last.number + (last.begin + last.count == sizes[last.number][0])
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
