"""The format's dtypes without torch: their sizes, and their names in safetensors."""

from __future__ import annotations

from collections.abc import Sequence

_FLOAT8 = (
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
)
#: Bytes of an element (section 6 of the format).
ITEMSIZES = {
    **dict.fromkeys(["bool", "uint8", "int8", *_FLOAT8, "float4_e2m1fn_x2"], 1),
    **dict.fromkeys(["int16", "uint16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["int32", "uint32", "float32", "complex32", "bcomplex32"], 4),
    **dict.fromkeys(["int64", "uint64", "float64", "complex64"], 8),
    "complex128": 16,
}

#: The dtypes that safetensors and torch share, with their names in a header
#: (``safetensors/src/tensor.rs``).
_SAFETENSORS_NAMES = {
    "bool": "BOOL",
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}


def safetensors_name(name: str) -> str:
    """Return the name of a dtype in a safetensors header, or ``name`` if it has none."""
    return _SAFETENSORS_NAMES.get(name, name)


def safetensors_shape(name: str, shape: Sequence[int]) -> list[int]:
    """Return a shape as safetensors gives it. It counts float4 values, where torch counts pairs."""
    return [*shape[:-1], shape[-1] * 2] if name == "float4_e2m1fn_x2" and shape else list(shape)


def why_not_safetensors(name: str, shape: Sequence[int]) -> str | None:
    """Return why safetensors cannot hold tensors of a dtype, or None if it can."""
    if name not in _SAFETENSORS_NAMES:
        return name
    if name == "float4_e2m1fn_x2" and not shape:
        return f"{name} without a dimension, which safetensors cannot count in pairs"
    return None
