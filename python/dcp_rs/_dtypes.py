"""torch's dtypes by the names that the format uses: torch's own."""

from __future__ import annotations

import torch

_NAMES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "complex64",
    "complex128",
    "complex32",
    "bcomplex32",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]

#: Every dtype of the format that this torch knows.
BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}

#: The reverse of ``BY_NAME``.
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}
