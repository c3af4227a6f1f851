"""Writes of one rank: its entries of a state dict, their plan, and how their bytes get to files.

:func:`select` flattens the state dict, :func:`plan_locally` describes the entries,
:meth:`Writes.choose` leaves out what other ranks write, and :func:`write_entries` writes the rest.
Tensors that are not in host memory as they are stored pass through memory of bounded size, cut
into pieces.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _core, _torch
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.names import nothing_passes, selector
from dcp_rs.errors import DcpRsError, PlanError, UnsupportedError
from dcp_rs.options import WriteOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import (
    NAMES,
    REQUIRES_GRAD,
    as_integers,
    can_require_grad,
    cast_to,
    is_counter,
)
from dcp_rs.tensors.flatten import flatten
from dcp_rs.tensors.memory import (
    check_has_shape,
    flat_bytes,
    has_shape,
    require_real_memory,
    why_not_raw,
)
from dcp_rs.tensors.nesting import Container, TreePath, name_of, remaining, storable
from dcp_rs.tensors.regions import ALIGNMENT, BLOCK_BYTES, Cut, cut, narrow, unflatten
from dcp_rs.tensors.shards import ShardCache, global_shape, local_pieces
from dcp_rs.transfer.buffers import new_slabs, slab_bytes
from dcp_rs.transfer.copy_stream import CopyStream, Pair, Transfer, copy_stream_for

# --- what a save stores ---------------------------------------------------------------------------


@dataclass
class Selected:
    """Entries of a flattened state dict that a save stores.

    Attributes:
        values: the entries by name.
        paths: the places of all entries of the state dict, with keys as the format stores them.
        containers: containers that the paths do not describe.
        nothing_to_save: a message, if ``include`` and ``exclude`` leave nothing of this rank.
    """

    values: dict[str, Any]
    paths: dict[str, TreePath]
    containers: list[Container]
    nothing_to_save: str | None = None

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
    strict: bool = False,
    state_of: Callable[[Any], Any] | None = None,
) -> Selected:
    """Flatten a state dict, and apply ``include`` and ``exclude``.

    It warns of keys that load as text.

    Args:
        state_dict: the state dict.
        include, exclude: globs over names.
        strict: raise in place of the warning.
        state_of: as for :func:`dcp_rs.tensors.flatten.flatten`.

    Raises:
        PlanError: two entries have one name.
        UnsupportedError: with ``strict``, a key loads as text. Or a key is a number of more than 64
            bits, infinity, or a tuple with such numbers.
    """
    flat = flatten(state_dict, state_of)
    selected = Selected(flat.values, flat.paths, flat.containers)
    if include is not None or exclude is not None:
        passes = selector(include, exclude)
        values = {name: value for name, value in flat.values.items() if passes(name)}
        leaves = [path for name, path in flat.paths.items() if name in values]
        selected.values = values
        selected.containers = remaining(flat.containers, leaves, passes)
        if flat.values and not values:
            selected.nothing_to_save = nothing_passes("save", include, exclude, flat.values)
    if not flat.is_text:
        _store_keys(selected, strict=strict)
    return selected


def _store_keys(selected: Selected, *, strict: bool) -> None:
    """Turn the keys that the format cannot hold into text."""
    lost: dict[str, Any] = {}

    def stored(path: TreePath, *, is_saved: bool = True) -> TreePath:
        path, keys = storable(path)
        if keys and is_saved:
            lost[name_of(path)] = keys[0]
        return path

    selected.paths = {
        fqn: stored(path, is_saved=fqn in selected.values) for fqn, path in selected.paths.items()
    }
    selected.containers = [replace(each, path=stored(each.path)) for each in selected.containers]
    known = "keys are text, numbers, None, and tuples of such"
    for name, key in lost.items():
        if isinstance(key, int | float | tuple):  # its text could be another key
            msg = f"{name!r}: the key {key!r} cannot be kept: {known}, and integers have 64 bits"
            raise UnsupportedError(msg, tensor=name)
        msg = (
            f"{name!r}: the key {key!r} ({type(key).__name__}) is kept as text, "
            f"{str(key)!r}: {known}"
        )
        if strict:
            raise UnsupportedError(f"{msg} (strict_values=True)", tensor=name)
        warn_caller(msg)


# --- the plan -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Entry:
    """A chunk or a value to write.

    Attributes:
        fqn: its name.
        data: a strided tensor on any device, or the bytes of a value; None until it is pickled.
        shape: the shape of the whole tensor.
        offsets, sizes: the chunk in that tensor.
        flags: its flags (section 3.3 of the format).
        path, position: its place in the state dict, if the planner gave one.
        dtype: the dtype to cast to while it is written; None for no cast.
        value: a value, or a tensor that raw bytes cannot hold. The rank that writes it pickles it.
    """

    fqn: str
    data: torch.Tensor | bytes | None
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    flags: int = 0
    path: tuple[Any, ...] | None = None
    position: int | None = None
    dtype: torch.dtype | None = None
    value: Any = None

    @property
    def tensor(self) -> torch.Tensor:
        """The data, which is no value."""
        return cast(torch.Tensor, self.data)

    @property
    def nbytes(self) -> int:
        """The bytes of the payload; 0 for a value that is not pickled."""
        if not isinstance(self.data, torch.Tensor):
            return len(self.data or b"")
        return self.data.numel() * (self.dtype or self.data.dtype).itemsize

    @property
    def is_as_stored(self) -> bool:
        """True if memory, of any device, holds the payload as it is written."""
        data = self.data
        return not isinstance(data, torch.Tensor) or (
            self.dtype in (None, data.dtype)
            and data.is_contiguous()
            and not data.is_conj()
            and not data.is_neg()
        )

    def head(self, nbytes: int) -> Entry:
        """Return an entry of the first ``nbytes`` of a tensor; a value is returned unchanged."""
        data = self.data
        if not isinstance(data, torch.Tensor) or self.nbytes <= nbytes:
            return self
        count = nbytes // (self.dtype or data.dtype).itemsize
        while data.dim() > 1 and data[0].numel() >= count:
            data = data[0]
        rows = -(-count // max(1, data[0].numel()))
        return replace(self, data=data[:rows].reshape(-1)[:count])

    def item(self) -> _core.SaveItem:
        """Return the entry as the engine takes it."""
        data = self.data
        dtype = NAMES[self.dtype or data.dtype] if isinstance(data, torch.Tensor) else None
        return _core.SaveItem(
            self.fqn,
            self.nbytes,
            dtype=dtype,
            shape=self.shape,
            offsets=self.offsets,
            sizes=self.sizes,
            flags=self.flags,
            path=self.path,
            position=self.position,
        )


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
            fqn, value = entry.fqn, entry.value
            if entry.data is not None:
                continue
            if isinstance(value, torch.Tensor):
                entry.data = as_object(fqn, value)
            else:
                entry.data = pickles.dump(fqn, value)
                pickles.warn_unless_loadable(fqn, value, entry.data, strict=strict)


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


# --- bytes ----------------------------------------------------------------------------------------


def refuse_meta(fqn: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor on the meta device, of which ``torch.save`` would store nothing."""
    if tensor.device.type == "meta":
        msg = f"tensor {fqn!r} is on the meta device: there is nothing to save"
        raise UnsupportedError(msg, tensor=fqn)


