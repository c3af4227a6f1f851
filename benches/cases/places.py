"""Where checkpoints lie: folders of very many files, files that are slow to open, overlays; and what a process costs that only looks."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import checkpoints, loaders, page_cache
from harness.context import Context, Sizes
from harness.driven import BENCHES, Driven
from harness.pairs import Contender, Times, measure
from harness.rows import Row, figure, versus
from harness.states import Pattern, model_shapes, size_of, small_shapes

import dcp_rs

#: Rows and columns of what a rank saved: 64 KiB of float32.
ROWS, COLUMNS = 128, 128
#: How late each file opens, in seconds.
LATE = 0.0005
OPENINGS = 50

ALONE, CROWDED = "dcp_rs.open, alone in its folder", "dcp_rs.open, among other files"
OVERLAY = "dcp_rs.load, through overlayfs"
AT_ONCE = "dcp_rs.load, files that open at once"
DELAYS = "the delays, one after the other"
PASS, IMPORT, LS = "python -c pass", "python -c 'import dcp_rs'", "python -m dcp_rs ls FILE"


def run(context: Context) -> list[Row]:
    return [*_crowded(context), *_waiting(context), *_overlay(context), *_processes(context)]


def by_ranks(ranks: int) -> Pattern:
    """One tensor, of which each rank has 64 KiB."""
    return Pattern({"weight": (ROWS * ranks, COLUMNS)}, torch.float32)


def _share(sizes: Sizes, whole: int) -> int:
    """As many of what the full size has `whole` of."""
    return max(1, whole * sizes.small // 20_000)


def _crowded(context: Context) -> list[Row]:
    pattern = Pattern(small_shapes(16), torch.float32)
    others = _share(context.sizes, 100_000)
    alone, crowd = context.folder / "alone", context.folder / "crowd"
    paths = {ALONE: checkpoints.native(alone, pattern), CROWDED: checkpoints.native(crowd, pattern)}
    for i in range(others):
        (paths[CROWDED] / f"other-{i:06}").touch()

    def contender(name: str) -> Contender:
        def open_often() -> None:
            for _ in range(OPENINGS):
                with dcp_rs.open(paths[name]) as checkpoint:
                    assert len(checkpoint) == len(pattern.shapes)

        return Contender(name, open_often)

    times = measure([contender(ALONE), contender(CROWDED)], **context.pairs)
    checkpoints.remove(crowd)
    case = f"open a checkpoint in a folder of {others:,} files"
    return [versus(case, times, CROWDED, ALONE, reach=0.5, stretch=0.91)]


def _waiting(context: Context) -> list[Row]:
    """Files that all open late, in a process whose calls of `open` are delayed."""
    ranks = _share(context.sizes, 4_096)
    pattern = by_ranks(ranks)
    case = f"load from {ranks:,} files of 64 KiB, each opened {LATE * 1000:g} ms late"

    def make(path: Path) -> None:
        writers = [dcp_rs.RsWriter(path, fsync=False) for _ in range(ranks)]
        checkpoints.save_row_sharded(writers, [("weight", pattern.view("weight"))])

    path = checkpoints.ensure(context.folder / f"{ranks}-files", make)
    page_cache.warm(path)
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch, "slow_open.so")
        source = BENCHES / "workers" / "slow_open.c"
        try:
            subprocess.run(
                ["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True
            )
        except FileNotFoundError:
            return [Row(case, loaders.OURS, DELAYS, skipped=True, note="there is no C compiler")]
        script = BENCHES / "workers" / "files_worker.py"
        late = {"LD_PRELOAD": str(library), "DCP_RS_BENCH_OPEN_US": f"{LATE * 1e6:.0f}"}
        command = [sys.executable, script, path, str(ranks)]
        with Driven(command, **late) as waits, Driven(command) as prompt:
            times = measure([_asked(AT_ONCE, prompt), _asked(loaders.OURS, waits)], **context.pairs)
    for name in (loaders.OURS, AT_ONCE):
        if times[name].error is not None:
            return [Row(case, loaders.OURS, DELAYS, error=times[name].error)]
    pairs = zip(times[loaders.OURS].seconds, times[AT_ONCE].seconds, strict=True)
    added = {
        loaders.OURS: Times([max(waited - prompt, 1e-6) for waited, prompt in pairs]),
        DELAYS: Times([ranks * LATE] * len(times[AT_ONCE].seconds)),
    }
    note = f"what the delays add to a load of {times[AT_ONCE].median:.2g} s; their sum is computed"
    return [versus(case, added, loaders.OURS, DELAYS, reach=16, stretch=64, note=note)]


def _asked(name: str, process: Driven) -> Contender:
    return Contender(name, lambda: process.seconds("load"), verify=lambda: process.ask("verify"))


@contextlib.contextmanager
def _mounted(lower: Path) -> Iterator[Path | None]:
    """A folder seen through overlayfs; None where this user may not mount one."""
    with tempfile.TemporaryDirectory(dir=lower.parent) as scratch:
        upper, work, merged = (Path(scratch, name) for name in ("upper", "work", "merged"))
        for folder in (upper, work, merged):
            folder.mkdir()
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        command = ["mount", "-t", "overlay", "overlay", "-o", options, merged]
        try:
            status = subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode
        except FileNotFoundError:
            status = 1
        if status:
            yield None
            return
        try:
            yield merged
        finally:
            subprocess.run(["umount", merged], check=True)


def _overlay(context: Context) -> list[Row]:
    pattern = Pattern(model_shapes(context.sizes), torch.bfloat16)
    native = checkpoints.native(context.folder / "model", pattern)
    case = f"warm, {len(pattern.shapes)} bf16 tensors, {size_of(pattern.nbytes)}, through overlayfs"
    state = pattern.blank()
    with _mounted(native) as merged:
        if merged is None:
            return [
                Row(
                    case,
                    OVERLAY,
                    loaders.OURS,
                    skipped=True,
                    note="overlayfs cannot be mounted here",
                )
            ]

        def warm(name: str, path: Path) -> Contender:
            # Each time: some machines take back what nobody looked at for a while.
            return loaders.loads(
                name, loaders.ours, path, state, pattern, before=lambda: page_cache.warm(native)
            )

        times = measure([warm(OVERLAY, merged), warm(loaders.OURS, native)], **context.pairs)
    return [versus(case, times, OVERLAY, loaders.OURS, reach=0.95, stretch=1.0)]


def _processes(context: Context) -> list[Row]:
    """What a process takes beyond one that does nothing."""
    pattern = Pattern(small_shapes(16), torch.float32)
    path = checkpoints.torch_file(context.folder / "looked-at", pattern)
    commands = {
        PASS: ["-c", "pass"],
        IMPORT: ["-c", "import dcp_rs"],
        LS: ["-m", "dcp_rs", "ls", path],
    }
    # As everywhere but in containers that forbid it, modules are compiled once, in the first run,
    # which is not counted.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }

    def contender(name: str) -> Contender:
        def start() -> None:
            command = [sys.executable, *map(os.fspath, commands[name])]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)

        return Contender(name, start)

    times = measure([contender(name) for name in commands], **context.pairs)
    return [
        figure(
            f"{name}, beyond `{PASS}`",
            name,
            "ms",
            [
                (ours - least) * 1e3
                for ours, least in zip(times[name].seconds, times[PASS].seconds, strict=True)
            ],
            reach=60,
            stretch=30,
        )
        for name in (IMPORT, LS)
    ]
