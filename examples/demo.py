"""Save and restore one training state with stock DCP and with dcp-rs, and compare.

python examples/demo.py --size-mb 300
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from demo_model import training_state
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import dcp_rs
from dcp_rs import RsReader, RsWriter

# The name in the table, the folder, and the function.
_Way = tuple[str, Path, Callable[[dict[str, Any]], None]]

# Restores that are timed. The best time counts: the first restore may read from a cold disk.
_ROUNDS = 3

_README = Path(__file__).parents[1] / "README.md"

# The ways of the demonstration, and the rows and columns of the README's table.
_IN_README = {
    ("save", "dcp, RsWriter"): ("Save 2.28 GB | fsync", 1),
    ("restore", "dcp, RsReader"): ("Load 2.28 GB | warm", 1),
    ("restore", "dcp_rs, RsReader"): ("Load 2.28 GB | warm", 2),
}

_WHY = """\
README: how many times as fast as stock DCP, on the machine of README.md, with 2.28 GB. Yours may \
differ: warm restores are bound by the memory, saves by the disk. The size (--size-mb), the number \
of cores and other work on the machine count, too. `make bench` measures as README.md does."""


class DemoError(Exception):
    """The demonstration cannot run here, for example on a full disk."""


@dataclass
class _Row:
    action: str
    how: str
    seconds: float
    nbytes: int
    same: bool | None = None  # None: nothing was restored


def run_demo(size_mb: int = 300, keep: bool = False, console: Console | None = None) -> bool:
    """Save and restore a transformer's training state with stock DCP and with dcp-rs.

    Args:
        size_mb: Size of the model's bfloat16 weights, in MB (10^6 bytes); AdamW's state adds twice
            that.
        keep: Leave both checkpoints on the disk, and say where.
        console: Where to print.

    Returns:
        Whether everything restored was bit for bit what had been saved.

    Raises:
        DemoError: If the disk of temporary files has no room for two checkpoints.
    """
    console = console or Console()
    _check_space(size_mb)
    folder = Path(tempfile.mkdtemp(prefix="dcp-rs-demo-"))
    try:
        rows = _measure(size_mb, folder, console)
    finally:
        if keep:
            console.print(f"checkpoints kept in {folder}", soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    console.print(_table(rows, _ratios_of_readme()))
    if _ratios_of_readme():
        console.print(_WHY, highlight=False)
    well = all(row.same is not False for row in rows)
    if well:
        console.print("[green]everything restored is bit for bit what was saved[/]")
    else:
        console.print("[red]what was restored differs from what was saved[/]")
    return well


def _check_space(size_mb: int) -> None:
    folder = tempfile.gettempdir()
    # Weights and two moments of the same type, twice on the disk, and something to spare.
    needed = size_mb * 1_000_000 * 3 * 2 * 1.1
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DemoError(
            f"{folder} has {free / 1e9:.1f} GB free, the demo needs {needed / 1e9:.1f} GB: "
            "make room, choose another disk with TMPDIR, or a smaller size"
        )


def _measure(size_mb: int, folder: Path, console: Console) -> list[_Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    theirs, ours = folder / "stock", folder / "dcp-rs"
    saves, restores = _saves(theirs, ours), _restores(theirs, ours)
    rows: list[_Row] = []
    progress = Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress, _quiet_torch():
        steps = 2 + len(saves) + _ROUNDS * len(restores)
        task = progress.add_task("training one step", total=steps)
        state = training_state(size_mb, device)
        sizes = [tensor.nbytes for tensor in _tensors(state)]
        console.print(
            f"a transformer's training state: {len(sizes)} tensors, {sum(sizes) / 1e6:.0f} MB, "
            f"on {_name(device)}; torch {torch.__version__}",
            soft_wrap=True,
        )
        progress.advance(task)

        for how, path, save in saves:
            progress.update(task, description=f"save: {how}")
            seconds = _timed(partial(save, state), device)
            rows.append(_Row("save", how, seconds, _size_of(path)))
            progress.advance(task)

        best = [_Row("restore", how, float("inf"), sum(sizes), same=True) for how, _, _ in restores]
        destination = _blank(state)
        for _ in range(_ROUNDS):
            for row, (how, path, restore) in zip(best, restores, strict=True):
                progress.update(task, description=f"restore: {how}")
                _read_all(path)
                _spoil(destination)
                row.seconds = min(row.seconds, _timed(partial(restore, destination), device))
                row.same = bool(row.same) and _same(destination, state)
                progress.advance(task)
        rows += best

        progress.update(task, description="open")
        rows.append(_open_one(ours, state))
        progress.advance(task)
    return rows


def _saves(theirs: Path, ours: Path) -> list[_Way]:
    def stock(state: dict[str, Any]) -> None:
        save(state, storage_writer=FileSystemWriter(theirs), no_dist=True)

    def rust(state: dict[str, Any]) -> None:
        save(state, storage_writer=RsWriter(ours), no_dist=True)

    return [("dcp, FileSystemWriter", theirs, stock), ("dcp, RsWriter", ours, rust)]


def _restores(theirs: Path, ours: Path) -> list[_Way]:
    def stock(state: dict[str, Any]) -> None:
        state_dict_loader.load_state_dict(state, FileSystemReader(theirs), no_dist=True)

    def one_argument(state: dict[str, Any]) -> None:
        state_dict_loader.load_state_dict(state, RsReader(ours), no_dist=True)

    def rust(state: dict[str, Any]) -> None:
        dcp_rs.load_state_dict(state, RsReader(ours), no_dist=True)

    return [
        ("dcp, FileSystemReader", theirs, stock),
        ("dcp, RsReader", ours, one_argument),
        ("dcp_rs, RsReader", ours, rust),
    ]


def _open_one(path: Path, state: dict[str, Any]) -> _Row:
    """Read one tensor by name, without a copy."""
    want = state["model"]["output.weight"].cpu()
    begin = time.perf_counter()
    with dcp_rs.open(path) as checkpoint:
        got = checkpoint["model.output.weight"]
        seconds = time.perf_counter() - begin
        return _Row("open", "dcp_rs.open(path)", seconds, want.nbytes, _same(got, want))


# --- state dicts
# -----------------------------------------------------------------------------------


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)


def _blank(state: Any) -> Any:
    """Return a destination of the same structure, without the other values."""
    if isinstance(state, torch.Tensor):
        return torch.empty_like(state)
    if isinstance(state, dict):
        return {key: _blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_blank(value) for value in state]
    return None


def _spoil(state: Any) -> None:
    """Overwrite the last restore, which also allocates all memory."""
    if isinstance(state, torch.Tensor):
        state.reshape(-1).view(torch.uint8).fill_(0xA5)
        return
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, torch.Tensor | dict | list):
            _spoil(value)
        else:
            state[key] = None


def _same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return (
            isinstance(got, torch.Tensor)
            and (got.dtype, got.shape) == (want.dtype, want.shape)
            # As bytes: a NaN equals itself, and 0.0 is not -0.0.
            and torch.equal(_bytes_of(got), _bytes_of(want))
        )
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(_same(got[key], want[key]) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(_same, got, want))
    return type(got) is type(want) and bool(got == want)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# --- measuring
# -------------------------------------------------------------------------------------


def _timed(action: Callable[[], object], device: torch.device) -> float:
    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    settle()
    begin = time.perf_counter()
    action()
    settle()
    return time.perf_counter() - begin


def _read_all(path: Path) -> None:
    """Read the files into the page cache, which not every writer fills."""
    buffer = bytearray(1 << 20)
    for file in path.iterdir():
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"the CPU ({cores} cores)"


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Hide torch's warnings of a deprecated name and of a missing process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _ratios_of_readme() -> dict[tuple[str, str], str]:
    """Return what the README says of each way; nothing if the file is not beside this folder."""
    text = _README.read_text() if _README.exists() else ""
    found = {}
    for way, (row, column) in _IN_README.items():
        if match := re.search(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.MULTILINE):
            ratio = re.search(r"\*\*(\S+)\*\* x", match[1].split("|")[column])
            found[way] = f"{ratio[1]}x" if ratio else ""
    return found


def _table(rows: list[_Row], readme: dict[tuple[str, str], str]) -> Table:
    table = Table(
        title="restores: warm page cache, best of three; saves: once, synced to the disk",
        caption="dcp, dcp_rs: whose save or load_state_dict it was",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("", "with"):
        table.add_column(heading, no_wrap=True)
    for heading in ("seconds", "MB", "ratio", "README", "bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    base: dict[str, float] = {}
    for row in rows:
        ratio = base.setdefault(row.action, row.seconds) / row.seconds
        compared = row.action != "open"
        table.add_row(
            row.action,
            row.how,
            f"{row.seconds:.4f}",
            f"{row.nbytes / 1e6:.1f}",
            f"{ratio:.1f}x" if compared else "",
            readme.get((row.action, row.how), ""),
            {None: "", True: "same", False: "[red]DIFFERENT[/]"}[row.same],
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration. Exit codes: 0 success, 1 a difference, 2 it cannot run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=300, help="size of the model's weights")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints on the disk")
    options = parser.parse_args(arguments)
    console = Console()
    if options.size_mb < 1:
        parser.error("--size-mb must be at least 1")
    try:
        return 0 if run_demo(options.size_mb, options.keep, console) else 1
    except DemoError as error:
        console.print(f"[red]{error}[/]", soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
