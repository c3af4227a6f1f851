"""From stored chunks into tensors: in place where the bytes fit as they are, through a staging buffer otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dcp_rs import _core, _torch, gds
from dcp_rs._dtypes import BY_NAME
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.options import ReadOptions
from dcp_rs.upload import make_goal, upload

__all__ = ["Fill", "Target", "fill", "fill_regions", "stored_dtype"]


@dataclass(slots=True)
class Fill:
    """A rectangle of a stored chunk and the tensor it goes to.

    Attributes:
        chunk: of the index.
        offsets: where the rectangle begins in the chunk.
        tensor: what to fill; its shape is the rectangle's.
        name: FQN, for messages.
        dtype: of the chunk.
    """

    chunk: int
    offsets: Sequence[int]
    tensor: torch.Tensor
    name: str
    dtype: torch.dtype


@dataclass(slots=True)
class Target:
    """A region of a stored tensor, in as many chunks as it may be, and the tensor it goes to.

    Attributes:
        index: of the stored tensor.
        offsets: where the region begins in it.
        tensor: what to fill; its shape is the region's.
        name: FQN, for messages.
        dtype: of the stored tensor.
    """

    index: int
    offsets: Sequence[int]
    tensor: torch.Tensor
    name: str
    dtype: torch.dtype


def fill_regions(index: _core.Index, targets: Sequence[Target], options: ReadOptions) -> None:
    """Fills every tensor from the chunks that hold its region.

    Raises:
        PlanError: no chunk holds some part of a region.
    """
    direct: list[Target] = []
    others: list[Target] = []
    for target in targets:
        (direct if is_plain(target.tensor, target.dtype) else others).append(target)
    if direct:
        index.read_regions(
            [(t.index, t.offsets, t.tensor.shape, t.tensor.data_ptr(), t.tensor.stride()) for t in direct],
            **options.engine(),
        )
    if others:
        fill(index, [part for target in others for part in _parts(index, target)], options)


def _parts(index: _core.Index, target: Target) -> Iterator[Fill]:
    _check(target)
    for chunk, chunk_offsets, region_offsets, sizes in index.cover(target.index, target.offsets, target.tensor.shape):
        part = target.tensor
        for dim, (offset, size) in enumerate(zip(region_offsets, sizes, strict=True)):
            if size != part.shape[dim]:
                part = part.narrow(dim, offset, size)
        yield Fill(chunk, chunk_offsets, part, target.name, target.dtype)


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes of ``dtype`` in memory are all there is to ``tensor``."""
    return (
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and type(tensor) in PLAIN_TYPES
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
    )


def fill(index: _core.Index, fills: Sequence[Fill], options: ReadOptions) -> None:
    """Fills every tensor.

    In place: CPU tensors of the stored dtype, strided ones too. The others through slabs of host memory
    of bounded size, by copies that convert device and dtype.
    """
    direct: list[Fill] = []
    staged: list[Fill] = []
    for item in fills:
        (direct if is_plain(item.tensor, item.dtype) else staged).append(item)
    if direct:
        index.read_chunks([_request(item, item.tensor) for item in direct], **options.engine())
    if staged:
        _fill_staged(index, staged, options)


def _request(item: Fill, memory: torch.Tensor) -> tuple[int, Sequence[int], Sequence[int], int, Sequence[int]]:
    return item.chunk, item.offsets, memory.shape, memory.data_ptr(), memory.stride()


def _fill_staged(index: _core.Index, fills: Sequence[Fill], options: ReadOptions) -> None:
    for item in fills:
        _check(item)
    if options.io == "gds":
        fills = gds.fill(index, fills, options)
    goals = [make_goal(item.tensor, item.dtype) for item in fills]
    devices = list({item.tensor.device: None for item in fills})
    groups = {device: number for number, device in enumerate(devices)}
    wants = [
        (item.chunk, item.offsets, item.tensor.shape, goal.flat, groups[item.tensor.device])
        for item, goal in zip(fills, goals, strict=True)
    ]
    if wants:
        upload(index, wants, goals, devices, options)


def _check(item: Fill | Target) -> None:
    """Raises for a tensor that copies cannot fill."""
    if item.tensor.device.type == "meta":
        msg = f"tensor {item.name!r} is on the meta device, where there is nothing to fill"
        raise PlanError(msg, tensor=item.name)
    if item.tensor.layout != torch.strided:
        msg = f"tensor {item.name!r} has layout {item.tensor.layout}; only strided tensors can be filled"
        raise UnsupportedError(msg, tensor=item.name)
    if not _torch.has_memory(item.tensor):
        msg = f"tensor {item.name!r} has no memory to fill: its storage was freed"
        raise PlanError(msg, tensor=item.name)
    if any(size > 1 and stride == 0 for size, stride in zip(item.tensor.shape, item.tensor.stride(), strict=True)):
        msg = f"tensor {item.name!r}: the destination has several elements in one place of memory; give it memory of its own"
        raise PlanError(msg, tensor=item.name)


def stored_dtype(name: str, dtype: str | None) -> torch.dtype:
    """The torch dtype for a name of the format."""
    found = BY_NAME.get(dtype or "")
    if found is None:
        msg = f"tensor {name!r} is of dtype {dtype}, which torch {torch.__version__} does not have"
        raise UnsupportedError(msg, tensor=name)
    return found
