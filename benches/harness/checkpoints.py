"""The checkpoints that cases load: made once a run, each the same state in another format."""

import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter

import dcp_rs
from harness import page_cache
from harness.states import Pattern

#: A Hugging Face folder is cut into this many files, as larger models are.
HF_FILES = 4


def ensure(path: Path, make: Callable[[Path], object]) -> Path:
    """The checkpoint at `path`, made where it is not there yet, durable and in the page cache."""
    if not path.exists():
        unfinished = path.with_name(path.name + ".unfinished")
        remove(unfinished)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        page_cache.sync(unfinished)
        unfinished.rename(path)
    return path


def remove(path: Path) -> None:
    """Removes a checkpoint, or a folder of them, if it is there."""
    shutil.rmtree(path, ignore_errors=True)


def torch_file(folder: Path, pattern: Pattern) -> Path:
    return ensure(
        folder / "checkpoint.pth",
        lambda path: torch.save(
            {name: tensor.clone() for name, tensor in pattern.state().items()}, path
        ),
    )


def native(folder: Path, pattern: Pattern) -> Path:
    return ensure(folder / "dcp-rs", lambda path: dcp_rs.save(pattern.state(), path))


def stock(folder: Path, pattern: Pattern) -> Path:
    return ensure(
        folder / "stock",
        lambda path: dcp.save(
            pattern.state(), storage_writer=dcp.FileSystemWriter(path), no_dist=True
        ),
    )


def hugging_face(folder: Path, pattern: Pattern) -> Path:
    def make(path: Path) -> None:
        path.mkdir()
        shards: list[list[str]] = [[] for _ in range(HF_FILES)]
        filled = [0] * HF_FILES
        for name in pattern.shapes:
            smallest = filled.index(min(filled))
            shards[smallest].append(name)
            filled[smallest] += pattern.view(name).nbytes
        weight_map: dict[str, str] = {}
        for i, names in enumerate(filter(None, shards)):
            file = f"model-{i + 1:05}-of-{HF_FILES:05}.safetensors"
            save_file({n: pattern.view(n).clone() for n in names}, path / file, {"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": pattern.nbytes}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    return ensure(folder / "hugging-face", make)


class _Shards(DefaultSavePlanner):
    """Resolves the items of a plan that was made by hand."""

    def __init__(self, tensors: Mapping[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._tensors[write_item.index]


def save_row_sharded(
    writers: list[StorageWriter], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """What as many ranks as there are writers save of tensors sharded by rows, in this one process."""
    ranks = len(writers)
    plans: list[list[WriteItem]] = [[] for _ in range(ranks)]
    parts: dict[MetadataIndex, torch.Tensor] = {}
    for name, tensor in tensors:
        row = 0
        for rank, part in enumerate(torch.chunk(tensor, ranks)):
            offsets = torch.Size([row, *[0] * (tensor.ndim - 1)])
            index = MetadataIndex(name, offsets, rank)
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=part.shape)
            properties = TensorProperties.create_from_tensor(tensor)
            data = TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape)
            plans[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            parts[index] = part
            row += len(part)
    local_plans = []
    for rank, (writer, items) in enumerate(zip(writers, plans, strict=True)):
        writer.reset()
        named = (
            "kwargs" in inspect.signature(writer.set_up_storage_writer).parameters
        )  # not before torch 2.9
        writer.set_up_storage_writer(rank == 0, **({"rank": rank} if named else {}))
        local_plans.append(writer.prepare_local_plan(SavePlan(items)))
    global_plans, metadata = create_default_global_save_plan(local_plans)
    planner = _Shards(parts)
    results = [
        writer.write_data(plan, planner).wait()
        for writer, plan in zip(writers, writers[0].prepare_global_plan(global_plans), strict=True)
    ]
    writers[0].finish(metadata=metadata, results=results)


def row_sharded(folder: Path, pattern: Pattern, ranks: int) -> tuple[Path, Path]:
    """The same tensors, native and stock, saved by some ranks."""

    def make(writer: Callable[[Path], StorageWriter]) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            # Clones: the stock writer copies a part whose storage is larger than it is.
            tensors = ((name, pattern.view(name)) for name in pattern.shapes)
            save_row_sharded([writer(path) for _ in range(ranks)], tensors)

        return write

    return (
        ensure(folder / "dcp-rs", make(dcp_rs.RsWriter)),
        ensure(folder / "stock", make(dcp.FileSystemWriter)),
    )


@contextmanager
def pretend_rank(rank: int, world_size: int) -> Iterator[None]:
    """A process group without other processes: enough for DTensors that only plan. The other ranks are on other machines."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        yield
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        dist.destroy_process_group()


def read_options() -> dict[str, Any]:
    """What torch's reader of safetensors takes to use all cores: in torch 2.8 it has one thread."""
    takes = inspect.signature(dcp.HuggingFaceStorageReader).parameters
    return {"thread_count": len(os.sched_getaffinity(0))} if "thread_count" in takes else {}
