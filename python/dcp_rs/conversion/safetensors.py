"""Conversion to safetensors files, named and indexed as on Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.metadata import MERGED_FROM
from dcp_rs.conversion.job import Job, Task, split
from dcp_rs.conversion.output import Output
from dcp_rs.errors import PlanError
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.elements import safetensors_name, safetensors_shape, why_not_safetensors

__all__ = ["RESERVED", "header", "why_not", "why_not_of", "write"]

#: The bytes of a file, if the number of shards is not given. transformers has the same limit.
_SHARD_BYTES = 5_000_000_000
_HEADER_LIMIT = 100_000_000
_ALIGNMENT = 4096
#: Metadata about pieces of tensors in a file. The result has whole tensors.
_OF_PIECES = frozenset({"DCP_SHARDING_INFO", "DCP_VERSION", "DCPRS"})
#: Keys of the metadata with a meaning of their own, so that no tied tensor is noted under them.
RESERVED = _OF_PIECES | {"format", MERGED_FROM}


def why_not_of(dtype: torch.dtype, shape: Sequence[int]) -> str | None:
    """Return why safetensors cannot hold a tensor of this dtype and shape; None if it can."""
    return why_not_safetensors(NAMES.get(dtype, str(dtype).removeprefix("torch.")), shape)


def why_not(task: Task) -> str | None:
    """Return why safetensors cannot hold an entry; None if it can."""
    if task.dtype is None:
        return "is not a tensor"
    if (what := why_not_of(task.dtype, task.item.shape)) is not None:
        return f"is of {what}"
    if task.name == "__metadata__":
        return "has a name that safetensors keeps for itself"
    return None


def write(job: Job, output: Output) -> None:
    """Write one file, or several files and their index."""
    runs = split(job.tasks, job.shards or -(-job.total // _SHARD_BYTES))
    single = output.result != output.folder
    if single or len(runs) == 1:
        names = [output.result.name if single else f"{job.name}.safetensors"]
    else:
        names = [f"{job.name}-{i + 1:05}-of-{len(runs):05}.safetensors" for i in range(len(runs))]
    files: list[tuple[str, bytes, int]] = []
    values: list[_core.PlacedValue] = []
    order: list[Task] = []
    kept = {key: text for key, text in job.source.metadata().items() if key not in _OF_PIECES}
    if job.merged_from:
        kept[MERGED_FROM] = json.dumps(job.merged_from)
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        # Large elements first, so that every tensor is aligned.
        tasks = sorted(run, key=lambda task: -task.dtype.itemsize if task.dtype else 0)
        ties = {
            tied: kept for tied, kept in job.report.tied.items() if any(t.name == kept for t in run)
        }
        metadata = {**ties, "format": "pt", **kept}
        head = header(metadata, ((t.name, t.region().dtype, t.item.shape, t.nbytes) for t in tasks))
        at = len(head)
        for task in tasks:
            values.append(_core.PlacedValue(task.name, number, at, task.nbytes))
            at += task.nbytes
        files.append((name, head, at))
        order += tasks
    save = _core.Save.create_files(os.fspath(output.folder), files, values, **job.engine())
    try:
        numbers = [i for i, task in enumerate(order) if task.nbytes]
        job.write(save, [order[i].region() for i in numbers], numbers)
        save.finish()
    except BaseException:
        save.abort()
        raise
    job.report.files = len(files)
    if len(names) > 1:
        weight_map = {
            task.name: name for name, run in zip(names, runs, strict=True) for task in run
        }
        _write_index(job, output, weight_map)


def header(
    metadata: Mapping[str, str] | None,
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int], int]],
) -> bytes:
    """Return the header of a file with these tensors (name, dtype, shape, bytes), in order.

    Raises:
        PlanError: the header would be longer than readers allow.
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        called = NAMES[dtype]
        entries[name] = {
            "dtype": safetensors_name(called),
            "shape": safetensors_shape(called, shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > _HEADER_LIMIT:
        msg = (
            "the names of the tensors do not fit into one safetensors file: more shards are needed"
        )
        raise PlanError(msg)
    return len(text).to_bytes(8, "little") + text


def _write_index(job: Job, output: Output, weight_map: dict[str, str]) -> None:
    """Write the index of several files, as transformers does."""
    index = {"metadata": {"total_size": job.total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    _core.publish(
        os.fspath(output.folder),
        f"{job.name}.safetensors.index.json",
        text.encode(),
        job.options.fsync,
    )
