"""States to be saved to a server of objects, and what comes back from there."""

from __future__ import annotations

import torch

import dcp_rs
from support.object_server import ObjectServer
from support.states import blank


def small_state():
    """Less than a part of a multipart upload."""
    torch.manual_seed(0)
    return {
        "big": torch.randn(1500, 1024),
        "small": torch.arange(7),
        "empty": torch.empty(0, 4),
        "many": {f"t{i}": torch.full((5, 3), float(i)) for i in range(40)},
        "step": 17,
    }


def large_state(seed=0):
    """More than a part: a tensor of several parts, some that share one, strided ones, values."""
    torch.manual_seed(seed)
    return {
        "big": torch.randn(3 << 20),
        "strided": torch.randn(700, 1100).t(),
        "half": torch.randn(1000, 333).to(torch.bfloat16),
        "many": {f"t{i}": torch.full((37, i % 5), float(i)) for i in range(300)},
        "step": seed,
        "blob": "x" * 10_000,
    }


def names(server: ObjectServer, prefix: str = "ckpt") -> list[str]:
    """The names of what is under a prefix, sorted."""
    return [key.removeprefix(f"{prefix}/") for key in server.keys(f"{prefix}/")]


def loaded(server: ObjectServer, state, prefix: str = "ckpt"):
    """What is there for the names of ``state``, with its digests checked."""
    into = blank(state)
    dcp_rs.load(into, server.url(prefix), storage_options=server.options(), verify=True)
    return into
