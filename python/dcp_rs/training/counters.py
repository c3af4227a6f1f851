"""Counters of optimizers: what they count steps in keeps its dtype, whatever that of their moments becomes.

A ``step`` in bfloat16 stands still at 256: one more is rounded away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_rs.dcp.save_planner import RsSavePlanner
from dcp_rs.tensors.trees import flatten

__all__ = ["counters_as_they_are", "is_counter"]


def is_counter(value: Any) -> bool:
    """Whether an entry of an optimizer's state is a tensor without dimensions."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


@contextmanager
def counters_as_they_are(planner: SavePlanner | None, state: Mapping[str, Any]) -> Iterator[None]:
    """A save within it stores the counters in ``state``, the optimizers' part of its state dict, in their own dtype."""
    if not isinstance(planner, RsSavePlanner) or planner.dtype is None:
        yield
        return
    before = planner.spared
    planner.spared = before | {name for name, value in flatten(state).values.items() if is_counter(value)}
    try:
        yield
    finally:
        planner.spared = before
