"""The local shards of a tensor: rectangles of the whole, and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from dcp_rs import _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.errors import PlanError
from dcp_rs.tensors.regions import narrow

#: For each dimension, runs of consecutive indices in a shard: (first in the whole tensor, first in
#: the shard, count).
Runs = list[list[tuple[int, int, int]]]
#: A cache for one plan of the offsets and runs of shards, because torch takes some 60 microseconds
#: to compute them. The keys are (shape, mesh, coordinate, placements). This process may have been
#: another rank when it made an equal mesh.
ShardCache = dict[Any, tuple[tuple[int, ...], Runs]]


@dataclass(slots=True)
class Piece:
    """A rectangle of a tensor in local memory.

    Attributes:
        offsets: the offsets in the whole tensor.
        tensor: the memory, in the shape of the rectangle.
        shard: the offsets of the shard around it, as DCP's planners see it.
        at: the offsets in that shard.
        number: the number of the shard in this process.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor
    shard: tuple[int, ...]
    at: tuple[int, ...]
    number: int = 0


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor that ``tensor`` may be a shard of."""
    if isinstance(tensor, ShardedTensor):
        return tuple(tensor.size())
    if _torch.has_place(tensor):
        return tuple(tensor.global_shape)  # type: ignore[attr-defined]
    return tensor.shape


def local_pieces(fqn: str, tensor: torch.Tensor, cache: ShardCache) -> list[Piece]:
    """Return the rectangles of a tensor in this process; none if it is not part of the mesh.

    Args:
        fqn: the name of the tensor, for messages.
        tensor: a tensor of any kind that DCP knows.
        cache: the cache of the plan. Begin with an empty one.

    Raises:
        PlanError: a DTensor has a ``Partial`` placement, or a tensor does not hold a chunk that it
            describes.
    """
    if type(tensor) in PLAIN_TYPES and not _torch.is_shard(tensor):
        zeros = (0,) * tensor.dim()
        return [Piece(zeros, tensor.detach() if tensor.requires_grad else tensor, zeros, zeros)]
    if isinstance(tensor, DTensor):
        local = _torch.local_of(tensor)
        if type(local) in PLAIN_TYPES and not _torch.describes_chunks(local):
            local = local.detach() if local.requires_grad else local
            return _dtensor_pieces(fqn, tensor, local, cache)
    # A rank without a part of a tensor may describe a chunk of no elements, of any place.
    is_empty = 0 in global_shape(tensor)
    return [
        _described_piece(fqn, tensor, chunk, i)
        for i, chunk in enumerate(_torch.chunk_list(tensor))
        if is_empty or 0 not in chunk.sizes
    ]


def _described_piece(
    fqn: str, tensor: torch.Tensor, chunk: ChunkStorageMetadata, number: int
) -> Piece:
    """Return a chunk that a tensor describes, as torch finds it: the beginning of a shard."""
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    try:
        shard = _torch.find_shard(tensor, MetadataIndex(fqn, chunk.offsets, number)).detach()
        if tuple(shard.shape) != sizes:
            shard = narrow(shard, (0,) * shard.dim(), sizes)
    except (ValueError, RuntimeError) as error:
        msg = f"tensor {fqn!r} does not hold the chunk of {sizes} at {offsets} that it describes"
        raise PlanError(f"{msg}: {error}", tensor=fqn) from error
    return _piece(offsets, shard, number)


def _piece(offsets: tuple[int, ...], tensor: torch.Tensor, number: int = 0) -> Piece:
    return Piece(offsets, tensor, offsets, (0,) * len(offsets), number)


def _dtensor_pieces(
    fqn: str, tensor: DTensor, local: torch.Tensor, cache: ShardCache
) -> list[Piece]:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    key = (tensor.shape, tensor.device_mesh, tuple(coordinate), tensor.placements)
    if key not in cache:
        cache[key] = _layout(fqn, tensor)
    offsets, runs = cache[key]
    if not runs:
        return [_piece(offsets, local)]
    return [
        Piece(global_at, narrow(local, local_at, sizes), offsets, local_at)
        for global_at, local_at, sizes in (zip(*of_dims, strict=True) for of_dims in product(*runs))
    ]


def _layout(fqn: str, tensor: DTensor) -> tuple[tuple[int, ...], Runs]:
    """Return the offsets of the shard, and its runs if ranks interleave in a dimension."""
    if any(placement.is_partial() for placement in tensor.placements):
        msg = (
            f"tensor {fqn!r} has pending reductions (placements {tensor.placements}), "
            "and no values yet"
        )
        raise PlanError(msg, tensor=fqn)
    offsets = _torch.dtensor_offsets(tensor)
    if not any(_torch.is_strided_shard(p) for p in tensor.placements):
        return offsets, []
    runs = [_runs(tensor, dim) for dim in range(tensor.dim())]
    if all(len(r) <= 1 for r in runs):
        return tuple(r[0][0] if r else o for r, o in zip(runs, offsets, strict=True)), []
    return offsets, runs


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """Return the indices of the shard along ``dim``. torch shards the indices to find them."""
    placements: list[Placement] = [
        _torch.with_dim(p, 0) if getattr(p, "dim", None) == dim else Replicate()
        for p in tensor.placements
    ]
    indices = torch.arange(tensor.shape[dim], device=tensor.device_mesh.device_type)
    sharded = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None)
    runs: list[tuple[int, int, int]] = []
    for at, index in enumerate(sharded.to_local().tolist()):
        if runs and index == runs[-1][0] + runs[-1][2]:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((index, at, 1))
    return runs
