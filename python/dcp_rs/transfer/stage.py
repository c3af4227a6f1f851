"""Copies of state dicts in host memory, for saves that go on while training does."""

from __future__ import annotations

import copy
import os
import threading
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_rs import _torch
from dcp_rs.errors import StateChangedError
from dcp_rs.tensors.memory import changes_seen, identity
from dcp_rs.tensors.nesting import StandIn, like
from dcp_rs.transfer.blocks import BLOCK_BYTES, Block, BlockPool, blocks
from dcp_rs.transfer.copy_stream import Transfer, copy_stream_for

__all__ = ["HostStager", "Staging"]

_ALIGN = 64
#: By the bytes of an element. Those of complex128 and larger are copied as what they are.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_IMMUTABLE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)


class HostStager:
    """Copies state dicts to host memory, which is pinned for tensors of an accelerator.

    The memory is kept after the save, for the next copy of about the same size.
    :func:`dcp_rs.release_pinned_memory` frees it.

    Args:
        cache: keep memory for this stager alone. A copy then waits until the save of the copy
            before is over, so that there is one at a time. :meth:`release` frees the memory.

    Example:
        ```python
        stager = dcp_rs.HostStager(cache=True)  # once; the next save copies to the same memory
        future = dcp_rs.async_save({"model": model}, "ckpt", stager=stager)
        future.result()
        ```
    """

    def __init__(self, *, cache: bool = False) -> None:
        self.cache = cache
        self._pool = BlockPool() if cache else blocks
        self._last: Staging | None = None

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a state dict to host memory. The original may change once this returns.

        Args:
            state_dict: what to copy. Dicts, lists and tuples are copied too; other values are the
                same objects.

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
        """Begin a copy: what is no tensor is copied, and of tensors what devices were asked for until now is what will be.

        Args:
            state_dict: what to copy.
            watched: look whether a tensor is changed before the copy is finished.
            wait: with ``cache``, until the copy before is released.

        Returns:
            The copy that has begun; its ``finish`` copies the bytes.
        """
        if self.cache and wait and self._last is not None:
            self._last.wait()
        staging = self._start(state_dict, watched=watched)
        if self.cache:
            self._last = staging
        return staging

    def _start(self, state_dict: Mapping[str, Any], *, watched: bool) -> Staging:
        found = _Found()
        found.look_at(state_dict)
        devices = {
            source.device for _, source, _ in found.places.values() if source.device.type != "cpu"
        }
        pin = min(devices, key=str, default=None)
        # Tensors of inference could not be written to in another thread, nor does torch detach
        # wrappers in that mode.
        with torch.inference_mode(False):
            taken = self._pool.take(found.cut(), pin=pin)
            try:
                made, pairs = found.targets_in(taken)
                staged = like(
                    state_dict, ((key, _rebuilt(value, made)) for key, value in state_dict.items())
                )
            except BaseException:
                self._pool.give(taken)
                raise
        versions = found.versions() if watched else []
        return Staging(_Staged(staged, taken), taken, self._pool, pairs, versions)

    def release(self) -> None:
        """Free the memory that ``cache=True`` keeps and no save uses.

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


#: By device: the copies, as bits, and what they are copies of.
Pairs = dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]


class Staging:
    """A copy of a state dict that has begun, and the blocks that it lies in.

    Whoever saves it calls :meth:`release` when that is over. Where nobody does, the blocks go when
    the copy does.

    Attributes:
        state_dict: the copy. The bytes of its tensors are there after :meth:`finish`.
    """

    def __init__(
        self,
        staged: dict[str, Any],
        taken: list[Block],
        pool: BlockPool,
        pairs: Pairs,
        versions: list[tuple[str, torch.Tensor, int]],
    ) -> None:
        self.state_dict = staged
        self._taken = taken
        self._pool = pool
        self._process = os.getpid()
        self._released = threading.Event()
        # Made here: what is copied waits for what the caller's stream of each device holds now, and
        # for nothing that comes later.
        self._copies = [
            (copy_stream_for(device), targets, sources)
            for device, (targets, sources) in pairs.items()
        ]
        for stream, _, _ in self._copies:
            stream.order_after_caller()
        self._versions = versions

    def finish(self) -> None:
        """Copies the bytes of the tensors; when it returns, or raises, nothing is being copied any more. Called once, by any thread.

        Raises:
            StateChangedError: torch counted a change of a tensor meanwhile, where that was to be
                watched.
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
            targets = sources = []  # an error is kept longer than what was to be saved
            self._copies, self._versions = [], []
        if changed:
            msg = (
                f"tensor {changed[0]!r} was changed while it was being copied: "
                "wait for future.staged.result() before anything is, by optimizer.step() or a forward pass that writes to buffers"
            )
            raise StateChangedError(msg, tensor=changed[0])

    def release(self) -> None:
        """Give the blocks back: the next copy is made there. Nobody reads, or makes, this one any more."""
        self.state_dict, taken, self._taken = {}, self._taken, []
        self._copies, self._versions = [], []
        if self._process == os.getpid():  # in a fork, they are of the parent
            self._pool.give(taken)
        self._released.set()

    def wait(self) -> None:
        """Wait until it is released, in this process."""
        if self._process == os.getpid():
            self._released.wait()

    def holds(self, tensors: Iterable[Any]) -> bool:
        """Return whether any of the tensors lies in its blocks."""
        places = [(block.memory.data_ptr(), block.nbytes) for block in self._taken]
        starts = (
            value.data_ptr()
            for value in tensors
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        )
        return any(0 <= start - at < nbytes for start in starts for at, nbytes in places)


