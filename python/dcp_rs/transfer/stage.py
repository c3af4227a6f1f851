"""Staging: copies of state dicts in host memory, so that training goes on while they are saved."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _torch
from dcp_rs.errors import StateChangedError
from dcp_rs.tensors.dtypes import as_integers
from dcp_rs.tensors.memory import changes_seen, clone, identity, why_not_raw
from dcp_rs.tensors.nesting import StandIn, map_leaves
from dcp_rs.tensors.pickles import IMMUTABLE
from dcp_rs.tensors.regions import ALIGNMENT
from dcp_rs.transfer.buffers import BLOCK_BYTES, Block, BlockPool, shared_blocks
from dcp_rs.transfer.copy_stream import Transfer, copy_stream_for

__all__ = ["HostStager", "Staging"]


class HostStager:
    """A stager that copies state dicts to host memory, pinned for tensors of an accelerator.

    The memory stays after the save, for the next copy of about the same size.
    :func:`dcp_rs.release_pinned_memory` frees it.

    Args:
        cache: keep memory for this stager alone. A copy then waits for the save of the previous
            copy, so that there is one at a time. :meth:`release` frees the memory.

    Example:
        ```python
        stager = dcp_rs.HostStager(cache=True)  # once; the next save copies to the same memory
        future = dcp_rs.async_save({"model": model}, "ckpt", stager=stager)
        future.result()
        ```
    """

    def __init__(self, *, cache: bool = False) -> None:
        self.cache = cache
        self._pool = BlockPool() if cache else shared_blocks
        self._last: Staging | None = None

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a state dict to host memory. The original may change once this returns.

        Args:
            state_dict: the state dict to copy, with its dicts, lists and values.

        Returns:
            The copy.

        Example:
            ```python
            copy = dcp_rs.HostStager().stage({"model": model.state_dict()})
            ```
        """
        staging = self._start(state_dict, watched=False)
        staging.finish()
        return staging.state_dict

    def _begin(
        self, state_dict: Mapping[str, Any], *, watched: bool = False, wait: bool = True
    ) -> Staging:
        """Begin a copy. It copies all values but the bytes of tensors.

        On a device, the bytes are those after the work that its current stream holds now.

        Args:
            state_dict: the state dict to copy.
            watched: raise in ``finish`` if a tensor changes before the copy is finished.
            wait: with ``cache``, wait until the previous copy is released.

        Returns:
            The copy. Its ``finish`` copies the bytes.
        """
        if self.cache and wait and self._last is not None:
            self._last.wait()
        staging = self._start(state_dict, watched=watched)
        if self.cache:
            self._last = staging
        return staging

    def _start(self, state_dict: Mapping[str, Any], *, watched: bool) -> Staging:
        layout = _Layout()
        layout.add(state_dict)
        devices = {entry.source.device for entry in layout.entries.values()}
        pin = min((one for one in devices if one.type != "cpu"), key=str, default=None)
        # Another thread could not write to tensors of inference mode, nor does torch detach wrapper
        # subclasses in that mode.
        with torch.inference_mode(False):
            taken = self._pool.take(layout.sizes, pin=pin)
            try:
                made, pairs = layout.copies_in(taken)
                staged = map_leaves(state_dict, partial(_copied, made=made))
            except BaseException:
                self._pool.give(taken)
                raise
        versions = layout.versions() if watched else []
        return Staging(_Staged(staged, taken), taken, self._pool, pairs, versions)

    def release(self) -> None:
        """Free the memory of ``cache=True`` that no save uses.

        Example:
            ```python
            stager = dcp_rs.HostStager(cache=True)
            dcp_rs.async_save({"model": model}, "ckpt", stager=stager).result()
            stager.release()
            ```
        """
        if self.cache:
            self._pool.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_stager, (self.cache,)


def _new_stager(cache: bool) -> HostStager:
    return HostStager(cache=cache)


#: The destinations and sources of the copies from each device.
_Pairs = dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]


