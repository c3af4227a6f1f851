"""Descriptions of the entries of a checkpoint, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcp_rs import _core
from dcp_rs.checkpoint.folders import checkpoint_path
from dcp_rs.errors import PlanError
from dcp_rs.tensors.elements import ITEMSIZES


@dataclass(frozen=True)
class TensorInfo:
    """Description of an entry.

    Attributes:
        name: its FQN.
        dtype: its dtype; None for a value.
        shape: the shape of the whole tensor; empty for a value.
        chunks: the number of its chunks.
        nbytes: the bytes of the whole tensor, or of the stored value.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    chunks: int
    nbytes: int


@dataclass(frozen=True)
class ChunkInfo:
    """Description of a stored chunk of a tensor.

    Attributes:
        offsets, sizes: its rectangle in the tensor.
        file: its data file.
        offset, nbytes: its bytes in that file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


def describe(index: _core.Index, number: int) -> TensorInfo:
    """Return the description of an entry. The dtype is the format's name of it."""
    entry = index.tensor(number)
    if entry.dtype is None:
        nbytes = index.chunks(number)[0].length
    else:
        nbytes = math.prod(entry.shape) * ITEMSIZES.get(entry.dtype, 1)
    return TensorInfo(entry.name, entry.dtype, entry.shape, entry.chunk_count, nbytes)


def check_held(
    index: _core.Index, regions: Sequence[tuple[int, Sequence[int], Sequence[int]]]
) -> None:
    """Check that a checkpoint holds all of some regions (tensor, offsets, sizes).

    Call it before you allocate memory: a forged shape may be huge, but the files bound the chunks.

    Raises:
        PlanError: the checkpoint lacks elements.
    """
    for region, at, lacking in index.check_regions(regions, []):
        name = index.name(regions[region][0])
        msg = (
            f"tensor {name!r}: the checkpoint does not hold {list(lacking)} elements at {list(at)}"
        )
        raise PlanError(msg, path=checkpoint_path(index), tensor=name)
