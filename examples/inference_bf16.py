"""Load a float32 training checkpoint into a bfloat16 model, without a float32 copy.

python examples/inference_bf16.py /tmp/inference
"""

import sys
from pathlib import Path

import torch
from torch import nn

import dcp_rs
from dcp_rs import RsLoadPlanner
from dcp_rs.optim import save_training_state


def build() -> nn.Module:
    """Return the model, on the default device."""
    return nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 100))


def main(folder: str) -> nn.Module:
    """Save a training checkpoint, and load its model."""
    path = Path(folder) / "ckpt"
    trained = build()
    save_training_state(path, trained, torch.optim.AdamW(trained.parameters()))

    with torch.device("meta"):  # no memory yet
        model = build()
    state = model.state_dict()
    # The names in the checkpoint are "model.<name>". Its optimizer state is not read.
    rename = {"model": ""}
    dcp_rs.load(state, path, dtype=torch.bfloat16, device="cpu", assign=True, rename=rename)
    model.load_state_dict(state, assign=True)
    model.eval()

    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, trained.state_dict()[name].bfloat16())

    # Tensors one by one, each onto its own device and with its own dtype.
    planner = RsLoadPlanner(checkpoint=path, rename=rename)
    head = planner.resolve_tensor("3.weight", device="cpu", dtype=torch.float32)
    assert torch.equal(head, trained.state_dict()["3.weight"])
    return model


if __name__ == "__main__":
    model = main(sys.argv[1])
    print(model(torch.arange(4)).shape, next(model.parameters()).dtype)
