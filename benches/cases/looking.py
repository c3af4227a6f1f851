"""What it costs to look: reports and logs of a load, statistics beside a plain read, arrays without torch."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of, small_shapes
from safetensors.numpy import load_file
from safetensors.torch import save_file

import dcp_rs
from dcp_rs.checkpoint.locate import open_index
from dcp_rs.checkpoint.source import IndexSource
from dcp_rs.checkpoint.stats import TensorStats, stats
from dcp_rs.options import ReadOptions

REPORTED = "dcp_rs.load_state_dict, report and INFO log"
SILENT = "the same, logger off"
STATS = "stats"
READ = "pread of the same files, 8 MiB at a time, all cores"
ARRAYS = "dcp_rs.open(framework='np'), every name"
SAFETENSORS = "safetensors.numpy.load_file"
IMPORT = "python -c 'import torch'"

_STEP = 8 << 20


def run(context: Context) -> list[Row]:
    return [*_reports(context), *_statistics(context), *_arrays(context)]


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


_NAMES = """
import sys
if sys.argv[1] == "ours":
    import dcp_rs
    with dcp_rs.open(sys.argv[2], framework="np") as checkpoint:
        count = len([checkpoint[name].dtype for name in checkpoint])
else:
    from safetensors.numpy import load_file
    count = len([array.dtype for array in load_file(sys.argv[2]).values()])
assert count == int(sys.argv[3]), count
assert "torch" not in sys.modules
"""


def _arrays(context: Context) -> list[Row]:
    """In this process, and as a process that begins with nothing. Of types that NumPy has."""
    pattern = Pattern(model_shapes(context.sizes), torch.float16)

    def make(path: Path) -> None:
        path.mkdir()
        save_file(pattern.state(), path / "model.safetensors")

    path = checkpoints.ensure(context.folder / "arrays", make) / "model.safetensors"
    page_cache.warm(path)
    seen: dict[str, np.ndarray] = {}

    def ours() -> None:
        with dcp_rs.open(path, framework="np") as checkpoint:
            seen.update((name, checkpoint[name]) for name in checkpoint)

    def check() -> None:
        pattern.check({name: torch.from_numpy(array) for name, array in seen.items()})
        seen.clear()

    here = measure(
        [
            Contender(ARRAYS, ours, verify=check),
            Contender(SAFETENSORS, lambda: seen.update(load_file(path)), verify=check),
        ],
        **context.pairs,
    )

    def process(name: str, *arguments: str | Path) -> Contender:
        def start() -> None:
            subprocess.run([sys.executable, "-c", *map(str, arguments)], check=True)

        return Contender(name, start)

    count = str(len(pattern.shapes))
    processes = measure(
        [
            process(ARRAYS, _NAMES, "ours", path, count),
            process(SAFETENSORS, _NAMES, "safetensors", path, count),
            process(IMPORT, "import torch"),
        ],
        **context.pairs,
    )
    case = f"NumPy, warm, {len(pattern.shapes)} float16 tensors, {size_of(pattern.nbytes)}"
    return [
        versus(case, here, ARRAYS, SAFETENSORS),
        versus(f"{case}, a new process", processes, ARRAYS, SAFETENSORS),
        versus(f"{case}, a new process", processes, ARRAYS, IMPORT),
    ]
