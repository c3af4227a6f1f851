"""What the coordinator of a save does and receives, for 8 to 16,384 ranks: a simulation without processes.

Every rank holds a shard of each of 500 tensors (`sharded`), a shard that 8 ranks share (`hybrid`),
or all of them (`replicated`). Its plan is what a real rank would send. torch's planner gets the
same as items, for as many ranks as it can do in reasonable time.
"""

from __future__ import annotations

import argparse
import pickle
import time

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_rs import _core

NAMES = [
    f"model.layers.{i // 7}.{part}"
    for i in range(500)
    for part in [
        (
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "attention.wo",
            "ffn.w1",
            "ffn.w2",
            "ffn.w3",
        )[i % 7]
    ]
]
COLUMNS = 4096


def place(
    kind: str, rank: int, ranks: int
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Shape, offsets and sizes of what a rank holds of each tensor."""
    parts = {"sharded": ranks, "hybrid": max(1, ranks // 8), "replicated": 1}[kind]
    rows = 4 * parts
    part = rank % parts
    return (rows, COLUMNS), (4 * part, 0), (4, COLUMNS)


def our_plan(kind: str, rank: int, ranks: int) -> bytes:
    shape, offsets, sizes = place(kind, rank, ranks)
    plan = _core.SavePlan()
    nbytes = sizes[0] * sizes[1] * 4
    plan.add(
        [
            _core.SaveItem(name, nbytes, dtype="float32", shape=shape, offsets=offsets, sizes=sizes)
            for name in NAMES
        ]
    )
    return plan.request()


def stock_plan(kind: str, rank: int, ranks: int) -> SavePlan:
    shape, offsets, sizes = (torch.Size(x) for x in place(kind, rank, ranks))
    properties = TensorProperties(dtype=torch.float32)
    items = [
        WriteItem(
            MetadataIndex(name, offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, shape),
        )
        for name in NAMES
    ]
    return SavePlan(items, planner_data={name: tuple(name.split(".")) for name in NAMES})


def stock(kind: str, ranks: int) -> tuple[float, int, int]:
    plans = [pickle.dumps(stock_plan(kind, rank, ranks)) for rank in range(ranks)]
    begin = time.perf_counter()
    planner = DefaultSavePlanner()
    out, _ = planner.create_global_plan([pickle.loads(plan) for plan in plans])
    answers = [pickle.dumps(plan) for plan in out]
    return time.perf_counter() - begin, sum(map(len, plans)), sum(map(len, answers))


def ours(kind: str, ranks: int, repeat: int) -> tuple[float, int, int, float]:
    """Seconds of processor time, the least of some runs, which one thread spends; bytes of plans and of answers; seconds to make a plan."""
    begin = time.perf_counter()
    plans = [pickle.dumps(our_plan(kind, rank, ranks)) for rank in range(ranks)]
    making = (time.perf_counter() - begin) / ranks
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        keep, items, _ = _core.assign_saves([pickle.loads(plan) for plan in plans])
        answers = [pickle.dumps(bits) for bits in keep]
        times.append(time.process_time() - begin)
    shape, _, sizes = place(kind, 0, ranks)
    assert items == len(NAMES) * shape[0] // sizes[0]
    return min(times), sum(map(len, plans)), sum(map(len, answers)), making


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096, 16384])
    parser.add_argument(
        "--stock-ranks",
        type=int,
        default=64,
        help="the most ranks that torch's planner is tried with",
    )
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(
        "| kind | ranks | plans gathered | a rank | answers | coordinator | a chunk held | torch: plans | torch: coordinator |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in ("sharded", "hybrid", "replicated"):
        for ranks in options.ranks:
            seconds, sent, answered, _ = ours(kind, ranks, options.repeat)
            held = ranks * len(NAMES)
            row = f"| {kind} | {ranks} | {sent / 1e6:.3f} MB | {sent / ranks / 1e3:.1f} kB | {answered / 1e3:.1f} kB"
            row += f" | {seconds:.4f} s | {seconds / held * 1e9:.0f} ns"
            if ranks <= options.stock_ranks:
                theirs, plans, _ = stock(kind, ranks)
                row += f" | {plans / 1e6:.2f} MB | {theirs:.2f} s |"
            else:
                row += " | - | - |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
