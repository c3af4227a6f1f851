"""Write items as the coordinator gets to know of them, and as it gives them to ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_rs import _core
from dcp_rs.engine.metadata import tensor_flags
from dcp_rs.errors import PlanError
from dcp_rs.tensors.dtypes import NAMES

__all__ = ["Planned", "kept_items", "request_of"]

#: A name and, of a chunk of a tensor, its offsets; None of a value.
Planned = tuple[str, tuple[int, ...] | None]


def request_of(items: Iterable[WriteItem], paths: Any) -> bytes:
    """What the coordinator has to know of the items, as of those that were never made.

    Args:
        items: of one rank.
        paths: names to their paths in the state dict, where the plan says so.
    """
    known = paths if isinstance(paths, Mapping) else {}
    plan = _core.SavePlan()
    plan.add([_described(item, known.get(item.index.fqn)) for item in items])
    return plan.request()


def _described(item: WriteItem, path: Any) -> _core.SaveItem:
    fqn, data = item.index.fqn, item.tensor_data
    path = path if isinstance(path, tuple) else None
    is_raw = item.type != WriteItemType.BYTE_IO and data is not None and _is_raw(data.properties)
    if not is_raw or data is None:
        return _core.SaveItem(fqn, 0, path=path)
    dtype, sizes = data.properties.dtype, tuple(data.chunk.sizes)
    nbytes = torch.Size(sizes).numel() * dtype.itemsize
    return _core.SaveItem(
        fqn,
        nbytes,
        dtype=NAMES[dtype],
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=sizes,
        flags=tensor_flags(data.properties),
        path=path,
    )


def _is_raw(properties: Any) -> bool:
    return properties.layout == torch.strided and properties.dtype in NAMES


def kept_items(items: Collection[WriteItem], planned: list[Planned], keep: bytes | None) -> list[WriteItem]:
    """Those of the items that the coordinator gave to this rank.

    Args:
        items: of all that the rank holds.
        planned: the same, as they were planned without items.
        keep: a bit for each of ``planned``; None: all.

    Raises:
        PlanError: torch's items are of other pieces than what was planned.
    """
    kept = {place for i, place in enumerate(planned) if keep is None or keep[i // 8] >> (i % 8) & 1}
    chosen = [item for item in items if not kept.isdisjoint(_places(item))]
    if len(chosen) != len(kept):
        named = {place for item in chosen for place in _places(item)}
        fqn, offsets = next(place for place in kept if place not in named)
        msg = f"{fqn!r} is saved in pieces for which torch has no items (one begins at {offsets}): a planner that wants items cannot save it"
        raise PlanError(msg, tensor=fqn)
    return chosen


def _places(item: WriteItem) -> tuple[Planned, Planned]:
    """What it may have been planned as: tensors that raw bytes cannot hold are values."""
    index = item.index
    return (index.fqn, tuple(index.offset or ())), (index.fqn, None)
