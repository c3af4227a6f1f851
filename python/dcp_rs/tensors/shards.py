"""What of a tensor is in this process: rectangles of the whole, and the memory they are in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from dcp_rs import _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.errors import PlanError

__all__ = ["Layouts", "Piece", "global_shape", "local_pieces"]


#: For each dimension, the runs of consecutive indices that a shard holds: (first in the whole,
#: first in the shard, how many).
Runs = list[list[tuple[int, int, int]]]
#: Offsets and runs of shards, to be kept for one plan: torch takes some 60 microseconds a tensor to
#: compute them, and a model repeats a few. No offsets: this process is not part of the mesh. By
#: (shape, the mesh's id, placements), as most tensors share meshes, with the mesh, whose id is no
#: other's while it is held; and by (shape, mesh, place in it, placements), for meshes that are
#: equal. Beyond a plan this process may be another rank.
Layouts = dict[Any, tuple[DeviceMesh, tuple[int, ...] | None, Runs]]

#: They have no shape but their own, unless they are marked.
_OF_ONE_SHAPE = (*PLAIN_TYPES, DTensor)


@dataclass(slots=True)
class Piece:
    """A rectangle of a tensor, in memory here.

    Attributes:
        offsets: where it begins in the whole tensor.
        tensor: its memory; the shape is the rectangle's.
        shard: the offsets of the shard that it is part of, as DCP's planners see it.
        at: where it begins in that shard.
        number: of the shard, among those here.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor
    shard: tuple[int, ...]
    at: tuple[int, ...]
    number: int = 0


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole, of which ``tensor`` may be a shard."""
    if type(tensor) in _OF_ONE_SHAPE and "global_shape" not in tensor.__dict__:
        return tensor.shape
    if isinstance(tensor, ShardedTensor):
        return tuple(tensor.size())
    return tuple(getattr(tensor, "global_shape", tensor.shape))


def local_pieces(fqn: str, tensor: torch.Tensor, layouts: Layouts) -> list[Piece]:
    """The rectangles of ``tensor`` that this process holds; none where it is not part of the tensor's mesh.

    Args:
        fqn: its name, for messages.
        tensor: of any kind that DCP knows.
        layouts: what the plan knows already; begin with an empty one.
    """
    if type(tensor) in PLAIN_TYPES and "global_shape" not in tensor.__dict__:
        zeros = (0,) * tensor.dim()
        return [Piece(zeros, tensor.detach() if tensor.requires_grad else tensor, zeros, zeros)]
    if isinstance(tensor, DTensor):
        local = _torch.wait_tensor(tensor.to_local())
        if type(local) in PLAIN_TYPES:
            return _dtensor_pieces(
                fqn, tensor, local.detach() if local.requires_grad else local, layouts
            )
    if isinstance(tensor, ShardedTensor):
        return [
            _piece(tuple(shard.metadata.shard_offsets), shard.tensor.detach(), i)
            for i, shard in enumerate(tensor.local_shards())
        ]
    return [
        _piece(
            tuple(chunk.offsets),
            _torch.find_shard(tensor, MetadataIndex(fqn, chunk.offsets, i)).detach(),
            i,
        )
        for i, chunk in enumerate(_torch.chunk_list(tensor))
    ]


def _piece(offsets: tuple[int, ...], tensor: torch.Tensor, number: int = 0) -> Piece:
    return Piece(offsets, tensor, offsets, (0,) * len(offsets), number)


def _dtensor_pieces(
    fqn: str, tensor: DTensor, local: torch.Tensor, layouts: Layouts
) -> list[Piece]:
    mesh = tensor.device_mesh
    key = (tensor.shape, id(mesh), tensor.placements)
    layout = layouts.get(key)
    if layout is None:
        layout = layouts[key] = _layout_on(mesh, fqn, tensor, layouts)
    _, offsets, runs = layout
    if offsets is None:
        return []
    if not runs:
        return [_piece(offsets, local)]
    return [
        Piece(global_at, _narrow(local, local_at, sizes), offsets, local_at)
        for global_at, local_at, sizes in _rectangles(runs)
    ]


def _layout_on(
    mesh: DeviceMesh, fqn: str, tensor: DTensor, layouts: Layouts
) -> tuple[DeviceMesh, tuple[int, ...] | None, Runs]:
    """That of a tensor on a mesh which is not known yet; an equal one may be."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return mesh, None, []
    key = (tensor.shape, mesh, tuple(coordinate), tensor.placements)
    if key not in layouts:
        layouts[key] = (mesh, *_layout(fqn, tensor))
    _, offsets, runs = layouts[key]
    return mesh, offsets, runs


def _layout(fqn: str, tensor: DTensor) -> tuple[tuple[int, ...], Runs]:
    """The offsets of the shard; and its runs, where a strided placement interleaves it with others (else empty)."""
    if any(placement.is_partial() for placement in tensor.placements):
        msg = f"tensor {fqn!r} has pending reductions (placements {tensor.placements}), and no values yet"
        raise PlanError(msg, tensor=fqn)
    offsets = _torch.dtensor_offsets(tensor)
    if not any(_torch.is_strided_shard(p) for p in tensor.placements):
        return offsets, []
    runs = [_runs(tensor, dim) for dim in range(tensor.dim())]
    if all(len(r) <= 1 for r in runs):
        return tuple(r[0][0] if r else o for r, o in zip(runs, offsets, strict=True)), []
    return offsets, runs


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """Which indices along ``dim`` the shard holds: asked of torch itself, by sharding the indices in the same way."""
    placements: list[Placement] = [
        _torch.with_dim(p, 0) if getattr(p, "dim", None) == dim else Replicate()
        for p in tensor.placements
    ]
    indices = torch.arange(tensor.shape[dim], device=tensor.device_mesh.device_type)
    held = (
        distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None)
        .to_local()
        .tolist()
    )
    runs: list[tuple[int, int, int]] = []
    for at, index in enumerate(held):
        if runs and index == runs[-1][0] + runs[-1][2]:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((index, at, 1))
    return runs


def _rectangles(runs: Runs) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    if not runs:
        yield (), (), ()
        return
    for whole, shard, count in runs[0]:
        for wholes, shards, counts in _rectangles(runs[1:]):
            yield (whole, *wholes), (shard, *shards), (count, *counts)


def _narrow(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
