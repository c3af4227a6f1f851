"""The dtypes of the format by name, without torch: their sizes, and NumPy's counterparts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcp_rs.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ITEMSIZES",
    "bits_dtype",
    "has_ml_dtypes",
    "numpy_dtype",
    "safetensors_name",
    "safetensors_shape",
    "why_not_safetensors",
]

#: Bytes of an element (section 6 of the format).
ITEMSIZES = {
    **dict.fromkeys(["bool", "uint8", "int8"], 1),
    **dict.fromkeys(
        ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"], 1
    ),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(["int16", "uint16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["int32", "uint32", "float32", "complex32", "bcomplex32"], 4),
    **dict.fromkeys(["int64", "uint64", "float64", "complex64"], 8),
    "complex128": 16,
}

#: The types that safetensors and torch share, by their names in a header
#: (``safetensors/src/tensor.rs``).
_SAFETENSORS_NAMES = {
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
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
#: The first releases of safetensors that read a type; the others are as old as any that torch 2.8
#: works with.
_SINCE = {
    "F8_E8M0": (0, 6),
    "F4": (0, 6),
    "C64": (0, 7),
    "F8_E4M3FNUZ": (0, 8),
    "F8_E5M2FNUZ": (0, 8),
}

_IN_NUMPY = frozenset(
    [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + ["bool", "float16", "float32", "float64", "complex64", "complex128"]
)
#: What ``ml_dtypes`` adds. Its float4 has an element a byte, and is not torch's.
_IN_ML_DTYPES = frozenset(
    [
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
)


def safetensors_name(name: str) -> str:
    """What a header of safetensors calls the format's dtype ``name``; the same name where it has none."""
    return _SAFETENSORS_NAMES.get(name, name)


def safetensors_shape(name: str, shape: Sequence[int]) -> list[int]:
    """The sizes that a header of safetensors gives a tensor of the format's dtype ``name``: of float4 it counts values, and torch pairs of them."""
    return [*shape[:-1], shape[-1] * 2] if name == "float4_e2m1fn_x2" and shape else list(shape)


def why_not_safetensors(name: str, shape: Sequence[int]) -> str | None:
    """What of a dtype keeps a tensor out of files of safetensors, if anything does: they are to be read where they are written."""
    header = _SAFETENSORS_NAMES.get(name)
    if header is None:
        return name
    if header == "F4" and not shape:
        return f"{name} without a dimension, which safetensors cannot count in pairs"
    since, here = _SINCE.get(header, (0, 0)), _safetensors_version()
    if here < since:
        return f"{name}, which safetensors has from {since[0]}.{since[1]} on: {here[0]}.{here[1]} is installed"
    return None


@cache
def _safetensors_version() -> tuple[int, int]:
    from importlib.metadata import version  # with all that mail is made of

    major, minor = version("safetensors").split(".")[:2]
    return int(major), int(minor)


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
