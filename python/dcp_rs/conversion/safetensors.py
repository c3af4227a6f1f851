"""Into safetensors files, as Hugging Face names and indexes them."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs.conversion.job import Job, Task, split
from dcp_rs.conversion.place import Place

__all__ = ["why_not", "write"]

#: The types that safetensors and torch share, by their names in a header (``safetensors/src/tensor.rs``).
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
#: A file without a count of shards has at most this many bytes, as transformers cuts it.
_SHARD_BYTES = 5_000_000_000
_HEADER_LIMIT = 100_000_000
_ALIGNMENT = 4096


def why_not(task: Task) -> str | None:
    """Why safetensors cannot hold an entry, if it cannot."""
    if task.dtype is None:
        return "is not a tensor"
    if task.dtype not in _DTYPES:
        return f"is of {str(task.dtype).removeprefix('torch.')}"
    if task.name == "__metadata__":
        return "has a name that safetensors keeps for itself"
    return None


def write(job: Job, place: Place) -> None:
    """``model.safetensors``, or several files and ``model.safetensors.index.json``."""
    runs = split(job.tasks, job.shards or -(-job.total // _SHARD_BYTES))
    single = place.result != place.folder
    if single or len(runs) == 1:
        names = [place.result.name if single else "model.safetensors"]
    else:
        names = [f"model-{i + 1:05}-of-{len(runs):05}.safetensors" for i in range(len(runs))]
    files: list[tuple[str, bytes, int]] = []
    values: list[tuple[str, int, int, int]] = []
    order: list[Task] = []
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        # Large elements first, so that every tensor is aligned.
        tasks = sorted(run, key=lambda task: -task.dtype.itemsize if task.dtype else 0)
        metadata = {"format": "pt"}
        metadata |= {tied: kept for tied, kept in job.report.tied.items() if any(t.name == kept for t in run)}
        head = _header(metadata, tasks)
        at = len(head)
        for task in tasks:
            values.append((task.name, number, at, task.nbytes))
            at += task.nbytes
        files.append((name, head, at))
        order += tasks
    save = _core.Save.create_files(os.fspath(place.folder), files, values, **job.engine())
    try:
        numbers = [i for i, task in enumerate(order) if task.nbytes]
        job.write(save, [order[i].region() for i in numbers], numbers)
        save.finish()
    except BaseException:
        save.abort()
        raise
    job.report.files = len(files)
    if len(names) > 1:
        weight_map = {task.name: name for name, run in zip(names, runs, strict=True) for task in run}
        _write_index(job, place, weight_map)


def _header(metadata: dict[str, str], tasks: list[Task]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for task in tasks:
        dtype = _DTYPES[task.region().dtype]
        entries[task.name] = {"dtype": dtype, "shape": list(task.item.shape), "data_offsets": [at, at + task.nbytes]}
        at += task.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > _HEADER_LIMIT:
        msg = f"the names of {len(tasks)} tensors do not fit into one safetensors file: more shards are needed"
        raise ValueError(msg)
    return len(text).to_bytes(8, "little") + text


def _write_index(job: Job, place: Place, weight_map: dict[str, str]) -> None:
    """As transformers writes it."""
    index = {"metadata": {"total_size": job.total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    _core.publish(os.fspath(place.folder), "model.safetensors.index.json", text.encode(), job.options.fsync)
