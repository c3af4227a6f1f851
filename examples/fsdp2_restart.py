"""FSDP2 training that resumes on any number of ranks.

torchrun --nproc-per-node 4 examples/fsdp2_restart.py /tmp/run     # trains to step 10
torchrun --nproc-per-node 2 examples/fsdp2_restart.py /tmp/run 20  # resumes on two ranks
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_rs.errors import CheckpointNotFoundError
from dcp_rs.optim import RngState, load_training_state, save_training_state

SAVE_EVERY = 5


def build() -> nn.Module:
    """Return a model of three layers, each an FSDP unit."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(folder: str, steps: int = 10) -> list[float]:
    """Train up to ``steps``. Return the losses of the steps of this call."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    extra: dict[str, Any] = {"scheduler": scheduler, "rng": RngState(), "step": 0}
    path = Path(folder) / "latest"
    with suppress(CheckpointNotFoundError):  # a new run has none
        load_training_state(path, model, optimizer, extra)
    losses = []
    for step in range(extra["step"], steps):
        batch = torch.Generator().manual_seed(step)
        x = torch.randn(8, 16, generator=batch)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if (step + 1) % SAVE_EVERY == 0:
            extra["step"] = step + 1
            # The last checkpoint stays whole until the new one is.
            save_training_state(path, model, optimizer, extra)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = main(sys.argv[1], *map(int, sys.argv[2:]))
    if dist.get_rank() == 0:
        print("losses", [round(loss, 4) for loss in losses])
    dist.destroy_process_group()
