"""Bit-exact comparison of state dicts: NaN payloads and negative zeros count."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_rs.tensors.same import raw_bytes

__all__ = ["assert_state_equal", "raw_bytes", "same_bits", "state_differences"]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(raw_bytes(left), raw_bytes(right))


def state_differences(got: Any, want: Any, path: str = "state") -> list[str]:
    """One line for each place where the two differ; empty when they are the same."""
    if isinstance(want, torch.Tensor):
        return _tensor_differences(got, want, path)
    if type(got) is not type(want):
        return [f"{path}: got a {type(got).__name__}, want a {type(want).__name__}"]
    if isinstance(want, Mapping):
        lines = [f"{path}: missing {key!r}" for key in want if key not in got]
        lines += [f"{path}: unexpected {key!r}" for key in got if key not in want]
        for key in want:
            if key in got:
                lines += state_differences(got[key], want[key], f"{path}[{key!r}]")
        return lines
    if isinstance(want, Sequence) and not isinstance(want, str | bytes):
        if len(got) != len(want):
            return [f"{path}: got {len(got)} items, want {len(want)}"]
        return [
            line
            for i, (g, w) in enumerate(zip(got, want, strict=True))
            for line in state_differences(g, w, f"{path}[{i}]")
        ]
    if isinstance(want, float) and struct.pack("<d", got) == struct.pack("<d", want):
        return []  # NaNs too
    if got == want and not isinstance(want, float):
        return []
    return [f"{path}: got {got!r}, want {want!r}"]


def _tensor_differences(got: Any, want: torch.Tensor, path: str) -> list[str]:
    if not isinstance(got, torch.Tensor):
        return [f"{path}: got a {type(got).__name__}, want a tensor"]
    if isinstance(want, DTensor):
        if not isinstance(got, DTensor):
            return [f"{path}: got a plain tensor, want a DTensor"]
        if got.placements != want.placements or got.shape != want.shape:
            shapes = tuple(got.shape), tuple(want.shape)
            return [f"{path}: got {got.placements}, want {want.placements}; shapes {shapes}"]
        got, want, path = got.to_local(), want.to_local(), path + " (local)"
    if got.dtype != want.dtype:
        return [f"{path}: got {got.dtype}, want {want.dtype}"]
    if got.shape != want.shape:
        return [f"{path}: got shape {tuple(got.shape)}, want {tuple(want.shape)}"]
    differing = torch.nonzero(raw_bytes(got) != raw_bytes(want)).reshape(-1)
    if len(differing) == 0:
        return []
    first = int(differing[0]) // want.element_size()
    what = f"{len(differing)} bytes of {want.dtype} {tuple(want.shape)} differ"
    return [f"{path}: {what}, the first in element {first}"]


def assert_state_equal(got: Any, want: Any) -> None:
    """Fail with a line for each place where `got` is not bit for bit `want`."""
    differences = state_differences(got, want)
    if differences:
        shown = "\n".join(f"  {line}" for line in differences[:20])
        more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
        msg = f"{len(differences)} differences:\n{shown}{more}"
        raise AssertionError(msg)