class Staging:
    """A copy of a state dict in progress, and its blocks of memory.

    Call :meth:`release` when the copy was saved. Without that call, the blocks are freed with the
    copy.

    Attributes:
        state_dict: the copy. It is complete after :meth:`finish`.
    """

    def __init__(
        self,
        staged: dict[str, Any],
        taken: list[Block],
        pool: BlockPool,
        pairs: _Pairs,
        versions: list[tuple[str, torch.Tensor, int]],
    ) -> None:
        self.state_dict = staged
        self._taken = taken
        self._pool = pool
        self._process = os.getpid()
        self._released = threading.Event()
        # The streams begin here, so that the copies wait for the present work of the caller's
        # stream, and for no later work.
        self._copies = [
            (copy_stream_for(device), targets, sources)
            for device, (targets, sources) in pairs.items()
        ]
        for stream, _, _ in self._copies:
            stream.order_after_caller()
        self._versions = versions

    def finish(self) -> None:
        """Copy the bytes of the tensors, and wait for all copies. Any thread may call it, once.

        Raises:
            StateChangedError: the copy is watched, and a tensor changed meanwhile.
        """
        try:
            with ExitStack() as stack:
                for stream, targets, sources in self._copies:
                    stack.callback(stream.drain)
                    stream.download(targets[0], Transfer(grouped=[(targets, sources)]))
            changed = [
                name for name, tensor, version in self._versions if changes_seen(tensor) != version
            ]
        finally:
            targets = sources = []  # the traceback of an error would keep them
            self._copies, self._versions = [], []
        if changed:
            msg = (
                f"tensor {changed[0]!r} was changed while it was being copied: wait for "
                "future.staged.result() before anything is, by optimizer.step() or a forward pass "
                "that writes to buffers"
            )
            raise StateChangedError(msg, tensor=changed[0])

    def release(self) -> None:
        """Give the blocks back for the next copy. Nothing may use this copy any more."""
        self.state_dict, taken, self._taken = {}, self._taken, []
        self._copies, self._versions = [], []
        if self._process == os.getpid():  # a fork leaves them to the parent
            self._pool.give(taken)
        self._released.set()

    def wait(self) -> None:
        """Wait until the copy is released, in the process that made it."""
        if self._process == os.getpid():
            self._released.wait()

    def holds(self, tensors: Iterable[Any]) -> bool:
        """Return whether any of the tensors is in the blocks of this copy."""
        places = [(block.memory.data_ptr(), block.nbytes) for block in self._taken]
        starts = (
            value.data_ptr()
            for value in tensors
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        )
        return any(0 <= start - at < nbytes for start in starts for at, nbytes in places)


@dataclass(frozen=True, slots=True)
class _TensorCopy:
    """A tensor of a state dict to copy.

    Attributes:
        name: its name, for messages.
        tensor: the tensor.
        source: its local memory.
        block, offset: its place in the blocks of the copy. Tied tensors share a place.
    """

    name: str
    tensor: torch.Tensor
    source: torch.Tensor
    block: int
    offset: int


