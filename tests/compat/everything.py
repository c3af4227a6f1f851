"""What is in the kind `everything` of the compat corpus of format version 1: every dtype, shapes, names, shards of two ranks, by torch's own planner.

It depends on torch and dcp_rs alone, and on no random numbers, and does not change: the checkpoint
is not built anew.
"""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2

DTYPES = [
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

VALUES: dict[str, Any] = {
    "int": -3,
    "float": 0.1,
    "bool": True,
    "none": None,
    "text": "größe\n重み\x00",
    "bytes": bytes(range(256)),
    "list": [1, "two", [None]],
    "tuple": (1, (2.5,)),
}

NAMES = ["", "__metadata__", "__metadata__~", "a/b@c", 'quote"\\', "重み.größe\n", "n" * 300]


def pattern(count: int, seed: int) -> bytes:
    """Bytes of a linear congruential generator (the constants of glibc's TYPE_0)."""
    state, out = seed, bytearray()
    for _ in range(count):
        state = (1103515245 * state + 12345) & 0x7FFFFFFF
        out.append(state >> 16 & 0xFF)
    return bytes(out)


def tensor(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Every bit pattern may occur: NaNs with payloads, infinities, subnormal numbers."""
    kind: torch.dtype = getattr(torch, dtype)
    count = torch.Size(shape).numel() * kind.itemsize
    if count == 0:
        return torch.empty(shape, dtype=kind)
    raw = pattern(count, seed)
    if dtype == "bool":
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).reshape(shape)


def sharded() -> dict[str, tuple[torch.Tensor, int]]:
    """What is split over the ranks, and along which dimension."""
    return {
        "rows": (tensor((5, 3), "float32", 101), 0),
        "columns": (tensor((4, 7), "bfloat16", 102), 1),
        "deep": (tensor((2, 3, 4), "int16", 103), 2),
        "complex": (tensor((4, 2), "complex128", 104), 0),
        "one_row": (tensor((1, 6), "uint8", 105), 0),
    }


def state() -> dict[str, Any]:
    """All that is in the checkpoint; what is split is whole here. Dtypes that this torch lacks are left out."""
    known = [name for name in DTYPES if hasattr(torch, name)]
    whole: dict[str, Any] = {
        "dtypes": {name: tensor((2, 3), name, 1 + DTYPES.index(name)) for name in known},
        "shapes": {
            "scalar": tensor((), "float64", 50),
            "empty": tensor((0,), "float32", 0),
            "hole": tensor((3, 0, 2), "int32", 0),
            "odd": tensor((1, 13, 1), "uint8", 51),
            "transposed": tensor((3, 4), "float32", 52).t(),
        },
        "parameter": torch.nn.Parameter(tensor((4,), "float32", 53)),
        "names": {name: tensor((3,), "int8", 60 + i) for i, name in enumerate(NAMES)},
        "top/level": tensor((2,), "int64", 70),
        "optimizer": {
            "state": {0: {"step": tensor((), "float32", 71)}},
            "param_groups": [{"lr": 0.001, "betas": (0.9, 0.95), "params": [0]}],
        },
        "values": VALUES,
        "__metadata__": tensor((2,), "float16", 72),
    }
    return whole | {"sharded": {name: value for name, (value, _) in sharded().items()}}


def save(rank: int, path: str) -> None:
    """One rank's part."""
    from dcp_rs import RsWriter

    mesh = init_device_mesh("cpu", (RANKS,))
    parts = state()
    parts["sharded"] = {
        name: distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)
        for name, (value, dim) in sharded().items()
    }
    parts["of_rank"] = {str(rank): tensor((2, 2), "int32", 80 + rank)}
    dcp.save(parts, storage_writer=RsWriter(path))


def expected() -> dict[str, Any]:
    """`state()`, and what each rank has alone."""
    own = {str(rank): tensor((2, 2), "int32", 80 + rank) for rank in range(RANKS)}
    return state() | {"of_rank": own}
