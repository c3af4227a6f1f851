"""FSDP2 training with a StatefulDataLoader that resumes on another number of ranks.

pip install torchdata
torchrun --nproc-per-node 4 examples/resharded_loader.py /tmp/run 3  # three steps
torchrun --nproc-per-node 2 examples/resharded_loader.py /tmp/run 9  # goes on with two ranks
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dcp_rs.errors import CheckpointNotFoundError
from dcp_rs.optim import PerRank, RngState, load_training_state, save_training_state

SAMPLES, BATCH = 96, 2


class Part(Sampler[int]):
    """This rank's samples from a start on, of one random order of all samples."""

    def __init__(self, start: int, rank: int, ranks: int) -> None:
        self.start, self.rank, self.ranks = start, rank, ranks

    def __iter__(self) -> Iterator[int]:
        """Return the numbers of the samples."""
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
        return iter(order[self.start + self.rank :: self.ranks])


class Loader:
    """Batches of this rank. The state counts the samples that it has returned since a start."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.start = self.seen = 0
        self._make()

    def _make(self) -> None:
        # Its own generator: `iter` draws a seed, which would come from the restored random state.
        self._loader = StatefulDataLoader(
            range(SAMPLES),
            batch_size=BATCH,
            sampler=Part(self.start, self.rank, self.ranks),
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Return an iterator over the batches that are left."""
        for batch in self._loader:
            self.seen += len(batch)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place of this rank, and the state of its loader."""
        return {"start": self.start, "seen": self.seen, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved place, or begin at the start that `divide` returned."""
        self.start, self.seen = state["start"], state["seen"]
        self._make()
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])


def divide(states: dict[int, Any], rank: int, ranks: list[int]) -> dict[str, int]:  # noqa: ARG001
    """Begin after all samples that the saved ranks have seen."""
    start = states[0]["start"] + sum(state["seen"] for state in states.values())
    return {"start": start, "seen": 0}


def build() -> nn.Module:
    """Return a small model with dropout, sharded over all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def main(folder: str, steps: int) -> tuple[list[float], list[int]]:
    """Train up to ``steps``, and save. Return the losses and the samples of this call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = Loader(rank, ranks)
    extra: dict[str, Any] = {
        "loader": PerRank(loader, key=rank, reshard=divide),
        "rng": RngState(),
        "step": 0,
    }
    torch.manual_seed(rank)
    path = Path(folder) / "latest"
    with suppress(CheckpointNotFoundError):  # a new run has none
        load_training_state(path, model, optimizer, extra)
    losses, samples = [], []
    batches = iter(loader)
    for step in range(extra["step"], steps):
        batch = next(batches)
        x = batch.float().unsqueeze(1) / SAMPLES
        loss = (model(x) - x.square()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        samples += batch.tolist()
        extra["step"] = step + 1
    save_training_state(path, model, optimizer, extra)
    return losses, samples


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, _ = main(sys.argv[1], int(sys.argv[2]))
    if dist.get_rank() == 0:
        print("losses", [round(loss, 4) for loss in losses])
    dist.destroy_process_group()
