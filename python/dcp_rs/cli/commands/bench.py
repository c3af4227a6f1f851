"""``bench``: the readers that can read a checkpoint, timed on this machine."""

from __future__ import annotations

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

from dcp_rs._progress import watching
from dcp_rs.cli import options
from dcp_rs.cli.app import command
from dcp_rs.cli.output import line, print_json, size
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
@options.checkpoint
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
    include: Sequence[str],
    rounds: int,
    cold: bool,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Time dcp-rs, torch and safetensors as they read this checkpoint on this machine."""
    import dcp_rs
    from dcp_rs.checkpoint.locate import open_index

    with dcp_rs.open(path, allow_external=allow_external) as checkpoint:
        kind = checkpoint.source
        if kind == "torch":
            msg = f"{path} is a file of torch.save: there is one reader for it"
            raise UnsupportedError(msg, path=path)
        destination = _destination(checkpoint, path, include)
    index = open_index(path, rank=None, allow_external=allow_external)
    index.check_files(range(index.chunk_count))  # the other readers open any path that is named
    files = index.file_paths()
    total = sum(tensor.nbytes for tensor in destination.values())
    readers = _readers(path, kind, files, threads=threads, allow_external=allow_external)
    rows = []
    work = total * rounds * len(readers)
    with watching(True, "reading", total=work) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for done, (name, read) in enumerate(readers, 1):
            before = partial(_prepare, destination, files, cold=cold)
            rows.append(_measure(name, read, destination, before, rounds=rounds))
            if progress is not None:
                progress(done * rounds * total, None)
    if all(row.seconds is None for row in rows):
        msg = f"no reader can read {path}: {rows[0].problem}"
        raise UnsupportedError(msg, path=path)
    is_same = len({row.checksum for row in rows if row.checksum is not None}) <= 1
    tensors = len(destination)
    if as_json:
        print_json(
            {
                "path": str(path),
                "tensors": tensors,
                "bytes": total,
                "cold": cold,
                "rounds": rounds,
                "same_bits": is_same,
                "readers": [asdict(row) for row in rows],
            }
        )
    else:
        cache = "cold page cache" if cold else "warm page cache"
        line(f"{tensors:,} tensors, {size(total)}, into CPU memory; {cache}, best of {rounds}")
        _show(rows, total)
        if not is_same:
            line(("the readers disagree on the data", "bold red"))
    return 0 if is_same else 1


def _destination(checkpoint: Any, path: Path, include: Sequence[str]) -> State:
    """Return empty tensors for those that are chosen, if they fit in memory."""
    import torch

    from dcp_rs.checkpoint.names import globs

    chosen = globs(list(include) or None)
    infos = [checkpoint.info(name) for name in checkpoint if chosen is None or chosen.match(name)]
    tensors = [info for info in infos if info.dtype is not None]
    if not tensors:
        matching = f" that matches {' '.join(include)}" if include else ""
        msg = f"there is no tensor to read in {path}{matching}"
        raise PlanError(msg)
    total = sum(torch.Size(info.shape).numel() * info.dtype.itemsize for info in tensors)
    free = _free_memory()
    if free is not None and total > free * 0.8:
        msg = (
            f"{size(total)} of tensors do not fit in {size(free)} of free memory: "
            "choose some with --include"
        )
        raise UnsupportedError(msg)
    return {info.name: torch.empty(info.shape, dtype=info.dtype, device="cpu") for info in tensors}


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            int(text.split()[1]) * 1024 for text in lines if text.startswith("MemAvailable")
        )
    except (OSError, ValueError, StopIteration):
        return None


def _readers(
    path: Path, kind: str, files: Sequence[Path], **options: Any
) -> list[tuple[str, Read]]:
    import torch.distributed.checkpoint as dcp

    import dcp_rs

    def through_torch(reader: Callable[[], Any], state: State) -> None:
        dcp.load(state, storage_reader=reader(), no_dist=True)  # type: ignore[attr-defined]

    def stock(name: str) -> tuple[str, Read]:
        reader = partial(getattr(dcp, name), os.fspath(path))
        return f"dcp.load, {name}", partial(through_torch, reader)

    own = partial(dcp_rs.RsReader, path, **options)
    readers: list[tuple[str, Read]] = [
        ("dcp_rs.load", lambda state: dcp_rs.load(state, path, no_dist=True, **options)),
        ("dcp.load, RsReader", partial(through_torch, own)),
    ]
    if kind == "dcp":
        return [*readers, stock("FileSystemReader")]
    if path.is_dir() and hasattr(dcp, "HuggingFaceStorageReader"):
        readers.append(stock("HuggingFaceStorageReader"))
    return [*readers, ("safetensors, one by one", partial(_safetensors, files))]


def _safetensors(files: Sequence[Path], state: State) -> None:
    from safetensors import safe_open

    left = set(state)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                if name in left and opened.get_slice(name).get_shape() == list(state[name].shape):
                    state[name].copy_(opened.get_tensor(name))
                    left.discard(name)
    if left:
        raise UnsupportedError("tensors that are cut over files are not put together")


def _measure(
    name: str, read: Read, destination: State, before: Callable[[], None], *, rounds: int
) -> Row:
    row = Row(name)
    for _ in range(rounds):
        before()
        begin = time.perf_counter()
        try:
            read(dict(destination))
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            lines = str(error).strip().split("\n")
            message = lines[0] if isinstance(error, Exception) else lines[-1]
            row.problem = message or type(error).__name__
            return row
        seconds = time.perf_counter() - begin
        row.seconds = seconds if row.seconds is None else min(row.seconds, seconds)
    row.checksum = 0
    for tensor in destination.values():
        row.checksum = zlib.crc32(memoryview(_bytes_of(tensor).numpy()), row.checksum)
    return row


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

    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _show(rows: Sequence[Row], total: int) -> None:
    width = max(len(row.reader) for row in rows)
    stock = [
        row.seconds
        for row in rows
        if row.seconds is not None and "RsReader" not in row.reader and "dcp_rs" not in row.reader
    ]
    line((f"{'':{width}}   seconds   GB/s", "dim"))
    for row in rows:
        if row.seconds is None:
            line(f"{row.reader:<{width}}   ", (f"cannot: {row.problem}", "dim"))
            continue
        against = f"   {stock[0] / row.seconds:.1f}x" if stock else ""
        line(f"{row.reader:<{width}}  {row.seconds:8.3f} {total / row.seconds / 1e9:6.2f}{against}")
