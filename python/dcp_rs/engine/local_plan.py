"""What one rank holds for a save: its state dict, flattened, and an item for each tensor, piece of one, or value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _core, _torch
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import selector, some
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors.dtypes import NAMES, REQUIRES_GRAD, can_require_grad, cast_to, is_counter
from dcp_rs.tensors.flatten import Flat, flatten
from dcp_rs.tensors.memory import why_not_raw
from dcp_rs.tensors.nesting import Container, TreePath, name_of, remaining, storable
from dcp_rs.tensors.shards import Layouts, global_shape, local_pieces
from dcp_rs.transfer.save import Entry, dump, refuse_meta

__all__ = [
    "LocalPlan",
    "Nesting",
    "PlanOptions",
    "Selected",
    "Value",
    "Writes",
    "plan_locally",
    "select",
]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How a state dict becomes the items of a save.

    Attributes:
        flatten, flatten_sharded, lowest_rank: as in torch's ``DefaultSavePlanner``.
        dtype: what floating-point tensors of 16 bits and more are stored as; None: as they are.
        include, exclude: globs over names.
    """

    flatten: bool = True
    flatten_sharded: bool = True
    lowest_rank: bool = False
    dtype: torch.dtype | None = None
    include: Any = None
    exclude: Any = None


@dataclass
class Nesting:
    """How a state dict was nested.

    Attributes:
        paths: of its leaves, by FQN, in its order, with keys as they are.
        containers: those that the paths do not tell.
        lost: keys that the format cannot hold, by the name of what they lead to. They are text
            here.
    """

    paths: dict[str, TreePath]
    containers: list[Container]
    lost: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, flat: Flat) -> Nesting:
        """Return the nesting of a flattened state dict."""
        if flat.is_text:
            return cls(flat.paths, flat.containers)
        lost: dict[str, Any] = {}

        def kept(path: TreePath) -> TreePath:
            path, keys = storable(path)
            if keys:
                lost[name_of(path)] = keys[0]
            return path

        paths = {fqn: kept(path) for fqn, path in flat.paths.items()}
        return cls(
            paths, [Container(c.position, kept(c.path), c.kind) for c in flat.containers], lost
        )

    def judge(self, *, strict: bool) -> None:
        """Warn of keys that come back as text.

        Raises:
            UnsupportedError: there are some, with ``strict``; or a number of more than 64 bits,
                infinity, or a tuple with such.
        """
        for name, key in self.lost.items():
            keys = "keys are text, numbers, None, and tuples of such"
            if isinstance(key, int | float | tuple):  # its text could not be told from a text
                msg = f"{name!r}: the key {key!r} cannot be kept: {keys}, and integers have 64 bits"
                raise UnsupportedError(msg, tensor=name)
            msg = f"{name!r}: the key {key!r} ({type(key).__name__}) is kept as text, {str(key)!r}: {keys}"
            if strict:
                raise UnsupportedError(f"{msg} (strict_values=True)", tensor=name)
            warn_caller(msg)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The places of the leaves."""
        return {fqn: position for position, fqn in enumerate(self.paths)}

    def places(self, names: list[str]) -> tuple[list[TreePath | None], list[int | None]]:
        """Return the path and the position of each leaf; None for what is no leaf."""
        if list(self.paths) == names:  # nothing was added, taken or moved
            return list(self.paths.values()), list(range(len(names)))
        return [self.paths.get(name) for name in names], [
            self.positions.get(name) for name in names
        ]

    def only(self, names: Iterable[str], passes: Callable[[str], bool]) -> Nesting:
        """Return that of a state dict of which only the leaves ``names`` are left, and other containers that pass."""
        leaves = [self.paths[name] for name in names]
        lost = {name: key for name, key in self.lost.items() if passes(name)}
        return Nesting(self.paths, remaining(self.containers, leaves, passes), lost)


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
    if options.flatten_sharded and any(
        issubclass(kind, ShardedTensor) for kind in set(map(type, values.values()))
    ):
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


@dataclass(slots=True)
class Value:
    """A value, or a tensor that raw bytes cannot hold. The rank that writes it pickles it."""

    fqn: str
    value: Any
    path: tuple[Any, ...] | None
    position: int | None

    def item(self) -> _core.SaveItem:
        """Return what the coordinator and the engine get to know of it."""
        return _core.SaveItem(self.fqn, 0, path=self.path, position=self.position)


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


@dataclass
class LocalPlan:
    """The items that a rank holds.

    Attributes:
        selected: the entries of the state dict.
        items: what the coordinator and the engine know of them: plain tensors first, then
            ``others``.
        tensors: the list in which the plain tensors have their places.
        others: pieces of sharded tensors, tensors that are no plain memory, and values.
    """

    selected: Selected
    items: _core.SavePlan
    tensors: list[Any]
    others: list[Entry | Value]

    def writes(self, keep: bytes | None, *, strict: bool) -> Writes:
        """Return what the rank writes of its items. Pickle the values among them.

        Args:
            keep: a bit for each item; None: all of them.
            strict: refuse keys and values that would not load back as they are; without it, warn.

        Raises:
            UnsupportedError: with ``strict``, a key that comes back as text; a value that cannot be
                stored.
            UnsafePickleError: with ``strict``, a value that would not load under
                ``weights_only=True``.
        """
        kept = (self.others[i] for i in self.items.kept_others(keep))
        entries = [
            Entry(e.fqn, dump(e.fqn, e.value, strict=strict)) if isinstance(e, Value) else e
            for e in kept
        ]
        nesting = self.selected.nesting
        if nesting is not None and nesting.lost:
            nesting.judge(strict=strict)
        return Writes(self.items, keep, self.tensors, entries, nesting)


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
        uncast = {
            name
            for name, value in entries
            if isinstance(value, torch.Tensor) and is_counter(name, value.shape)
        }
        names.sort(key=uncast.__contains__)  # they come last: Rust casts the others in one call
    end = len(names) - len(uncast)
    values = list(map(selected.values.__getitem__, names))
    paths, positions = (None, None) if selected.nesting is None else selected.nesting.places(names)
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
    layouts: Layouts = {}
    others: list[Entry | Value] = []
    for i in (*not_plain, *range(end, len(names))):
        path, position = paths[i] if paths else None, positions[i] if positions else None
        others += _items_of(
            names[i], values[i], path, position, layouts, options.dtype if i < end else None
        )
    items.add([other.item() for other in others])
    return LocalPlan(selected, items, values, others)


def _items_of(
    fqn: str,
    value: Any,
    path: tuple[Any, ...] | None,
    position: int | None,
    layouts: Layouts,
    dtype: torch.dtype | None,
) -> list[Entry | Value]:
    """Return the items of an entry of a state dict that is no plain tensor: one for each piece that this rank holds.

    Args:
        fqn, value: its name, and what it is.
        path, position: of the entry in the state dict, where that is known.
        layouts: what is known of the layouts of other tensors.
        dtype: what floating-point tensors are stored as; None: as they are.

    Raises:
        PlanError: a tensor whose pieces torch cannot tell, or that is on ``meta``.
        UnsupportedError: a shard that the format cannot hold.
    """
    if not isinstance(value, torch.Tensor):
        return [Value(fqn, value, path, position)]
    is_sharded = isinstance(value, (DTensor, ShardedTensor)) or hasattr(value, "global_shape")
    if not is_sharded:
        value = _torch.wait_tensor(value)
        refuse_meta(fqn, value)
        if why_not_raw(value) is not None:
            return [Value(fqn, value, path, position)]
    try:
        pieces = local_pieces(fqn, value, layouts)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        msg = f"tensor {fqn!r} cannot be saved: {error}"
        raise PlanError(msg, tensor=fqn) from error
    shape = tuple(global_shape(value))
    items: list[Entry | Value] = []
    for piece in pieces:
        tensor = piece.tensor
        if is_sharded:
            tensor = _torch.wait_tensor(tensor)
            refuse_meta(fqn, tensor)
            if (refusal := why_not_raw(tensor)) is not None:
                msg = f"tensor {fqn!r}: a shard of it cannot be saved: {refusal}"
                raise UnsupportedError(msg, tensor=fqn)
        stored = tensor.dtype if dtype is None else cast_to(tensor.dtype, dtype)
        requires_grad = tensor.requires_grad or (
            value.requires_grad and can_require_grad(tensor.dtype)
        )
        flags = REQUIRES_GRAD if requires_grad else 0
        sizes = tuple(tensor.shape)
        items.append(
            Entry(
                fqn,
                tensor.detach(),
                shape,
                tuple(piece.offsets),
                sizes,
                flags,
                path,
                position,
                dtype=stored,
            )
        )
    return items
