"""A server of objects on the same machine, and the ways to load from it and to save to it."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

import dcp_rs
from harness import loaders
from harness.driven import Driven, worker
from harness.pairs import Contender
from harness.states import Pattern

OURS, OBSTORE, FSSPEC = (
    "dcp_rs.load, s3://",
    "obstore, ranges of 8 MiB, 64 at a time",
    "FsspecReader, s3fs",
)
CONNECTOR = "S3StorageReader, s3torchconnector"
SAVES, SAVES_FSSPEC = "dcp_rs.save, s3://", "FsspecWriter, s3fs"
PACKAGES = {OBSTORE: "obstore", FSSPEC: "s3fs", SAVES_FSSPEC: "s3fs", CONNECTOR: "s3torchconnector"}
KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_region": "us-east-1"}
PART = 8 << 20

State = loaders.State


def is_there(name: str) -> bool:
    """Whether what a contender needs is installed. Without `make bench`'s own packages, as in the tests, what is there is run."""
    return find_spec(PACKAGES[name]) is not None


@dataclass
class Store:
    """A server that runs."""

    endpoint: str
    process: Driven

    def counts(self) -> dict[str, int]:
        """Requests since the last time, by kind; `all` of them; `data`, gets of data files; `most at once`."""
        return {
            name: count for name, count in self.process.ask("counts").items() if name != "seconds"
        }

    def options(self) -> dict[str, Any]:
        """`storage_options` that lead to it."""
        return {**KEYS, "aws_endpoint": self.endpoint, "aws_allow_http": True}

    def environment(self) -> dict[str, str]:
        """The same, for another process."""
        told = {**KEYS, "aws_endpoint_url": self.endpoint, "aws_allow_http": "true"}
        return {name.upper(): value for name, value in told.items()}

    def fsspec_options(self) -> dict[str, Any]:
        """The same, as s3fs has them."""
        client = {"endpoint_url": self.endpoint, "region_name": KEYS["aws_region"]}
        return {
            "key": KEYS["aws_access_key_id"],
            "secret": KEYS["aws_secret_access_key"],
            "client_kwargs": client,
        }


@contextlib.contextmanager
def serving(latency: float, *folders: Path) -> Iterator[Store]:
    """A server with the files of folders; each request waits `latency` seconds."""
    with worker("store_worker", str(latency), *folders) as process:
        yield Store(process.ask("endpoint")["endpoint"], process)


def url(folder: Path) -> str:
    """Where the server has a folder."""
    return f"s3://bucket/{folder.name}"


def raw(store: Store, folder: Path) -> Contender:
    """The bytes of the data files, as ranges: the limit of client and server."""

    def run() -> None:
        import obstore
        from obstore.store import S3Store

        config = {**KEYS, "aws_endpoint": store.endpoint}
        client = S3Store("bucket", config=config, client_options={"allow_http": True})
        parts = [
            (f"{folder.name}/{file.name}", start, min(PART, file.stat().st_size - start))
            for file in folder.glob("*.safetensors")
            for start in range(0, file.stat().st_size, PART)
        ]
        with ThreadPoolExecutor(64) as pool:
            fetched = pool.map(
                lambda part: len(obstore.get_range(client, part[0], start=part[1], length=part[2])),
                parts,
            )
            assert sum(fetched) == sum(length for _, _, length in parts)

    return Contender(OBSTORE, run)


def ours(store: Store, folder: Path, state: State, pattern: Pattern) -> Contender:
    def load(path: Path, into: State) -> None:
        dcp_rs.load(into, url(path), storage_options=store.options(), no_dist=True)

    return loaders.loads(OURS, load, folder, state, pattern)


def fsspec(store: Store, folder: Path, state: State, pattern: Pattern) -> Contender:
    def load(path: Path, into: State) -> None:
        from torch.distributed.checkpoint import FsspecReader

        dcp.load(
            into, storage_reader=FsspecReader(url(path), **store.fsspec_options()), no_dist=True
        )

    return loaders.loads(FSSPEC, load, folder, state, pattern, warm_up=False)


def connector(store: Store, folder: Path, state: State, pattern: Pattern) -> Contender:
    def load(path: Path, into: State) -> None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageReader

        region, config = KEYS["aws_region"], S3ClientConfig(force_path_style=True, unsigned=True)
        reader = S3StorageReader(region, url(path), config)
        # It takes no endpoint; its client does.
        reader.fs._client = S3Client(region, endpoint=store.endpoint, s3client_config=config)  # noqa: SLF001
        dcp.load(into, storage_reader=reader, no_dist=True)

    return loaders.loads(CONNECTOR, load, folder, state, pattern, warm_up=False)


def _saves(
    name: str, save: Callable[[State, str], None], store: Store, state: State, pattern: Pattern
) -> Contender:
    """A contender that saves to a prefix of its own for each run, which is loaded and compared after it, and removed."""
    runs = iter(range(1_000_000))
    at = [""]

    def before() -> None:
        at[0] = f"s3://bucket/saved/{name.split(',', maxsplit=1)[0]}-{next(runs)}"

    def verify() -> None:
        loaded = pattern.blank()
        dcp_rs.load(loaded, at[0], storage_options=store.options(), no_dist=True)
        pattern.check(loaded)
        store.process.ask("forget", at[0].removeprefix("s3://bucket/"))

    return Contender(name, lambda: save(state, at[0]), before=before, verify=verify, warm_up=False)


def saves(store: Store, state: State, pattern: Pattern) -> Contender:
    def save(state: State, to: str) -> None:
        dcp_rs.save(state, to, storage_options=store.options(), no_dist=True)

    return _saves(SAVES, save, store, state, pattern)


def saves_fsspec(store: Store, state: State, pattern: Pattern) -> Contender:
    def save(state: State, to: str) -> None:
        from torch.distributed.checkpoint import FsspecWriter

        dcp.save(state, storage_writer=FsspecWriter(to, **store.fsspec_options()), no_dist=True)

    return _saves(SAVES_FSSPEC, save, store, state, pattern)
