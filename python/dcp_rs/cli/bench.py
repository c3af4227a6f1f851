"""``bench``: every reader that can read a checkpoint, on this disk and this machine."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_rs._progress import watching
from dcp_rs.cli.output import line, print_json, size
from dcp_rs.errors import DcpRsError, PlanError, UnsupportedError

__all__ = ["bench"]

_POISON = 0xA5


@dataclass
class Row:
    """One reader: its best time, and a checksum of what it read; or why it could not."""

    reader: str
    seconds: float | None = None
    checksum: int | None = None
    problem: str | None = None


def bench(
    path: Path,
    *,
    include: Sequence[str],
    rounds: int,
    cold: bool,
    allow_external: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """1 where two readers disagree on the data."""
    import torch

    import dcp_rs
    from dcp_rs.checkpoint.locate import open_index
    from dcp_rs.checkpoint.names import globs

    wanted = globs(list(include) or None)
    with dcp_rs.open(path, allow_external=allow_external) as checkpoint:
        infos = [
            checkpoint.info(name) for name in checkpoint if wanted is None or wanted.match(name)
        ]
        kind = checkpoint.source
    if kind == "torch":
        msg = f"{path} is a file of torch.save: there is one reader for it"
        raise UnsupportedError(msg, path=path)
    index = open_index(path, rank=None, allow_external=allow_external)
    index.check_files(range(index.chunk_count))  # other readers would follow a name to anywhere
    files = index.file_paths()
    tensors = {info.name: (info.shape, info.dtype) for info in infos if info.dtype is not None}
    if not tensors:
        msg = f"there is no tensor to read in {path}" + (
            f" that matches {' '.join(include)}" if include else ""
        )
        raise PlanError(msg)
    total = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors.values())
    free = _free_memory()
    if free is not None and total > free * 0.8:
        msg = f"{size(total)} of tensors do not fit in {size(free)} of free memory: choose some with --include"
        raise UnsupportedError(msg)
    destination = {
        name: torch.empty(shape, dtype=dtype, device="cpu")
        for name, (shape, dtype) in tensors.items()
    }
    rows = []
    readers = _readers(path, kind, files, threads=threads, allow_external=allow_external)
    with watching(True, "reading", total=total * rounds * len(readers)) as progress, _quiet():
        for done, (name, read) in enumerate(readers):
            rows.append(_measure(name, read, destination, files, rounds=rounds, cold=cold))
            if progress is not None:
                progress((done + 1) * rounds * total, None)
    if all(row.seconds is None for row in rows):
        msg = f"no reader can read {path}: {rows[0].problem}"
        raise UnsupportedError(msg, path=path)
    checksums = {row.checksum for row in rows if row.checksum is not None}
    _print(
        path,
        rows,
        total,
        len(tensors),
        same=len(checksums) <= 1,
        rounds=rounds,
        cold=cold,
        as_json=as_json,
    )
    return 0 if len(checksums) <= 1 else 1


def _free_memory() -> int | None:
    with contextlib.suppress(OSError, ValueError), Path("/proc/meminfo").open() as lines:
        for text in lines:
            if text.startswith("MemAvailable:"):
                return int(text.split()[1]) * 1024
    return None


Read = Callable[[dict[str, Any]], None]


def _readers(
    path: Path, kind: str, files: Sequence[Path], **options: Any
) -> list[tuple[str, Read]]:
    import torch.distributed.checkpoint as dcp

    import dcp_rs

    def rust(state: dict[str, Any]) -> None:
        dcp_rs.load(state, path, no_dist=True, **options)

    def one_argument(state: dict[str, Any]) -> None:
        reader = dcp_rs.RsReader(path, **options)
        dcp.load(state, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]

    readers: list[tuple[str, Read]] = [("dcp_rs.load", rust), ("dcp.load, RsReader", one_argument)]
    if kind == "dcp":
        readers.append(
            (
                "dcp.load, FileSystemReader",
                lambda state: _stock(dcp, "FileSystemReader", path, state),
            )
        )
    elif path.is_dir() and hasattr(dcp, "HuggingFaceStorageReader"):
        name = "HuggingFaceStorageReader"
        readers.append((f"dcp.load, {name}", lambda state: _stock(dcp, name, path, state)))
    if kind != "dcp":
        readers.append(("safetensors, one by one", lambda state: _safetensors(files, state)))
    return readers


def _stock(dcp: Any, reader: str, path: Path, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=getattr(dcp, reader)(os.fspath(path)), no_dist=True)


def _safetensors(files: Sequence[Path], state: dict[str, Any]) -> None:
    from safetensors import safe_open

    left = set(state)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                if name in left and opened.get_slice(name).get_shape() == list(state[name].shape):
                    state[name].copy_(opened.get_tensor(name))
                    left.discard(name)
    if left:
        msg = "tensors that are cut over files are not put together"
        raise UnsupportedError(msg)


def _measure(
    name: str,
    read: Read,
    destination: dict[str, Any],
    files: Sequence[Path],
    *,
    rounds: int,
    cold: bool,
) -> Row:
    row = Row(name)
    for _ in range(rounds):
        for tensor in destination.values():
            _bytes_of(tensor).fill_(_POISON)
        for file in files:
            _evict(file) if cold else _warm(file)
        begin = time.perf_counter()
        try:
            read(dict(destination))
        except (
            DcpRsError,
            OSError,
            ValueError,
            RuntimeError,
            KeyError,
            TypeError,
            AssertionError,
        ) as error:
            row.problem = str(error).strip().split("\n")[0] or type(error).__name__
            return row
        except BaseException as error:
            # torch's CheckpointException is no Exception.
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            row.problem = str(error).strip().split("\n")[-1] or type(error).__name__
            return row
        seconds = time.perf_counter() - begin
        row.seconds = seconds if row.seconds is None else min(row.seconds, seconds)
    checksum = 0
    for tensor in destination.values():
        checksum = zlib.crc32(memoryview(_bytes_of(tensor).numpy()), checksum)
    row.checksum = checksum
    return row


def _bytes_of(tensor: Any) -> Any:
    import torch

    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _warm(file: Path) -> None:
    buffer = bytearray(1 << 20)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def _evict(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _print(
    path: Path,
    rows: list[Row],
    total: int,
    tensors: int,
    *,
    same: bool,
    rounds: int,
    cold: bool,
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "path": str(path),
                "tensors": tensors,
                "bytes": total,
                "cold": cold,
                "rounds": rounds,
                "same_bits": same,
                "readers": [
                    {
                        "reader": row.reader,
                        "seconds": row.seconds,
                        "checksum": row.checksum,
                        "problem": row.problem,
                    }
                    for row in rows
                ],
            }
        )
        return
    cache = "cold page cache" if cold else "warm page cache"
    line(f"{tensors:,} tensors, {size(total)}, into CPU memory; {cache}, best of {rounds}")
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
    if not same:
        line(("the readers disagree on the data", "bold red"))
