"""What a rank writes: the values behind a save plan, and the way of their bytes into the data files."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_rs import _core, _torch, objects, staging
from dcp_rs._dtypes import NAMES
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.errors import CorruptDataError, PlanError, UnsafePickleError, UnsupportedError
from dcp_rs.metadata import tensor_flags
from dcp_rs.options import WriteOptions
from dcp_rs.staging import Lane, Transfer

__all__ = ["Entry", "as_object", "collect", "why_not_raw", "write_entries"]

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
    """

    fqn: str
    data: torch.Tensor | bytes
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    flags: int = 0
    path: tuple[Any, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.data.nbytes if isinstance(self.data, torch.Tensor) else len(self.data)

    def item(self) -> tuple[Any, ...]:
        """What ``_core.Save.create`` takes."""
        dtype = NAMES[self.data.dtype] if isinstance(self.data, torch.Tensor) else None
        return self.fqn, dtype, self.shape, self.flags, self.path, self.offsets, self.sizes, self.nbytes


def collect(plan: SavePlan, planner: SavePlanner) -> list[Entry]:
    """Resolves every item of the plan. Tensors are not copied here.

    Raises:
        UnsupportedError: a value that the format cannot hold.
        PlanError: a tensor has another shape than the plan says.
    """
    paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    return [_entry(item, planner.resolve_data(item), paths.get(item.index.fqn)) for item in plan.items]


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
    if tensor.device.type == "meta":  # torch.save would take it, and store nothing
        msg = f"tensor {fqn!r} is on the meta device: there is nothing to save"
        raise UnsupportedError(msg, tensor=fqn)
    refusal = why_not_raw(tensor)
    if refusal is not None:
        return Entry(fqn, as_object(fqn, tensor, refusal), path=path)
    chunk = item.tensor_data.chunk
    if tuple(tensor.shape) != tuple(chunk.sizes):
        msg = f"tensor {fqn!r}: the planner resolved {tuple(tensor.shape)} for a chunk of {tuple(chunk.sizes)}"
        raise PlanError(msg, tensor=fqn)
    return Entry(
        fqn,
        tensor.resolve_conj().resolve_neg(),
        shape=tuple(item.tensor_data.size),
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        flags=tensor_flags(item.tensor_data.properties),
        path=path,
    )


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


def as_object(fqn: str, tensor: torch.Tensor, refusal: str) -> bytes:
    """The tensor as ``torch.save`` bytes, if those load under ``weights_only=True``."""
    try:
        data = objects.dump(tensor)
        objects.check_loadable(fqn, data)
    except (CorruptDataError, UnsafePickleError, RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        msg = f"tensor {fqn!r} cannot be saved as raw bytes ({refusal}), nor as an object that loads with weights_only=True: {error}"
        raise UnsupportedError(msg, tensor=fqn) from error
    return data


def write_entries(save: _core.Save, entries: Sequence[Entry], options: WriteOptions) -> None:
    """Writes every entry: from where it is, if it is contiguous in host memory, or else through memory of bounded size."""
    in_place: list[tuple[int, Any]] = []
    devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    strided: list[tuple[int, torch.Tensor]] = []
    for i, entry in enumerate(entries):
        if not isinstance(entry.data, torch.Tensor):
            in_place.append((i, torch.frombuffer(bytearray(entry.data), dtype=torch.uint8) if entry.data else None))
        elif entry.data.device.type != "cpu":
            devices.setdefault(entry.data.device, []).append((i, entry.data))
        elif entry.data.is_contiguous():
            in_place.append((i, entry.data))
        else:
            strided.append((i, entry.data))
    save.write([(i, 0, data.data_ptr(), data.nbytes) for i, data in in_place if data is not None and data.nbytes])
    for batch in _batches(strided, options.inflight_bytes(accelerator=False)):
        copies = [(i, tensor.contiguous()) for i, tensor in batch]
        save.write([(i, 0, copy.data_ptr(), copy.nbytes) for i, copy in copies if copy.nbytes])
    for device, tensors in devices.items():
        _write_from_device(save, device, tensors, options)


def _batches(items: Sequence[tuple[int, torch.Tensor]], limit: int) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Groups of at most ``limit`` bytes, but never less than one tensor."""
    batch: list[tuple[int, torch.Tensor]] = []
    total = 0
    for item in items:
        if batch and total + item[1].nbytes > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += item[1].nbytes
    if batch:
        yield batch


@dataclass(slots=True)
class _Part:
    """Some bytes of a device tensor, and where they go in a slab."""

    item: int
    at: int  # first byte of the item
    source: torch.Tensor  # 1-d, uint8, on the device
    slab_at: int


def _write_from_device(
    save: _core.Save, device: torch.device, tensors: Sequence[tuple[int, torch.Tensor]], options: WriteOptions
) -> None:
    """Copies down into some slabs while others are being written."""
    max_bytes = options.inflight_bytes(accelerator=True)
    nbytes = staging.slab_bytes(max_bytes, least=BLOCK_BYTES)
    total = sum(tensor.nbytes for _, tensor in tensors)
    count = max(1, min(max_bytes // nbytes, -(-total // nbytes) + 1))
    slabs = staging.slabs.take(count, nbytes, pinned=True)
    free = list(reversed(slabs))
    lane = staging.lane_for(device)
    copying: deque[tuple[torch.Tensor, list[_Part], Any]] = deque()
    slabfuls = _slabfuls(tensors, nbytes)
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


_ALIGNMENT = 64


def _slabfuls(tensors: Sequence[tuple[int, torch.Tensor]], slab_bytes: int) -> Iterator[list[_Part]]:
    """Cuts tensors at multiples of a block, and packs the parts into slabs."""
    parts: list[_Part] = []
    at = 0
    for item, tensor in tensors:
        begin = 0
        while begin < tensor.nbytes:
            room = slab_bytes - at
            left = tensor.nbytes - begin
            length = left if left <= room else room // BLOCK_BYTES * BLOCK_BYTES
            if length <= 0:
                yield parts
                parts, at = [], 0
                continue
            parts.append(_Part(item, begin, _bytes_of(tensor, begin, begin + length), at))
            begin += length
            at += -(-length // _ALIGNMENT) * _ALIGNMENT
    if parts:
        yield parts


def _bytes_of(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Bytes of the elements in row-major order, on the tensor's device. Of a strided tensor, only the rows that hold them are copied."""
    if not tensor.is_contiguous() and tensor.dim() > 0:
        row = tensor.nbytes // tensor.shape[0]
        first, last = begin // row, -(-end // row)
        tensor = tensor.narrow(0, first, last - first).contiguous()
        begin, end = begin - first * row, end - first * row
    return tensor.reshape(-1).view(torch.uint8)[begin:end]
