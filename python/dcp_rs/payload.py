"""What a rank writes: the values behind a save plan, and the way of their bytes into the data files."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_rs import _core, _torch, objects, staging
from dcp_rs._dtypes import NAMES
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.errors import CorruptDataError, PlanError, UnsafePickleError, UnsupportedError
from dcp_rs.metadata import tensor_flags
from dcp_rs.options import WriteOptions
from dcp_rs.staging import Lane, Transfer

__all__ = ["Entry", "Writes", "as_object", "collect", "dump", "refuse_meta", "why_not_raw", "write_entries"]

#: Parts begin at multiples of this in a buffer.
_ALIGNMENT = 64

#: Digests cover blocks of this many bytes, so a tensor that is written in parts is cut at multiples of it.
BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class Entry:
    """One chunk or value to write.

    Attributes:
        fqn: its name.
        data: a strided tensor on any device, or the bytes of a non-tensor value.
        shape, offsets, sizes: of the whole tensor, and of this chunk in it.
        flags: section 3.3 of the format.
        path: in the state dict, where the planner gave it.
        dtype: what the tensor is cast to while it is written; None: it stays what it is.
    """

    fqn: str
    data: torch.Tensor | bytes
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    flags: int = 0
    path: tuple[Any, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        if not isinstance(self.data, torch.Tensor):
            return len(self.data)
        return self.data.numel() * (self.dtype or self.data.dtype).itemsize

    @property
    def is_in_place(self) -> bool:
        """Whether the payload lies in host memory as it is written."""
        data = self.data
        return (
            isinstance(data, torch.Tensor)
            and data.device.type == "cpu"
            and self.dtype in (None, data.dtype)
            and data.is_contiguous()
            and not data.is_conj()
            and not data.is_neg()
        )

    def item(self) -> tuple[Any, ...]:
        """What ``_core.Save.create`` takes."""
        dtype = NAMES[self.dtype or self.data.dtype] if isinstance(self.data, torch.Tensor) else None
        return self.fqn, dtype, self.shape, self.flags, self.path, self.offsets, self.sizes, self.nbytes


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
    if type(planner).lookup_object is DefaultSavePlanner.lookup_object:
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


def dump(fqn: str, value: Any) -> bytes:
    """The bytes of a value, or of a tensor that raw bytes cannot hold. Warns of a value that will not load under ``weights_only=True``.

    Raises:
        UnsupportedError: a value that does not pickle; such a tensor does not load under ``weights_only=True`` either.
    """
    refusal = why_not_raw(value) if isinstance(value, torch.Tensor) else None
    if refusal is not None:
        return as_object(fqn, value, refusal)
    data = objects.dump_named(fqn, value)
    objects.warn_unless_loadable(fqn, value, data)
    return data


def as_object(fqn: str, tensor: torch.Tensor, refusal: str) -> bytes:
    """The tensor as ``torch.save`` bytes, if those load under ``weights_only=True``."""
    try:
        data = objects.dump(tensor)
        objects.check_loadable(fqn, data)
    except (CorruptDataError, UnsafePickleError, RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        msg = f"tensor {fqn!r} cannot be saved as raw bytes ({refusal}), nor as an object that loads with weights_only=True: {error}"
        raise UnsupportedError(msg, tensor=fqn) from error
    return data


def write_entries(save: _core.Save, entries: Sequence[Entry], options: WriteOptions, first: int = 0) -> None:
    """Writes every entry; they are the items of ``save`` from ``first``.

    What lies in host memory as it is stored is written from there, the rest through memory of bounded size.
    """
    values = [(i, entry.data) for i, entry in enumerate(entries, first) if isinstance(entry.data, bytes)]
    if values:
        save.write_values(values)
    tensors = [
        (i, entry) for i, entry in enumerate(entries, first) if isinstance(entry.data, torch.Tensor) and entry.nbytes
    ]
    in_place = [(i, entry) for i, entry in tensors if entry.is_in_place]
    if in_place:
        save.write([(i, 0, entry.data.data_ptr(), entry.nbytes) for i, entry in in_place])  # type: ignore[union-attr]
    devices: dict[torch.device, list[tuple[int, Entry]]] = {}
    host: list[tuple[int, Entry]] = []
    for i, entry in tensors:
        if entry.data.device.type != "cpu":  # type: ignore[union-attr]
            devices.setdefault(entry.data.device, []).append((i, entry))  # type: ignore[union-attr]
        elif not entry.is_in_place:
            host.append((i, entry))
    if host:
        _write_converted(save, host, options.inflight_bytes(accelerator=False))
    for device, entries_there in devices.items():
        _write_from_device(save, device, entries_there, options)


def _write_converted(save: _core.Save, entries: Sequence[tuple[int, Entry]], limit: int) -> None:
    """Writes host tensors that are cast, strided or lazily conjugated, through a buffer."""
    # Half of the limit: while a part is cast or gathered it exists twice.
    size = max(BLOCK_BYTES, limit // 2 // BLOCK_BYTES * BLOCK_BYTES)
    buffer = torch.empty(min(size, sum(_aligned(entry.nbytes) for _, entry in entries)), dtype=torch.uint8)
    base, at = buffer.data_ptr(), 0
    parts: list[tuple[int, int, int, int]] = []
    for i, entry in entries:
        if at + entry.nbytes > buffer.nbytes:
            save.write(parts)
            at, parts = 0, []
        done = 0
        for part in _raw_parts(entry, size):
            taken = 0
            while taken < part.nbytes:
                if at == buffer.nbytes:  # full of this entry alone: whole blocks
                    save.write([(i, done, base, at)])
                    done, at = done + at, 0
                length = min(part.nbytes - taken, buffer.nbytes - at)
                buffer[at : at + length] = part[taken : taken + length]
                taken, at = taken + length, at + length
        parts.append((i, done, base + at - (entry.nbytes - done), entry.nbytes - done))
        at = min(_aligned(at), buffer.nbytes)
    save.write(parts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _raw_parts(entry: Entry, limit: int) -> Iterator[torch.Tensor]:
    """The payload of a tensor, in order, as flat uint8 tensors of about ``limit`` bytes at most."""
    tensor = cast(torch.Tensor, entry.data)
    dtype = entry.dtype or tensor.dtype
    for part in _slices(tensor, limit // dtype.itemsize):
        yield _row_major(part.resolve_conj().resolve_neg().to(dtype)).view(torch.uint8)


def _slices(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Views that follow each other in row-major order, of at most ``limit`` elements."""
    if tensor.numel() <= limit:
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    if row > limit:
        for i in range(tensor.shape[0]):
            yield from _slices(tensor[i], limit)
        return
    rows = limit // row
    for i in range(0, tensor.shape[0], rows):
        yield tensor[i : i + rows]


