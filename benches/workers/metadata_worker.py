"""Opens a checkpoint and plans the load of one rank, in a process of its own: `metadata_worker.py PATH FQNS RANKS`."""

import sys
import time
from typing import Any

import torch
from cases.metadata import COLUMNS, ROWS, names
from harness.checkpoints import pretend_rank
from harness.driven import Answer, serve
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_rs

PATH, FQNS, RANKS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def state_dict() -> dict[str, Any]:
    """What one rank of as many as saved wants: its row shard of every tensor."""
    mesh = init_device_mesh("cpu", (RANKS,))
    return {
        name: DTensor.from_local(
            torch.empty(ROWS, COLUMNS),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size([ROWS * RANKS, COLUMNS]),
            stride=(COLUMNS, 1),
        )
        for name in names(FQNS)
    }


def plan(reader: StorageReader, planner: LoadPlanner) -> Answer:
    """As `dcp.load` goes about it on one rank."""
    state = state_dict()
    start = time.perf_counter()
    metadata = reader.read_metadata()
    opened = time.perf_counter()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    local = reader.prepare_local_plan(planner.create_local_plan())
    done = time.perf_counter()
    items = local.items
    return {
        "read_metadata": opened - start,
        "plan": done - opened,
        "items": len(items),
        "planner": type(planner).__name__,
        "wanted": sorted(
            (item.storage_index.fqn, list(item.storage_offsets), list(item.lengths))
            for item in items[:: max(1, len(items) // 50)]
        ),
    }


def our_planner() -> LoadPlanner:
    return getattr(dcp_rs, "RsLoadPlanner", DefaultLoadPlanner)()


with pretend_rank(RANKS // 3, RANKS):
    serve(
        {
            "ours": lambda: plan(dcp_rs.RsReader(PATH), our_planner()),
            "ours-stock-planner": lambda: plan(dcp_rs.RsReader(PATH), DefaultLoadPlanner()),
            "stock": lambda: plan(FileSystemReader(PATH), DefaultLoadPlanner()),
        }
    )
