"""Targets of a load: regions of stored tensors, and the tensors to fill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from dcp_rs import _core
from dcp_rs.errors import UnsupportedError
from dcp_rs.tensors.dtypes import BY_NAME
from dcp_rs.tensors.regions import unflatten

T = TypeVar("T")


@dataclass(slots=True)
class Target:
    """A region of a stored tensor, and the tensor to fill from it.

    Attributes:
        index: the number of the stored tensor, or of a chunk.
        offsets: the offsets of the region in it.
        tensor: the tensor to fill. Its shape is that of the region.
        name: the FQN, for messages.
        dtype: the stored dtype.
        place: the position in the plan. Tensors that share memory are filled in this order.
        of_chunk: whether ``index`` and ``offsets`` refer to a chunk.
    """

    index: int
    offsets: Sequence[int]
    tensor: torch.Tensor
    name: str
    dtype: torch.dtype
    place: int = 0
    of_chunk: bool = False

    @classmethod
    def whole(
        cls, number: int, entry: _core.TensorEntry, device: torch.device | str | int
    ) -> Target:
        """Return a new tensor on ``device`` as the target of a whole stored tensor."""
        dtype, shape = stored_dtype(entry.name, entry.dtype), entry.shape
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return cls(number, [0] * len(shape), tensor, entry.name, dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of the region as it is stored."""
        return self.tensor.numel() * self.dtype.itemsize


def groups(items: Iterable[tuple[T, int]], max_bytes: int) -> Iterator[list[T]]:
    """Yield consecutive items of up to ``max_bytes`` together, but at least one.

    Args:
        items: each item with its bytes.
        max_bytes: the bound on the bytes of a group.
    """
    group: list[T] = []
    total = 0
    for item, nbytes in items:
        if group and total + nbytes > max_bytes:
            yield group
            group, total = [], 0
        group.append(item)
        total += nbytes
    if group:
        yield group


def fills(
    index: int, shape: Sequence[int], begin: int, flat: torch.Tensor, offsets: Sequence[int] = ()
) -> list[_core.Fill]:
    """Return the reads of a run of elements of a region, in row-major order.

    Args:
        index: the number of the stored tensor, or of a chunk.
        shape: the sizes of the region.
        begin: the first element of the run.
        flat: host memory for the run.
        offsets: the offsets of the region in the stored tensor; none for its beginning.
    """
    return [
        _core.Fill(
            index,
            [a + b for a, b in zip(first, offsets, strict=True)] if offsets else first,
            into.shape,
            into.data_ptr(),
            into.stride(),
        )
        for first, into in unflatten(shape, begin, flat)
    ]


def stored_dtype(name: str, dtype: str | None) -> torch.dtype:
    """Return the torch dtype of a stored tensor.

    Raises:
        UnsupportedError: this torch does not have the dtype.
    """
    found = BY_NAME.get(dtype or "")
    if found is None:
        msg = f"tensor {name!r} is of dtype {dtype}, which torch {torch.__version__} does not have"
        raise UnsupportedError(msg, tensor=name)
    return found
