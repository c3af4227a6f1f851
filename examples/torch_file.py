"""Read a file of torch.save as a checkpoint: tensors by name, and an FSDP1 run that resumes.

torchrun --nproc-per-node 2 examples/torch_file.py /tmp/torch_file
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

import dcp_rs
from dcp_rs import RsLoadPlanner, RsReader
from dcp_rs.optim import load_optim_state_dict


def by_name(path: Path) -> dict[str, torch.Tensor]:
    """Load tensors, each to a device and a dtype. Nothing else is read."""
    planner = RsLoadPlanner(checkpoint=path)
    first = planner.resolve_tensor("model.0.0.weight", device="cpu", dtype=torch.bfloat16)
    places = {
        "model.0.0.bias": "cpu",
        "model.1.bias": "cuda" if torch.cuda.is_available() else "cpu",
    }
    return {"first": first} | {
        name: planner.resolve_tensor(name, device=device) for name, device in places.items()
    }


class Doubled(RsLoadPlanner):
    """A custom planner: it chooses the memory of tensors, and changes them after the load."""

    def resolve_tensor(self, read_item: ReadItem | str, **options: Any) -> torch.Tensor:
        """Return the memory for a tensor."""
        return torch.empty_like(super().resolve_tensor(read_item, **options))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Change a tensor that was loaded."""
        self.state_dict[read_item.dest_index.fqn].copy_(2 * tensor)
        super().commit_tensor(read_item, tensor)


def doubled(path: Path) -> torch.Tensor:
    """Load a tensor with the planner."""
    state = {"model": {"1.bias": torch.zeros(4)}}
    dcp.load(state, storage_reader=RsReader(path), planner=Doubled(), no_dist=True)
    return state["model"]["1.bias"]


def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    """Return a model in two FSDP units. On a CPU, FSDP1 needs the device."""
    torch.manual_seed(seed)
    cpu = torch.device("cpu")
    inner = FSDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU()), device_id=cpu)
    model = FSDP(nn.Sequential(inner, nn.Linear(32, 4)), device_id=cpu)
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    )
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: FSDP, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Make one step, with the same batch on each rank."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main(folder: str) -> tuple[list[float], list[list[float]]]:
    """Return two losses after the save, and after each way to resume."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1 recommends FSDP2
    path = Path(folder) / "checkpoint.pth"
    model, optimizer = build(seed=0)
    for step in range(3):
        train(model, optimizer, step)
    state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
    dist.barrier()
    want = [train(model, optimizer, 3), train(model, optimizer, 4)]

    got = []
    # 1. As in the documentation of FSDP, with dcp_rs.open in place of torch.load. A rank reads its
    # part of the file.
    model, optimizer = build(seed=1)
    with dcp_rs.open(path) as checkpoint:
        state = checkpoint.state_dict()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
    got.append([train(model, optimizer, 3), train(model, optimizer, 4)])

    # 2. The optimizer in one call.
    model, optimizer = build(seed=2)
    state = {"model": model.state_dict()}
    dcp_rs.load(state, path)
    model.load_state_dict(state["model"])
    load_optim_state_dict(path, model, optimizer)
    got.append([train(model, optimizer, 3), train(model, optimizer, 4)])
    return want, got


if __name__ == "__main__":
    dist.init_process_group("gloo")
    want, got = main(sys.argv[1])
    assert got == [want] * 2
    if dist.get_rank() == 0:
        print("losses after the save", want, "after resuming", got)
        print(
            {
                name: (tensor.dtype, tensor.device)
                for name, tensor in by_name(Path(sys.argv[1]) / "checkpoint.pth").items()
            }
        )
    dist.destroy_process_group()
