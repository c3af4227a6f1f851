"""The format's dtypes in torch, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from dcp_rs.tensors.elements import ITEMSIZES

#: Every dtype of the format that this torch has.
BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEMSIZES if hasattr(torch, name)
}

#: Short names of dtypes.
_ALIASES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "f64": "float64",
    "fp64": "float64",
}

#: The reverse of ``BY_NAME``.
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}

#: The bit of a tensor's ``flags`` for ``requires_grad`` (section 3.3 of the format).
REQUIRES_GRAD = 1

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Integers of the same size for dtypes that some devices cannot copy.
_COPIED_AS = {
    dtype: _INTEGERS[dtype.itemsize]
    for name, dtype in BY_NAME.items()
    if re.match(r"uint(16|32|64)|float[48]_|b?complex32", name)
}

#: The dtypes that ``torch._foreach_copy_`` copies in one kernel since torch 2.8: the macros of
#: ``foreach_tensor_copy_list_kernel_cuda_`` (ForeachBinaryOpList.cu). Later releases add four
#: float8 dtypes, for which this one raises.
COPIED_IN_GROUPS = NAMES.keys() - _COPIED_AS.keys()

_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.")


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as integers if some devices cannot copy the dtype, else the tensor itself."""
    dtype = _COPIED_AS.get(tensor.dtype)
    return tensor if dtype is None else tensor.view(dtype)


def can_require_grad(dtype: torch.dtype) -> bool:
    """Return whether tensors of the dtype may require a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def is_counter(name: str, shape: Sequence[int]) -> bool:
    """Return whether an entry counts an optimizer's steps: a scalar tensor in its state.

    No option casts such a tensor. In bfloat16, a ``step`` stands still at 256.
    """
    return len(shape) == 0 and _OPTIMIZER_STATE.search(name) is not None


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype by torch's name, or by a short one such as ``bf16``.

    Raises:
        ValueError: it is not a floating-point dtype.
    """
    if dtype is None:
        return None
    found: torch.dtype | None
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.").lower()
        found = BY_NAME.get(_ALIASES.get(name, name))
    else:
        found = dtype
    is_known = isinstance(found, torch.dtype) and found in NAMES
    if found is None or not is_known or not found.is_floating_point:
        msg = (
            f"dtype={dtype!r}: must be one of float64, float32, float16, bfloat16, "
            "or of the float8 types"
        )
        raise ValueError(msg)
    if str(found) == "torch.float4_e2m1fn_x2":
        msg = f"dtype={dtype!r}: torch has no conversion to it"
        raise ValueError(msg)
    return found


def cast_to(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor after a cast of floating-point tensors to ``dtype``.

    Dtypes of 8 bits and fewer stay, because their scales are other tensors.
    """
    if dtype is None or not stored.is_floating_point or stored.itemsize < 2:
        return stored
    return dtype
