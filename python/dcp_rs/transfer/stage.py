"""Staging: copies of state dicts in host memory, so that training goes on while they are saved."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _torch
from dcp_rs.errors import StateChangedError
from dcp_rs.tensors.dtypes import as_integers
from dcp_rs.tensors.memory import changes_seen, clone, flat_bytes, identity, why_not_raw
from dcp_rs.tensors.nesting import map_leaves
from dcp_rs.tensors.regions import ALIGNMENT, narrow, unflatten
from dcp_rs.transfer.buffers import BLOCK_BYTES, SLAB_BYTES, BlockPool, host_memory
from dcp_rs.transfer.copy_stream import CopyStream, Pair, Transfer, copy_stream_for, is_accelerator

#: Tensors of a device up to this size are gathered there, and copied together.
_SMALL_BYTES = 1 << 20


def stage(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state dict to host memory of its own. The original may change once this returns."""
    leaves: list[Any] = []
    map_leaves(state_dict, leaves.append)
    staging = Staging(dict(enumerate(leaves)), None)
    staging.finish()
    copies = iter(staging.values.values())
    staged: dict[str, Any] = map_leaves(state_dict, lambda _: next(copies))
    return staged


class Staging:
    """Copies of tensors and values in progress. Call :meth:`release` when they were saved.

    It copies all values but the bytes of tensors. On a device, the bytes are those after the work
    that its current stream holds now.

    Args:
        values: the tensors and values by name.
        pool: where the memory comes from; None for memory that the copies own.
        watched: raise in :meth:`finish` if a tensor changes before.

    Attributes:
        values: the copies by name. They are complete after :meth:`finish`.
    """

    def __init__(
        self, values: Mapping[Any, Any], pool: BlockPool | None, *, watched: bool = False
    ) -> None:
        self._pool = pool
        # Another thread could not write to tensors of inference mode, nor does torch detach wrapper
        # subclasses in that mode.
        with torch.inference_mode(False):
            sources: dict[Hashable, torch.Tensor] = {}
            keys: dict[Any, Hashable] = {}  # tied tensors have one
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and (raw := _raw_memory(value)) is not None:
                    keys[name] = key = identity(raw)
                    sources.setdefault(key, raw)
            places, sizes = _place(sources)
            # Before memory is pinned, which fails while a graph is captured.
            copies = {
                device: _DeviceCopies(copy_stream_for(device))
                for device in {source.device for source in sources.values() if source.numel()}
            }
            pin = min(filter(is_accelerator, copies), key=str, default=None)
            if pool is None:
                memory = [host_memory(size, pinned=pin is not None) for size in sizes]
                self._taken = []
            else:
                self._taken = pool.take(sizes, pin=pin)
                memory = [block.memory for block in self._taken]
            try:
                views: dict[Hashable, torch.Tensor] = {}  # the first over each place
                self.values = {}
                for name, value in values.items():
                    if name not in keys:
                        self.values[name] = map_leaves(value, _copied)
                        continue
                    key = keys[name]
                    view = _view(memory, places[key], sources[key])
                    views.setdefault(key, view)
                    self.values[name] = _like(value, view)
                _arrange(copies, sources, places, views, memory)
                self._copies = list(copies.values())
            except BaseException:
                self.release()
                raise
        self._versions = [
            (name, values[name], changes_seen(values[name])) for name in keys if watched
        ]

    def finish(self) -> None:
        """Copy the bytes of the tensors, and wait for all copies. Any thread may call it, once.

        Raises:
            StateChangedError: the copy is watched, and a tensor changed meanwhile.
        """
        try:
            with ExitStack() as stack:
                for of_device in self._copies:
                    stack.callback(of_device.stream.drain)
                    of_device.start()
            changed = [
                name for name, tensor, version in self._versions if changes_seen(tensor) != version
            ]
        finally:
            for of_device in self._copies:  # the traceback of an error would keep the tensors
                of_device.direct, of_device.runs = [], []
            self._copies, self._versions = [], []
        if changed:
            msg = (
                f"tensor {changed[0]!r} was changed while it was being copied: wait for "
                "future.staged.result() before anything is, by optimizer.step() or a forward pass "
                "that writes to buffers"
            )
            raise StateChangedError(msg, tensor=changed[0])

    def release(self) -> None:
        """Give the memory back for the next copy. Nothing may use this copy any more."""
        self.values, self._copies, self._versions = {}, [], []
        taken, self._taken = self._taken, []
        if self._pool is not None:
            self._pool.give(taken)


#: A block and the offset in it.
_Place = tuple[int, int]
#: Memory, and parts of it: the offset and source of each.
_Run = tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]


def _place(sources: Mapping[Hashable, torch.Tensor]) -> tuple[dict[Hashable, _Place], list[int]]:
    """Return a place in blocks for each tensor, and the sizes of the blocks.

    The small tensors of a device lie side by side.
    """
    places: dict[Hashable, _Place] = {}
    sizes: list[int] = []
    order: Iterable[tuple[Hashable, torch.Tensor]] = sources.items()
    if any(is_accelerator(source.device) for source in sources.values()):
        order = sorted(order, key=lambda each: (str(each[1].device), each[1].nbytes > _SMALL_BYTES))
    for key, source in order:
        nbytes = source.nbytes
        if nbytes == 0:
            places[key] = 0, 0
            continue
        begin = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT if sizes else 0
        if not sizes or begin + nbytes > BLOCK_BYTES:
            sizes.append(0)
            begin = 0
        places[key] = len(sizes) - 1, begin
        sizes[-1] = begin + nbytes
    return places, sizes


