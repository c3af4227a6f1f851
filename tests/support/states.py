"""State dicts that cover what a checkpoint can hold, and destinations for them. Nothing here comes from the package under test."""

import math
from typing import Any

import numpy as np
import torch

from support.oracle import memory_of, raw_bytes
from support.second_reader import DTYPES

#: The dtypes of the format that the installed torch has (bcomplex32 is the newest).
ALL_DTYPES: list[torch.dtype] = [
    getattr(torch, name) for name, _, _ in DTYPES.values() if hasattr(torch, name)
]


def random_tensor(
    shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Random bits, so that NaNs with payloads, infinities and subnormal numbers occur."""
    count = math.prod(shape)
    if dtype == torch.bool:
        data = np.random.default_rng(seed).integers(0, 2, count, dtype=np.uint8).tobytes()
    else:
        data = np.random.default_rng(seed).bytes(count * dtype.itemsize)
    # `frombuffer` refuses what is empty.
    raw = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return raw.view(dtype).reshape(shape)


def can_copy(dtype: torch.dtype) -> bool:
    """Return whether the installed torch copies tensors of this dtype (2.8 cannot copy float4)."""
    try:
        source = random_tensor((4, 4), dtype)[:, ::2]
        torch.empty_like(source).copy_(source)
    except NotImplementedError:
        return False
    return True


def blank(state: Any) -> Any:
    """A destination for `state`: contiguous tensors that differ in every byte, and no other values."""
    if isinstance(state, torch.Tensor):
        made = torch.empty(state.shape, dtype=state.dtype, device="cpu")
        every_bit = 1 if state.dtype == torch.bool else 0xFF
        memory_of(made)[:] = np.frombuffer(raw_bytes(state), np.uint8) ^ every_bit
        return made
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None


def dtypes_state(shape: tuple[int, ...] = (5, 3), seed: int = 0) -> dict[str, torch.Tensor]:
    """A tensor of each dtype."""
    return {
        str(dtype).removeprefix("torch."): random_tensor(shape, dtype, seed + i)
        for i, dtype in enumerate(ALL_DTYPES)
    }


def shapes_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Scalars, empty tensors, and views that are not contiguous or are lazily conjugated or negated."""
    base = random_tensor((6, 8), seed=seed)
    # Finite numbers where a view computes its elements.
    numbers = torch.arange(24, dtype=torch.float32, device="cpu").reshape(4, 6)
    complex_numbers = torch.complex(numbers, -numbers)
    return {
        "scalar": random_tensor((), seed=seed + 1),
        "scalar_int": torch.tensor(7, device="cpu"),
        "empty": torch.empty(0, device="cpu"),
        "empty_inside": torch.empty(3, 0, 2, dtype=torch.bfloat16, device="cpu"),
        "one": random_tensor((1, 1, 1), torch.float64, seed + 2),
        "deep": random_tensor((1, 2, 1, 3, 1, 2, 1, 2), torch.int16, seed + 3),
        "transposed": base.t(),
        "rows": base[2:5],
        "columns": base[:, 1:7:2],
        "expanded": base[:1].expand(6, 8),
        "channels_last": random_tensor((2, 3, 4, 5), seed=seed + 4).to(
            memory_format=torch.channels_last
        ),
        "conjugate": complex_numbers.conj(),
        "negative": complex_numbers.conj().imag,
        "odd_length": random_tensor((4097,), torch.uint8, seed + 5),
        "two_blocks": random_tensor((1 << 20, 2), torch.uint8, seed + 6),
    }


def nested_state(seed: int = 0) -> dict[str, Any]:
    """A training state in small: model, optimizer with a list of groups, plain values."""
    parameter = random_tensor((8, 4), torch.bfloat16, seed)
    return {
        "model": {
            "embedding.weight": parameter,
            "layers": {"0": {"weight": random_tensor((4, 4), seed=seed + 1)}},
        },
        "optimizer": {
            "state": {
                "embedding.weight": {
                    "step": torch.tensor(12.0, device="cpu"),
                    "exp_avg": random_tensor((8, 4), seed=seed + 2),
                    "exp_avg_sq": random_tensor((8, 4), seed=seed + 3),
                }
            },
            "param_groups": [
                {"lr": 3e-4, "betas": (0.9, 0.95), "params": ["embedding.weight"]},
            ],
        },
        "step": 12,
        "loss": float("inf"),
        "name": "ünïcode",
        "flag": True,
        "nothing": None,
        "buffers": [random_tensor((3,), torch.int64, seed + 4), torch.tensor(1, device="cpu")],
    }


def strange_names_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Names that are legal as keys and awkward as anything else."""
    names = [
        "",
        " ",
        "a/b",
        "../up",
        "model.0@1",
        "__metadata__",
        "__metadata__~",
        'quote"back\\slash',
        "line\nbreak\ttab\x00nul",
        "gewicht.größe.重み.🔥",
        "n" * 2000,
    ]
    return {name: random_tensor((3,), seed=seed + i) for i, name in enumerate(names)}
