"""Conversion to safetensors files, named and indexed as on Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.blocks import Region
from dcp_rs.checkpoint.metadata import MERGED_FROM
from dcp_rs.conversion.job import Job, Task, aborting, split
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.elements import safetensors_name, safetensors_shape, why_not_safetensors

#: The bytes of a file, if the number of shards is not given. transformers has the same limit.
_SHARD_BYTES = 5_000_000_000
#: The number of names in a message.
_SHOWN = 5
_HEADER_LIMIT = 100_000_000
_ALIGNMENT = 4096
#: Metadata about pieces of tensors in a file. The result has whole tensors.
_OF_PIECES = frozenset({"DCP_SHARDING_INFO", "DCP_VERSION", "DCPRS"})
#: Keys of a model in a training state.
_MODELS = ("model", "model_state_dict", "state_dict", "module")
#: Keys of the metadata with a meaning of their own, so that no tied tensor is noted under them.
_RESERVED = _OF_PIECES | {"format", MERGED_FROM}


def why_not_of(dtype: torch.dtype, shape: Sequence[int]) -> str | None:
    """Return why safetensors cannot hold a tensor of this dtype and shape; None if it can."""
    return why_not_safetensors(NAMES.get(dtype, str(dtype).removeprefix("torch.")), shape)


def leave_out(job: Job) -> None:
    """Leave out entries that the format cannot hold, and second names of tied tensors.

    The metadata of the files has the second names. ``transformers`` and
    ``safetensors.torch.load_model`` tie these tensors again.

    Raises:
        UnsupportedError: the format cannot hold an entry, and ``skip_unsupported`` is not set.
    """
    refused = {task.item.name: why for task in job.tasks if (why := _why_not(task)) is not None}
    if refused and not job.request.skip_unsupported:
        named = "; ".join(f"{name!r} {why}" for name, why in list(refused.items())[:_SHOWN])
        more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        advice = "skip_unsupported=True leaves them out"
        if model := _model_of(job, refused):
            only = f"include='{model}.*' and rename={{'{model}': ''}} take the model alone"
            advice = f"{only}; {advice}"
        msg = (
            f"safetensors cannot hold {len(refused)} of {len(job.tasks)} entries: {named}{more}. "
            f"{advice}"
        )
        raise UnsupportedError(msg, tensor=next(iter(refused)))
    job.report.skipped = refused
    names = {task.item.name: task.name for task in job.tasks if task.item.name not in refused}
    tied = job.source.tied([task.item for task in job.tasks if task.item.name in names])
    for name, kept in tied.items():
        if names[name] not in _RESERVED:
            job.report.tied[names.pop(name)] = names[kept]
    job.tasks = [task for task in job.tasks if task.item.name in names]


def _model_of(job: Job, refused: Mapping[str, str]) -> str | None:
    """Return the key of the model in a training state that is converted whole; None for others."""
    if job.request.include is not None or job.request.rename is not None:
        return None
    for key in _MODELS:
        inside = [task.item.name for task in job.tasks if task.item.name.startswith(f"{key}.")]
        if inside and refused.keys().isdisjoint(inside):
            return key
    return None


def _why_not(task: Task) -> str | None:
    """Return why safetensors cannot hold an entry; None if it can."""
    if task.dtype is None:
        return "is not a tensor"
    if (what := why_not_of(task.dtype, task.item.shape)) is not None:
        return f"is of {what}"
    if task.name == "__metadata__":
        return "has a name that safetensors keeps for itself"
    return None


def write(job: Job, result: Path) -> None:
    """Write one file, or a folder of several files and their index."""
    folder = result.parent if job.request.as_file else result
    if not job.request.as_file:
        folder.mkdir()
    runs = _files(job, result)
    weight_map = {task.name: file for file, run in runs.items() for task in run}
    kept = {key: text for key, text in job.source.metadata().items() if key not in _OF_PIECES}
    if job.merged_from:
        kept[MERGED_FROM] = json.dumps(job.merged_from)
    files: list[tuple[str, bytes, int]] = []
    values: list[_core.PlacedValue] = []
    regions: dict[int, Region] = {}
    for number, (file, run) in enumerate(runs.items()):
        # Large elements first, so that every tensor is aligned.
        tensors = sorted(
            ((task.name, task.region()) for task in run), key=lambda t: -t[1].dtype.itemsize
        )
        ties = {
            name: first for name, first in job.report.tied.items() if weight_map.get(first) == file
        }
        head = header(
            {**ties, "format": "pt", **kept},
            ((name, region.dtype, region.sizes, region.nbytes) for name, region in tensors),
        )
        at = len(head)
        for name, region in tensors:
            if region.nbytes:
                regions[len(values)] = region
            values.append(_core.PlacedValue(name, number, at, region.nbytes))
            at += region.nbytes
        files.append((file, head, at))
    save = _core.Save.create_files(folder, files, values, **job.engine())
    with aborting(save):
        job.write(save, regions)
        save.finish()
    job.report.files = len(files)
    if len(files) > 1:
        _write_index(job, folder, weight_map)


def _files(job: Job, result: Path) -> dict[str, list[Task]]:
    """Return the entries of each file, by its name."""
    if job.request.as_file:
        return {result.name: job.tasks}
    stem = job.request.name
    runs = split(job.tasks, job.request.shards or -(-job.total // _SHARD_BYTES))
    if len(runs) == 1:
        return {f"{stem}.safetensors": runs[0]}
    return {
        f"{stem}-{number:05}-of-{len(runs):05}.safetensors": run
        for number, run in enumerate(runs, 1)
    }


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


def _write_index(job: Job, folder: Path, weight_map: dict[str, str]) -> None:
    """Write the index of several files, as transformers does."""
    index = {"metadata": {"total_size": job.total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    _core.publish(
        folder,
        f"{job.request.name}.safetensors.index.json",
        text.encode(),
        job.request.write_options.fsync,
    )
