"""Read items as torch's planner makes them, for readers and planners that want to see each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_rs.engine.matching import EntryInfo
from dcp_rs.tensors.shards import Layouts, Piece, local_pieces

__all__ = ["items_of", "missing_elements"]

#: Offsets and sizes.
_Box = tuple[tuple[int, ...], tuple[int, ...]]


def items_of(
    found: Mapping[str, EntryInfo], state_dict: Mapping[str, Any], stored: Mapping[str, Any]
) -> list[ReadItem]:
    """Return items for all that is read, as torch's planner makes them.

    Args:
        found: names of the state dict, and what the checkpoint has for each.
        state_dict: what is filled.
        stored: metadata by stored name.
    """
    layouts: Layouts = {}
    items: list[ReadItem] = []
    for fqn, entry in found.items():
        if entry.is_bytes:
            items.append(_bytes_item(fqn, entry.name))
        else:
            pieces = local_pieces(fqn, state_dict[fqn], layouts)
            items += _tensor_items(fqn, entry.name, stored[entry.name], pieces)
    return items


def _bytes_item(fqn: str, stored: str) -> ReadItem:
    """The item of a non-tensor value."""
    zero = torch.Size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(fqn),
        dest_offsets=zero,
        storage_index=MetadataIndex(stored),
        storage_offsets=zero,
        lengths=zero,
    )


def _tensor_items(fqn: str, stored: str, entry: TensorStorageMetadata, pieces: Sequence[Piece]) -> list[ReadItem]:
    """The items of what this process holds of a tensor, which the checkpoint has under the name ``stored``."""
    chunks = [ChunkStorageMetadata(offsets=torch.Size(p.offsets), sizes=torch.Size(p.tensor.shape)) for p in pieces]
    items: list[ReadItem] = create_read_items_for_chunk_list(stored, entry, chunks)
    if stored == fqn and all(piece.offsets == piece.shard for piece in pieces):
        return items
    return [_of_shard(fqn, item, pieces[item.dest_index.index or 0]) for item in items]


def _of_shard(fqn: str, item: ReadItem, piece: Piece) -> ReadItem:
    return ReadItem(
        type=item.type,
        dest_index=MetadataIndex(fqn, torch.Size(piece.shard), piece.number),
        dest_offsets=torch.Size(a + b for a, b in zip(piece.at, item.dest_offsets, strict=True)),
        storage_index=item.storage_index,
        storage_offsets=item.storage_offsets,
        lengths=item.lengths,
    )


def missing_elements(piece: Piece, entry: TensorStorageMetadata) -> _Box | None:
    """Some elements of a piece, as offsets in the whole tensor and sizes, that no chunk of the checkpoint holds; None where all are held."""
    left = [(tuple(piece.offsets), tuple(piece.tensor.shape))] if piece.tensor.numel() else []
    for chunk in entry.chunks:
        if not left:
            break
        left = [rest for box in left for rest in _outside(box, (tuple(chunk.offsets), tuple(chunk.sizes)))]
    return left[0] if left else None


def _outside(box: _Box, other: _Box) -> Iterator[_Box]:
    """What of a box is not in the other, as boxes."""
    offsets, sizes = list(box[0]), list(box[1])
    inner = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(offsets, sizes, other[0], other[1], strict=True)]
    if any(begin >= end for begin, end in inner):
        yield box
        return
    for dim, (begin, end) in enumerate(inner):
        first, last = offsets[dim], offsets[dim] + sizes[dim]
        for at, size in ((first, begin - first), (end, last - end)):
            if size:
                yield (*offsets[:dim], at, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :])
        offsets[dim], sizes[dim] = begin, end - begin
