"""Tensors that have to be put together or cast, in files of their own instead of memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from dcp_rs import _core
from dcp_rs.checkpoint.blocks import Region, blocks
from dcp_rs.conversion.job import Job

__all__ = ["in_memory", "to_tensors"]

_ALIGNMENT = 4096


def to_tensors(job: Job, regions: Sequence[Region], folder: Path) -> list[torch.Tensor]:
    """A tensor for each region, over one mapping of a file without a name. It lives as long as any of them.

    Raises:
        OSError: the disk is full, or fails.
    """
    results: list[torch.Tensor | None] = [None] * len(regions)
    values: list[_core.PlacedValue] = []
    numbers: list[int] = []
    at = 0
    for number, region in enumerate(regions):
        if region.numel == 0:
            results[number] = torch.empty(region.sizes, dtype=region.dtype)
            continue
        numbers.append(number)
        values.append(_core.PlacedValue(region.item.name, 0, at, region.nbytes))
        at += -(-region.nbytes // _ALIGNMENT) * _ALIGNMENT
    if numbers:
        engine = job.engine() | {"fsync": False, "io": "buffered"}
        save = _core.Save.create_files(os.fspath(folder), [("scratch", b"", at)], values, **engine)
        file = folder / "scratch"
        try:
            job.write(save, [regions[i] for i in numbers], range(len(numbers)))
            save.finish()
            with file.open("rb") as stream:
                # Private: torch wants to be able to write to it.
                memory = mmap.mmap(stream.fileno(), at, access=mmap.ACCESS_COPY)
        except BaseException:
            save.abort()
            raise
        finally:
            file.unlink(missing_ok=True)
        for number, value in zip(numbers, values, strict=True):
            region = regions[number]
            flat = torch.frombuffer(memory, dtype=region.dtype, count=region.numel, offset=value.offset)
            results[number] = flat.view(region.sizes)
    return [tensor for tensor in results if tensor is not None]


def in_memory(job: Job, region: Region) -> torch.Tensor:
    """A tensor of its own, for regions that are small."""
    made = torch.empty(region.sizes, dtype=region.dtype)
    flat = made.view(-1).view(torch.uint8) if region.sizes else made.view(1).view(torch.uint8)
    for batch in blocks(job.source, [region] if region.numel else [], job.slabs):
        for block in batch:
            flat[block.at : block.at + block.data.nbytes] = block.data
    job.advance(made.nbytes)
    return made
