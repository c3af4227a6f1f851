"""Loads the model's state once, in a process of its own: `load_worker.py PATH_OR_URL SIZE`, then prepare LOADER, load, verify."""

import sys
from pathlib import Path

import torch
from harness import loaders
from harness.context import SIZES
from harness.driven import serve
from harness.states import Pattern, model_shapes

PATH = sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1])
PATTERN = Pattern(model_shapes(SIZES[sys.argv[2]]), torch.bfloat16)
STATE = PATTERN.blank()
LOADERS = {
    loaders.OURS: loaders.ours,
    loaders.STOCK: loaders.stock,
    loaders.HUGGING_FACE: loaders.hugging_face,
    loaders.SAFETENSORS: loaders.safetensors,
}
chosen = [loaders.ours]


def prepare(name: str) -> None:
    chosen[0] = LOADERS[name]


serve(
    {
        "prepare": prepare,
        "load": lambda: chosen[0](PATH, STATE),
        "verify": lambda: PATTERN.check(STATE),
    }
)