class _Layout:
    """The tensors of a state dict, and their places in blocks of host memory.

    Attributes:
        entries: the tensors by ``id``.
        sizes: the sizes of the blocks.
    """

    def __init__(self) -> None:
        self.entries: dict[int, _TensorCopy] = {}
        self.sizes: list[int] = []
        self._places: dict[Hashable, tuple[int, int]] = {}

    def add(self, value: Any, name: str = "") -> None:
        """Add the tensors in a value of any kind."""
        if isinstance(value, torch.Tensor):
            source = _raw_memory(value)
            if source is not None and id(value) not in self.entries:
                key = identity(source)
                if key not in self._places:
                    self._places[key] = self._reserve(source.nbytes)
                self.entries[id(value)] = _TensorCopy(name, value, source, *self._places[key])
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                self.add(entry, f"{name}.{key}" if name else str(key))
        elif isinstance(value, (list, tuple)):
            for number, entry in enumerate(value):
                self.add(entry, f"{name}.{number}")

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        """Return the block and the offset for ``nbytes`` more bytes."""
        if nbytes == 0:
            return 0, 0
        begin = -(-self.sizes[-1] // ALIGNMENT) * ALIGNMENT if self.sizes else 0
        if not self.sizes or begin + nbytes > BLOCK_BYTES:
            self.sizes.append(0)
            begin = 0
        self.sizes[-1] = begin + nbytes
        return len(self.sizes) - 1, begin

    def copies_in(self, blocks: list[Block]) -> tuple[dict[int, torch.Tensor], _Pairs]:
        """Return the copies of the tensors by ``id``, and the transfers that fill them."""
        made: dict[int, torch.Tensor] = {}
        pairs: _Pairs = {}
        copied: set[tuple[int, int]] = set()
        storages = [block.memory.untyped_storage() for block in blocks]
        with torch.no_grad():
            for key, entry in self.entries.items():
                source, place = entry.source, (entry.block, entry.offset)
                target = _view(storages, *place, source.dtype, source.shape)
                if source.numel() and place not in copied:
                    copied.add(place)
                    targets, sources = pairs.setdefault(source.device, ([], []))
                    targets.append(as_integers(target))
                    # Conjugated in the order of the caller's stream: on the host it would come
                    # before the bytes.
                    sources.append(as_integers(source.resolve_conj().resolve_neg()))
                made[key] = _like(entry.tensor, target)
        return made, pairs

    def versions(self) -> list[tuple[str, torch.Tensor, int]]:
        """Return (name, tensor, version counter) of the tensors whose changes torch counts."""
        counted = (
            (entry.name, entry.tensor, changes_seen(entry.tensor))
            for entry in self.entries.values()
        )
        return [(name, tensor, seen) for name, tensor, seen in counted if seen is not None]


def _raw_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the local memory of a tensor, or None if its own class must copy it."""
    local = _torch.wait_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    is_raw = (
        type(local) in _torch.PLAIN_TYPES
        and local.device.type != "meta"
        and why_not_raw(local) is None
    )
    return local.detach() if is_raw else None


def _view(
    storages: Sequence[torch.UntypedStorage],
    block: int,
    offset: int,
    dtype: torch.dtype,
    shape: Iterable[int],
) -> torch.Tensor:
    """Return a tensor over a place in the storages of blocks."""
    view: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu")
    shape = torch.Size(shape)
    if shape.numel() == 0:
        return view.view(shape)
    nbytes = shape.numel() * dtype.itemsize
    # A storage of its own, because torch.save writes the whole storage of a tensor inside a value.
    view.set_(storages[block][offset : offset + nbytes], 0, shape)  # type: ignore[call-overload]
    return view


def _like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the kind of ``value`` over the memory of ``target``."""
    if isinstance(value, DTensor):
        return _torch.dtensor_of(target, _torch.spec_of(value), requires_grad=value.requires_grad)
    _torch.copy_place_in_whole(value, target)
    return target.requires_grad_() if value.requires_grad else target


def _copied(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """Return the copy of a leaf, which training cannot change."""
    if isinstance(value, IMMUTABLE):
        return value
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, ShardedTensor):
        return _torch.host_copy_of_sharded(value)
    copied = clone(value, to_host=True)
    return copied.requires_grad_() if copied is not value and value.requires_grad else copied


@dataclass(frozen=True)
class _Placed:
    """A tensor in a block, as a staged state dict pickles it.

    Attributes:
        block, offset: its place.
        dtype, shape: of its local memory.
        requires_grad: whether it requires a gradient.
        attributes: its place in a larger tensor, if it is a shard without a DTensor.
        spec: the spec of a DTensor, else None.
    """

    block: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    attributes: dict[str, Any]
    spec: Any


class _Staged(StandIn):
    """A staged state dict. It pickles as shared copies of its blocks, and places in them.

    torch would share the memory of each tensor in turn. If two tensors share a storage, that ends
    with SIGSEGV (2.15), because the storage's Python object is that of other memory by then.
    """

    def __init__(self, staged: dict[str, Any], blocks: list[Block]) -> None:
        super().__init__(staged)
        self._blocks = blocks

    def __reduce__(self) -> tuple[Any, ...]:
        blocks = [block.shared_memory() for block in self._blocks]
        return _from_blocks, (blocks, map_leaves(self, self._place))

    def _place(self, value: Any) -> Any:
        """Return the place of a tensor in the blocks, and any other value unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        local = value.to_local() if isinstance(value, DTensor) else value
        if (
            type(local) not in _torch.PLAIN_TYPES
            or local.layout != torch.strided
            or local.device.type != "cpu"
        ):
            return value
        starts = [local.data_ptr() - block.memory.data_ptr() for block in self._blocks]
        place = next(
            (
                (number, start)
                for number, start in enumerate(starts)
                if 0 <= start < self._blocks[number].nbytes
            ),
            None if local.numel() else (0, 0),
        )
        if place is None:
            return value
        spec = _torch.spec_of(value) if isinstance(value, DTensor) else None
        attributes, shape = _torch.place_in_whole(value), tuple(local.shape)
        return _Placed(*place, local.dtype, shape, value.requires_grad, attributes, spec)


def _from_blocks(blocks: list[torch.Tensor], placed: dict[str, Any]) -> dict[str, Any]:
    """Rebuild a staged state dict in another process."""
    storages = [block.untyped_storage() for block in blocks]

    def tensor(value: Any) -> Any:
        if not isinstance(value, _Placed):
            return value
        target = _view(storages, value.block, value.offset, value.dtype, value.shape)
        if value.spec is not None:
            return _torch.dtensor_of(target, value.spec, requires_grad=value.requires_grad)
        target.__dict__.update(value.attributes)
        return target.requires_grad_() if value.requires_grad else target

    rebuilt: dict[str, Any] = map_leaves(placed, tensor)
    return rebuilt
