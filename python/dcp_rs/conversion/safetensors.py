"""Into safetensors files, as Hugging Face names and indexes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.merged_from import KEY
from dcp_rs.conversion.job import Job, Task, split
from dcp_rs.conversion.place import Place
from dcp_rs.errors import PlanError
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.elements import safetensors_name, safetensors_shape, why_not_safetensors

__all__ = ["RESERVED", "header", "why_not", "why_not_of", "write"]

#: A file without a count of shards has at most this many bytes, as transformers cuts it.
_SHARD_BYTES = 5_000_000_000
_HEADER_LIMIT = 100_000_000
_ALIGNMENT = 4096
#: What a header says of the pieces in its own file: they are whole tensors in another.
_OF_PIECES = frozenset({"DCP_SHARDING_INFO", "DCP_VERSION", "DCPRS"})
#: What of a header's metadata has a meaning, so that no tensor that is left out may be noted under
#: it.
RESERVED = _OF_PIECES | {"format", KEY}


def why_not_of(dtype: torch.dtype, shape: Sequence[int]) -> str | None:
    """What of its dtype keeps a tensor out, if anything does."""
    return why_not_safetensors(NAMES.get(dtype, str(dtype).removeprefix("torch.")), shape)


def why_not(task: Task) -> str | None:
    """Why safetensors cannot hold an entry, if it cannot."""
    if task.dtype is None:
        return "is not a tensor"
    if (what := why_not_of(task.dtype, task.item.shape)) is not None:
        return f"is of {what}"
    if task.name == "__metadata__":
        return "has a name that safetensors keeps for itself"
    return None


def write(job: Job, place: Place) -> None:
    """``model.safetensors`` (or what it is called), or several files and ``model.safetensors.index.json``."""
    runs = split(job.tasks, job.shards or -(-job.total // _SHARD_BYTES))
    single = place.result != place.folder
    if single or len(runs) == 1:
        names = [place.result.name if single else f"{job.name}.safetensors"]
    else:
        names = [f"{job.name}-{i + 1:05}-of-{len(runs):05}.safetensors" for i in range(len(runs))]
    files: list[tuple[str, bytes, int]] = []
    values: list[_core.PlacedValue] = []
    order: list[Task] = []
    said = {key: text for key, text in job.source.metadata().items() if key not in _OF_PIECES}
    if job.merged_from:
        said[KEY] = json.dumps(job.merged_from)
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        # Large elements first, so that every tensor is aligned.
        tasks = sorted(run, key=lambda task: -task.dtype.itemsize if task.dtype else 0)
        ties = {
            tied: kept for tied, kept in job.report.tied.items() if any(t.name == kept for t in run)
        }
        metadata = {**ties, "format": "pt", **said}
        head = header(metadata, ((t.name, t.region().dtype, t.item.shape, t.nbytes) for t in tasks))
        at = len(head)
        for task in tasks:
            values.append(_core.PlacedValue(task.name, number, at, task.nbytes))
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
        weight_map = {
            task.name: name for name, run in zip(names, runs, strict=True) for task in run
        }
        _write_index(job, place, weight_map)


def header(
    metadata: Mapping[str, str] | None,
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int], int]],
) -> bytes:
    """What a file begins with, whose tensors (name, dtype, shape, bytes) follow each other.

    Raises:
        PlanError: it would be longer than readers allow.
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


def _write_index(job: Job, place: Place, weight_map: dict[str, str]) -> None:
    """As transformers writes it."""
    index = {"metadata": {"total_size": job.total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    _core.publish(
        os.fspath(place.folder),
        f"{job.name}.safetensors.index.json",
        text.encode(),
        job.options.fsync,
    )
