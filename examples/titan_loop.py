"""A loop in the manner of torchtitan: FSDP2 over tensor parallelism, checkpoints in the background, the newest ones kept.

torchrun --nproc-per-node 4 examples/titan_loop.py /tmp/titan
"""

import shutil
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp_rs
from dcp_rs.optim import PerRank, RngState, load_training_state, training_state

KEEP = 2
INTERVAL = 2


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of (batch, 16)."""
        return x + self.down(torch.relu(self.up(x)))


class Loader:
    """A data loader that knows how far it has come: each data-parallel rank another part of the data."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def next(self) -> torch.Tensor:
        """The next batch."""
        self.at += 1
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * self.rank + self.at))

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position."""
        self.at = state["at"]


class Checkpointer:
    """Saves every ``INTERVAL`` steps in the background, and finds the newest checkpoint to start from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: Future[Any] | None = None
        # Saves in the background talk among themselves, next to the training's own collectives.
        self.group = dist.new_group(backend="gloo")

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole: only such have an index."""
        steps = [int(p.parent.name[5:]) for p in self.folder.glob("step-*/index.dcprs")]
        return self.folder / f"step-{max(steps)}" if steps else None

    def save(self, step: int, *state: Any) -> None:
        """Waits for the save before, and begins this one. Training may go on as soon as it returns."""
        self.wait()
        values = training_state(*state)
        self.pending = dcp_rs.async_save(values, self.folder / f"step-{step}", process_group=self.group)

    def wait(self) -> None:
        """Until the save is done; raises if it failed. Then what is older than the newest ``KEEP`` goes."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        if dist.get_rank() == 0:
            steps = sorted(int(p.name[5:]) for p in self.folder.glob("step-*"))
            for step in steps[:-KEEP]:
                shutil.rmtree(self.folder / f"step-{step}")
        dist.barrier()


def main(folder: str, steps: int = 6) -> list[float]:
    """Trains up to ``steps``; returns the losses of the steps made now."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2) if size > 1 else (1, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
    for block in (model[0], model[1]):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    loader = Loader(mesh["dp"].get_local_rank())
    extra = {"scheduler": scheduler, "loader": PerRank(loader), "rng": RngState(), "step": 0}

    checkpointer = Checkpointer(Path(folder))
    newest = checkpointer.newest()
    dist.barrier()  # every rank has looked before one may save
    if newest is not None:
        load_training_state(newest, model, optimizer, extra)
    losses = []
    for step in range(extra["step"], steps):
        x = loader.next()
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        extra["step"] = step + 1
        if (step + 1) % INTERVAL == 0:
            checkpointer.save(step + 1, model, optimizer, extra)
    checkpointer.wait()
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = main(sys.argv[1], *map(int, sys.argv[2:]))
    if dist.get_rank() == 0:
        print("losses", [round(loss, 4) for loss in losses])
    dist.destroy_process_group()
