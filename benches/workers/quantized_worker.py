"""Load a quantized checkpoint, or the same in bfloat16, in a fresh process.

`quantized_worker.py QUANTIZED PLAIN`, then `prepare quantized` or `prepare plain`, `load`,
`verify`.
"""

import sys
from pathlib import Path

import torch
from harness.driven import serve

import dcp_rs

QUANTIZED, PLAIN = Path(sys.argv[1]), Path(sys.argv[2])
STATE: dict[str, torch.Tensor] = {}
chosen = ["plain"]


def prepare(name: str) -> None:
    """Allocate the destination, so that it is there before the load."""
    chosen[0] = name
    with dcp_rs.open(PLAIN) as plain:
        for key in plain:
            STATE[key] = torch.full(plain.info(key).shape, 1, dtype=torch.bfloat16)


def load() -> None:
    if chosen[0] == "quantized":
        dcp_rs.load(STATE, QUANTIZED, dequantize=True, no_dist=True)
    else:
        dcp_rs.load(STATE, PLAIN, no_dist=True)


def verify() -> None:
    with dcp_rs.open(PLAIN) as plain:
        assert all(torch.equal(plain[name], tensor) for name, tensor in STATE.items())


serve({"prepare": prepare, "load": load, "verify": verify})
