"""Loads from a store and saves to one: a server of objects on the same machine, by itself and with 20 ms for each request.

The server is that of the tests: threads of a Python process, which send from memory. It takes cores
from the loaders, all alike.
"""

import math
import sys

import torch
from harness import checkpoints, stores
from harness.context import Context
from harness.driven import BENCHES, Driven
from harness.memory import extra_anonymous_bytes
from harness.pairs import measure
from harness.rows import Row, figure, versus
from harness.states import Pattern, model_shapes, shard, size_of, small_shapes, square_shapes
from harness.stores import CONNECTOR, FSSPEC, OBSTORE, OURS, SAVES, SAVES_FSSPEC

import dcp_rs
from dcp_rs import _core
from dcp_rs._url import StorageOptions
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.options import ReadOptions

LATENCY = 0.02
SAVED_BY, LOADED_BY, RANK = 8, 4, 1
#: What a request for columns should bring on average at the least: 8 MiB.
REQUEST = 8 << 20


def run(context: Context) -> list[Row]:
    model = Pattern(model_shapes(context.sizes), torch.bfloat16)
    small = Pattern(small_shapes(context.sizes.small), torch.float32)
    return [
        *_loads(
            context,
            "model",
            model,
            0.0,
            {OBSTORE: (0.8, 0.95), FSSPEC: (8, 13), CONNECTOR: (2.5, 3.8)},
        ),
        *_loads(
            context,
            "model",
            model,
            LATENCY,
            {OBSTORE: (0.8, 0.95), FSSPEC: (5, 6), CONNECTOR: (3, 3.8)},
        ),
        *_loads(context, "small", small, LATENCY, {FSSPEC: (40, 150)}),
        *_columns(context),
        *_opening(context, model),
        *_memory(context, model),
        *_saves(context, model),
    ]


def _case(pattern: Pattern, latency: float) -> str:
    return f"{len(pattern.shapes):,} tensors, {size_of(pattern.nbytes)}, {latency * 1000:.0f} ms a request"


def _loads(
    context: Context,
    name: str,
    pattern: Pattern,
    latency: float,
    bounds: dict[str, tuple[float, float]],
) -> list[Row]:
    folder = context.folder / f"remote-{name}"
    native, stock = checkpoints.native(folder, pattern), checkpoints.stock(folder, pattern)
    state = pattern.blank()
    with stores.serving(latency, native, stock) as store:
        contenders = [stores.ours(store, native, state, pattern)]
        if stores.is_there(FSSPEC):
            contenders.append(stores.fsspec(store, stock, state, pattern))
        if CONNECTOR in bounds and stores.is_there(CONNECTOR):
            contenders.append(stores.connector(store, stock, state, pattern))
        if OBSTORE in bounds and stores.is_there(OBSTORE):
            contenders.append(stores.raw(store, native))
        times = measure(contenders, **context.pairs)
    return [
        versus(_case(pattern, latency), times, OURS, other, reach=reach, stretch=stretch)
        for other, (reach, stretch) in bounds.items()
        if other in times
    ]


def _columns(context: Context) -> list[Row]:
    """One column shard of what was saved as row shards: what is fetched for a byte that is wanted, and in how many requests."""
    pattern = Pattern(square_shapes(context.sizes), torch.bfloat16)
    native, _ = checkpoints.row_sharded(context.folder / "reshard", pattern, SAVED_BY)
    rows = []
    with stores.serving(0.0, native) as store, checkpoints.pretend_rank(RANK, LOADED_BY):
        options = StorageOptions.of(store.options())
        index = open_index(
            stores.url(native), rank=None, allow_external=False, storage_options=options
        )
        mesh = torch.distributed.init_device_mesh("cpu", (LOADED_BY,))
        fills, kept = [], []
        for name, shape in pattern.shapes.items():
            want = shard(pattern.view(name), 1, mesh)
            to = torch.empty(want.shape, dtype=want.dtype)
            offsets = [0, RANK * -(-shape[1] // LOADED_BY)]
            fills.append(
                _core.Fill(index.find(name), offsets, want.shape, to.data_ptr(), to.stride())
            )
            kept.append((want, to))
        store.counts()
        stats = index.read_regions(fills, **ReadOptions().engine())
        asked = store.counts()["get"]
        for want, to in kept:
            assert torch.equal(to.view(torch.int16), want.view(torch.int16))
        case = f"column shard of {LOADED_BY}, saved as row shards of {SAVED_BY} ({size_of(pattern.nbytes)})"
        told = "counted by the engine"
        rows.append(
            figure(
                f"{case}: fetched for each byte wanted",
                OURS,
                "B/B",
                [stats.read / stats.wanted],
                reach=4.0,
                note=told,
            )
        )
        # A file is never asked for in less than one.
        least = max(SAVED_BY, math.ceil(stats.read / REQUEST))
        said = "1 is a request for 8 MiB, or for a file; counted by the server"
        rows.append(figure(f"{case}: requests", OURS, "x", [asked / least], reach=1.0, note=said))
    return rows


def _opening(context: Context, pattern: Pattern) -> list[Row]:
    native = checkpoints.native(context.folder / "remote-model", pattern)
    with stores.serving(0.0, native) as store:
        with dcp_rs.open(stores.url(native), storage_options=store.options()) as ckpt:
            assert set(ckpt.keys()) == set(pattern.shapes)
        asked = store.counts()["all"]
    return [
        figure(
            "requests for opening a checkpoint",
            "dcp_rs.open, s3://",
            "",
            [asked],
            reach=3,
            stretch=2,
        )
    ]


def _memory(context: Context, pattern: Pattern) -> list[Row]:
    """What a load takes beyond its destination, with as many requests in flight as there may be."""
    native = checkpoints.native(context.folder / "remote-model", pattern)
    case = f"extra anonymous memory while loading {size_of(pattern.nbytes)}, {LATENCY * 1000:.0f} ms a request"
    rounds = min(3, context.pairs["rounds"])
    extra, most = [], 0
    with stores.serving(LATENCY, native) as store:
        for _ in range(rounds):
            with Driven(
                [
                    sys.executable,
                    BENCHES / "workers" / "load_worker.py",
                    stores.url(native),
                    context.size,
                ],
                **store.environment(),
            ) as process:
                process.ask("prepare", "dcp_rs.load")
                extra.append(extra_anonymous_bytes(process, "load") / 1e6)
                process.ask("verify")
            most = max(most, store.counts()["most at once"])
    note = f"first load of a process; up to {most} requests at a time, counted by the server"
    return [figure(case, OURS, "MB", extra, reach=300, stretch=200, note=note)]


def _saves(context: Context, pattern: Pattern) -> list[Row]:
    state = pattern.state()
    rows = []
    for latency in (0.0, LATENCY):
        with stores.serving(latency) as store:
            contenders = [stores.saves(store, state, pattern)]
            if stores.is_there(SAVES_FSSPEC):
                contenders.append(stores.saves_fsspec(store, state, pattern))
            times = measure(contenders, **context.pairs)
        case = f"save {_case(pattern, latency)}"
        if SAVES_FSSPEC in times:
            rows.append(versus(case, times, SAVES, SAVES_FSSPEC, reach=3.5, stretch=4.5))
        elif times[SAVES].error is None:
            rows.append(figure(case, SAVES, "s", times[SAVES].seconds))
        else:
            rows.append(Row(case, SAVES, error=times[SAVES].error))
    return rows
