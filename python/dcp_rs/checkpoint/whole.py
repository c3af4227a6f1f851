"""Tensors as wholes, in memory of their own, by one load."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dcp_rs import _core
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.transfer.counts import Counts
from dcp_rs.transfer.load import fill
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = ["read_whole"]


def read_whole(
    index: _core.Index,
    numbers: Iterable[int],
    device: torch.device | str | int,
    options: ReadOptions,
    counts: Counts | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors with these numbers, by name, in that order.

    Raises:
        PlanError: the checkpoint does not hold all of one.
    """
    wanted: list[tuple[int, str, torch.dtype, tuple[int, ...]]] = []
    for number in numbers:
        entry = index.tensor(number)
        wanted.append((number, entry.name, stored_dtype(entry.name, entry.dtype), entry.shape))
    # Before there is memory for them: a shape may be of any size, what chunks hold is bounded by their files.
    for place, at, lacking in index.check_regions([(n, [0] * len(shape), shape) for n, _, _, shape in wanted], []):
        name = wanted[place][1]
        msg = f"tensor {name!r}: the checkpoint does not hold {list(lacking)} elements at {list(at)}"
        raise PlanError(msg, path=index.path, tensor=name)
    targets = [
        Target(number, [0] * len(shape), torch.empty(shape, dtype=dtype, device=device), name, dtype)
        for number, name, dtype, shape in wanted
    ]
    fill(index, targets, options, counts)
    return {target.name: target.tensor for target in targets}
