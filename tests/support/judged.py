"""What comes of reading a small checkpoint that may be damaged: a typed error, or what was saved."""

import torch

import dcp_rs
from dcp_rs.errors import DcpRsError
from support import same_bits

STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3, dtype=torch.bfloat16)},
    "count": torch.tensor(3),
    "value": "x",
}

FLAT = {
    "model.w": STATE["model"]["w"],
    "model.b": STATE["model"]["b"],
    "count": STATE["count"],
    "value": "x",
}


def read_all(path):
    with dcp_rs.open(path, verify=True) as checkpoint:
        return {name: checkpoint[name] for name in checkpoint}


def same(left, right):
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_bits(left, right)
    return type(left) is type(right) and left == right


def outcome(path, want=FLAT):
    """The name of the typed error, or "right"; anything else fails. `want` is None where the bytes may say anything."""
    try:
        got = read_all(path)
    except DcpRsError as error:
        return type(error).__name__
    if want is not None:
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert same(got[name], value), name
    return "right"
