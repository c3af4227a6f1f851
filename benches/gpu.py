"""Loads checkpoints onto an accelerator: dcp-rs beside stock DCP and others, and beside what the machine can do.

    python benches/gpu.py --device cuda --sizes 2,16 --out benches/results

It needs no compiler and no network: with a wheel that was carried there, `pip install --no-deps
dcp_rs-*-abi3-*.whl`, or the wheel unpacked into a folder that PYTHONPATH names. It ran with torch
2.15 and Python 3.11 on a CPU; torch 2.8 and later and Python 3.11 and later are meant to do. Peers
take part where they can be imported; wheels of theirs can be carried the same way. With `--device
cpu` it measures nothing that matters, but shows that it works.

Every contender loads in every round, in an order that turns, and the median counts. What was loaded
is compared bit for bit with what was saved, after every load. Loads begin and end with the device
idle.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime as dt
import importlib
import importlib.util
import itertools
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import checkpoints, machine, page_cache
from harness.states import Pattern, size_of

import dcp_rs

State = dict[str, torch.Tensor]
HERE = Path(__file__).resolve().parent
MIB = 1 << 20

OURS = "dcp_rs.load"
STOCK = "FileSystemReader"
H2D_LIMIT = "limit: pinned copies of the same bytes"
DISK_LIMIT = "limit: direct reads of the same bytes"


# --- what is loaded
# --------------------------------------------------------------------------------


def large_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """145 tensors as a decoder of 16 layers has them, bf16, of about `nbytes` in all."""
    hidden = 64
    while True:
        wide, small, vocab = 4 * hidden, hidden // 4, 40 * hidden
        layer = 2 * hidden * hidden + 2 * small * hidden + 3 * wide * hidden + 2 * hidden
        if 2 * (16 * layer + vocab * hidden) >= nbytes:
            break
        hidden += 64
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden)}
    for i in range(16):
        matrices = {"q": hidden, "k": small, "v": small, "o": hidden, "gate": wide, "up": wide}
        shapes |= {f"layers.{i}.{name}": (rows, hidden) for name, rows in matrices.items()}
        shapes |= {f"layers.{i}.down": (hidden, wide)}
        shapes |= {f"layers.{i}.norm{n}": (hidden,) for n in (1, 2)}
    return shapes


def small_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """20,000 tensors (fewer below 80 MB) of `nbytes` in all, bf16."""
    count = max(1, min(20_000, nbytes // 4096))
    return {f"experts.{i}": (max(1, nbytes // count // 64), 32) for i in range(count)}


LAYOUTS = {"large": large_shapes, "small": small_shapes}


# --- contenders
# ------------------------------------------------------------------------------------


@dataclass
class Data:
    """The same state in every format that a contender reads."""

    folder: Path
    pattern: Pattern

    def path(self, kind: str) -> Path:
        """The checkpoint of this kind, made where it is not there yet."""
        if kind == "native":
            return checkpoints.native(self.folder, self.pattern)
        if kind == "stock":
            return checkpoints.stock(self.folder, self.pattern)
        if kind == "hugging-face":
            return checkpoints.hugging_face(self.folder, self.pattern)
        if kind == "torch":
            return checkpoints.ensure(
                self.folder / "torch.pt", lambda path: torch.save(self.pattern.state(), path)
            )
        pack = importlib.import_module("flashpack").pack_to_file
        return checkpoints.ensure(
            self.folder / "flashpack",
            lambda path: pack(self.pattern.state(), str(path), torch.bfloat16),
        )


@dataclass
class Contender:
    """One way to load.

    Attributes:
        name: in the table.
        kind: of checkpoint.
        load: takes its path, the state to fill (or to give back another), and the device.
        needs: the module that it needs.
        cuda_only: it cannot do without.
    """

    name: str
    kind: str
    load: Callable[[Path, State, torch.device], State | None]
    needs: str | None = None
    cuda_only: bool = False

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot take part, if it cannot."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        if self.cuda_only and device.type != "cuda":
            return "it is for CUDA alone"
        if self.name == "safe_open.prefetch":
            safe_open = importlib.import_module("safetensors").safe_open
            return None if hasattr(safe_open, "prefetch") else "safetensors before 0.9 has none"
        return None


def safetensors_files(path: Path) -> list[str]:
    return [str(file) for file in sorted(path.glob("*.safetensors"))]


def load_ours(path: Path, state: State, device: torch.device, **options: Any) -> None:  # noqa: ARG001
    dcp_rs.load(state, path, no_dist=True, **options)


def load_ours_stock_planner(path: Path, state: State, device: torch.device) -> None:  # noqa: ARG001
    dcp.load(state, storage_reader=dcp_rs.RsReader(path), no_dist=True)


def stream_ours(path: Path, state: State, device: torch.device) -> State:  # noqa: ARG001
    with dcp_rs.open(path, device=device) as source:
        return dict(source.stream())


def load_stock(path: Path, state: State, device: torch.device) -> None:  # noqa: ARG001
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def load_hugging_face(path: Path, state: State, device: torch.device) -> None:  # noqa: ARG001
    reader = dcp.HuggingFaceStorageReader(str(path), **checkpoints.read_options())
    dcp.load(state, storage_reader=reader, no_dist=True)


def load_safetensors(path: Path, state: State, device: torch.device) -> State:  # noqa: ARG001
    from safetensors.torch import load_file

    loaded: State = {}
    for file in safetensors_files(path):
        loaded |= load_file(file, device=str(device))
    return loaded


def load_prefetch(path: Path, state: State, device: torch.device) -> State:  # noqa: ARG001
    from safetensors import safe_open

    loaded: State = {}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(f, framework="pt")) for f in safetensors_files(path)]
        loaders = [file.prefetch(device=str(device)) for file in files]
        for loader in loaders:
            loaded |= dict(loader)
    return loaded


def load_torch(path: Path, state: State, device: torch.device) -> None:  # noqa: ARG001
    for name, tensor in torch.load(path, mmap=True, weights_only=True).items():
        state[name].copy_(tensor)


def load_fastsafetensors(path: Path, state: State, device: torch.device) -> State:
    fast = importlib.import_module("fastsafetensors")
    with fast.fastsafe_open(safetensors_files(path), device=str(device), nogds=True) as file:
        return {name: file.get_tensor(name).clone() for name in state}


def load_instanttensor(path: Path, state: State, device: torch.device) -> State:  # noqa: ARG001
    safe_open = importlib.import_module("instanttensor").safe_open
    with safe_open(safetensors_files(path), framework="pt", device=device) as file:
        return {name: tensor.clone() for name, tensor in file.tensors()}


def load_runai(path: Path, state: State, device: torch.device) -> None:  # noqa: ARG001
    streamer = importlib.import_module("runai_model_streamer").SafetensorsStreamer
    with streamer() as source:
        source.stream_files(safetensors_files(path))
        for name, tensor in source.get_tensors():
            state[name].copy_(tensor)


def load_flashpack(path: Path, state: State, device: torch.device) -> State:  # noqa: ARG001
    flash = importlib.import_module("flashpack.deserialization")
    storage, meta = flash.read_flashpack_file(str(path), device=device)
    return dict(flash.iterate_from_flash_tensor(storage, meta))


CONTENDERS = [
    Contender(OURS, "native", load_ours),
    Contender("dcp.load, RsReader", "native", load_ours_stock_planner),
    Contender("dcp_rs.open(...).stream()", "native", stream_ours),
    Contender(
        "dcp_rs.load, verify=True",
        "native",
        lambda path, state, device: load_ours(path, state, device, verify=True),
    ),
    Contender(STOCK, "stock", load_stock),
    Contender("HuggingFaceStorageReader", "hugging-face", load_hugging_face, "safetensors"),
    Contender("safetensors load_file", "hugging-face", load_safetensors, "safetensors"),
    Contender("safe_open.prefetch", "hugging-face", load_prefetch, "safetensors", cuda_only=True),
    Contender("torch.load(mmap=True) + copy_", "torch", load_torch),
    Contender("fastsafetensors", "hugging-face", load_fastsafetensors, "fastsafetensors"),
    Contender("InstantTensor", "hugging-face", load_instanttensor, "instanttensor", cuda_only=True),
    Contender("Run:ai streamer", "hugging-face", load_runai, "runai_model_streamer"),
    Contender("flashpack", "flashpack", load_flashpack, "flashpack"),
]


# --- limits
# ----------------------------------------------------------------------------------------


def h2d_seconds(nbytes: int, device: torch.device) -> float:
    """The time of copies of `nbytes` from pinned memory to the device, 64 MiB each, one after another."""
    chunk = min(nbytes, 64 * MIB)
    source = torch.empty(chunk, dtype=torch.uint8, pin_memory=device.type != "cpu").fill_(1)
    destination = torch.empty(chunk, dtype=torch.uint8, device=device)
    synchronize(device)
    begin = time.perf_counter()
    for at in range(0, nbytes, chunk):
        size = min(chunk, nbytes - at)
        destination[:size].copy_(source[:size], non_blocking=True)
    synchronize(device)
    return time.perf_counter() - begin


def disk_seconds(path: Path, depth: int = 32, block: int = 4 * MIB) -> float:
    """The time of reading all data files past the page cache, `depth` reads in flight."""
    files = [file for file in page_cache.files_of(path) if file.stat().st_size >= block]
    jobs = [(file, at) for file in files for at in range(0, file.stat().st_size, block)]
    descriptors = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files}
    take = itertools.count()

    def read() -> None:
        with mmap.mmap(-1, block) as buffer:
            while (job := next(take)) < len(jobs):
                file, at = jobs[job]
                os.preadv(descriptors[file], [buffer], at)

    try:
        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(depth) as pool:
            for future in [pool.submit(read) for _ in range(depth)]:
                future.result()
        return time.perf_counter() - begin
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


# --- measuring
# -------------------------------------------------------------------------------------


@dataclass
class Row:
    """A line of the table.

    Attributes:
        case, name: what was loaded, and how.
        seconds: of every round.
        first_seconds: of the load before those, with pinning and imports.
        gb_s: median, in 10^9 bytes a second.
        device_extra: most bytes of the device beyond the tensors that were loaded, where it can
            tell.
        pinned: pinned bytes in use after the load, where torch can tell.
        error: why there is no figure.
    """

    case: str
    name: str
    seconds: list[float] = field(default_factory=list)
    first_seconds: float | None = None
    gb_s: float | None = None
    device_extra: int | None = None
    pinned: int | None = None
    error: str | None = None


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def blank(pattern: Pattern, device: torch.device) -> State:
    """Tensors to fill, with what no checkpoint holds."""
    state = {
        name: torch.empty(shape, dtype=pattern.dtype, device=device)
        for name, shape in pattern.shapes.items()
    }
    for tensor in state.values():
        tensor.view(torch.uint8).fill_(0x5A)
    synchronize(device)
    return state


def check(pattern: Pattern, state: State, device: torch.device) -> None:
    """Raises unless every bit is right, and where it should be."""
    for name, shape in pattern.shapes.items():
        tensor = state[name]
        assert tensor.device.type == device.type, f"{name} is on {tensor.device}"
        assert tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}"
        stored = tensor.detach().cpu().contiguous().view(torch.uint8).view(-1)
        assert torch.equal(stored, pattern.bytes_of(name)), f"{name} was not loaded as it was saved"


def one_load(
    contender: Contender, data: Data, device: torch.device, *, cold: bool, row: Row
) -> float:
    path = data.path(contender.kind)
    (page_cache.drop if cold else page_cache.warm)(path)
    state = blank(data.pattern, device)
    module = torch.get_device_module(device) if device.type == "cuda" else None
    if module is not None:
        module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device) if module is not None else 0
    begin = time.perf_counter()
    loaded = contender.load(path, state, device)
    synchronize(device)
    seconds = time.perf_counter() - begin
    if module is not None:
        own = 0 if loaded is None else data.pattern.nbytes
        row.device_extra = max(
            row.device_extra or 0, module.max_memory_allocated(device) - before - own
        )
        if hasattr(module, "host_memory_stats"):
            row.pinned = int(module.host_memory_stats().get("allocated_bytes.current", 0))
    check(data.pattern, state if loaded is None else loaded, device)
    return seconds


def one_round(
    contender: Contender, data: Data, device: torch.device, row: Row, *, first: bool, cold: bool
) -> None:
    """One load, into the row, or why there is none. Errors of dcp-rs are not a line in a table."""
    if row.error is not None:
        return
    try:
        seconds = one_load(contender, data, device, cold=cold, row=row)
    except Exception as error:
        if contender.name == OURS:
            raise
        row.error = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        return
    if first:
        row.first_seconds = seconds
    else:
        row.seconds.append(seconds)


def measure(case: str, data: Data, device: torch.device, rounds: int, *, cold: bool) -> list[Row]:
    """All contenders and limits of one case."""
    rows: dict[str, Row] = {}
    contenders = []
    for contender in CONTENDERS:
        row = rows[contender.name] = Row(case, contender.name, error=contender.why_not(device))
        if row.error is None:
            contenders.append(contender)
    rows[H2D_LIMIT] = Row(case, H2D_LIMIT)
    rows[DISK_LIMIT] = Row(case, DISK_LIMIT)
    native = data.path("native")
    for i in range(rounds + 1):
        rows[H2D_LIMIT].seconds.append(h2d_seconds(data.pattern.nbytes, device))
        if cold:
            page_cache.drop(native)
            rows[DISK_LIMIT].seconds.append(disk_seconds(native))
        for contender in contenders[i % len(contenders) :] + contenders[: i % len(contenders)]:
            one_round(contender, data, device, rows[contender.name], first=i == 0, cold=cold)
    rows[H2D_LIMIT].seconds.pop(0)
    rows[DISK_LIMIT].seconds[:1] = []
    for row in rows.values():
        if row.error is None and row.seconds:
            row.gb_s = data.pattern.nbytes / statistics.median(row.seconds) / 1e9
    if not cold:
        rows[DISK_LIMIT].error = "warm"
    return list(rows.values())


def measure_saves(case: str, data: Data, device: torch.device, rounds: int) -> list[Row]:
    """From the device to durable files."""
    state = {name: data.pattern.view(name).to(device) for name in data.pattern.shapes}
    writers: dict[str, Callable[[Path], object]] = {
        "dcp_rs.save": lambda path: dcp_rs.save(state, path, no_dist=True),
        "FileSystemWriter": lambda path: dcp.save(
            state, storage_writer=dcp.FileSystemWriter(path), no_dist=True
        ),
    }
    rows = {name: Row(case, name) for name in writers}
    for i in range(rounds + 1):
        for name, save in writers.items():
            path = data.folder / "save"
            synchronize(device)
            begin = time.perf_counter()
            save(path)
            seconds = time.perf_counter() - begin
            if name == "dcp_rs.save" and i == 0:
                again = blank(data.pattern, torch.device("cpu"))
                dcp_rs.load(again, path, no_dist=True)
                check(data.pattern, again, torch.device("cpu"))
            shutil.rmtree(path)
            if i == 0:
                rows[name].first_seconds = seconds
            else:
                rows[name].seconds.append(seconds)
    for row in rows.values():
        row.gb_s = data.pattern.nbytes / statistics.median(row.seconds) / 1e9
    return list(rows.values())


# --- report
# ----------------------------------------------------------------------------------------


def markdown(results: dict[str, Any]) -> str:
    """The results as a table for each case."""
    about = results["machine"]
    where = f"{about['accelerator']}, {about['cpu']} ({about['cores']} cores), data on {about['file_system']}"
    versions = f"torch {about['torch']}, Python {about['python']}"
    lines = [f"{results['date']}, {where}, {versions}; medians of {results['rounds']} rounds."]
    for case, group in itertools.groupby(results["rows"], key=lambda row: row["case"]):
        rows = list(group)
        speed = {row["name"]: row["gb_s"] for row in rows}
        limit = speed.get(DISK_LIMIT) if "cold" in case else speed.get(H2D_LIMIT)
        base = speed.get(STOCK) or speed.get("FileSystemWriter")
        lines += [
            "",
            f"### {case}",
            "",
            "| | GB/s | of the limit | times stock | first load, s | extra on device |",
            "|---|---|---|---|---|---|",
        ]
        for row in sorted(rows, key=lambda row: -(row["gb_s"] or 0)):
            if row["gb_s"] is None:
                lines.append(f"| {row['name']} | - | | | | {row['error'] or ''} |")
                continue
            share = f"{row['gb_s'] / limit:.2f}" if limit else ""
            times = f"{row['gb_s'] / base:.1f}" if base else ""
            first = f"{row['first_seconds']:.3f}" if row["first_seconds"] is not None else ""
            extra = size_of(row["device_extra"]) if row["device_extra"] is not None else ""
            lines.append(
                f"| {row['name']} | {row['gb_s']:.2f} | {share} | {times} | {first} | {extra} |"
            )
    return "\n".join(lines) + "\n"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    has = torch.accelerator.is_available()
    default = torch.accelerator.current_accelerator() if has else "cpu"
    parser.add_argument("--device", default=str(default), help="(default: %(default)s)")
    parser.add_argument("--sizes", default="2,16", help="GB, with commas (default: %(default)s)")
    parser.add_argument("--layouts", default="large,small", help="(default: %(default)s)")
    parser.add_argument("--caches", default="warm,cold", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--only", help="contenders whose names contain one of these, with commas")
    parser.add_argument("--no-saves", action="store_true", help="measure loads alone")
    parser.add_argument("--folder", type=Path, default=HERE / "data", help="where data goes")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="(default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
    device = torch.empty(0, device=options.device).device  # with its index
    if options.only:
        wanted = options.only.split(",")
        CONTENDERS[:] = [
            c for c in CONTENDERS if c.name == OURS or any(word in c.name for word in wanted)
        ]
    options.folder.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "machine": machine.describe(options.folder),
        "device": str(device),
        "rounds": options.rounds,
        "rows": [],
    }
    stem = f"{results['date']}-gpu-{machine.label(results['machine'])}"
    for i, size in enumerate(options.sizes.split(",")):
        for layout in options.layouts.split(","):
            if layout == "small" and i > 0:
                continue  # 20,000 tensors of 4 KiB are the case, whatever the size of the others
            folder = Path(tempfile.mkdtemp(prefix="gpu-", dir=options.folder))
            try:
                nbytes = int(float(size) * 1e9)
                if layout == "small":
                    nbytes = min(nbytes, 20_000 * 4096)
                data = Data(folder, Pattern(LAYOUTS[layout](nbytes), torch.bfloat16))
                what = f"{len(data.pattern.shapes)} tensors, {size_of(data.pattern.nbytes)}"
                for cache in options.caches.split(","):
                    case = f"{what}, {cache}"
                    print(f"-- {case}", flush=True)
                    rows = measure(case, data, device, options.rounds, cold=cache == "cold")
                    results["rows"] += [asdict(row) for row in rows]
                if not options.no_saves:
                    case = f"{what}, saved"
                    print(f"-- {case}", flush=True)
                    rows = measure_saves(case, data, device, options.rounds)
                    results["rows"] += [asdict(row) for row in rows]
            finally:
                shutil.rmtree(folder)
            # A run that is interrupted leaves what it has.
            (options.out / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
            (options.out / f"{stem}.md").write_text(markdown(results))
    print(markdown(results))
    print(f"written to {options.out / stem}.json and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