@dataclass(slots=True)
class _Part:
    """Some bytes of a device tensor, and where they go in a slab."""

    item: int
    at: int  # first byte of the item
    source: torch.Tensor  # 1-d, uint8, on the device
    slab_at: int


def _write_from_device(
    save: _core.Save, device: torch.device, entries: Sequence[tuple[int, Entry]], options: WriteOptions
) -> None:
    """Copies down into some slabs while others are being written."""
    max_bytes = options.inflight_bytes(accelerator=True)
    nbytes = staging.slab_bytes(max_bytes, least=BLOCK_BYTES)
    total = sum(entry.nbytes for _, entry in entries)
    count = max(1, min(max_bytes // nbytes, -(-total // nbytes) + 1))
    slabs = staging.slabs.take(count, nbytes, pinned=True)
    free = list(reversed(slabs))
    lane = staging.lane_for(device)
    copying: deque[tuple[torch.Tensor, list[_Part], Any]] = deque()
    slabfuls = _slabfuls(entries, nbytes)
    try:
        while True:
            while free and (parts := next(slabfuls, None)):
                slab = free.pop()
                # The caller's stream may be making a strided part contiguous.
                lane.order_after_caller()
                copying.append((slab, parts, lane.download(slab, _transfer(slab, lane, parts))))
            if not copying:
                break
            # Half of what there is: the disk gets large writes, and the copies to the other half go on meanwhile.
            ready = [copying.popleft() for _ in range(min(len(copying), max(1, count // 2)))]
            for _, _, token in ready:
                lane.wait(token)
            save.write(
                [
                    (part.item, part.at, slab.data_ptr() + part.slab_at, part.source.nbytes)
                    for slab, parts, _ in ready
                    for part in parts
                ]
            )
            free += [slab for slab, _, _ in ready]
    finally:
        lane.order_before_caller()
        for _, _, token in copying:
            lane.wait(token)
    staging.slabs.give(slabs)


def _transfer(slab: torch.Tensor, lane: Lane, parts: Sequence[_Part]) -> Transfer:
    """The copies of the parts into the slab: the small ones are gathered on the device first."""
    transfer = Transfer()
    group: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    scratch: torch.Tensor | None = None
    for part in parts:
        begin, end = part.slab_at, part.slab_at + part.source.nbytes
        if part.source.nbytes >= BLOCK_BYTES:
            transfer.direct.append((slab[begin:end], part.source))
            continue
        if scratch is None:
            scratch = lane.scratch(slab)
        if transfer.runs and begin - transfer.runs[-1][1] < _ALIGNMENT:
            transfer.runs[-1] = (transfer.runs[-1][0], end)
        else:
            transfer.runs.append((begin, end))
        group[0].append(scratch[begin:end])
        group[1].append(part.source)
    if group[0]:
        transfer.grouped.append(group)
    return transfer


def _slabfuls(entries: Sequence[tuple[int, Entry]], slab_bytes: int) -> Iterator[list[_Part]]:
    """Cuts tensors at multiples of a block, casts them, and packs the parts into slabs."""
    parts: list[_Part] = []
    at = 0
    for item, entry in entries:
        begin = 0
        while begin < entry.nbytes:
            room = slab_bytes - at
            left = entry.nbytes - begin
            length = left if left <= room else room // BLOCK_BYTES * BLOCK_BYTES
            if length <= 0:
                yield parts
                parts, at = [], 0
                continue
            parts.append(_Part(item, begin, _bytes_of(entry, begin, begin + length), at))
            begin += length
            at += _aligned(length)
    if parts:
        yield parts


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a vector of stride 1, which a tensor of one element need not be after ``contiguous().reshape(-1)``."""
    dtype = tensor.dtype
    if dtype.itemsize == 1 and not tensor.is_contiguous():
        # Not every torch can copy its youngest dtypes, but all can copy bytes.
        tensor = tensor.view(torch.uint8)
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(dtype)


def _bytes_of(entry: Entry, begin: int, end: int) -> torch.Tensor:
    """Bytes of the elements in row-major order, on the tensor's device. Of a strided tensor, only the rows that hold them are copied."""
    tensor = cast(torch.Tensor, entry.data)
    dtype = entry.dtype or tensor.dtype
    if not tensor.is_contiguous() and tensor.dim() > 0:
        row = entry.nbytes // tensor.shape[0]
        first, last = begin // row, -(-end // row)
        tensor = tensor.narrow(0, first, last - first)
        begin, end = begin - first * row, end - first * row
    part = _row_major(tensor)[begin // dtype.itemsize : end // dtype.itemsize]
    return part.resolve_conj().resolve_neg().to(dtype).view(torch.uint8)
