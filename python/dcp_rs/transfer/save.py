"""Writes of one rank: values as bytes, and tensors from wherever their memory is.

Tensors that are not in host memory as they are stored pass through memory of bounded size, cut
into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from dcp_rs import _core
from dcp_rs.errors import DcpRsError, UnsupportedError
from dcp_rs.options import WriteOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import NAMES, as_integers
from dcp_rs.tensors.memory import flat_bytes, why_not_raw
from dcp_rs.tensors.regions import BLOCK_BYTES, Cut, cut, narrow, unflatten
from dcp_rs.transfer.buffers import new_slabs, slab_bytes
from dcp_rs.transfer.copy_stream import CopyStream, Transfer, copy_stream_for, is_accelerator


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


def refuse_meta(fqn: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor on the meta device, of which ``torch.save`` would store nothing."""
    if tensor.device.type == "meta":
        msg = f"tensor {fqn!r} is on the meta device: there is nothing to save"
        raise UnsupportedError(msg, tensor=fqn)


def dump(fqn: str, value: Any, *, strict: bool) -> bytes:
    """Return the bytes of a value, or of a tensor that raw bytes cannot hold.

    It warns of a value that will not load under ``weights_only=True``.

    Raises:
        UnsafePickleError: a value will not load, and ``strict`` is set.
        UnsupportedError: a value does not pickle, or a tensor will not load.
    """
    if isinstance(value, torch.Tensor):
        return as_object(fqn, value)
    data = pickles.dump_named(fqn, value)
    pickles.warn_unless_loadable(fqn, value, data, strict=strict)
    return data


def as_object(fqn: str, tensor: torch.Tensor) -> bytes:
    """Return the ``torch.save`` bytes of a tensor that raw bytes cannot hold.

    Raises:
        UnsupportedError: the bytes would not load under ``weights_only=True``.
    """
    try:
        data = pickles.dump_named(fqn, tensor)
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
    fallbacks: list[str] | None = None,
) -> None:
    """Write entries, or compare them with a parent.

    Args:
        save: the save, or the comparison.
        entries: the entries.
        options: how to write.
        first: the number of the first entry among the items of ``save``.
        only: for each item of ``save``, whether to write it; default: all.
        fallbacks: takes reasons why copies from a device are slow.
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
        else:
            _write_copies(save, numbered, options, fallbacks)


def _write_copies(
    save: _core.Save | _core.Reuse,
    entries: Sequence[tuple[int, Entry]],
    options: WriteOptions,
    fallbacks: list[str] | None,
) -> None:
    """Write the (item, entry) pairs of one device through slabs.

    On a device, the bytes are those after the work of the caller's stream.
    """
    device = entries[0][1].tensor.device
    pinned = is_accelerator(device)
    max_bytes = options.inflight_bytes(accelerator=pinned)
    if not pinned:
        max_bytes //= 2  # a tensor that is conjugated exists twice
    nbytes = slab_bytes(max_bytes, least=BLOCK_BYTES)
    total = sum(entry.nbytes for _, entry in entries)
    count = max(1, min(max_bytes // nbytes, -(-total // nbytes) + 1))
    stream = copy_stream_for(device, fallbacks)
    free = new_slabs(count, nbytes, pinned=pinned, fallbacks=fallbacks)
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
        source: torch.Tensor | None = None
        if entry.is_as_stored:
            source = flat_bytes(entry.tensor)[part.begin : part.begin + part.count]
            if part.count >= BLOCK_BYTES:
                transfer.direct.append((slab[part.at : end], source))
                continue
        if scratch is None:
            scratch = stream.scratch(slab)
        transfer.add_run(part.at, end)
        if source is not None:
            places.append(scratch[part.at : end])
            sources.append(source)
            continue
        tensor, dtype = entry.tensor, entry.dtype or entry.tensor.dtype
        if dtype == tensor.dtype and not tensor.is_conj():
            tensor = as_integers(tensor)
            dtype = tensor.dtype
        run = scratch[part.at : end].view(dtype)
        for offsets, place in unflatten(tensor.shape, part.begin // dtype.itemsize, run):
            source = narrow(tensor, offsets, place.shape).resolve_conj().resolve_neg()
            transfer.single.append((place, source))
    if places:
        transfer.grouped.append((places, sources))
    return transfer