class _Found:
    """The tensors of a state dict, each with a place in one row of bytes: one for all that are the same memory, as tied weights are."""

    def __init__(self) -> None:
        #: The tensor, the memory to copy, and where that goes.
        self.places: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.nbytes = 0
        self._at: dict[Hashable, int] = {}
        self._names: dict[int, str] = {}
        #: Where in the row each block begins.
        self._starts: list[int] = []

    def look_at(self, value: Any, name: str = "") -> None:
        if isinstance(value, torch.Tensor):
            source = _memory_of(value)
            if source is not None and id(value) not in self.places:
                at = self._at.setdefault(identity(source), self.nbytes)
                self.places[id(value)] = value, source, at
                self._names[id(value)] = name
                if at == self.nbytes:
                    self.nbytes += -(-source.numel() * source.element_size() // _ALIGN) * _ALIGN
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                self.look_at(entry, f"{name}.{key}" if name else str(key))
        elif isinstance(value, (list, tuple)):
            for number, entry in enumerate(value):
                self.look_at(entry, f"{name}.{number}")

    def cut(self) -> list[int]:
        """Cuts the row into blocks, between tensors. Returns their sizes."""
        self._starts, end = [], 0
        sizes: list[int] = []
        extents = sorted(
            (at, at + source.nbytes) for _, source, at in self.places.values() if source.numel()
        )
        for at, stop in extents:
            if not sizes or (at >= end and stop - self._starts[-1] > BLOCK_BYTES):
                self._starts.append(at)
                sizes.append(0)
            end = max(end, stop)
            sizes[-1] = end - self._starts[-1]
        return sizes

    def place(self, at: int) -> tuple[int, int]:
        """The block that a place in the row is in, and the place in it."""
        block = max(0, bisect_right(self._starts, at) - 1)
        return block, at - (self._starts[block] if self._starts else 0)

    def targets_in(self, taken: Sequence[Block]) -> tuple[dict[int, torch.Tensor], Pairs]:
        """The copies that are to be, by the identity of what they are copies of; and what has to be copied for them."""
        made = {}
        pairs: Pairs = {}
        copied: set[int] = set()
        with torch.no_grad():
            for key, (value, source, at) in self.places.items():
                number, begin = self.place(at)
                if source.numel() == 0:
                    target = torch.empty(source.shape, dtype=source.dtype, device="cpu")
                else:
                    target = _view(taken[number].memory, begin, source.dtype, source.shape)
                    if at not in copied:
                        copied.add(at)
                        # Here, in the order of the caller's stream: the host would conjugate what
                        # has not arrived yet.
                        values = _bits(source.resolve_conj().resolve_neg())
                        targets, sources = pairs.setdefault(source.device, ([], []))
                        targets.append(_bits(target))
                        sources.append(values)
                made[key] = _like(value, target)
        return made, pairs

    def versions(self) -> list[tuple[str, torch.Tensor, int]]:
        """The tensors whose changes torch counts, by name, and how often each was changed."""
        counted = (
            (self._names[key], value, changes_seen(value))
            for key, (value, _, _) in self.places.items()
        )
        return [(name, value, seen) for name, value, seen in counted if seen is not None]


def _memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What raw bytes can hold of a tensor; None for kinds that are copied as a whole."""
    local = _torch.wait_tensor(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    is_raw = (
        type(local) in _torch.PLAIN_TYPES
        and local.layout == torch.strided
        and not local.is_nested
        and not local.is_quantized
        and local.device.type != "meta"
        and _torch.has_memory(local)
    )
    return local.detach() if is_raw else None


def _view(block: torch.Tensor, at: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    view: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu")
    view.set_(block.untyped_storage(), at // dtype.itemsize, shape)  # type: ignore[call-overload]
    return view


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that every device copies, as of some of the youngest they do not."""
    return tensor.view(_BITS.get(tensor.dtype.itemsize, tensor.dtype))


def _like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A tensor of the kind of ``value`` with the memory of ``target``."""
    if isinstance(value, DTensor):
        return _torch.dtensor_of(target, _torch.spec_of(value), requires_grad=value.requires_grad)
    _torch.copy_place_in_whole(value, target)
    return target.requires_grad_() if value.requires_grad else target


def _rebuilt(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """The value with copies in place of its tensors, and nothing in it that training could change."""
    if isinstance(value, torch.Tensor):
        copied = made.get(id(value))
        if copied is not None:
            return copied
        if isinstance(value, ShardedTensor):
            return _torch.host_copy_of_sharded(value)
        return _copied(value) if value.device.type != "meta" else value
    if isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, Mapping):
        return like(value, ((key, _rebuilt(entry, made)) for key, entry in value.items()))
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(entry, made) for entry in value)
    return copy.deepcopy(value)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, by the tensor's own class."""
    copied = tensor.detach().clone().cpu()
    return copied.requires_grad_() if tensor.requires_grad else copied


@dataclass(frozen=True)
class _At:
    """A place in a block."""

    block: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    attributes: dict[str, Any]
    spec: Any  # of a DTensor, else None


class _Staged(StandIn):
    """A staged state dict that pickles as its blocks, mapped by the other process, and places in them.

    torch would share the memory of each tensor as it comes to it, and where two tensors lie in one
    storage it ends with SIGSEGV (2.15): its Python object is that of other memory by then.
    """

    def __init__(self, staged: dict[str, Any], blocks: list[Block]) -> None:
        super().__init__(staged)
        self._blocks = blocks

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_blocks, ([block.shared_memory() for block in self._blocks], self.placed())

    def placed(self) -> dict[str, Any]:
        """The state dict with places in the blocks for its tensors."""
        return like(self, ((key, self._placed(value)) for key, value in self.items()))

    def _placed(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._place(value) or value
        if isinstance(value, dict):
            return like(value, ((key, self._placed(entry)) for key, entry in value.items()))
        if type(value) in (list, tuple):
            return type(value)(self._placed(entry) for entry in value)
        return value

    def _place(self, tensor: torch.Tensor) -> _At | None:
        """Where it lies in which block; None: it was not copied to one."""
        spec = _torch.spec_of(tensor) if isinstance(tensor, DTensor) else None
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if (
            type(local) not in _torch.PLAIN_TYPES
            or local.layout != torch.strided
            or local.device.type != "cpu"
        ):
            return None
        number, at = 0, 0
        if local.numel():
            starts = [local.data_ptr() - block.memory.data_ptr() for block in self._blocks]
            within = [
                number
                for number, start in enumerate(starts)
                if 0 <= start < self._blocks[number].nbytes
            ]
            if not within:
                return None
            number, at = within[0], starts[within[0]]
        return _At(
            number,
            at,
            local.dtype,
            tuple(local.shape),
            tensor.requires_grad,
            _torch.place_in_whole(tensor),
            spec,
        )


def _from_blocks(blocks: list[torch.Tensor], placed: dict[str, Any]) -> dict[str, Any]:
    return like(placed, ((key, _unplaced(value, blocks)) for key, value in placed.items()))


def _unplaced(value: Any, blocks: list[torch.Tensor]) -> Any:
    if isinstance(value, _At):
        if 0 in value.shape:
            target = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        else:
            target = _view(blocks[value.block], value.offset, value.dtype, torch.Size(value.shape))
        if value.spec is not None:
            return _torch.dtensor_of(target, value.spec, requires_grad=value.requires_grad)
        target.__dict__.update(value.attributes)
        return target.requires_grad_() if value.requires_grad else target
    if isinstance(value, dict):
        return like(value, ((key, _unplaced(entry, blocks)) for key, entry in value.items()))
    if type(value) in (list, tuple):
        return type(value)(_unplaced(entry, blocks) for entry in value)
    return value
