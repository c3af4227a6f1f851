"""Saved by 8 ranks as row shards; one of 4 ranks loads its column shard of every matrix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.loaders import OURS, OURS_SHARED, OURS_STOCK_PLANNER, STOCK
from harness.memory import storage_bytes_read
from harness.pairs import Contender, measure
from harness.rows import Row, figure, versus
from harness.states import Pattern, check_shards, scramble, shard, shards, size_of, square_shapes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dcp_rs import _core
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.options import ReadOptions

SAVED_BY, LOADED_BY, RANK = 8, 4, 1


def run(context: Context) -> list[Row]:
    pattern = Pattern(square_shapes(context.sizes), torch.bfloat16)
    native, stock = checkpoints.row_sharded(context.folder / "reshard", pattern, SAVED_BY)
    with checkpoints.pretend_rank(RANK, LOADED_BY):
        return [
            *_times(context, pattern, native, stock),
            *_amounts(pattern, native),
            *_cold(context, pattern, native, stock),
        ]


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (LOADED_BY,))


def _contender(
    name: str,
    load: Callable[[Path, Any], None],
    path: Path,
    pattern: Pattern,
    prepare: Callable[[Path], None],
) -> Contender:
    mesh = _mesh()
    state, memory = shards(pattern, 1, mesh)

    def before() -> None:
        scramble(memory.values())
        prepare(path)

    return Contender(
        name,
        lambda: load(path, state),
        before=before,
        verify=lambda: check_shards(pattern, 1, mesh, memory),
        warm_up=False,
    )


def _case(pattern: Pattern, warmth: str) -> str:
    return (
        f"{warmth}, saved as row shards of {SAVED_BY} ({size_of(pattern.nbytes)}), "
        f"loaded as one column shard of {LOADED_BY}"
    )


def _times(context: Context, pattern: Pattern, native: Path, stock: Path) -> list[Row]:
    def warm(path: Path) -> None:
        page_cache.warm(path)

    times = measure(
        [
            _contender(OURS, loaders.ours, native, pattern, warm),
            _contender(STOCK, loaders.stock, stock, pattern, warm),
            _contender(OURS_STOCK_PLANNER, loaders.ours_stock_planner, native, pattern, warm),
        ],
        **context.pairs,
    )
    case = _case(pattern, "warm")
    return [
        versus(case, times, OURS, STOCK, reach=8, stretch=15),
        versus(case, times, OURS_STOCK_PLANNER, STOCK),
    ]


def _amounts(pattern: Pattern, native: Path) -> list[Row]:
    """Bytes read for each byte wanted, as the engine counts them, in every mode."""
    rows = []
    index = open_index(native)
    # Past the page cache what lies between thin rows is read where that is quicker: there time is
    # the measure.
    bounds = {"row": (1.05, 1.0), "column": (2.0, 1.5)}
    for dim, kind in ((0, "row"), (1, "column")):
        for io in ("mmap", "direct", "buffered"):
            reach, stretch = (None, None) if (kind, io) == ("column", "direct") else bounds[kind]
            fills, kept = [], []
            for name, shape in pattern.shapes.items():
                tensor = index.find(name)
                assert tensor is not None
                want = shard(pattern.view(name), dim, _mesh())
                to = torch.empty(want.shape, dtype=want.dtype)
                offsets = [0, 0]
                offsets[dim] = RANK * -(-shape[dim] // LOADED_BY)
                fills.append(_core.Fill(tensor, offsets, want.shape, to.data_ptr(), to.stride()))
                kept.append((want, to))
            if io != "mmap":
                page_cache.drop(native)
            stats = index.read_regions(fills, **ReadOptions(io=io).engine())
            for want, to in kept:
                assert torch.equal(to.view(torch.int16), want.view(torch.int16))
            rows.append(
                figure(
                    f"bytes read for each byte wanted, {kind} shard of {LOADED_BY}",
                    f"dcp_rs, io={io!r}",
                    "B/B",
                    [stats.read / stats.wanted],
                    reach=reach,
                    stretch=stretch,
                    note="counted by the engine",
                )
            )
    return rows


def _cold(context: Context, pattern: Pattern, native: Path, stock: Path) -> list[Row]:
    """Cold: times, and what the kernel says was read from the disk."""
    amounts: dict[str, list[float]] = {OURS: [], STOCK: []}
    wanted = sum(shard(pattern.view(name), 1, _mesh()).nbytes for name in pattern.shapes)

    def counted(name: str, load: Callable[[Path, Any], None]) -> Callable[[Path, Any], None]:
        def run_counted(path: Path, state: Any) -> None:
            before = storage_bytes_read()
            load(path, state)
            amounts[name].append((storage_bytes_read() - before) / wanted)

        return run_counted

    times = measure(
        [
            _contender(OURS, counted(OURS, loaders.ours), native, pattern, page_cache.drop),
            _contender(STOCK, counted(STOCK, loaders.stock), stock, pattern, page_cache.drop),
            _contender(OURS_SHARED, loaders.ours_shared, native, pattern, page_cache.drop),
        ],
        **context.pairs,
    )
    case = _case(pattern, "cold")
    rows = [
        versus(case, times, OURS, STOCK, reach=1.5, stretch=2),
        versus(case, times, OURS_SHARED, STOCK),
    ]
    rows += [
        figure(
            f"cold, bytes the disk delivered for each byte wanted, column shard of {LOADED_BY}",
            name,
            "B/B",
            amounts[name],
            note="/proc/self/io; what lies between thin rows is read where that is quicker",
        )
        for name in (OURS, STOCK)
        if amounts[name]
    ]
    return rows
