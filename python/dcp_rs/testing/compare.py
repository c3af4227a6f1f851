"""Bit-exact comparison of state dicts: NaN payloads and negative zeros count."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_rs.tensors.equality import raw_bytes, same
from dcp_rs.tensors.memory import why_not_raw

__all__ = ["assert_state_equal", "raw_bytes", "same_bits", "state_differences"]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether dtype, shape and every bit are equal.

    Of two ``DTensor`` objects, the placements and the local tensors are compared.
    """
    return not _tensor_differences(left, right, "")


def state_differences(got: Any, want: Any, path: str = "state") -> list[str]:
    """Return a line for each difference. The list is empty if there is none.

    Sparse and quantized tensors, and others that raw bytes cannot hold, are compared by their
    parts, with devices and ``requires_grad``.
    """
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
    return [] if _is_same(got, want) else [f"{path}: got {got!r}, want {want!r}"]


def _is_same(got: Any, want: Any) -> bool:
    """Compare numbers and arrays bit for bit. Other values are equal, or pickle to equal bytes."""
    with suppress(Exception):  # a comparison may raise anything
        if not isinstance(want, float | complex | np.ndarray) and got == want:
            return True
    with suppress(Exception):
        return same(got, want)
    return False


def _tensor_differences(got: Any, want: torch.Tensor, path: str) -> list[str]:
    if not isinstance(got, torch.Tensor):
        return [f"{path}: got a {type(got).__name__}, want a tensor"]
    kinds = ["a DTensor" if isinstance(one, DTensor) else "a plain tensor" for one in (got, want)]
    if kinds[0] != kinds[1]:
        return [f"{path}: got {kinds[0]}, want {kinds[1]}"]
    for name in ("placements", "dtype", "shape"):
        have, should = (getattr(one, name, None) for one in (got, want))
        if have != should:
            return [f"{path}: got the {name} {have}, want {should}"]
    if isinstance(got, DTensor) and isinstance(want, DTensor):
        return _tensor_differences(got.to_local(), want.to_local(), f"{path} (local)")
    if why_not_raw(got) is not None or why_not_raw(want) is not None:
        what = f"{type(want).__name__}s of {want.dtype} {tuple(want.shape)}"
        return [] if same(got, want) else [f"{path}: {what} differ"]
    differing = torch.nonzero(raw_bytes(got) != raw_bytes(want)).reshape(-1)
    if len(differing) == 0:
        return []
    first = int(differing[0]) // want.element_size()
    what = f"{len(differing)} bytes of {want.dtype} {tuple(want.shape)} differ"
    return [f"{path}: {what}, the first in element {first}"]


def assert_state_equal(got: Any, want: Any) -> None:
    """Fail with a line for each difference between ``got`` and ``want``, bit for bit."""
    differences = state_differences(got, want)
    if differences:
        shown = "\n".join(f"  {line}" for line in differences[:20])
        more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
        msg = f"{len(differences)} differences:\n{shown}{more}"
        raise AssertionError(msg)
