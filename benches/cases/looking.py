"""Measures what it costs to look: reports and logs of a load, statistics beside a plain read."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of, small_shapes

import dcp_rs
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.source import IndexSource
from dcp_rs.checkpoint.stats import TensorStats, stats
from dcp_rs.options import ReadOptions

REPORTED = "dcp_rs.load_state_dict, report and INFO log"
SILENT = "the same, logger off"
STATS = "stats"
READ = "pread of the same files, 8 MiB at a time, all cores"

_STEP = 8 << 20


def run(context: Context) -> list[Row]:
    return [*_reports(context), *_statistics(context)]


@contextmanager
def _logging(level: int) -> Iterator[None]:
    """The log of the package, written to a file nobody reads."""
    log = logging.getLogger("dcp_rs")
    before = log.level, log.propagate
    with Path(os.devnull).open("w") as nowhere:
        handler = logging.StreamHandler(nowhere)
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(before[0])
            log.propagate = before[1]


def _reports(context: Context) -> list[Row]:
    pattern = Pattern(small_shapes(context.sizes.small), torch.float32)
    path = checkpoints.native(context.folder / "small", pattern)
    page_cache.warm(path)
    state = pattern.blank()

    def load(level: int) -> None:
        with _logging(level):
            dcp_rs.load_state_dict(
                state, dcp_rs.RsReader(path), no_dist=True, planner=dcp_rs.RsLoadPlanner()
            )

    times = measure(
        [
            loaders.loads(REPORTED, lambda *_: load(logging.INFO), path, state, pattern),
            loaders.loads(SILENT, lambda *_: load(logging.CRITICAL), path, state, pattern),
        ],
        rounds=3 * context.pairs["rounds"],  # a difference of a hundredth
        slow_rounds=context.pairs["slow_rounds"],
    )
    case = f"reports: {len(pattern.shapes):,} float32 tensors of 64x16"
    return [versus(case, times, REPORTED, SILENT, reach=0.97, stretch=0.99)]


def _statistics(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    path = checkpoints.native(context.folder / "model", pattern)
    files = sorted(path.glob("*.safetensors"))
    found: list[TensorStats] = []

    def ours() -> None:
        index = open_index(path)
        source = IndexSource(index, ReadOptions())
        found[:] = stats(source, source.items)

    def check() -> None:
        assert len(found) == len(pattern.shapes)
        one = min(found, key=lambda one: one.elements)
        want = pattern.view(one.name).double()
        finite = want[want.isfinite()]
        assert (one.min, one.max) == (float(finite.min()), float(finite.max()))
        assert one.nan == int(want.isnan().sum())

    cores = len(os.sched_getaffinity(0))

    def read() -> None:
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(_read, [(files, core, cores) for core in range(cores)]))

    rows = []
    for warmth, before in (("warm", page_cache.warm), ("cold", page_cache.drop)):
        times = measure(
            [
                Contender(
                    name,
                    run,
                    before=lambda before=before: before(path),
                    verify=verify,
                    warm_up=warmth == "warm",
                )
                for name, run, verify in ((STATS, ours, check), (READ, read, lambda: None))
            ],
            **context.pairs,
        )
        rows.append(versus(f"stats, {warmth}, {size_of(pattern.nbytes)}", times, STATS, READ))
    return rows


def _read(job: tuple[list[Path], int, int]) -> None:
    """Every so manyth piece of the files, into one buffer."""
    files, first, step = job
    buffer = bytearray(_STEP)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            for begin in range(first * _STEP, file.stat().st_size, step * _STEP):
                os.preadv(opened.fileno(), [buffer], begin)
