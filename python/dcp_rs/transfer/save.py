"""What a rank writes: values as bytes, tensors from where they are, and their way into the data files.

What does not lie in host memory as it is stored is cut into parts, which fit memory of bounded
size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from dcp_rs import _core, _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.errors import CorruptDataError, UnsafePickleError, UnsupportedError
from dcp_rs.options import WriteOptions
from dcp_rs.tensors import pickles
from dcp_rs.tensors.dtypes import AS_INTEGERS, NAMES
from dcp_rs.tensors.memory import check_made
from dcp_rs.tensors.regions import ALIGNMENT, cut, narrow, rectangles
from dcp_rs.transfer import slabs
from dcp_rs.transfer.copy_stream import CopyStream, Transfer, copy_stream_for

__all__ = [
    "BLOCK_BYTES",
    "Entry",
    "as_object",
    "dump",
    "refuse_meta",
    "turns",
    "why_not_raw",
    "write_entries",
]

#: Digests cover blocks of this many bytes, so a tensor that is written in parts is cut at multiples
#: of it.
BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class Entry:
    """One chunk or value to write.

    Attributes:
        fqn: its name.
        data: a strided tensor on any device, or the bytes of a non-tensor value.
        shape, offsets, sizes: of the whole tensor, and of this chunk in it.
        flags: section 3.3 of the format.
        path, position: in the state dict, where the planner gave them.
        dtype: what the tensor is cast to while it is written; None: it stays what it is.
    """

    fqn: str
    data: torch.Tensor | bytes
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    flags: int = 0
    path: tuple[Any, ...] | None = None
    position: int | None = None
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        if not isinstance(self.data, torch.Tensor):
            return len(self.data)
        return self.data.numel() * (self.dtype or self.data.dtype).itemsize

    @property
    def is_as_stored(self) -> bool:
        """Whether the payload lies in memory, of whichever device, as it is written."""
        data = self.data
        return isinstance(data, bytes) or (
            self.dtype in (None, data.dtype)
            and data.is_contiguous()
            and not data.is_conj()
            and not data.is_neg()
        )

    def head(self, nbytes: int) -> Entry:
        """The first ``nbytes`` of a tensor's payload, or all of it where there is no more; a value as it is."""
        data = self.data
        if not isinstance(data, torch.Tensor) or self.nbytes <= nbytes:
            return self
        count = nbytes // (self.dtype or data.dtype).itemsize
        while data.dim() > 1 and data[0].numel() >= count:
            data = data[0]
        rows = -(-count // max(1, data[0].numel()))
        return replace(self, data=data[:rows].reshape(-1)[:count])

    def item(self) -> _core.SaveItem:
        """As the engine has it."""
        dtype = (
            NAMES[self.dtype or self.data.dtype] if isinstance(self.data, torch.Tensor) else None
        )
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
    """Raises for a tensor on the meta device: torch.save would take it, and store nothing."""
    if tensor.device.type == "meta":
        msg = f"tensor {fqn!r} is on the meta device: there is nothing to save"
        raise UnsupportedError(msg, tensor=fqn)


def why_not_raw(tensor: torch.Tensor) -> str | None:
    """Why raw bytes cannot hold the tensor, if they cannot."""
    if tensor.is_quantized:
        return "it is quantized"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"its layout is {tensor.layout}"
    if _torch.is_wrapper_subclass(tensor) or not _torch.has_memory(tensor):
        kind = type(tensor)
        return "its memory has been freed" if kind in PLAIN_TYPES else f"it is a {kind.__name__}"
    if tensor.dtype not in NAMES:
        return f"its dtype is {tensor.dtype}"
    return None


def dump(fqn: str, value: Any, *, strict: bool) -> bytes:
    """The bytes of a value, or of a tensor that raw bytes cannot hold. Warns of a value that will not load under ``weights_only=True``.

    Raises:
        UnsafePickleError: such a value, with ``strict``.
        UnsupportedError: a value that does not pickle; such a tensor does not load under
            ``weights_only=True`` either.
    """
    refusal = why_not_raw(value) if isinstance(value, torch.Tensor) else None
    if refusal is not None:
        return as_object(fqn, value, refusal)
    data = pickles.dump_named(fqn, value)
    pickles.warn_unless_loadable(fqn, value, data, strict=strict)
    return data


def as_object(fqn: str, tensor: torch.Tensor, refusal: str) -> bytes:
    """The tensor as ``torch.save`` bytes, if those load under ``weights_only=True``."""
    try:
        data = pickles.dump(tensor)
        pickles.check_loadable(fqn, data)
    except (
        *(
            CorruptDataError,
            UnsafePickleError,
            RuntimeError,
            NotImplementedError,
            TypeError,
            AttributeError,
        ),
        KeyError,  # of a dtype that torch.save does not know
    ) as error:
        msg = f"tensor {fqn!r} cannot be saved as raw bytes ({refusal}), nor as an object that loads with weights_only=True: {error}"
        raise UnsupportedError(msg, tensor=fqn) from error
    return data


#: What is written first, and what then; plain tensors were before.
_VALUES, _IN_PLACE, _CONVERTED, _DEVICES = 1, 2, 3, 4


def turns(entries: Sequence[Entry]) -> list[int]:
    """For each entry, in which turn :func:`write_entries` writes it, from 1 on: values, what lies in host memory as it is stored, what does not, each device."""
    devices: dict[torch.device, int] = {}
    found = []
    for entry in entries:
        if isinstance(entry.data, bytes):
            found.append(_VALUES)
        elif entry.data.device.type != "cpu":
            found.append(devices.setdefault(entry.data.device, _DEVICES + len(devices)))
        else:
            found.append(_IN_PLACE if entry.is_as_stored else _CONVERTED)
    return found


def write_entries(
    save: _core.Save | _core.Reuse,
    entries: Sequence[Entry],
    options: WriteOptions,
    first: int = 0,
    *,
    only: Sequence[bool] | None = None,
) -> None:
    """Writes entries, or has them compared; they are the items of ``save`` from ``first``.

    What lies in host memory as it is stored is written from there, the rest through memory of
    bounded size. ``only``, for each item of the save: whether to write it; default: all.
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
                [_core.Part(i, 0, entry.data.data_ptr(), entry.nbytes) for i, entry in numbered]
            )  # type: ignore[union-attr]
        elif turn == _CONVERTED:
            _write_converted(save, numbered, options.inflight_bytes(accelerator=False))
        else:
            _write_from_device(save, numbered[0][1].data.device, numbered, options)  # type: ignore[union-attr]


def _write_converted(
    save: _core.Save | _core.Reuse, entries: Sequence[tuple[int, Entry]], limit: int
) -> None:
    """Writes host tensors that are cast, strided or lazily conjugated, through a buffer."""
    # Half of the limit: what is conjugated exists twice.
    size = max(BLOCK_BYTES, limit // 2 // BLOCK_BYTES * BLOCK_BYTES)
    nbytes = min(size, sum(entry.nbytes + ALIGNMENT for _, entry in entries))
    buffer = check_made(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    for parts in pack(entries, buffer.nbytes):
        for part in parts:
            for place, source in gathered(part, buffer[part.at : part.stop]):
                place.copy_(source)
        save.write([part.write_from(buffer.data_ptr()) for part in parts])


def _write_from_device(
    save: _core.Save | _core.Reuse,
    device: torch.device,
    entries: Sequence[tuple[int, Entry]],
    options: WriteOptions,
) -> None:
    """Writes tensors of one device: (item of ``save``, entry) each. They are those that the caller's current stream makes."""
    max_bytes = options.inflight_bytes(accelerator=True)
    nbytes = slabs.slab_bytes(max_bytes, least=BLOCK_BYTES)
    total = sum(entry.nbytes for _, entry in entries)
    count = max(1, min(max_bytes // nbytes, -(-total // nbytes) + 1))
    taken = slabs.kept.take(count, nbytes, pinned=True)
    free = list(reversed(taken))
    stream = copy_stream_for(device)
    copying: deque[tuple[torch.Tensor, list[Part], Transfer, Any]] = deque()
    filled = pack(entries, nbytes)
    try:
        while True:
            while free and (parts := next(filled, None)):
                slab = free.pop()
                transfer = _transfer(slab, stream, parts)
                # It may read what the caller's stream is still conjugating. Until it is done,
                # somebody has to keep that.
                stream.order_after_caller()
                copying.append((slab, parts, transfer, stream.download(slab, transfer)))
            if not copying:
                break
            # Half of what there is: the disk gets large writes, and the copies to the other half go
            # on meanwhile.
            ready = [copying.popleft() for _ in range(min(len(copying), max(1, count // 2)))]
            for *_, token in ready:
                stream.wait(token)
            save.write(
                [part.write_from(slab.data_ptr()) for slab, parts, *_ in ready for part in parts]
            )
            free += [slab for slab, *_ in ready]
    finally:
        stream.order_before_caller()
        for *_, token in copying:
            stream.wait(token)
    slabs.kept.give(taken)


def _transfer(slab: torch.Tensor, stream: CopyStream, parts: Sequence[Part]) -> Transfer:
    """The copies of the parts into the slab.

    What lies on the device as it is written comes straight, if it is large. The rest is gathered in
    the scratch memory first, where it is cast as well: that takes no other memory, be the tensor
    strided as it may.
    """
    transfer = Transfer()
    together: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    scratch: torch.Tensor | None = None
    for part in parts:
        begin, end = part.at, part.stop
        whole = flat(part.entry)
        if whole is not None and end - begin >= BLOCK_BYTES:
            transfer.direct.append((slab[begin:end], whole[part.begin : part.end]))
            continue
        if scratch is None:
            scratch = stream.scratch(slab)
        if transfer.runs and begin - transfer.runs[-1][1] < ALIGNMENT:
            transfer.runs[-1] = (transfer.runs[-1][0], end)
        else:
            transfer.runs.append((begin, end))
        if whole is not None:
            together[0].append(scratch[begin:end])
            together[1].append(whole[part.begin : part.end])
        else:
            transfer.single += gathered(part, scratch[begin:end])
    if together[0]:
        transfer.grouped.append(together)
    return transfer


@dataclass(slots=True)
class Part:
    """Bytes of the payload of a tensor, and where they go.

    Attributes:
        item: the number of the entry in its save.
        entry: whose payload it is.
        begin, end: bytes of the payload.
        at: where the first goes, in memory that holds several parts.
    """

    item: int
    entry: Entry
    begin: int
    end: int
    at: int

    @property
    def stop(self) -> int:
        """Where the last has gone."""
        return self.at + self.end - self.begin

    def write_from(self, address: int) -> _core.Part:
        """What ``_core.Save.write`` takes, with the memory at ``address``."""
        return _core.Part(self.item, self.begin, address + self.at, self.end - self.begin)


def pack(entries: Sequence[tuple[int, Entry]], max_bytes: int) -> Iterator[list[Part]]:
    """Cuts tensors at multiples of a block, and packs the parts: so many as ``max_bytes`` hold, which is a block at least."""
    for cuts in cut(((entry.nbytes, 1, BLOCK_BYTES) for _, entry in entries), max_bytes):
        yield [
            Part(*entries[part.number], part.begin, part.begin + part.count, part.at)
            for part in cuts
        ]


def flat(entry: Entry) -> torch.Tensor | None:
    """All bytes of a tensor that lies in memory as it is written; None: it does not."""
    if not entry.is_as_stored:
        return None
    tensor = cast(torch.Tensor, entry.data)
    # Not view(-1): a tensor of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def gathered(part: Part, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(destination, source) for each rectangle of the part: together its elements in row-major order, in one run of memory."""
    tensor = cast(torch.Tensor, part.entry.data)
    dtype = part.entry.dtype or tensor.dtype
    if dtype == tensor.dtype and dtype in AS_INTEGERS and not tensor.is_conj():
        dtype = AS_INTEGERS[dtype]
        tensor = tensor.view(dtype)
    elements, at = memory.view(dtype), 0
    begin, end = part.begin // dtype.itemsize, part.end // dtype.itemsize
    for offsets, sizes in rectangles(tensor.shape, begin, end - begin):
        source = narrow(tensor, offsets, sizes).resolve_conj().resolve_neg()
        yield elements[at : at + source.numel()].view(source.shape), source
        at += source.numel()
