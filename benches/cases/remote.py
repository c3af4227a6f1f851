"""Loads from a store: a server of objects on the same machine, by itself and with 20 ms for each request.

The server is that of the tests: threads of a Python process, which send from memory. It takes cores from the loaders, all alike.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from harness import checkpoints, loaders
from harness.context import Context
from harness.pairs import Contender, measure
from harness.rows import Row, versus
from harness.states import Pattern, model_shapes, size_of, small_shapes

import dcp_rs

OURS, OBSTORE, FSSPEC = "dcp_rs.load, s3://", "obstore, ranges of 8 MiB, 64 at a time", "FsspecReader, s3fs"
WORKER = Path(__file__).resolve().parents[1] / "workers" / "store_worker.py"
KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_region": "us-east-1"}
PACKAGES = {OBSTORE: "obstore", FSSPEC: "s3fs"}
PART = 8 << 20


@contextlib.contextmanager
def serving(latency: float, *folders: Path) -> Iterator[str]:
    command = [sys.executable, str(WORKER), str(latency), *map(str, folders)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


def raw(endpoint: str, folder: Path) -> Contender:
    """The bytes of the data files, into memory that is there: the limit of client and server."""

    def run() -> None:
        import obstore
        from obstore.store import S3Store

        store = S3Store("bucket", config={**KEYS, "aws_endpoint": endpoint}, client_options={"allow_http": True})
        parts = [
            (f"{folder.name}/{file.name}", start, min(PART, file.stat().st_size - start))
            for file in folder.glob("*.safetensors")
            for start in range(0, file.stat().st_size, PART)
        ]
        with ThreadPoolExecutor(64) as pool:
            fetched = pool.map(
                lambda part: len(obstore.get_range(store, part[0], start=part[1], length=part[2])), parts
            )
            assert sum(fetched) == sum(length for _, _, length in parts)

    return Contender(OBSTORE, run)


def ours(endpoint: str, folder: Path, state: loaders.State, pattern: Pattern) -> Contender:
    options = {**KEYS, "aws_endpoint": endpoint, "aws_allow_http": True}

    def load(path: Path, into: loaders.State) -> None:
        dcp_rs.load(into, f"s3://bucket/{path.name}", storage_options=options, no_dist=True)

    return loaders.loads(OURS, load, folder, state, pattern)


def fsspec(endpoint: str, folder: Path, state: loaders.State, pattern: Pattern) -> Contender:
    def load(path: Path, into: loaders.State) -> None:
        from torch.distributed.checkpoint import FsspecReader

        reader = FsspecReader(
            f"s3://bucket/{path.name}",
            key=KEYS["aws_access_key_id"],
            secret=KEYS["aws_secret_access_key"],
            client_kwargs={"endpoint_url": endpoint, "region_name": "us-east-1"},
        )
        dcp.load(into, storage_reader=reader, no_dist=True)

    return loaders.loads(FSSPEC, load, folder, state, pattern, warm_up=False)


def run(context: Context) -> list[Row]:
    model = Pattern(model_shapes(context.sizes), torch.bfloat16)
    small = Pattern(small_shapes(context.sizes.small), torch.float32)
    rows: list[Row] = []
    for name, pattern, latency, bounds in (
        ("model", model, 0.0, {OBSTORE: (0.8, 0.95), FSSPEC: (8, 13)}),
        ("model", model, 0.02, {OBSTORE: (0.8, 0.95), FSSPEC: (5, 6)}),
        ("small", small, 0.02, {FSSPEC: (40, 150)}),
    ):
        # Without `make bench`'s own packages, as in the tests, what is there is run.
        bounds = {other: bound for other, bound in bounds.items() if find_spec(PACKAGES[other])}  # noqa: PLW2901
        folder = context.folder / f"remote-{name}"
        native, stock = checkpoints.native(folder, pattern), checkpoints.stock(folder, pattern)
        state = pattern.blank()
        with serving(latency, native, stock) as endpoint:
            contenders = [ours(endpoint, native, state, pattern)]
            if FSSPEC in bounds:
                contenders.append(fsspec(endpoint, stock, state, pattern))
            if OBSTORE in bounds:
                contenders.append(raw(endpoint, native))
            times = measure(contenders, **context.pairs)
        case = f"{len(pattern.shapes):,} tensors, {size_of(pattern.nbytes)}, {latency * 1000:.0f} ms a request"
        rows += [
            versus(case, times, OURS, other, reach=reach, stretch=stretch) for other, (reach, stretch) in bounds.items()
        ]
    return rows
