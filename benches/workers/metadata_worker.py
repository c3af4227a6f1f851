"""Opens a checkpoint and plans the load of one rank, in a process of its own: `metadata_worker.py PATH FQNS RANKS`."""

import sys
import time
from typing import Any

import torch
from cases.metadata import COLUMNS, ROWS, names
from harness.checkpoints import pretend_rank
from harness.driven import Answer, serve
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
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
    wanted = sorted(regions(planner, local))
    return {
        "read_metadata": opened - start,
        "plan": done - opened,
        "planner": type(planner).__name__,
        "items": len(wanted),
        "wanted": wanted[:: max(1, len(wanted) // 50)],
    }


def regions(planner: LoadPlanner, plan: LoadPlan) -> list[tuple[str, list[int], list[int]]]:
    """Name, offsets in the whole tensor and sizes of all that a plan reads."""
    if isinstance(planner, dcp_rs.RsLoadPlanner):
        reads = planner.local_reads(plan)
        assert reads is not None
        return [(t.name, list(t.offsets), list(t.tensor.shape)) for t in reads.targets]
    found = []
    for item in plan.items:
        chunk = item.storage_index.offset
        assert chunk is not None
        offsets = [a + b for a, b in zip(chunk, item.storage_offsets, strict=True)]
        found.append((item.storage_index.fqn, offsets, list(item.lengths)))
    return found


with pretend_rank(RANKS // 3, RANKS):
    serve(
        {
            "ours": lambda: plan(dcp_rs.RsReader(PATH), dcp_rs.RsLoadPlanner()),
            "ours-stock-planner": lambda: plan(dcp_rs.RsReader(PATH), DefaultLoadPlanner()),
            "stock": lambda: plan(FileSystemReader(PATH), DefaultLoadPlanner()),
        }
    )
