"""What a load found besides what it loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["LoadReport", "Mismatch"]


@dataclass(frozen=True)
class Mismatch:
    """A name where state dict and checkpoint differ: ``expected`` in the state dict, ``got`` in the checkpoint."""

    name: str
    expected: Any
    got: Any


@dataclass
class LoadReport:
    """What a load found besides what it loaded. Names are those of the state dict, but for ``unexpected``.

    Attributes:
        missing: in the state dict, not in the checkpoint.
        tied: in the state dict, not in the checkpoint, and filled all the same: tensors that are the memory of another, whose name follows.
        unexpected: in the checkpoint, not in the state dict.
        dtype_mismatched: tensors that were cast.
        shape_mismatched: tensors of another shape, which were left alone.
        partly_filled: tensors of which the checkpoint does not hold all; one on ``meta`` was left there.
        excluded: in the state dict, but not wanted by ``include`` and ``exclude``.
    """

    missing: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    dtype_mismatched: list[Mismatch] = field(default_factory=list)
    shape_mismatched: list[Mismatch] = field(default_factory=list)
    partly_filled: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
