"""One rank of several on this machine: `rank_worker.py RANK WORLD_SIZE STORE SIZE`, then want WHAT, load LOADER PATH, verify."""

import functools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.context import SIZES
from harness.driven import serve
from harness.loaders import BROADCAST, OURS, OURS_ALONE, OURS_SHARED, OURS_STOCK_PLANNER, STOCK
from harness.states import Pattern, check_shards, scramble, shard, shards, square_shapes
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
)
from torch.distributed.device_mesh import init_device_mesh

import dcp_rs

RANK, WORLD_SIZE = int(sys.argv[1]), int(sys.argv[2])
PATTERN = Pattern(square_shapes(SIZES[sys.argv[4]]), torch.bfloat16)
#: What a rank can want of each matrix, by the dimension that is sharded; and of "stages" some of
#: the matrices whole.
DIMS = {"replicas": None, "stages": None, "rows": 0, "columns": 1}

os.environ["LOCAL_WORLD_SIZE"] = str(WORLD_SIZE)
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", rank=RANK, world_size=WORLD_SIZE, store=dist.FileStore(sys.argv[3], WORLD_SIZE)
)
MESH = init_device_mesh("cpu", (WORLD_SIZE,))


class Wanted:
    """What this rank loads into."""

    def __init__(self, what: str) -> None:
        self.dim = DIMS[what]
        if self.dim is None:
            names = list(PATTERN.shapes)
            first, end = (len(names) * rank // WORLD_SIZE for rank in (RANK, RANK + 1))
            self.names = names[first:end] if what == "stages" else names
            self.state = self.memory = PATTERN.blank(self.names)
        else:
            self.state, self.memory = shards(PATTERN, self.dim, MESH)

    def check(self) -> None:
        if self.dim is None:
            PATTERN.check(self.memory, self.names)
        else:
            check_shards(PATTERN, self.dim, MESH, self.memory)
        scramble(self.memory.values())

    def broadcast(self, path: str) -> None:
        """By torch's reader of such files, which knows whole tensors only: under a DTensor two ranks did not return within 180 s."""
        whole = whole_tensors()
        dcp.load(
            whole,
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
            checkpoint_id=path,
        )
        assert self.dim is not None
        for name, tensor in whole.items():
            self.memory[name].copy_(shard(tensor, self.dim, MESH))


@functools.cache
def whole_tensors() -> dict[str, torch.Tensor]:
    """Memory for all of every matrix, made before the first round."""
    return PATTERN.blank()


wanted: list[Wanted] = []


def want(what: str) -> None:
    wanted.clear()
    wanted.append(Wanted(what))


def load(loader: str, path: str) -> None:
    state = wanted[0].state
    if loader == OURS:
        dcp_rs.load(state, path)
    elif loader in (OURS_ALONE, OURS_SHARED):
        dcp_rs.load(state, path, shared=loader == OURS_SHARED)
    elif loader == OURS_STOCK_PLANNER:
        dcp.load(state, storage_reader=dcp_rs.RsReader(path))
    elif loader == BROADCAST:
        wanted[0].broadcast(path)
    else:
        assert loader == STOCK
        dcp.load(state, storage_reader=dcp.FileSystemReader(Path(path)))


def verify() -> None:
    wanted[0].check()


serve({"want": want, "load": load, "verify": verify})
dist.destroy_process_group()
