"""Loads: bytes go in place where they fit unchanged, and through slabs otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _core, _torch
from dcp_rs._progress import Counts
from dcp_rs.errors import CorruptDataError, PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.memory import (
    check_fillable,
    is_opaque,
    is_plain,
    memory_of,
    require_real_memory,
    space_of,
)
from dcp_rs.transfer.target import Target, groups
from dcp_rs.transfer.upload import upload


@dataclass
class Load:
    """All targets of one load.

    CPU tensors of the stored dtype are filled in place, strided ones too. Other tensors are filled
    by copies from slabs of host memory, which convert device and dtype.

    Targets that share memory end with the values that filling one after another leaves. The order
    is that of stock DCP's readers: file by file as the plan first needs them, and within a file as
    planned.

    Attributes:
        index: the checkpoint.
        options: how to read.
        batch: the batch, which may have targets already.
        counts: counters for the bytes.
        common: the sections of the checkpoint that other ranks read, too.
    """

    index: _core.Index
    options: ReadOptions
    batch: _core.Batch
    counts: Counts
    common: _core.SharedSections | None = None
    #: The targets that the engine does not fill in place.
    _device_targets: list[Target] = field(default_factory=list)
    #: Targets that share memory are filled one pass after another.
    _passes: int = 0

    def add(self, targets: Iterable[Target]) -> None:
        """Add targets.

        Raises:
            PlanError: no chunk holds a part of a region; or a tensor has no memory, or elements
                that share bytes.
            UnsupportedError: a tensor is not strided.
        """
        direct: list[Target] = []
        for target in targets:
            if is_plain(target.tensor, target.dtype):
                direct.append(target)
            else:
                self._add_device_target(target)
        self.batch.add(direct)

    def _add_device_target(self, target: Target) -> None:
        check_fillable(target.name, target.tensor)
        number = len(self._device_targets)
        self._device_targets.append(target)
        if is_opaque(target.tensor):
            self.batch.add_opaque(number, target, memory_of(target.tensor))
        else:
            space = space_of(target.tensor.device)
            self.batch.add_device_target(number, target, space, there=True)

    def arrange(self) -> None:
        """Arrange the targets after the last one was added."""
        self._passes = self.batch.arrange()
        if self.common is not None:
            self.batch.divide(self.common)

    def run(self) -> None:
        """Fill the targets."""
        tell = None if self.counts.watch is None else self.counts.tell
        for number in range(self._passes):
            self.counts.add(self.batch.read(number, progress=tell, **self.options.engine()))
            if regions := self.batch.slab_regions(number):
                self._upload(regions, tell)
            if opaque := self.batch.opaque(number):
                targets = [self._device_targets[i] for i in opaque]
                _fill_opaque(self.index, targets, self.options, self.counts)

    def _upload(self, regions: Sequence[int], tell: Callable[[int], None] | None) -> None:
        """Fill targets through slabs."""
        while True:
            try:
                found = upload(self.batch, regions, self._device_targets, self.options, tell)
            except (CorruptDataError, OSError) as error:
                # A file of a tier that is damaged or cannot be read is read from elsewhere.
                path = error.filename if isinstance(error, OSError) else error.path
                if path is None or not self.index.pass_over(path, str(error)):
                    raise
            else:
                self.counts.add(found)
                return


def fill(
    index: _core.Index,
    targets: Sequence[Target],
    options: ReadOptions,
    counts: Counts | None = None,
    common: _core.SharedSections | None = None,
) -> None:
    """Fill targets from an index. It raises what :meth:`Load.add` raises."""
    counts = Counts() if counts is None else counts
    load = Load(index, options, _core.Batch(index), counts, common)
    load.add(targets)
    load.arrange()
    load.run()


def read_values(
    index: _core.Index, chunks: Sequence[int], options: ReadOptions, counts: Counts
) -> list[bytes]:
    """Return the bytes of values, and count them."""
    stored = index.read_bytes(chunks, **options.engine())
    nbytes = sum(map(len, stored))
    counts.expected += nbytes
    counts.add(Counts(nbytes, nbytes))
    return stored


def _fill_opaque(
    index: _core.Index, targets: Sequence[Target], options: ReadOptions, counts: Counts
) -> None:
    """Fill tensors that only their class can access, by ``copy_`` from host memory."""
    sizes = ((target, target.nbytes) for target in targets)
    for group in groups(sizes, options.inflight_bytes(accelerator=False)):
        stored = [
            replace(
                target,
                tensor=require_real_memory(
                    torch.empty(target.tensor.shape, dtype=target.dtype, device="cpu")
                ),
            )
            for target in group
        ]
        fill(index, stored, options, counts)
        for target, values in zip(group, stored, strict=True):
            copy_value(target.name, target.tensor, values.tensor)


def copy_value(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Fill a tensor by the ``copy_`` of its class.

    Raises:
        PlanError: it does not take the value.
    """
    try:
        with torch.no_grad():
            _copy(tensor, value)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        msg = (
            f"tensor {name!r}: copy_ of its class {_class_of(tensor)} does not take what is "
            f"stored ({_class_of(value)}): {error}"
        )
        raise PlanError(msg, tensor=name) from error


