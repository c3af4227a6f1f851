"""What one rank holds for a save: the flattened state dict, its items, and the objects behind them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _core, _torch
from dcp_rs.checkpoint.names import selector, some
from dcp_rs.engine.writes import Nesting, Writes
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors.dtypes import NAMES, can_require_grad, cast_to, is_counter
from dcp_rs.tensors.flatten import flatten
from dcp_rs.tensors.nesting import TreePath
from dcp_rs.tensors.shards import Layouts, global_shape, local_pieces
from dcp_rs.transfer.entry import Entry
from dcp_rs.transfer.save import dump, refuse_meta, why_not_raw

__all__ = ["HeldItem", "LocalPlan", "PlanOptions", "Selected", "held_items", "plan_locally", "select"]


@dataclass(slots=True)
class HeldItem:
    """An item that is no plain tensor: a tensor of another kind, or a value."""

    fqn: str
    value: Any
    path: tuple[Any, ...] | None
    position: int | None
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # what it is stored as; None for values

    def item(self) -> _core.SaveItem:
        """What of it the coordinator and the engine get to know."""
        if self.dtype is None:
            return _core.SaveItem(self.fqn, 0, path=self.path, position=self.position)
        return _core.SaveItem(
            self.fqn,
            self.value.numel() * self.dtype.itemsize,
            dtype=NAMES[self.dtype],
            shape=self.shape,
            offsets=self.offsets,
            sizes=tuple(self.value.shape),
            flags=1 if self.value.requires_grad else 0,
            path=self.path,
            position=self.position,
        )

    def entry(self, *, strict: bool) -> Entry:
        """What is written; with ``strict``, a value that would not load back is refused."""
        if self.dtype is not None:
            return Entry(self.fqn, self.value.detach(), dtype=self.dtype)
        return Entry(self.fqn, dump(self.fqn, self.value, strict=strict))


def held_items(
    fqn: str,
    value: Any,
    path: tuple[Any, ...] | None,
    position: int | None,
    layouts: Layouts,
    becomes: Callable[[torch.dtype], torch.dtype],
) -> list[HeldItem]:
    """The items of an entry of a state dict.

    Args:
        fqn, value: its name, and what it is.
        path, position: of the entry in the state dict, where that is known.
        layouts: what is known of the layouts of other tensors.
        becomes: what tensors of a dtype are stored as.

    Raises:
        PlanError: a tensor whose pieces torch cannot tell, or that is on ``meta``.
        UnsupportedError: a shard that the format cannot hold.
    """
    if not isinstance(value, torch.Tensor):
        return [HeldItem(fqn, value, path, position)]
    is_sharded = isinstance(value, (DTensor, ShardedTensor)) or hasattr(value, "global_shape")
    if not is_sharded:
        value = _torch.wait_tensor(value)
        refuse_meta(fqn, value)
        if why_not_raw(value) is not None:
            return [HeldItem(fqn, value, path, position)]
    try:
        pieces = local_pieces(fqn, value, layouts)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        msg = f"tensor {fqn!r} cannot be saved: {error}"
        raise PlanError(msg, tensor=fqn) from error
    shape = tuple(global_shape(value))
    others = []
    for piece in pieces:
        tensor = _torch.wait_tensor(piece.tensor)
        refuse_meta(fqn, tensor)
        refusal = why_not_raw(tensor)
        if refusal is not None:
            msg = f"tensor {fqn!r}: a shard of it cannot be saved: {refusal}"
            raise UnsupportedError(msg, tensor=fqn)
        if value.requires_grad and not tensor.requires_grad and can_require_grad(tensor.dtype):
            tensor = tensor.detach().requires_grad_()
        others.append(HeldItem(fqn, tensor, path, position, shape, tuple(piece.offsets), becomes(tensor.dtype)))
    return others


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How a state dict becomes the items of a save.

    Attributes:
        flatten, flatten_sharded, lowest_rank: as in torch's ``DefaultSavePlanner``.
        remember: send a digest of a rank's plan where the coordinator has that plan from the save before.
        dtype: what floating-point tensors of 16 bits and more are stored as; None: as they are.
        include, exclude: globs over names.
    """

    flatten: bool = True
    flatten_sharded: bool = True
    lowest_rank: bool = False
    remember: bool = False
    dtype: torch.dtype | None = None
    include: Any = None
    exclude: Any = None

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what a tensor of this dtype is stored as."""
        return cast_to(dtype, self.dtype)


@dataclass
class Selected:
    """The entries of a flattened state dict that a save takes.

    Attributes:
        values: the entries by name.
        paths: where they are in the state dict, with text for keys, as torch has it.
        nesting: the same with keys as they are; None: the state dict was not flattened.
        options: how they were chosen.
        names: of all entries, where some may be left out.
    """

    values: dict[str, Any]
    paths: dict[str, TreePath]
    nesting: Nesting | None
    options: PlanOptions
    names: list[str]

    def refuse_nothing(self, items: int) -> None:
        """Raise a ``PlanError`` where ``include`` and ``exclude`` leave nothing to save on any rank."""
        if items == 0 and self.names and not self.values:
            msg = (
                f"there is nothing to save: no name passes include={self.options.include!r}, "
                f"exclude={self.options.exclude!r}; there are {some(self.names)}"
            )
            raise PlanError(msg)


def select(state_dict: Mapping[Any, Any], options: PlanOptions) -> Selected:
    """Flatten a state dict, and leave out what is not to be saved."""
    values: dict[str, Any] = dict(state_dict)
    paths: dict[str, TreePath] = {}
    nesting: Nesting | None = None
    if options.flatten:
        flat = flatten(state_dict)
        values, paths, nesting = flat.values, flat.text_paths(), Nesting.of(flat)
    if options.flatten_sharded and _has_nested(values.values()):
        values = _torch.flatten_sharded_tensors(values)
    passes = selector(options.include, options.exclude)
    if passes is None:
        return Selected(values, paths, nesting, options, [])
    names = list(values)
    values = {name: value for name, value in values.items() if passes(name)}
    if nesting is not None:
        nesting = nesting.only(values.keys() & paths.keys(), passes)
    paths = {name: path for name, path in paths.items() if passes(name)}
    return Selected(values, paths, nesting, options, names)


@dataclass
class LocalPlan:
    """The items that a rank holds.

    Attributes:
        selected: the entries of the state dict.
        items: what the coordinator and the engine know of them: plain tensors first, then ``others``.
        tensors: the list in which the plain tensors have their places.
        others: pieces of sharded tensors, values, and tensors that are no plain memory.
    """

    selected: Selected
    items: _core.SavePlan
    tensors: list[Any]
    others: list[HeldItem] = field(default_factory=list)

    def writes(self, keep: bytes | None, *, strict: bool) -> Writes:
        """Return what the rank writes of its items.

        Args:
            keep: a bit for each item; None: all of them.
            strict: refuse keys and values that would not load back as they are; without it, warn.

        Raises:
            UnsupportedError: with ``strict``, a key that comes back as text; a value that cannot be stored.
            UnsafePickleError: with ``strict``, a value that would not load under ``weights_only=True``.
        """
        entries = [self.others[i].entry(strict=strict) for i in self.items.kept_others(keep)]
        if self.selected.nesting is not None:
            self.selected.nesting.judge(strict=strict)
        return Writes(self.items, keep, self.tensors, entries, self.selected.nesting)


def plan_locally(state_dict: Mapping[Any, Any], options: PlanOptions) -> LocalPlan:
    """Describe what this rank holds.

    Raises:
        PlanError: a tensor whose shards torch cannot tell, or two entries of one name.
        UnsupportedError: a tensor that the format cannot hold.
    """
    selected = select(state_dict, options)
    names = list(selected.values)
    uncast: set[str] = set()
    if options.dtype is not None:
        entries = selected.values.items()
        uncast = {name for name, value in entries if isinstance(value, torch.Tensor) and is_counter(name, value.shape)}
    if uncast:
        names.sort(key=uncast.__contains__)  # they come last: Rust casts the others in one call
    values = list(map(selected.values.__getitem__, names))
    paths, positions = (None, None) if selected.nesting is None else selected.nesting.places(names)
    end = sum(name not in uncast for name in names) if uncast else len(names)
    items = _core.SavePlan()
    not_plain = items.add_plain(
        names[:end],
        None if paths is None else paths[:end],
        values[:end],
        _torch.PLAIN_TYPES,
        NAMES,
        positions=None if positions is None else positions[:end],
        cast=None if options.dtype is None else NAMES[options.dtype],
    )
    plan = LocalPlan(selected, items, values)
    layouts: Layouts = {}
    for i in (*not_plain, *range(end, len(names))):
        path, position = paths[i] if paths else None, positions[i] if positions else None
        stored_dtype = options.stored_dtype if i < end else _as_it_is
        plan.others += held_items(names[i], values[i], path, position, layouts, stored_dtype)
    items.add([other.item() for other in plan.others])
    return plan


def _as_it_is(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _has_nested(values: Collection[Any]) -> bool:
    """Return whether a ShardedTensor is within another, as torch's FSDP over tensor parallelism once made them."""
    if not any(issubclass(kind, ShardedTensor) for kind in set(map(type, values))):
        return False
    return any(
        isinstance(shard.tensor, ShardedTensor)
        for value in values
        if isinstance(value, ShardedTensor)
        for shard in value.local_shards()
    )