def as_object(fqn: str, tensor: torch.Tensor) -> bytes:
    """Return the ``torch.save`` bytes of a tensor that raw bytes cannot hold.

    Raises:
        UnsupportedError: the bytes would not load under ``weights_only=True``.
    """
    try:
        data = pickles.dump(fqn, tensor)
        pickles.check_loadable(fqn, data)
    except DcpRsError as error:
        msg = (
            f"tensor {fqn!r} cannot be saved as raw bytes ({why_not_raw(tensor)}), nor as an "
            f"object that loads with weights_only=True: {error}"
        )
        raise UnsupportedError(msg, tensor=fqn) from error
    return data


#: The order of writes. The engine writes plain tensors before.
_VALUES, _IN_PLACE, _COPIES = 1, 2, 3


def turns(entries: Sequence[Entry]) -> list[int]:
    """Return the turn, from 1 on, in which :func:`write_entries` writes each entry.

    Values come first, then tensors in host memory as they are stored, and then the other tensors,
    one device after another.
    """
    devices: dict[torch.device, int] = {}
    found = []
    for entry in entries:
        if not isinstance(entry.data, torch.Tensor):
            found.append(_VALUES)
        elif entry.data.device.type == "cpu" and entry.is_as_stored:
            found.append(_IN_PLACE)
        else:
            found.append(devices.setdefault(entry.data.device, _COPIES + len(devices)))
    return found


def write_entries(
    save: _core.Save | _core.Reuse,
    entries: Sequence[Entry],
    options: WriteOptions,
    first: int = 0,
    *,
    only: Sequence[bool] | None = None,
) -> None:
    """Write entries, or compare them with a parent.

    Args:
        save: the save, or the comparison.
        entries: the entries.
        options: how to write.
        first: the number of the first entry among the items of ``save``.
        only: for each item of ``save``, whether to write it; default: all.
    """
    of_turn: dict[int, list[tuple[int, Entry]]] = {}
    for i, (entry, turn) in enumerate(zip(entries, turns(entries), strict=True), first):
        if entry.nbytes and (only is None or only[i]):
            of_turn.setdefault(turn, []).append((i, entry))
    for turn, numbered in sorted(of_turn.items()):
        if turn == _VALUES:
            save.write_values([(i, entry.data) for i, entry in numbered])  # type: ignore[misc]
        elif turn == _IN_PLACE:
            save.write(
                [_core.Part(i, 0, entry.tensor.data_ptr(), entry.nbytes) for i, entry in numbered]
            )
        elif numbered[0][1].tensor.device.type == "cpu":
            _write_host_copies(save, numbered, options)
        else:
            _write_device_copies(save, numbered, options)


