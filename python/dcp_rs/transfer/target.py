"""What a load wants: regions of stored tensors, and the tensors that they go to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcp_rs import _core
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.dtypes import BY_NAME
from dcp_rs.tensors.regions import rectangles

__all__ = ["Target", "fills", "stored_dtype"]


@dataclass(slots=True)
class Target:
    """A region of a stored tensor, and the tensor it goes to.

    Attributes:
        index: which stored tensor, taken from whichever chunks hold it; or which chunk.
        offsets: where the region begins in it.
        tensor: what to fill; its shape is the region's.
        name: FQN, for messages.
        dtype: of the stored tensor.
        place: in the plan, for the order in which shared memory is filled.
        of_chunk: the region is of a chunk, as those who plan by chunks have it.
    """

    index: int
    offsets: Sequence[int]
    tensor: torch.Tensor
    name: str
    dtype: torch.dtype
    place: int = 0
    of_chunk: bool = False

    @property
    def nbytes(self) -> int:
        """Of the region, as it is stored."""
        return self.tensor.numel() * self.dtype.itemsize


def fills(
    index: int, shape: Sequence[int], begin: int, flat: torch.Tensor, offsets: Sequence[int] = ()
) -> list[_core.Fill]:
    """Return reads of the elements from ``begin`` on of a region, in row-major order.

    Args:
        index: which stored tensor, or which chunk.
        shape: of the region.
        begin: the first element.
        flat: where they go: a row of host memory.
        offsets: where the region begins in the stored tensor; default: at its first element.
    """
    found, at = [], 0
    for first, sizes in rectangles(shape, begin, flat.numel()):
        into = flat[at : at + math.prod(sizes)].view(sizes)
        place = [a + b for a, b in zip(first, offsets, strict=True)] if offsets else first
        found.append(_core.Fill(index, place, into.shape, into.data_ptr(), into.stride()))
        at += into.numel()
    return found


def stored_dtype(name: str, dtype: str | None) -> torch.dtype:
    """The torch dtype for a name of the format.

    Raises:
        UnsupportedError: this torch has none of the name.
    """
    found = BY_NAME.get(dtype or "")
    if found is None:
        msg = f"tensor {name!r} is of dtype {dtype}, which torch {torch.__version__} does not have"
        raise UnsupportedError(msg, tensor=name)
    return found
