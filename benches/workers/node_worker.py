"""A node of one rank: `node_worker.py RANK WORLD_SIZE STORE SIZE BASE ROOT`, then save or restore, on nodes or plain, and verify.

BASE is the folder of this node, ROOT where its runs go.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.context import SIZES
from harness.driven import Answer, serve
from harness.states import Pattern, check_shards, scramble, shards, square_shapes
from torch.distributed.device_mesh import init_device_mesh

import dcp_rs

RANK, WORLD_SIZE = int(sys.argv[1]), int(sys.argv[2])
PATTERN = Pattern(square_shapes(SIZES[sys.argv[4]]), torch.bfloat16)
BASE, ROOT = Path(sys.argv[5]), sys.argv[6]

os.environ["LOCAL_WORLD_SIZE"] = "1"
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", rank=RANK, world_size=WORLD_SIZE, store=dist.FileStore(sys.argv[3], WORLD_SIZE)
)
MESH = init_device_mesh("cpu", (WORLD_SIZE,))
STATE, MEMORY = shards(PATTERN, 0, MESH)
FULL, _ = shards(PATTERN, 0, MESH)
for name, tensor in FULL.items():
    tensor.to_local().copy_(PATTERN.view(name).chunk(WORLD_SIZE)[RANK])
STEP = 1


def manager(run: str, copies: str) -> dcp_rs.CheckpointManager:
    """The run on nodes with so many copies; plain with none: one folder that all share."""
    if copies == "plain":
        return dcp_rs.CheckpointManager(BASE.parent / run)
    more: dict[str, Any] = {"local": BASE / run, "node": f"node{RANK}", "copies": int(copies)}
    return dcp_rs.CheckpointManager(f"{ROOT}/{run}", upload_every=1_000_000, **more)


open_managers: list[dcp_rs.CheckpointManager] = []


def prepare(run: str, copies: str) -> None:
    """Makes a manager, after a step that is not timed, which alone goes to the root."""
    open_managers.append(manager(run, copies))
    open_managers[0].save(0, {"tiny": torch.ones(1)})


def save() -> None:
    open_managers[0].save(STEP, dict(FULL))


def close() -> None:
    open_managers.pop().close()


def restore(run: str, copies: str) -> Answer:
    """Loads the newest step, as a job does that begins again."""
    with manager(run, copies) as run_manager:
        step = run_manager.load(dict(STATE))
    assert step == STEP, f"step {step} was loaded"
    return {}


def verify() -> None:
    check_shards(PATTERN, 0, MESH, MEMORY)
    scramble(MEMORY.values())


serve({"prepare": prepare, "save": save, "close": close, "restore": restore, "verify": verify})
dist.destroy_process_group()