def _write_host_copies(
    save: _core.Save | _core.Reuse, entries: Sequence[tuple[int, Entry]], options: WriteOptions
) -> None:
    """Write the (item, entry) pairs of tensors in host memory that does not hold them as stored."""
    # Half of the bound, as a tensor that is conjugated exists twice.
    most = max(BLOCK_BYTES, options.inflight_bytes(accelerator=False) // 2)
    nbytes = min(most, sum(entry.nbytes + ALIGNMENT for _, entry in entries))
    buffer = require_real_memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    for parts in cut(((entry.nbytes, 1, BLOCK_BYTES) for _, entry in entries), nbytes):
        for part in parts:
            for place, source in _pairs(entries[part.number][1], part, buffer):
                place.copy_(source)
        save.write(
            [
                _core.Part(entries[p.number][0], p.begin, buffer.data_ptr() + p.at, p.count)
                for p in parts
            ]
        )


def _write_device_copies(
    save: _core.Save | _core.Reuse, entries: Sequence[tuple[int, Entry]], options: WriteOptions
) -> None:
    """Write the (item, entry) pairs of one device through slabs.

    The bytes are those after the work of the caller's stream.
    """
    max_bytes = options.inflight_bytes(accelerator=True)
    nbytes = slab_bytes(max_bytes, least=BLOCK_BYTES)
    total = sum(entry.nbytes for _, entry in entries)
    count = max(1, min(max_bytes // nbytes, -(-total // nbytes) + 1))
    stream = copy_stream_for(entries[0][1].tensor.device)
    free = new_slabs(count, nbytes, pinned=True)
    copying: deque[tuple[torch.Tensor, list[Cut], Transfer, Any]] = deque()
    cuts = cut(((entry.nbytes, 1, BLOCK_BYTES) for _, entry in entries), nbytes)
    try:
        while True:
            while free and (parts := next(cuts, None)):
                slab = free.pop()
                transfer = _transfer(slab, stream, entries, parts)
                # The copy may read memory that the caller's stream is still conjugating, so
                # `copying` keeps the transfer alive.
                stream.order_after_caller()
                copying.append((slab, parts, transfer, stream.download(slab, transfer)))
            if not copying:
                break
            # Half of the slabs at once: the disk gets large writes, while copies fill the others.
            ready = [copying.popleft() for _ in range(min(len(copying), max(1, count // 2)))]
            for *_, event in ready:
                event.synchronize()
            save.write(
                [
                    _core.Part(
                        entries[part.number][0], part.begin, slab.data_ptr() + part.at, part.count
                    )
                    for slab, parts, *_ in ready
                    for part in parts
                ]
            )
            free += [slab for slab, *_ in ready]
    finally:
        stream.order_before_caller()
        for *_, event in copying:
            event.synchronize()


def _transfer(
    slab: torch.Tensor,
    stream: CopyStream,
    entries: Sequence[tuple[int, Entry]],
    parts: Sequence[Cut],
) -> Transfer:
    """Return the copies of parts of tensors, in bytes, into a slab.

    Large parts that the device holds as they are written come directly. The others are gathered in
    scratch memory, where they are cast, too, so that this takes no other memory.
    """
    transfer = Transfer()
    places: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    scratch: torch.Tensor | None = None
    for part in parts:
        entry, end = entries[part.number][1], part.at + part.count
        if entry.is_as_stored and part.count >= BLOCK_BYTES:
            transfer.direct.append((slab[part.at : end], _bytes_of(entry, part)))
            continue
        if scratch is None:
            scratch = stream.scratch(slab)
        transfer.add_run(part.at, end)
        if entry.is_as_stored:
            places.append(scratch[part.at : end])
            sources.append(_bytes_of(entry, part))
        else:
            transfer.single += _pairs(entry, part, scratch)
    if places:
        transfer.grouped.append((places, sources))
    return transfer


def _bytes_of(entry: Entry, part: Cut) -> torch.Tensor:
    """Return a part of memory that holds a tensor as it is stored."""
    return flat_bytes(entry.tensor)[part.begin : part.begin + part.count]


def _pairs(entry: Entry, part: Cut, memory: torch.Tensor) -> Iterator[Pair]:
    """Yield the copies, in rectangles, of a part of a tensor into memory, as it is stored."""
    tensor, dtype = entry.tensor, entry.dtype or entry.tensor.dtype
    if dtype == tensor.dtype and not tensor.is_conj():
        tensor = as_integers(tensor)
        dtype = tensor.dtype
    run = memory[part.at : part.at + part.count].view(dtype)
    for offsets, place in unflatten(tensor.shape, part.begin // dtype.itemsize, run):
        yield place, narrow(tensor, offsets, place.shape).resolve_conj().resolve_neg()
