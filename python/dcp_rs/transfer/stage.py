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
from dcp_rs.tensors.memory import changes_seen, clone, identity, is_plain, why_not_raw
from dcp_rs.tensors.nesting import StandIn, map_leaves
from dcp_rs.tensors.regions import ALIGNMENT
from dcp_rs.transfer.buffers import BLOCK_BYTES, Block, BlockPool, shared_blocks
from dcp_rs.transfer.copy_stream import Group, Transfer, copy_stream_for

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
        staging = Staging(state_dict, self._pool, watched=False)
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
        staging = Staging(state_dict, self._pool, watched=watched)
        if self.cache:
            self._last = staging
        return staging

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
        return partial(HostStager, cache=self.cache), ()


class Staging:
    """A copy of a state dict in progress, and its blocks of memory.

    Call :meth:`release` when the copy was saved. Without that call, the blocks are freed with the
    copy.

    Args:
        state_dict: the state dict to copy.
        pool: where the blocks come from.
        watched: raise in :meth:`finish` if a tensor changes before.

    Attributes:
        state_dict: the copy. It is complete after :meth:`finish`.
    """

    def __init__(self, state_dict: Mapping[str, Any], pool: BlockPool, *, watched: bool) -> None:
        layout = _Layout()
        layout.add(state_dict)
        devices = {entry.source.device for entry in layout.entries.values()}
        pin = min((one for one in devices if one.type != "cpu"), key=str, default=None)
        self._pool = pool
        self._process = os.getpid()
        self._released = threading.Event()
        # Another thread could not write to tensors of inference mode, nor does torch detach wrapper
        # subclasses in that mode.
        with torch.inference_mode(False):
            self._taken = pool.take(layout.sizes, pin=pin)
            try:
                made, groups = layout.copies_in(self._taken)
                staged = map_leaves(state_dict, partial(_copied, made=made))
            except BaseException:
                pool.give(self._taken)
                raise
        self.state_dict: dict[Any, Any] = _Staged(staged, self._taken)
        # The streams begin here, so that the copies wait for the present work of the caller's
        # stream, and for no later work.
        self._copies = [(copy_stream_for(device), *group) for device, group in groups.items()]
        for stream, _, _ in self._copies:
            stream.order_after_caller()
        self._versions = [
            (entry.name, entry.tensor, changes_seen(entry.tensor))
            for entry in layout.entries.values()
            if watched
        ]

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
        return any(
            _find(self._taken, value) is not None
            for value in tensors
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        )


@dataclass(frozen=True, slots=True)
class _TensorCopy:
    """A tensor of a state dict to copy.

    Attributes:
        name: its name, for messages.
        tensor: the tensor.
        source: its local memory.
        place: the block and the offset of its copy. Tied tensors share a place.
    """

    name: str
    tensor: torch.Tensor
    source: torch.Tensor
    place: tuple[int, int]


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
                self.entries[id(value)] = _TensorCopy(name, value, source, self._places[key])
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

    def copies_in(
        self, blocks: list[Block]
    ) -> tuple[dict[int, torch.Tensor], dict[torch.device, Group]]:
        """Return the copies of the tensors by ``id``, and what fills them from each device."""
        made: dict[int, torch.Tensor] = {}
        groups: dict[torch.device, Group] = {}
        copied: set[tuple[int, int]] = set()
        memory = [block.memory for block in blocks]
        with torch.no_grad():
            for key, entry in self.entries.items():
                source, place = entry.source, entry.place
                target = _view(memory, *place, source.dtype, source.shape)
                if source.numel() and place not in copied:
                    copied.add(place)
                    targets, sources = groups.setdefault(source.device, ([], []))
                    targets.append(as_integers(target))
                    # Conjugated in the order of the caller's stream: on the host it would come
                    # before the bytes.
                    sources.append(as_integers(source.resolve_conj().resolve_neg()))
                made[key] = _as_kind(target, *_kind_of(entry.tensor))
        return made, groups


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
    memory: Sequence[torch.Tensor], block: int, offset: int, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """Return a tensor over a place in blocks."""
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    view: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu")
    # A storage of its own, because torch.save writes the whole storage of a tensor inside a value.
    storage = memory[block].untyped_storage()[offset : offset + shape.numel() * dtype.itemsize]
    return view.set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]


def _find(blocks: Sequence[Block], tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the block that holds the memory of a tensor, and the offset in it."""
    for number, block in enumerate(blocks):
        offset = tensor.data_ptr() - block.memory.data_ptr()
        if 0 <= offset < block.nbytes:
            return number, offset
    return None


#: Properties of a tensor beside its memory: the spec of a DTensor, else None; its place in a larger
#: tensor, if it is a shard without a DTensor; and whether it requires a gradient.
_Kind = tuple[Any, dict[str, Any], bool]


def _kind_of(tensor: torch.Tensor) -> _Kind:
    spec = _torch.spec_of(tensor) if isinstance(tensor, DTensor) else None
    return spec, _torch.place_in_whole(tensor), tensor.requires_grad


def _as_kind(
    local: torch.Tensor, spec: Any, attributes: dict[str, Any], requires_grad: bool
) -> torch.Tensor:
    """Return a tensor of some kind over local memory."""
    if attributes:
        vars(local).update(attributes)
    if spec is not None:
        return _torch.dtensor_of(local, spec, requires_grad=requires_grad)
    return local.requires_grad_() if requires_grad else local


def _copied(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """Return the copy of a leaf, which training cannot change."""
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
        kind: what else it is.
    """

    block: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    kind: _Kind


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
        if not is_plain(local, local.dtype):
            return value
        place = _find(self._blocks, local) if local.numel() else (0, 0)
        if place is None:
            return value
        return _Placed(*place, local.dtype, local.shape, _kind_of(value))


def _from_blocks(blocks: list[torch.Tensor], placed: dict[str, Any]) -> dict[str, Any]:
    """Rebuild a staged state dict in another process."""

    def tensor(value: Any) -> Any:
        if not isinstance(value, _Placed):
            return value
        local = _view(blocks, value.block, value.offset, value.dtype, value.shape)
        return _as_kind(local, *value.kind)

    rebuilt: dict[str, Any] = map_leaves(placed, tensor)
    return rebuilt
