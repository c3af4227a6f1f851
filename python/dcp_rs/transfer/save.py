"""What a rank writes: the values behind a save plan, and the way of their bytes into the data files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_rs import _core, _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.dcp.metadata import tensor_flags
from dcp_rs.errors import CorruptDataError, PlanError, UnsafePickleError, UnsupportedError
from dcp_rs.options import WriteOptions
from dcp_rs.tensors import objects
from dcp_rs.tensors.dtypes import NAMES
from dcp_rs.transfer.download import write_from_device
from dcp_rs.transfer.parts import ALIGNMENT, BLOCK_BYTES, gathered, pack

__all__ = ["Entry", "Writes", "as_object", "collect", "dump", "refuse_meta", "why_not_raw", "write_entries"]


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
        write_from_device(save, device, entries_there, options)


def _write_converted(save: _core.Save, entries: Sequence[tuple[int, Entry]], limit: int) -> None:
    """Writes host tensors that are cast, strided or lazily conjugated, through a buffer."""
    # Half of the limit: what is conjugated exists twice.
    size = max(BLOCK_BYTES, limit // 2 // BLOCK_BYTES * BLOCK_BYTES)
    buffer = torch.empty(min(size, sum(entry.nbytes + ALIGNMENT for _, entry in entries)), dtype=torch.uint8)
    for parts in pack(entries, buffer.nbytes):
        for part in parts:
            for place, source in gathered(part, buffer[part.at : part.stop]):
                place.copy_(source)
        save.write([part.write_from(buffer.data_ptr()) for part in parts])
