"""FSDP1: save the optimizer state with FSDP's own functions, and resume in three ways.

torchrun --nproc-per-node 2 examples/fsdp1_optimizer.py /tmp/fsdp1
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp import StateDictType

import dcp_rs
from dcp_rs import RsReader, RsWriter
from dcp_rs.optim import load_optim_state_dict

SHARDED = StateDictType.SHARDED_STATE_DICT


def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    """Return a model in two FSDP units. On a CPU, FSDP1 needs the device."""
    torch.manual_seed(seed)
    cpu = torch.device("cpu")
    inner = FSDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU()), device_id=cpu)
    model = FSDP(nn.Sequential(inner, nn.Linear(32, 4)), device_id=cpu)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: FSDP, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Make one step, with the same batch on each rank."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main(folder: str) -> tuple[float, list[float]]:
    """Return the loss after the save, and after each way to resume."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1 recommends FSDP2
    path = Path(folder) / "ckpt"
    model, optimizer = build(seed=0)
    for step in range(3):
        train(model, optimizer, step)
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, storage_writer=RsWriter(path))
    want = train(model, optimizer, 3)

    def resumed() -> tuple[FSDP, torch.optim.Optimizer]:
        model, optimizer = build(seed=1)
        with FSDP.state_dict_type(model, SHARDED):
            state = {"model": model.state_dict()}
            dcp_rs.load(state, path)
            model.load_state_dict(state["model"])
        return model, optimizer

    got = []
    # 1. One call.
    model, optimizer = resumed()
    load_optim_state_dict(path, model, optimizer)
    got.append(train(model, optimizer, 3))

    # 2. By hand: FSDP allocates the shards, RsReader fills them, and FSDP takes them.
    model, optimizer = resumed()
    train(model, optimizer, 9)  # allocates the optimizer state
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, storage_reader=RsReader(path))
        model.load_state_dict(state["model"])
        flat = FSDP.optim_state_dict_to_load(
            model, optimizer, state["optim"], is_named_optimizer=False
        )
        optimizer.load_state_dict(flat)
    got.append(train(model, optimizer, 3))

    # 3. torch's helper, with RsReader for its reader.
    model, optimizer = resumed()
    with FSDP.state_dict_type(model, SHARDED):
        state = load_sharded_optimizer_state_dict(model.state_dict(), "optim", RsReader(path))
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
    got.append(train(model, optimizer, 3))
    return want, got


if __name__ == "__main__":
    dist.init_process_group("gloo")
    want, got = main(sys.argv[1])
    assert got == [want] * 3
    if dist.get_rank() == 0:
        print("loss after the save", want, "after resuming", got)
    dist.destroy_process_group()
