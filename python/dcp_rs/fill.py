"""From stored chunks into tensors: in place where the bytes fit as they are, through a staging buffer otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dcp_rs import _core, _torch
from dcp_rs._dtypes import BY_NAME
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.options import ReadOptions
from dcp_rs.staging import StagingRing

__all__ = ["Fill", "Target", "fill", "fill_regions", "split", "stored_dtype"]


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
    direct, others = [], []
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
    for chunk, chunk_offsets, region_offsets, sizes in index.cover(target.index, target.offsets, target.tensor.shape):
        part = target.tensor
        for dim, (offset, size) in enumerate(zip(region_offsets, sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        yield Fill(chunk, chunk_offsets, part, target.name, target.dtype)


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes of ``dtype`` in memory are all there is to ``tensor``."""
    return (
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and type(tensor) in _torch.PLAIN_TYPES
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
    )


def fill(index: _core.Index, fills: Sequence[Fill], options: ReadOptions) -> None:
    """Fills every tensor. In place: CPU tensors of the stored dtype, strided ones too. The others by ``copy_`` from a staging buffer
    of bounded size, which converts device and dtype.
    """
    direct, staged = [], []
    for item in fills:
        if not is_plain(item.tensor, item.dtype):
            staged.append(item)
        elif _torch.has_memory(item.tensor):
            direct.append(item)
        else:
            raise _freed(item.name)
    if direct:
        index.read_chunks([_request(item, item.tensor) for item in direct], **options.engine())
    if staged:
        _fill_staged(index, staged, options)


def _freed(name: str) -> PlanError:
    return PlanError(f"tensor {name!r} has no memory to fill: its storage has been freed", tensor=name)


def _request(item: Fill, memory: torch.Tensor) -> tuple[int, Sequence[int], Sequence[int], int, Sequence[int]]:
    return item.chunk, item.offsets, memory.shape, memory.data_ptr(), memory.stride()


def _fill_staged(index: _core.Index, fills: Sequence[Fill], options: ReadOptions) -> None:
    by_device: dict[torch.device, list[Fill]] = {}
    for item in fills:
        device = item.tensor.device
        if device.type == "meta":
            msg = f"tensor {item.name!r} is on the meta device, where there is nothing to fill"
            raise PlanError(msg, tensor=item.name)
        if item.tensor.layout != torch.strided:
            msg = f"tensor {item.name!r} has layout {item.tensor.layout}; only strided tensors can be filled"
            raise UnsupportedError(msg, tensor=item.name)
        by_device.setdefault(device, []).append(item)
    for device, items in by_device.items():
        ring = StagingRing.for_device(device, options.inflight_bytes(accelerator=device.type != "cpu"))
        with ring:
            for slab_fills in _slabfuls(items, ring.slab_bytes):
                slab = ring.acquire()
                views = [
                    slab[at : at + nbytes].view(item.dtype).view(item.tensor.shape) for item, at, nbytes in slab_fills
                ]
                requests = [_request(item, view) for (item, _, _), view in zip(slab_fills, views, strict=True)]
                index.read_chunks(requests, **options.engine())
                ring.copy_out(slab, [(item.tensor, view) for (item, _, _), view in zip(slab_fills, views, strict=True)])


_ALIGNMENT = 64


def _slabfuls(items: Sequence[Fill], slab_bytes: int) -> Iterator[list[tuple[Fill, int, int]]]:
    """Cuts and packs the rectangles into slabs: (rectangle, first byte, bytes)."""
    batch: list[tuple[Fill, int, int]] = []
    at = 0
    for item in items:
        for offsets, sizes in split(item.tensor.shape, item.dtype.itemsize, slab_bytes):
            piece = item
            if offsets is not None:
                tensor = item.tensor
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    tensor = tensor.narrow(dim, offset, size)
                start = [a + b for a, b in zip(item.offsets, offsets, strict=True)]
                piece = Fill(item.chunk, start, tensor, item.name, item.dtype)
            nbytes = piece.tensor.numel() * item.dtype.itemsize
            if at + nbytes > slab_bytes and batch:
                yield batch
                batch, at = [], 0
            batch.append((piece, at, nbytes))
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    if batch:
        yield batch


def split(sizes: Sequence[int], itemsize: int, limit: int) -> Iterator[tuple[Sequence[int] | None, Sequence[int]]]:
    """Cuts a rectangle into (offsets, sizes) of at most ``limit`` bytes each, in row-major order; offsets None: not cut.

    A single element is never cut.
    """
    total = itemsize
    for size in sizes:
        total *= size
    if total <= limit or not sizes:
        yield None, sizes
        return
    # The outermost dimension at which a whole step fits decides; dimensions before it are walked one by one.
    dim, inner = 0, total // sizes[0]
    while inner > limit and dim + 1 < len(sizes):
        dim += 1
        inner //= sizes[dim]
    step = max(1, limit // max(1, inner))
    outer = [0] * dim
    while True:
        for begin in range(0, sizes[dim], step):
            extent = min(step, sizes[dim] - begin)
            yield [*outer, begin, *[0] * (len(sizes) - dim - 1)], [*[1] * dim, extent, *sizes[dim + 1 :]]
        for d in reversed(range(dim)):
            outer[d] += 1
            if outer[d] < sizes[d]:
                break
            outer[d] = 0
        else:
            return


def stored_dtype(name: str, dtype: str | None) -> torch.dtype:
    """The torch dtype for a name of the format."""
    found = BY_NAME.get(dtype or "")
    if found is None:
        msg = f"tensor {name!r} is of dtype {dtype}, which torch {torch.__version__} does not have"
        raise UnsupportedError(msg, tensor=name)
    return found