@dataclass
class _DeviceCopies:
    """Copies of the tensors of one device.

    Attributes:
        stream: where they run.
        direct: (destination, source) of large tensors.
        runs: small tensors side by side, and then pieces of large ones that are strided.
        last: where the last run of small tensors begins.
    """

    stream: CopyStream
    direct: list[Pair] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)
    last: _Place = 0, 0

    def start(self) -> None:
        """Start all copies."""
        for memory, parts in self.runs:
            scratch = self.stream.scratch(memory)
            transfer = Transfer(runs=[(0, memory.numel())])
            places: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for at, source in parts:
                place = scratch[at : at + source.nbytes]
                if source.is_contiguous():  # as bytes, so that one kernel copies every dtype
                    places.append(place)
                    sources.append(flat_bytes(source))
                else:
                    transfer.single.append((place.view(source.dtype).view(source.shape), source))
            if places:
                transfer.grouped.append((places, sources))
            self.stream.download(memory, transfer)
        if self.direct:
            targets, sources = map(list, zip(*self.direct, strict=True))
            self.stream.download(targets[0], Transfer(grouped=[(targets, sources)]))


def _arrange(
    copies: Mapping[torch.device, _DeviceCopies],
    sources: Mapping[Hashable, torch.Tensor],
    places: Mapping[Hashable, _Place],
    views: Mapping[Hashable, torch.Tensor],
    memory: Sequence[torch.Tensor],
) -> None:
    """Add the copies of tensors to their places. They wait for the present work of the caller."""
    with torch.no_grad():
        for key, (block, begin) in places.items():
            source = sources[key]
            if not source.numel():
                continue
            of_device = copies[source.device]
            # Conjugated in the order of the caller's stream: on the host it would come before the
            # bytes.
            raw = as_integers(source.resolve_conj().resolve_neg())
            end = begin + source.nbytes
            is_large = source.nbytes > _SMALL_BYTES
            if not is_accelerator(source.device) or (is_large and raw.is_contiguous()):
                of_device.direct.append((as_integers(views[key]), raw))
                continue
            if is_large:
                of_device.runs += _strided_runs(memory[block][begin:end], raw)
                continue
            last, first = of_device.last
            if of_device.runs and block == last and end <= first + SLAB_BYTES:
                _, parts = of_device.runs[-1]
                of_device.runs[-1] = (memory[block][first:end], parts)
                parts.append((begin - first, raw))
                continue
            of_device.last = block, begin
            of_device.runs.append((memory[block][begin:end], [(0, raw)]))
    for of_device in copies.values():
        of_device.stream.reserve(max((run.numel() for run, _ in of_device.runs), default=0))
        of_device.stream.order_after_caller()


def _strided_runs(memory: torch.Tensor, source: torch.Tensor) -> Iterator[_Run]:
    """Yield runs of one slab. Whole, the tensor would be made contiguous on the device."""
    for begin in range(0, memory.numel(), SLAB_BYTES):
        run = memory[begin : begin + SLAB_BYTES]
        parts: list[tuple[int, torch.Tensor]] = []
        at = 0
        for offsets, place in unflatten(
            source.shape, begin // source.itemsize, run.view(source.dtype)
        ):
            parts.append((at, narrow(source, offsets, place.shape)))
            at += place.nbytes
        yield run, parts


def _raw_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the local memory of a tensor, or None if its own class must copy it."""
    local = _torch.wait_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    is_raw = (
        type(local) in _torch.PLAIN_TYPES
        and local.device.type != "meta"
        and why_not_raw(local) is None
    )
    return local.detach() if is_raw else None


def _view(memory: Sequence[torch.Tensor], place: _Place, source: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``source`` over a place in blocks."""
    if not source.numel():
        return torch.empty(source.shape, dtype=source.dtype, device="cpu")
    block, begin = place
    view: torch.Tensor = torch.empty(0, dtype=source.dtype, device="cpu")
    # A storage of its own, because torch.save writes the whole storage of a tensor inside a value.
    storage = memory[block].untyped_storage()[begin : begin + source.nbytes]
    return view.set_(storage, 0, source.shape)  # type: ignore[call-overload, no-any-return]


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the kind of another one, over other local memory."""
    _torch.copy_place_in_whole(tensor, local)
    if isinstance(tensor, DTensor):
        spec = _torch.spec_of(tensor)
        return _torch.dtensor_of(local, spec, requires_grad=tensor.requires_grad)
    return local.requires_grad_() if tensor.requires_grad else local


def _copied(value: Any) -> Any:
    """Return the copy of a leaf, which training cannot change."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if isinstance(value, ShardedTensor):
        return value.to("cpu", copy=True)
    copied = clone(value, to_host=True)
    return copied.requires_grad_() if copied is not value and value.requires_grad else copied
