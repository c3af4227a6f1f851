"""What a rank writes for a plan: the tensors and values that a planner resolves, item by item."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_rs import _core, _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.dcp.save_planner import RsSavePlanner
from dcp_rs.engine.metadata import tensor_flags
from dcp_rs.engine.writes import Nesting, Writes
from dcp_rs.errors import PlanError
from dcp_rs.tensors import objects
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.memory import parts
from dcp_rs.transfer.entry import Entry
from dcp_rs.transfer.save import as_object, refuse_meta, why_not_raw

__all__ = ["Resolved", "writes_of"]


class Resolved:
    """Keeps apart what a planner resolves: it may make the next item in the memory of this one, as stock's writer lets it.

    What lies in the memory of the state dict stays there, and is not copied.

    Args:
        planner: it, or one that wraps it. Where none of them has a ``state_dict``, everything counts as made for the save.
    """

    def __init__(self, planner: object) -> None:
        self._held = [value for state_dict in _state_dicts(planner, set()) for value in state_dict.values()]
        self._storages = {_torch.storage_id(tensor) for value in self._held for tensor in _memory(value)}

    def apart(self, data: Any) -> Any:
        """A tensor in memory that the planner does not have: a copy, where it is not the state dict's. Anything else as it is."""
        if not isinstance(data, torch.Tensor) or data.device.type == "meta" or self.is_passing(data):
            return data
        tensor = _torch.wait_tensor(data)
        if _torch.storage_id(tensor) in self._storages:
            return data
        return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)

    def is_passing(self, data: Any) -> bool:
        """Whether it is a tensor that raw bytes cannot hold: what is stored of it is made at once, and there is nothing to keep."""
        return isinstance(data, torch.Tensor) and why_not_raw(_torch.wait_tensor(data)) is not None


def _state_dicts(planner: object, seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Those of a planner and of the planners that it wraps."""
    seen.add(id(planner))
    state_dict = getattr(planner, "state_dict", None)
    if isinstance(state_dict, Mapping):
        yield state_dict
    for inner in getattr(planner, "__dict__", {}).values():
        if isinstance(inner, SavePlanner) and id(inner) not in seen:
            yield from _state_dicts(inner, seen)


def _memory(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in whose memory a value of a state dict lies, as far as that is known."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield from _memory(shard.tensor)
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        with torch.no_grad():
            yield from (part.tensor for part in parts(value))


def writes_of(plan: SavePlan, planner: SavePlanner, *, strict: bool) -> Writes:
    """Resolve the items of this rank's plan. Warn of keys that come back as text.

    Raises:
        UnsupportedError, UnsafePickleError: what cannot be stored; with ``strict`` also what would not load back as it is.
        PlanError: the planner resolved something else than it planned.
    """
    # Else somebody changed the plan's paths, or the planner does not know them.
    nesting = planner._nesting(plan.planner_data) if isinstance(planner, RsSavePlanner) else None
    resolved = None if _resolves_for_good(planner) else Resolved(planner)
    writes = _collect(plan, planner, nesting, resolved, strict=strict)
    if nesting is not None:
        nesting.judge(strict=strict)
    return writes


def _resolves_for_good(planner: SavePlanner) -> bool:
    """Return whether what it resolves is the state dict's, or a copy that nobody else has, as with torch's planner and ours."""
    return isinstance(planner, DefaultSavePlanner) and all(_is_own(planner, name) for name in _OWN)


def _collect(
    plan: SavePlan, planner: SavePlanner, nesting: Nesting | None, resolved: Resolved | None, *, strict: bool
) -> Writes:
    """Resolves every item of the plan.

    Args:
        plan, planner: of this rank.
        nesting: of the state dict, if the planner knows it; else paths are those of the plan.
        resolved: keeps what the planner resolves; None: it is nobody else's to change, and no tensor is copied here.
        strict: refuse values that would not load back.

    Raises:
        UnsupportedError: a value that the format cannot hold.
        PlanError: a tensor has another shape than the plan says.
        UnsafePickleError: a value that would not load back.
    """
    paths: Mapping[str, Any] = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    positions: Mapping[str, int] = {}
    if nesting is not None:
        paths, positions = nesting.paths, nesting.positions
    whole: list[WriteItem] = []
    names: list[str] = []
    tensors: list[Any] = []
    shapes: list[Any] = []
    entries: list[Entry] = []
    for item in plan.items:
        data = planner.resolve_data(item)
        fqn, is_passing = item.index.fqn, False
        if resolved is not None:
            data, is_passing = resolved.apart(data), resolved.is_passing(data)
        if not is_passing and item.type == WriteItemType.TENSOR and item.tensor_data and _is_whole(item.tensor_data):
            whole.append(item)
            names.append(fqn)
            tensors.append(data)
            shapes.append(item.tensor_data.size)
        else:
            entries.append(_entry(item, data, paths.get(fqn), positions.get(fqn)))
            _judge(item, data, planner, strict=strict)
    core = _core.SavePlan()
    where = list(map(paths.get, names))
    at = list(map(positions.get, names))
    others = core.add_plain(names, where, tensors, PLAIN_TYPES, NAMES, positions=at, shapes=shapes)
    entries += [_entry(whole[i], tensors[i], where[i], at[i]) for i in others]
    core.add([entry.item() for entry in entries])
    return Writes(core, None, tensors, entries, nesting)


def _is_whole(data: TensorWriteData) -> bool:
    return data.chunk.sizes == data.size and not any(data.chunk.offsets)


#: What writers call for each item, and what that calls, as torch and this package have them before anybody patches them.
_OWN = {
    name: (getattr(DefaultSavePlanner, name), getattr(RsSavePlanner, name))
    for name in ("resolve_data", "lookup_object", "transform_object")
}


def _is_own(planner: SavePlanner, name: str) -> bool:
    return getattr(getattr(planner, name), "__func__", None) in _OWN[name]


def _judge(item: WriteItem, data: Any, planner: SavePlanner, *, strict: bool) -> None:
    """Warns of a value that will not load (``strict``: refuses it), where the planner is one that tells which value it was."""
    if item.type != WriteItemType.BYTE_IO or not isinstance(planner, DefaultSavePlanner):
        return
    if _is_own(planner, "lookup_object"):
        objects.warn_unless_loadable(item.index.fqn, planner.lookup_object(item.index), data.getvalue(), strict=strict)


def _entry(item: WriteItem, data: torch.Tensor | io.BytesIO, path: Any, position: int | None) -> Entry:
    fqn = item.index.fqn
    path = path if isinstance(path, tuple) else None
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            msg = f"value {fqn!r}: the planner resolved a {type(data).__name__}, not io.BytesIO"
            raise PlanError(msg, tensor=fqn)
        return Entry(fqn, data.getvalue(), path=path, position=position)
    if not isinstance(data, torch.Tensor) or item.tensor_data is None:
        msg = f"tensor {fqn!r}: the planner resolved a {type(data).__name__}"
        raise PlanError(msg, tensor=fqn)
    tensor = _torch.wait_tensor(data.detach())
    refuse_meta(fqn, tensor)
    refusal = why_not_raw(tensor)
    if refusal is not None:
        return Entry(fqn, as_object(fqn, tensor, refusal), path=path, position=position)
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
        position=position,
    )
