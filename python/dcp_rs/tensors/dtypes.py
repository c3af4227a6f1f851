"""torch's dtypes by the names that the format uses: torch's own."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from dcp_rs.tensors.elements import ITEMSIZES

#: Every dtype of the format that this torch knows.
BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEMSIZES if hasattr(torch, name)
}

#: The reverse of ``BY_NAME``.
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}

#: The bit of a tensor's ``flags`` that says it requires grad (section 3.3 of the format).
REQUIRES_GRAD = 1


def can_require_grad(dtype: torch.dtype) -> bool:
    """Whether torch lets tensors of it require a gradient."""
    return dtype.is_floating_point or dtype.is_complex


#: Dtypes whose bytes are copied as integers: not every device has a copy for them.
_YOUNG = (
    *("uint16", "uint32", "uint64", "complex32", "bcomplex32"),
    *(
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ),
)
AS_INTEGERS: dict[torch.dtype, torch.dtype] = {
    BY_NAME[name]: {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        BY_NAME[name].itemsize
    ]
    for name in _YOUNG
    if name in BY_NAME
}


#: What is below the state of an optimizer.
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.")


def is_counter(name: str, shape: Sequence[int]) -> bool:
    """Return whether an entry counts the steps of an optimizer: a tensor without dimensions in its state.

    No option casts it: in bfloat16, a ``step`` stands still at 256.
    """
    return len(shape) == 0 and _OPTIMIZER_STATE.search(name) is not None


def cast_to(stored: torch.dtype, wish: torch.dtype | None) -> torch.dtype:
    """What elements become where floating-point ones are to become ``wish``. Types of 8 bits and fewer stay: their scales are elsewhere."""
    return stored if wish is None or not stored.is_floating_point or stored.itemsize < 2 else wish


#: What ``torch._foreach_copy_`` takes on either side where a device has a kernel for it, from torch
#: 2.8 on: the macros of ``foreach_tensor_copy_list_kernel_cuda_`` (ForeachBinaryOpList.cu). Four of
#: float8 came later; on others it raises.
COPIED_IN_GROUPS = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.complex128,
        ),
    }
)
