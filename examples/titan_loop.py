"""A training loop as in torchtitan: FSDP2 over tensor parallelism, with async checkpoints.

torchrun --nproc-per-node 4 examples/titan_loop.py /tmp/titan
"""

import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_rs import CheckpointManager
from dcp_rs.optim import PerRank, RngState, training_state

KEEP = 2
INTERVAL = 2


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to ``x`` of (batch, 16)."""
        return x + self.down(torch.relu(self.up(x)))


class Loader:
    """A data loader with a position. Each data-parallel rank reads a part of the data."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def next(self) -> torch.Tensor:
        """Return the next batch."""
        self.at += 1
        return torch.randn(
            4, 16, generator=torch.Generator().manual_seed(1000 * self.rank + self.at)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position."""
        self.at = state["at"]


def main(folder: str, steps: int = 6) -> list[float]:
    """Train up to ``steps``. Return the losses of the steps of this call."""
    size = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (size // 2, 2) if size > 1 else (1, 1), mesh_dim_names=("dp", "tp")
    )
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
    for block in (model[0], model[1]):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    dp_rank = mesh["dp"].get_local_rank()
    loader = Loader(dp_rank)
    extra: dict[str, Any] = {
        "scheduler": scheduler,
        "loader": PerRank(loader, key=dp_rank),
        "rng": RngState(),
        "step": 0,
    }

    losses = []
    with CheckpointManager(
        folder, save_every=INTERVAL, keep_last=KEEP, preemption=signal.SIGTERM
    ) as manager:
        # The newest whole step, if there is one.
        manager.load_training_state(model, optimizer, extra)
        for step in range(extra["step"] + 1, steps + 1):
            x = loader.next()
            loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            extra["step"] = step
            if manager.should_save(step):
                manager.async_save(
                    step, training_state(model, optimizer, extra), metrics={"loss": losses[-1]}
                )
            if manager.preempted:
                break
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = main(sys.argv[1], *map(int, sys.argv[2:]))
    if dist.get_rank() == 0:
        print("losses", [round(loss, 4) for loss in losses])
    dist.destroy_process_group()
