"""Very many chunks: `read_metadata` and the plan of one rank, each time in a fresh process."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from harness import checkpoints, page_cache
from harness.context import Context
from harness.driven import worker
from harness.pairs import Contender, measure
from harness.rows import Row, figure, versus
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_rs import _core

#: Rows that each rank holds of every tensor, and columns. Nobody reads the data: it is small, so
#: that it need not be large.
ROWS, COLUMNS = 2, 8

OURS = "dcp_rs"
OURS_STOCK_PLANNER = "RsReader, stock planner"
STOCK = "FileSystemReader, stock planner"
WORKERS = {OURS: "ours", OURS_STOCK_PLANNER: "ours-stock-planner", STOCK: "stock"}


def names(fqns: int) -> list[str]:
    return [f"model.layers.{i // 10}.block.{i % 10}.weight" for i in range(fqns)]


def write_native(path: Path, fqns: int, ranks: int) -> None:
    """A checkpoint as `ranks` ranks save it: their indexes, merged."""
    path.mkdir(parents=True)
    commit(path, fqns, [write_rank(path, fqns, rank, ranks) for rank in range(ranks)])


def write_rank(path: Path, fqns: int, rank: int, ranks: int) -> bytes:
    """The data file of one rank; its index."""
    payload = torch.zeros(ROWS * COLUMNS)
    shape = (ROWS * ranks, COLUMNS)
    items = [
        _core.SaveItem(
            name,
            payload.nbytes,
            dtype="float32",
            shape=shape,
            offsets=(ROWS * rank, 0),
            sizes=(ROWS, COLUMNS),
        )
        for name in names(fqns)
    ]
    save = _core.Save.create(
        str(path),
        items,
        save_id=bytes(16),
        generation=1,
        token=rank,
        rank=rank,
        world_size=ranks,
        threads=0,
        fsync=False,
        io="buffered",
        max_inflight_bytes=64 << 20,
    )
    save.write([_core.Part(item, 0, payload.data_ptr(), payload.nbytes) for item in range(fqns)])
    return save.finish()


def commit(path: Path, fqns: int, indexes: list[bytes]) -> _core.Index:
    """What the coordinator does with the indexes of all ranks."""
    index, left = _core.commit_indexes(
        str(path),
        None,
        indexes,
        save_id=bytes(16),
        generation=1,
        planner_data={name: tuple(name.split(".")) for name in names(fqns)},
        items=fqns * len(indexes),
        names=(),
        fsync=False,
    )
    assert not left
    return index


def write_stock(path: Path, fqns: int, ranks: int) -> None:
    """The `.metadata` that the stock writer leaves of the same."""
    path.mkdir(parents=True)
    length = 1500  # of a record with the zip archive around it
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    properties = TensorProperties(dtype=torch.float32)
    for i, name in enumerate(names(fqns)):
        offsets = [torch.Size([ROWS * rank, 0]) for rank in range(ranks)]
        sizes = torch.Size([ROWS, COLUMNS])
        entries[name] = TensorStorageMetadata(
            properties,
            torch.Size([ROWS * ranks, COLUMNS]),
            [ChunkStorageMetadata(offset, sizes) for offset in offsets],
        )
        for rank, offset in enumerate(offsets):
            key = MetadataIndex(name, offset, rank)
            places[key] = _StorageInfo(f"__{rank}_0.distcp", i * length, length)
    paths = {name: tuple(name.split(".")) for name in entries}
    metadata = Metadata(entries, planner_data=paths, storage_data=places)
    with (path / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def run(context: Context) -> list[Row]:
    fqns, ranks = context.sizes.fqns, context.sizes.ranks
    folder = context.folder / "chunks"
    native = checkpoints.ensure(folder / "dcp-rs", lambda path: write_native(path, fqns, ranks))
    stock = checkpoints.ensure(folder / "stock", lambda path: write_stock(path, fqns, ranks))
    page_cache.warm(native / "index.dcprs", stock)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in WORKERS}

    def contender(name: str) -> Contender:
        path = stock if name == STOCK else native

        def once() -> float:
            with worker("metadata_worker", path, fqns, ranks) as process:
                answers[name].append(process.ask(WORKERS[name]))
            return float(answers[name][-1]["read_metadata"] + answers[name][-1]["plan"])

        def check() -> None:
            assert answers[name][-1]["items"] == fqns
            plans = {json.dumps(answer[-1]["wanted"]) for answer in answers.values() if answer}
            assert len(plans) == 1, "the plans differ"

        return Contender(name, once, verify=check, warm_up=False)

    times = measure([contender(name) for name in WORKERS], **context.pairs)
    case = f"{fqns * ranks:,} chunks ({fqns:,} FQNs x {ranks} ranks): read_metadata and one rank's plan"
    index_bytes = (native / "index.dcprs").stat().st_size / (fqns * ranks)
    return [
        versus(case, times, OURS, STOCK, reach=200, stretch=1000, note=_parts(answers[OURS])),
        versus(case, times, OURS_STOCK_PLANNER, STOCK, note=_parts(answers[OURS_STOCK_PLANNER])),
        figure(
            f"open an index of {fqns * ranks:,} chunks",
            OURS,
            "ms",
            [answer["read_metadata"] * 1e3 for answer in answers[OURS]],
            reach=100,
        ),
        figure("index, bytes a chunk", OURS, "B", [index_bytes], reach=120),
    ]


def _parts(answers: list[dict[str, Any]]) -> str:
    if not answers:
        return ""
    last = answers[-1]
    return f"planner {last['planner']}; read_metadata {last['read_metadata']:.3g} s, plan {last['plan']:.3g} s"
