"""What a rank writes: the values behind a save plan, and the way of their bytes into the data files."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_rs import _core, _torch, objects
from dcp_rs._dtypes import NAMES
from dcp_rs.errors import CorruptDataError, PlanError, UnsafePickleError, UnsupportedError
from dcp_rs.metadata import tensor_flags
from dcp_rs.options import WriteOptions
from dcp_rs.staging import StagingRing

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
        return "its memory has been freed" if kind in _torch.PLAIN_TYPES else f"it is a {kind.__name__}"
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
    """Copies down into one slab while another is being written."""
    ring = StagingRing.for_device(device, options.inflight_bytes(accelerator=True), align=BLOCK_BYTES)
    with ring:
        ready: tuple[torch.Tensor, list[_Part], Any] | None = None
        for parts in _slabfuls(tensors, ring.slab_bytes):
            slab = ring.acquire()
            token = ring.copy_in(slab, [(slab[p.slab_at : p.slab_at + p.source.nbytes], p.source) for p in parts])
            if ready is not None:
                _write_slab(save, ring, *ready)
            ready = slab, parts, token
        if ready is not None:
            _write_slab(save, ring, *ready)


def _write_slab(save: _core.Save, ring: StagingRing, slab: torch.Tensor, parts: list[_Part], token: Any) -> None:
    ring.wait(token)
    base = slab.data_ptr()
    save.write([(p.item, p.at, base + p.slab_at, p.source.nbytes) for p in parts])


def _slabfuls(tensors: Sequence[tuple[int, torch.Tensor]], slab_bytes: int) -> Iterator[list[_Part]]:
    """Cuts tensors at multiples of a block, and packs the parts into slabs."""
    parts: list[_Part] = []
    at = 0
    for item, tensor in tensors:
        if tensor.numel() == 0:
            continue
        # Not reshape(-1): a tensor of one element keeps whatever stride it has, and could not be viewed as bytes.
        flat = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        begin = 0
        while begin < flat.nbytes:
            room = slab_bytes - at
            length = min(
                flat.nbytes - begin, room if begin + room >= flat.nbytes else room // BLOCK_BYTES * BLOCK_BYTES
            )
            if length == 0:
                yield parts
                parts, at = [], 0
                continue
            parts.append(_Part(item, begin, flat[begin : begin + length], at))
            begin += length
            at += -(-length // 64) * 64
    if parts:
        yield parts
