"""What a rank writes for a plan: the tensors and values that a planner resolves, item by item."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_rs import _core, _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs._warnings import warn_caller
from dcp_rs.dcp.hooks import Methods
from dcp_rs.dcp.metadata import tensor_flags
from dcp_rs.dcp.resolved import Resolved
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors import objects
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.tensors.nesting import Container, TreePath, name_of, remaining, storable
from dcp_rs.tensors.trees import Flat
from dcp_rs.transfer.entry import Entry
from dcp_rs.transfer.save import as_object, refuse_meta, why_not_raw

__all__ = ["Nesting", "Writes", "collect"]


@dataclass
class Nesting:
    """How a state dict was nested.

    Attributes:
        paths: of its leaves, by FQN, in its order, with keys as they are.
        containers: those that the paths do not tell.
        lost: keys that the format cannot hold, by the name of what they lead to. They are text here.
    """

    paths: dict[str, TreePath]
    containers: list[Container]
    lost: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, flat: Flat) -> Nesting:
        """That of a state dict."""
        if flat.is_text:
            return cls(flat.paths, flat.containers)
        lost: dict[str, Any] = {}

        def kept(path: TreePath) -> TreePath:
            path, keys = storable(path)
            if keys:
                lost[name_of(path)] = keys[0]
            return path

        paths = {fqn: kept(path) for fqn, path in flat.paths.items()}
        return cls(paths, [Container(c.position, kept(c.path), c.kind) for c in flat.containers], lost)

    def judge(self, *, strict: bool) -> None:
        """Warns of keys that come back as text.

        Raises:
            UnsupportedError: there are some, with ``strict``.
        """
        for name, key in self.lost.items():
            msg = f"{name!r}: the key {key!r} ({type(key).__name__}) is kept as text, {str(key)!r}: keys are text, numbers, None, and tuples of such"
            if strict:
                raise UnsupportedError(f"{msg} (strict_values=True)", tensor=name)
            warn_caller(msg)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The places of the leaves."""
        return {fqn: position for position, fqn in enumerate(self.paths)}

    def places(self, names: list[str]) -> tuple[list[TreePath | None], list[int | None]]:
        """The path and the position of each leaf; None of what is none."""
        if list(self.paths) == names:  # nothing was added, taken or moved
            return list(self.paths.values()), list(range(len(names)))
        return [self.paths.get(name) for name in names], [self.positions.get(name) for name in names]

    def only(self, names: Iterable[str], passes: Callable[[str], bool]) -> Nesting:
        """That of a state dict of which only the leaves ``names`` are left, and other containers that pass."""
        leaves = [self.paths[name] for name in names]
        lost = {name: key for name, key in self.lost.items() if passes(name)}
        return Nesting(self.paths, remaining(self.containers, leaves, passes), lost)

    def to_core(self) -> list[tuple[int, TreePath, str]]:
        """The containers, as ``_core.Save.finish`` takes them."""
        return [(container.position, container.path, container.kind) for container in self.containers]


@dataclass
class Writes:
    """What one rank writes.

    Attributes:
        plan: its items.
        keep: which of them it writes, a bit for each; None: all.
        tensors: the list that the plan's plain tensors are places in.
        entries: the other items that it writes.
        nesting: of the state dict, where the planner is one that knows.
    """

    plan: _core.SavePlan
    keep: bytes | None
    tensors: list[Any]
    entries: list[Entry]
    nesting: Nesting | None = None


def collect(
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


_METHODS = Methods(DefaultSavePlanner, DefaultSavePlanner)


def _judge(item: WriteItem, data: Any, planner: SavePlanner, *, strict: bool) -> None:
    """Warns of a value that will not load (``strict``: refuses it), where the planner is one that tells which value it was."""
    if item.type != WriteItemType.BYTE_IO or not isinstance(planner, DefaultSavePlanner):
        return
    if not _METHODS.replaced(planner, ("lookup_object",)):
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
