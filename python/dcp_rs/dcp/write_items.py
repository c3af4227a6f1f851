"""What a rank writes for a plan: the tensors and values that a planner resolves, item by item."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_rs import _core, _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.dcp.metadata import tensor_flags
from dcp_rs.errors import PlanError
from dcp_rs.tensors import objects
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.transfer.entry import Entry
from dcp_rs.transfer.save import as_object, refuse_meta, why_not_raw

__all__ = ["Writes", "collect"]


@dataclass
class Writes:
    """What one rank writes.

    Attributes:
        plan: its items.
        keep: which of them it writes, a bit for each; None: all.
        tensors: the list that the plan's plain tensors are places in.
        entries: the other items that it writes.
    """

    plan: _core.SavePlan
    keep: bytes | None
    tensors: list[Any]
    entries: list[Entry]


def collect(plan: SavePlan, planner: SavePlanner) -> Writes:
    """Resolves every item of the plan. Tensors are not copied here.

    Raises:
        UnsupportedError: a value that the format cannot hold.
        PlanError: a tensor has another shape than the plan says.
    """
    paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    whole: list[WriteItem] = []
    names: list[str] = []
    tensors: list[Any] = []
    shapes: list[Any] = []
    entries: list[Entry] = []
    for item in plan.items:
        data = planner.resolve_data(item)
        fqn = item.index.fqn
        if item.type == WriteItemType.TENSOR and item.tensor_data is not None and _is_whole(item.tensor_data):
            whole.append(item)
            names.append(fqn)
            tensors.append(data)
            shapes.append(item.tensor_data.size)
        else:
            entries.append(_entry(item, data, paths.get(fqn)))
            _warn_unless_loadable(item, data, planner)
    core = _core.SavePlan()
    where = list(map(paths.get, names))
    others = core.add_plain(names, where, tensors, PLAIN_TYPES, NAMES, shapes=shapes)
    entries += [_entry(whole[i], tensors[i], where[i]) for i in others]
    core.add([entry.item() for entry in entries])
    return Writes(core, None, tensors, entries)


def _is_whole(data: TensorWriteData) -> bool:
    return data.chunk.sizes == data.size and not any(data.chunk.offsets)


def _warn_unless_loadable(item: WriteItem, data: Any, planner: SavePlanner) -> None:
    """Warns of a value that will not load, where the planner is one that tells which value it was."""
    if item.type != WriteItemType.BYTE_IO or not isinstance(planner, DefaultSavePlanner):
        return
    if type(planner).lookup_object is DefaultSavePlanner.lookup_object and "lookup_object" not in vars(planner):
        objects.warn_unless_loadable(item.index.fqn, planner.lookup_object(item.index), data.getvalue())


def _entry(item: WriteItem, data: torch.Tensor | io.BytesIO, path: Any) -> Entry:
    fqn = item.index.fqn
    path = path if isinstance(path, tuple) else None
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            msg = f"value {fqn!r}: the planner resolved a {type(data).__name__}, not io.BytesIO"
            raise PlanError(msg, tensor=fqn)
        return Entry(fqn, data.getvalue(), path=path)
    if not isinstance(data, torch.Tensor) or item.tensor_data is None:
        msg = f"tensor {fqn!r}: the planner resolved a {type(data).__name__}"
        raise PlanError(msg, tensor=fqn)
    tensor = _torch.wait_tensor(data.detach())
    refuse_meta(fqn, tensor)
    refusal = why_not_raw(tensor)
    if refusal is not None:
        return Entry(fqn, as_object(fqn, tensor, refusal), path=path)
    chunk = item.tensor_data.chunk
    if tuple(tensor.shape) != tuple(chunk.sizes):
        msg = f"tensor {fqn!r}: the planner resolved {tuple(tensor.shape)} for a chunk of {tuple(chunk.sizes)}"
        raise PlanError(msg, tensor=fqn)
    return Entry(
        fqn,
        tensor,
        shape=tuple(item.tensor_data.size),
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        flags=tensor_flags(item.tensor_data.properties),
        path=path,
    )
