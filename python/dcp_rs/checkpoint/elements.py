"""The dtypes of the format by name, without torch: their sizes, and NumPy's counterparts."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcp_rs.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ITEMSIZES", "SAFETENSORS_NAMES", "bits_dtype", "has_ml_dtypes", "numpy_dtype", "safetensors_name"]

#: Bytes of an element (section 6 of the format).
ITEMSIZES = {
    **dict.fromkeys(["bool", "uint8", "int8"], 1),
    **dict.fromkeys(["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"], 1),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(["int16", "uint16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["int32", "uint32", "float32", "complex32", "bcomplex32"], 4),
    **dict.fromkeys(["int64", "uint64", "float64", "complex64"], 8),
    "complex128": 16,
}

#: The types that safetensors and torch share, by their names in a header (``safetensors/src/tensor.rs``).
SAFETENSORS_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}

_IN_NUMPY = frozenset(
    [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + ["bool", "float16", "float32", "float64", "complex64", "complex128"]
)
#: What ``ml_dtypes`` adds. Its float4 has an element a byte, and is not torch's.
_IN_ML_DTYPES = frozenset(
    ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)


def safetensors_name(name: str) -> str:
    """What a header of safetensors calls the format's dtype ``name``; the same name where it has none."""
    return SAFETENSORS_NAMES.get(name, name)


def bits_dtype(name: str) -> np.dtype[Any]:
    """Unsigned integers of the same size as elements of the format's dtype ``name``.

    Raises:
        UnsupportedError: this release does not know the dtype.
    """
    import numpy as np

    if name not in ITEMSIZES:
        raise UnsupportedError(f"dtype {name!r} is not one that this release knows")
    return np.dtype(f"u{ITEMSIZES[name]}")


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """The format's dtype ``name`` in NumPy, if it has it by itself or through ``ml_dtypes``."""
    import numpy as np

    if name in _IN_NUMPY:
        return np.dtype(name)
    if name in _IN_ML_DTYPES and has_ml_dtypes():
        young = getattr(import_module("ml_dtypes"), name, None)
        return None if young is None else np.dtype(young)
    return None


@cache
def has_ml_dtypes() -> bool:
    """Whether ``ml_dtypes`` is installed."""
    try:
        import_module("ml_dtypes")
    except ImportError:
        return False
    return True