def _copy(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy into the memory of a tensor, which a model may share: a state dict holds views.

    ``copy_`` gives quantized tensors other scales, and tensors in COO other memory. That changes
    the view alone.
    """
    if tensor.is_quantized and value.is_quantized and _scales(tensor) != _scales(value):
        raise RuntimeError("the scales differ, and a load cannot change them in place")
    if not tensor.layout == value.layout == torch.sparse_coo:
        tensor.copy_(value)
        return
    value = value.coalesce()
    if not tensor.is_coalesced() or tensor.values().shape != value.values().shape:
        raise RuntimeError("the numbers of elements differ, or they are not coalesced")
    tensor.indices().copy_(value.indices())
    tensor.values().copy_(value.values())


def _scales(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how a quantized tensor is scaled."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()
    of_channels = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return tensor.qscheme(), tensor.q_per_channel_axis(), *(one.tolist() for one in of_channels)


def as_tensor(name: str, tensor: torch.Tensor, value: Any) -> torch.Tensor:
    """Return a stored value as a tensor that may fill ``tensor``. Nothing is written.

    Quantized and sparse tensors, and those of classes with a ``copy_`` of their own, are stored as
    values. So are numbers, which fill a tensor without dimensions if its dtype can hold them.

    Raises:
        PlanError: it is something else; or this rank holds only a shard of ``tensor``.
    """
    if isinstance(value, bool | int | float) and tensor.shape == ():
        number = torch.tensor(value, device="cpu")
        if torch.can_cast(number.dtype, tensor.dtype):
            return number.to(tensor.dtype)
    if not isinstance(value, torch.Tensor):
        what = f"of class {type(value).__name__} in the checkpoint"
    elif isinstance(tensor, DTensor | ShardedTensor) or _torch.is_shard(tensor):
        what = f"a whole of class {_class_of(value)} in the checkpoint, which cannot be divided"
    elif value.is_nested == tensor.is_nested and (value.is_nested or value.shape == tensor.shape):
        return value
    else:
        what = f"of shape {tuple(value.shape)} ({_class_of(value)}) in the checkpoint"
    msg = f"{name!r} is a tensor ({_class_of(tensor)}) in the state dict, and {what}"
    raise PlanError(msg, tensor=name)


def fill_tensor(name: str, tensor: Any, value: Any) -> bool:
    """Fill a tensor from a stored value. Return false if it is no tensor, or has no memory.

    Raises:
        PlanError: the value cannot fill it.
    """
    if not isinstance(tensor, torch.Tensor):
        return False
    found = as_tensor(name, tensor, value)
    if not tensor.is_meta:
        copy_value(name, tensor, found)
    return not tensor.is_meta


def _class_of(tensor: torch.Tensor) -> str:
    """Return the class of a tensor, with its dtype or layout if these make it special."""
    name = type(tensor).__name__
    if tensor.layout != torch.strided:
        return f"{name} with layout {tensor.layout}"
    return f"{name} of {tensor.dtype}" if tensor.is_quantized else name
