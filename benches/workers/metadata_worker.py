"""Opens a checkpoint and plans the load of one rank, in a process of its own: `metadata_worker.py PATH FQNS RANKS`."""

import os
import pickle
import sys
import time
from types import SimpleNamespace
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
from dcp_rs.engine import load as engine

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


def local_plan(reader: StorageReader, planner: LoadPlanner) -> tuple[LoadPlan, float, float]:
    """As `dcp.load` goes about it on one rank; and the seconds for the metadata, and for the plan."""
    state = state_dict()
    start = time.perf_counter()
    metadata = reader.read_metadata()
    opened = time.perf_counter()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    local = reader.prepare_local_plan(planner.create_local_plan())
    return local, opened - start, time.perf_counter() - opened


def plan(reader: StorageReader, planner: LoadPlanner) -> Answer:
    local, opening, planning = local_plan(reader, planner)
    wanted = sorted(regions(local))
    return {
        "read_metadata": opening,
        "plan": planning,
        "planner": type(planner).__name__,
        "items": len(wanted),
        "wanted": wanted[:: max(1, len(wanted) // 50)],
    }


def coordinate(reader: StorageReader, planner: LoadPlanner) -> Answer:
    """What the coordinator receives and does, if every rank's plan is as large as this one's."""
    local, opening, planning = local_plan(reader, planner)
    sent = pickle.dumps(local)
    start = time.perf_counter()
    plans = planner.create_global_plan([pickle.loads(sent) for _ in range(RANKS)])
    answers = [pickle.dumps(plan) for plan in reader.prepare_global_plan(plans)]
    return coordinated(opening, planning, sent, answers, start)


def coordinated(
    opening: float, planning: float, sent: bytes, answers: list[bytes], start: float
) -> Answer:
    return {
        "read_metadata": opening,
        "plan": planning,
        "sent": len(sent),
        "answered": len(answers[0]),
        "coordinator": time.perf_counter() - start,
    }


def regions(plan: LoadPlan) -> list[tuple[str, list[int], list[int]]]:
    """Name, offsets in the whole tensor and sizes of all that a plan reads."""
    found = []
    for item in plan.items:
        chunk = item.storage_index.offset
        assert chunk is not None
        offsets = [a + b for a, b in zip(chunk, item.storage_offsets, strict=True)]
        found.append((item.storage_index.fqn, offsets, list(item.lengths)))
    return found


def plan_of_ours() -> tuple[engine.Plan, float, float]:
    """The plan of `dcp_rs.load`; and the seconds for the metadata, and for the plan."""
    state = state_dict()
    request = engine.LoadRequest(state, dcp_rs.RsReader(PATH)._source)
    one_of_many: Any = SimpleNamespace(rank=RANKS // 3, is_alone=False)  # all that a plan asks for
    own = engine.plan_rank(request, one_of_many)
    own.clock.end("plan")
    own.clock.report(own.reads.report)
    phases = own.reads.report.phases
    return own, phases["metadata"], phases["plan"]


def plan_ours() -> Answer:
    own, opening, planning = plan_of_ours()
    wanted = sorted((t.name, list(t.offsets), list(t.tensor.shape)) for t in own.reads.targets)
    return {
        "read_metadata": opening,
        "plan": planning,
        "planner": "dcp_rs.load",
        "items": len(wanted),
        "wanted": wanted[:: max(1, len(wanted) // 50)],
    }


def coordinate_ours() -> Answer:
    """As `coordinate`, if machines have eight ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = "8"
    own, opening, planning = plan_of_ours()
    sent = pickle.dumps(own.summary)
    start = time.perf_counter()
    answers = [
        pickle.dumps(answer)
        for answer in engine.compare([pickle.loads(sent) for _ in range(RANKS)])
    ]
    return coordinated(opening, planning, sent, answers, start)


with pretend_rank(RANKS // 3, RANKS):
    serve(
        {
            "ours": plan_ours,
            "ours-stock-planner": lambda: plan(dcp_rs.RsReader(PATH), DefaultLoadPlanner()),
            "stock": lambda: plan(FileSystemReader(PATH), DefaultLoadPlanner()),
            "coordinate-ours": coordinate_ours,
            "coordinate-stock": lambda: coordinate(FileSystemReader(PATH), DefaultLoadPlanner()),
        }
    )
