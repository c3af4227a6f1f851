"""``bench``: the readers that can read a checkpoint, timed on this machine."""

from __future__ import annotations

import math
import os
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from dcp_rs.checkpoint.folders import local_path
from dcp_rs.checkpoint.names import selector
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.contents import Contents
from dcp_rs.cli.output import count, line, print_json, size
from dcp_rs.errors import PlanError, UnsupportedError

_POISON = 0xA5

State = dict[str, Any]
Read = Callable[[State], object]


@dataclass
class Row:
    """The best time of a reader, and a checksum of the data that it read; or its error."""

    reader: str
    seconds: float | None = None
    checksum: int | None = None
    problem: str | None = None


@command("bench", "dcp-rs bench ckpt/", "dcp-rs bench ckpt/ --cold --include 'model.layers.0.*'")
@click.argument("path", type=local_path)
@options.include
@click.option(
    "--rounds",
    metavar="N",
    type=click.IntRange(min=1),
    default=3,
    help="Read N times with each reader; the best time counts.",
)
@click.option("--cold", is_flag=True, help="Drop the files from the page cache before each read.")
@options.external
@options.threads
@options.json
def _bench(
    path: Path,
    include: list[str] | None,
    rounds: int,
    cold: bool,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Time dcp-rs, torch and safetensors as they read this checkpoint on this machine.

    PATH is a folder of dcp-rs, stock DCP or Hugging Face, or a .safetensors file or its
    .index.json.
    """
    contents = Contents(path, selector(include, None), allow_external=allow_external)
    index = contents.index
    if contents.format == "torch":
        msg = f"{path} is a file of torch.save: there is one reader for it"
        raise UnsupportedError(msg, path=path)
    index.check_files(range(index.chunk_count))  # the other readers open any path that is named
    destination = _destination(contents)
    total = sum(tensor.nbytes for tensor in destination.values())
    files = index.file_paths()
    readers = _readers(path, contents.format, files, threads=threads, allow_external=allow_external)
    width = max(map(len, readers))
    if not as_json:
        cache = "cold page cache" if cold else "warm page cache"
        number = f"{count(len(destination), 'tensor')}, {size(total)}"
        line(f"{number}, into CPU memory; {cache}, best of {rounds}")
        line((f"{'':{width}}   seconds   GB/s", "dim"))
    rows: list[Row] = []
    for name, read in readers.items():
        row = _measure(name, read, destination, files, cold=cold, rounds=rounds)
        rows.append(row)
        if as_json:
            continue
        if row.seconds is None:
            line(f"{name:<{width}}   ", (f"cannot: {row.problem}", "dim"))
        else:
            first = next(one.seconds for one in rows if one.seconds is not None)
            speed = f"{row.seconds:8.3f} {total / row.seconds / 1e9:6.2f}"
            line(f"{name:<{width}}  {speed}   {first / row.seconds:.1f}x")
    checksums = {row.checksum for row in rows if row.checksum is not None}
    if not checksums:
        msg = f"no reader can read {path}: {rows[-1].problem}"
        raise UnsupportedError(msg, path=path)
    is_same = len(checksums) == 1
    if as_json:
        print_json(
            {
                "path": str(path),
                "tensors": len(destination),
                "bytes": total,
                "cold": cold,
                "rounds": rounds,
                "same_bits": is_same,
                "readers": [asdict(row) for row in rows],
            }
        )
    elif not is_same:
        line(("the readers disagree on the data", "red"))
    return 0 if is_same else 1


def _destination(contents: Contents) -> State:
    """Return empty tensors for those that are chosen, if they fit in memory."""
    import torch

    from dcp_rs.transfer.target import stored_dtype

    tensors = [entry for entry in contents.entries if entry.dtype is not None]
    if not tensors:
        raise PlanError("there is no tensor to read, or --include matches none", path=contents.path)
    total = sum(entry.nbytes for entry in tensors)
    memory = _free_memory()
    if memory is not None and total > memory * 0.8:
        msg = (
            f"{size(total)} of tensors do not fit in {size(memory)} of free memory: "
            "choose some with --include"
        )
        raise UnsupportedError(msg)
    return {
        one.name: torch.empty(one.shape, dtype=stored_dtype(one.name, one.dtype), device="cpu")
        for one in tensors
    }


def _free_memory() -> int | None:
    """Return the bytes that can be taken without swapping, if the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(one.split()[1]) << 10 for one in lines if one.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def _readers(path: Path, source: str, files: Sequence[Path], **options: Any) -> dict[str, Read]:
    """Return the readers by name. Their times are compared with that of the first."""
    import torch.distributed.checkpoint as dcp

    import dcp_rs

    def through_torch(reader: Callable[[], Any], state: State) -> None:
        dcp.load(state, storage_reader=reader(), no_dist=True)  # type: ignore[attr-defined]

    readers: dict[str, Read] = {}
    stock = "FileSystemReader" if source == "dcp" else "HuggingFaceStorageReader"
    if path.is_dir() and hasattr(dcp, stock):
        reader = partial(getattr(dcp, stock), os.fspath(path))
        readers[f"dcp.load, {stock}"] = partial(through_torch, reader)
    if source != "dcp":
        readers["safetensors, one by one"] = partial(_safetensors, files)
    readers["dcp.load, RsReader"] = partial(
        through_torch, partial(dcp_rs.RsReader, path, **options)
    )
    readers["dcp_rs.load"] = partial(dcp_rs.load, path=path, no_dist=True, **options)
    return readers


def _safetensors(files: Sequence[Path], state: State) -> None:
    from safetensors import safe_open

    left = set(state)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in filter(left.__contains__, opened.keys()):
                if opened.get_slice(name).get_shape() == list(state[name].shape):
                    state[name].copy_(opened.get_tensor(name))
                    left.discard(name)
    if left:
        raise UnsupportedError("tensors that are cut over files are not put together")


def _measure(
    name: str, read: Read, destination: State, files: Sequence[Path], *, cold: bool, rounds: int
) -> Row:
    from torch.distributed.checkpoint.api import CheckpointException

    best = math.inf
    try:
        for _ in range(rounds):
            _prepare(destination, files, cold=cold)
            begin = time.perf_counter()
            with warnings.catch_warnings(action="ignore"):
                read(dict(destination))
            best = min(best, time.perf_counter() - begin)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # whatever a reader raises
        # A CheckpointException is no Exception, and has tracebacks before the cause.
        lines = str(error).strip().split("\n")
        cause = lines[0] if isinstance(error, Exception) else lines[-1]
        return Row(name, problem=cause or type(error).__name__)
    checksum = 0
    for tensor in destination.values():
        checksum = zlib.crc32(memoryview(_bytes_of(tensor).numpy()), checksum)
    return Row(name, best, checksum)


def _prepare(destination: State, files: Sequence[Path], *, cold: bool) -> None:
    """Overwrite the destination, and read the files into the page cache, or drop them from it."""
    for tensor in destination.values():
        _bytes_of(tensor).fill_(_POISON)
    buffer = bytearray(1 << 20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            if cold:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while stream.readinto(buffer):
                    pass


def _bytes_of(tensor: Any) -> Any:
    import torch

    return tensor.view(-1).view(torch.uint8)
