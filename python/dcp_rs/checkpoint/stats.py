"""Statistics of tensors, in pieces of bounded size that are read ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcp_rs._progress import Watch
from dcp_rs.checkpoint.blocks import Region, blocks, make_slabs
from dcp_rs.checkpoint.source import CheckpointReader, Item
from dcp_rs.tensors.dtypes import BY_NAME, NAMES

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


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of a tensor; of a complex one, of its real and imaginary parts together.

    Attributes:
        name: its FQN.
        dtype: the format's name of its dtype.
        shape: its shape.
        min, max: the extremes of the finite elements; None if there are none.
        mean: their mean in float64; None likewise.
        nan, inf: the numbers of such elements.
        elements: the number of all elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    min: float | int | None
    max: float | int | None
    mean: float | None
    nan: int
    inf: int
    elements: int


@dataclass(slots=True)
class _Sums:
    """Statistics of some elements. Mean and extremes are those of the finite ones."""

    finite: int = 0
    mean: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf
    nan: int = 0
    infinite: int = 0

    def add(self, piece: torch.Tensor, dtype: str) -> None:
        """Add the elements in some bytes, without sums that could overflow."""
        stored = piece.view(BY_NAME[_COUNTED_AS.get(dtype, dtype)])
        if dtype == "float4_e2m1fn_x2":
            values = torch.tensor(
                [*_FLOAT4, *(-value for value in _FLOAT4)], dtype=torch.float64, device="cpu"
            )
            numbers = values[torch.cat([stored & 15, stored >> 4]).long()]
        else:
            numbers = stored.double()
        is_finite = numbers.isfinite()
        finite = int(is_finite.sum())
        if finite < numbers.numel():
            nan = int(numbers.isnan().sum())
            self.nan, self.infinite = self.nan + nan, self.infinite + numbers.numel() - finite - nan
            numbers = numbers[is_finite]
        if finite == 0:
            return
        least, greatest = _extremes(stored, numbers, dtype)
        self.least, self.greatest = min(self.least, least), max(self.greatest, greatest)
        total = self.finite + finite
        mean = float((numbers / finite).sum())
        self.mean = self.mean * (self.finite / total) + mean * (finite / total)
        self.finite = total


def _extremes(stored: torch.Tensor, numbers: torch.Tensor, dtype: str) -> tuple[float, float]:
    """Return the least and the greatest element, integers exactly.

    Args:
        stored: the elements.
        numbers: the finite ones in float64.
        dtype: the format's name of their dtype.
    """
    if dtype == "uint64":  # torch cannot compare them
        signed = stored.view(torch.int64) ^ torch.iinfo(torch.int64).min
        least, greatest = (int(extreme) + (1 << 63) for extreme in signed.aminmax())
        return least, greatest
    lowest, highest = (stored if dtype == "int64" else numbers).aminmax()
    if dtype == "bool" or "int" in dtype:
        return int(lowest), int(highest)
    return float(lowest), float(highest)


def stats(
    source: CheckpointReader,
    items: Sequence[Item],
    progress: Watch | None = None,
) -> list[TensorStats]:
    """Return the statistics of tensors.

    Args:
        source: the checkpoint.
        items: its tensors to read, best in their order in the source.
        progress: called with the bytes counted so far, and all of them.

    Raises:
        CorruptDataError: a data file is missing or damaged, or no chunk holds some elements.
        UnsupportedError: the tensors are much larger than the files.
    """
    source.check(items)
    regions = [Region(item, None, item.dtype) for item in items if item.dtype is not None]
    dtypes = [NAMES[region.dtype] for region in regions]
    found = [_Sums() for _ in regions]
    total, done = sum(region.nbytes for region in regions), 0
    for slab in blocks(source, regions, make_slabs(_SLAB_BYTES)):
        for block in slab:
            for at in range(0, block.data.nbytes, _COUNTED_BYTES):
                piece = block.data[at : at + _COUNTED_BYTES]
                found[block.region].add(piece, dtypes[block.region])
            done += block.data.nbytes
        if progress is not None:
            progress(done, total)
    return [
        _finished(region.item, dtype, sums)
        for region, dtype, sums in zip(regions, dtypes, found, strict=True)
    ]


def _finished(item: Item, dtype: str, sums: _Sums) -> TensorStats:
    some = sums.finite > 0
    return TensorStats(
        item.name,
        dtype,
        item.shape,
        sums.least if some else None,
        sums.greatest if some else None,
        sums.mean if some else None,
        sums.nan,
        sums.infinite,
        math.prod(item.shape),
    )
