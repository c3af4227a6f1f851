"""Plan of one rank for a save: its flattened state dict, and an item for each tensor and value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _core, _torch
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import every, nothing_passes, selector
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.tensors.dtypes import NAMES, REQUIRES_GRAD, can_require_grad, cast_to, is_counter
from dcp_rs.tensors.flatten import flatten, holds_sharded
from dcp_rs.tensors.memory import check_has_shape, has_shape, why_not_raw
from dcp_rs.tensors.nesting import Container, TreePath, name_of, remaining, storable
from dcp_rs.tensors.shards import ShardCache, global_shape, local_pieces
from dcp_rs.transfer.save import Entry, dump, refuse_meta


def plan_locally(
    selected: Selected, dtype: torch.dtype | None, *, is_partial: bool = True
) -> Writes:
    """Describe the entries of this rank. Values are not pickled yet.

    Args:
        selected: the entries.
        dtype: dtype to store floating-point tensors of 16 bits and more in; None keeps theirs.
        is_partial: other ranks may save parts of the tensors.

    Raises:
        PlanError: a tensor's shards cannot be found; or other ranks hold a part of a tensor, and do
            not save.
        UnsupportedError: the format cannot hold a tensor.
    """
    names = list(selected.values)
    uncast: set[str] = set()
    if dtype is not None:
        uncast = {
            name
            for name, value in selected.values.items()
            if isinstance(value, torch.Tensor)
            and has_shape(value)
            and is_counter(name, value.shape)
        }
        names.sort(key=uncast.__contains__)  # they come last: Rust casts the others in one call
    end = len(names) - len(uncast)
    values = list(map(selected.values.__getitem__, names))
    paths, positions = selected.places(names)
    items = _core.SavePlan()
    not_plain = items.add_plain(
        names[:end],
        paths[:end],
        values[:end],
        _torch.PLAIN_TYPES,
        NAMES,
        positions=positions[:end],
        cast=None if dtype is None else NAMES[dtype],
    )
    layouts: ShardCache = {}
    entries: list[Entry] = []
    for i in (*not_plain, *range(end, len(names))):
        to = dtype if i < end else None
        of_one = _entries_of(names[i], values[i], paths[i], positions[i], layouts, to)
        if not is_partial and isinstance(values[i], torch.Tensor):
            check_complete(names[i], global_shape(values[i]), of_one)
        entries += of_one
    items.add([entry.item() for entry in entries])
    return Writes(items, values, entries, selected.containers)


def check_complete(fqn: str, shape: Sequence[int], entries: Iterable[Entry]) -> None:
    """Raise if a rank that saves alone holds only a part of a tensor.

    Raises:
        PlanError: other ranks hold elements of the tensor.
    """
    held = 0
    for entry in entries:
        if not isinstance(entry.data, torch.Tensor):
            return
        held += entry.data.numel()
    if held < (whole := math.prod(shape)):
        msg = (
            f"tensor {fqn!r}: this rank holds {held:,} of its {whole:,} elements, and saves alone: "
            "save on all ranks that hold it, without no_dist=True"
        )
        raise PlanError(msg, tensor=fqn)


def _entries_of(
    fqn: str,
    value: Any,
    path: tuple[Any, ...] | None,
    position: int | None,
    layouts: ShardCache,
    dtype: torch.dtype | None,
) -> list[Entry]:
    """Return what to write of an entry that is no plain tensor: each shard of this rank.

    Args:
        fqn: the name of the entry.
        value: the tensor or value.
        path, position: place of the entry in the state dict, if it is known.
        layouts: known layouts of other tensors.
        dtype: dtype to store floating-point tensors in; None keeps theirs.

    Raises:
        PlanError: the shards of the tensor cannot be found.
        UnsupportedError: the format cannot hold a shard, or the tensor has no values: it is on
            ``meta``, or of a lazy module.
    """
    if not isinstance(value, torch.Tensor):
        return [Entry(fqn, None, path=path, position=position, value=value)]
    check_has_shape(fqn, value, "save")
    shape = tuple(value.shape)
    shards: list[tuple[tuple[int, ...], torch.Tensor]]
    if isinstance(value, (DTensor, ShardedTensor)) or _torch.is_shard(value):
        try:
            pieces = local_pieces(fqn, value, layouts)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            msg = f"tensor {fqn!r} cannot be saved: {error}"
            raise PlanError(msg, tensor=fqn) from error
        shape = tuple(global_shape(value))
        shards = [(tuple(piece.offsets), _torch.wait_tensor(piece.tensor)) for piece in pieces]
        for _, tensor in shards:
            refuse_meta(fqn, tensor)
            if (refusal := why_not_raw(tensor)) is not None:
                msg = f"tensor {fqn!r}: a shard of it cannot be saved: {refusal}"
                raise UnsupportedError(msg, tensor=fqn)
    else:
        value = _torch.wait_tensor(value)
        refuse_meta(fqn, value)
        if why_not_raw(value) is not None:
            return [Entry(fqn, None, path=path, position=position, value=value)]
        shards = [((0,) * value.dim(), value)]
    entries: list[Entry] = []
    for offsets, tensor in shards:
        requires_grad = tensor.requires_grad or (
            value.requires_grad and can_require_grad(tensor.dtype)
        )
        entry = Entry(
            fqn,
            tensor.detach(),
            shape,
            offsets,
            tuple(tensor.shape),
            REQUIRES_GRAD if requires_grad else 0,
            path,
            position,
            dtype=tensor.dtype if dtype is None else cast_to(tensor.dtype, dtype),
        )
        entries.append(entry)
    return entries


@dataclass
class Writes:
    """Writes of one rank.

    Attributes:
        plan: the items of the rank: plain tensors first, then the entries of the rank.
        tensors: the values that the plain tensors are numbered in.
        entries: shards of tensors, tensors that are no plain memory, and values.
        containers: containers of the state dict that the paths do not describe; None if they are
            not known.
        keep: a bit for each item that the rank writes; None for all items.
    """

    plan: _core.SavePlan
    tensors: list[Any]
    entries: list[Entry]
    containers: list[Container] | None = None
    keep: bytes | None = None

    def choose(self, keep: bytes, *, strict: bool) -> None:
        """Leave out what other ranks write. Pickle the values among the rest.

        Args:
            keep: a bit for each item that this rank writes.
            strict: refuse values that would not load back as they are. By default, warn.

        Raises:
            UnsupportedError: a value cannot be stored.
            UnsafePickleError: with ``strict``, a value would not load under
                ``weights_only=True``.
        """
        self.keep = keep
        self.entries = [self.entries[i] for i in self.plan.kept_others(keep)]
        for entry in self.entries:
            if entry.data is None:
                entry.data = dump(entry.fqn, entry.value, strict=strict)


@dataclass
class Selected:
    """Entries of a flattened state dict that a save stores.

    Attributes:
        values: the entries by name.
        paths: their places in the state dict, with keys as the format stores them.
        containers: containers that the paths do not describe.
        text_keys: keys that the format stores as text, by the name of what they lead to.
        nothing_to_save: a message, if ``include`` and ``exclude`` leave nothing of this rank.
    """

    values: dict[str, Any]
    paths: dict[str, TreePath]
    containers: list[Container]
    text_keys: dict[str, Any] = field(default_factory=dict)
    nothing_to_save: str | None = None

    def check_keys(self, *, strict: bool) -> None:
        """Warn of keys that load as text.

        Raises:
            UnsupportedError: with ``strict``, there is such a key. Or a key is a number of more
                than 64 bits, infinity, or a tuple with such numbers.
        """
        for name, key in self.text_keys.items():
            keys = "keys are text, numbers, None, and tuples of such"
            if isinstance(key, int | float | tuple):  # its text could be another key
                msg = f"{name!r}: the key {key!r} cannot be kept: {keys}, and integers have 64 bits"
                raise UnsupportedError(msg, tensor=name)
            msg = (
                f"{name!r}: the key {key!r} ({type(key).__name__}) is kept as text, "
                f"{str(key)!r}: {keys}"
            )
            if strict:
                raise UnsupportedError(f"{msg} (strict_values=True)", tensor=name)
            warn_caller(msg)

    def places(self, names: list[str]) -> tuple[list[TreePath | None], list[int | None]]:
        """Return the path and the number of each name; None for names that are no leaves."""
        if list(self.paths) == names:  # the usual case, and the fast one
            return list(self.paths.values()), list(range(len(names)))
        positions = {name: position for position, name in enumerate(self.paths)}
        return list(map(self.paths.get, names)), list(map(positions.get, names))


def select(
    state_dict: Mapping[Any, Any],
    include: Any = None,
    exclude: Any = None,
    *,
    state_of: Callable[[Any], Any] | None = None,
) -> Selected:
    """Flatten a state dict, and apply ``include`` and ``exclude``.

    Args:
        state_dict: the state dict.
        include, exclude: globs over names.
        state_of: as for :func:`dcp_rs.tensors.flatten.flatten`.

    Raises:
        PlanError: two entries have one name.
    """
    flat = flatten(state_dict, state_of)
    selected = Selected(flat.values, flat.paths, flat.containers)
    if not flat.is_text:
        _store_keys(selected)
    if holds_sharded(flat):
        selected.values = _torch.flatten_sharded_tensors(flat.values)
    passes = selector(include, exclude)
    if passes is every:
        return selected
    values = selected.values
    selected.values = chosen = {name: value for name, value in values.items() if passes(name)}
    leaves = [path for name, path in selected.paths.items() if name in chosen]
    selected.containers = remaining(selected.containers, leaves, passes)
    selected.text_keys = {name: key for name, key in selected.text_keys.items() if passes(name)}
    if values and not chosen:
        selected.nothing_to_save = nothing_passes(include, exclude, values)
    return selected


def _store_keys(selected: Selected) -> None:
    """Turn the keys that the format cannot hold into text."""

    def stored(path: TreePath) -> TreePath:
        path, keys = storable(path)
        if keys:
            selected.text_keys[name_of(path)] = keys[0]
        return path

    selected.paths = {fqn: stored(path) for fqn, path in selected.paths.items()}
    selected.containers = [replace(each, path=stored(each.path)) for each in selected.containers]
