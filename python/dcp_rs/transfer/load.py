"""From stored chunks into tensors: in place where the bytes fit as they are, through a staging buffer otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dcp_rs import _core
from dcp_rs.errors import PlanError, UnsupportedError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.dtypes import BY_NAME
from dcp_rs.tensors.memory import check_fillable, is_opaque, is_plain, parts
from dcp_rs.transfer import gds
from dcp_rs.transfer.upload import make_goal, upload

__all__ = ["Fill", "Load", "Target", "fill_regions", "stored_dtype"]


@dataclass(slots=True)
class Fill:
    """A rectangle of a stored chunk and the tensor it goes to.

    Attributes:
        chunk: of the index.
        offsets: where the rectangle begins in the chunk.
        tensor: what to fill; its shape is the rectangle's.
        name: FQN, for messages.
        dtype: of the chunk.
        place: in the plan, for the order in which shared memory is filled.
    """

    chunk: int
    offsets: Sequence[int]
    tensor: torch.Tensor
    name: str
    dtype: torch.dtype
    place: int = 0


@dataclass(slots=True)
class Target:
    """A region of a stored tensor, in as many chunks as it may be, and the tensor it goes to.

    Attributes:
        index: of the stored tensor.
        offsets: where the region begins in it.
        tensor: what to fill; its shape is the region's.
        name: FQN, for messages.
        dtype: of the stored tensor.
        place: in the plan, for the order in which shared memory is filled.
    """

    index: int
    offsets: Sequence[int]
    tensor: torch.Tensor
    name: str
    dtype: torch.dtype
    place: int = 0


class Load:
    """All destinations of one load, together.

    Those that share memory hold in the end what filling one after another would leave: file by file, as the plan first comes to them, and of a
    file in the order of the plan. That is what stock DCP's readers do.

    In place are filled CPU tensors of the stored dtype, strided ones too. The others through slabs of host memory of bounded size, by copies
    that convert device and dtype.

    Args:
        index: where the data is.
        options: how to read.
        batch: what is planned already.
    """

    def __init__(self, index: _core.Index, options: ReadOptions, batch: _core.Batch | None = None) -> None:
        self._index = index
        self._options = options
        self._batch = _core.Batch(index) if batch is None else batch
        self._elsewhere: list[Fill] = []
        self._turns = 1

    def add_targets(self, targets: Iterable[Target]) -> None:
        """Adds regions.

        Raises:
            PlanError: no chunk holds some part of one, or a tensor cannot be filled: it has no memory, or elements that share bytes.
            UnsupportedError: a tensor that is not strided.
        """
        direct: list[Target] = []
        for target in targets:
            if is_plain(target.tensor, target.dtype):
                direct.append(target)
            else:
                check_fillable(target.name, target.tensor)
                for part in _parts(self._index, target):
                    self._add_elsewhere(part)
        self._batch.add_targets(direct)

    def add_fills(self, fills: Iterable[Fill]) -> None:
        """Adds rectangles of chunks. Raises as :meth:`add_targets`."""
        direct: list[Fill] = []
        for item in fills:
            if is_plain(item.tensor, item.dtype):
                direct.append(item)
            else:
                check_fillable(item.name, item.tensor)
                self._add_elsewhere(item)
        self._batch.add_fills(direct)

    def _add_elsewhere(self, item: Fill) -> None:
        self._batch.add_elsewhere(item, parts(item.tensor), covers=not is_opaque(item.tensor))
        self._elsewhere.append(item)

    def arrange(self, *, every: bool = False) -> int:
        """Ends the adding; returns how many turns it takes. ``every``: also what a later destination hides is filled in a turn of its own."""
        self._turns = self._batch.arrange(every=every)
        return self._turns

    def places(self, turn: int) -> list[int]:
        """The places of what is filled in a turn."""
        return self._batch.places(turn)

    def at_once(self) -> list[int]:
        """The places of which nothing has to wait for others, nor is hidden."""
        return self._batch.at_once()

    def leave_out(self, places: Iterable[int]) -> None:
        """What has these places is filled by others."""
        self._batch.leave_out(list(places))

    def run(self, turn: int) -> int:
        """Fills what has this turn. Returns the bytes that were read for what is filled in place."""
        _, nbytes = self._batch.read(turn, **self._options.engine())
        elsewhere = [self._elsewhere[i] for i in self._batch.elsewhere(turn)]
        _fill_staged(self._index, [item for item in elsewhere if not is_opaque(item.tensor)], self._options)
        _fill_opaque(self._index, [item for item in elsewhere if is_opaque(item.tensor)], self._options)
        return nbytes

    def run_all(self) -> int:
        """Fills everything, turn by turn."""
        return sum(self.run(turn) for turn in range(self.arrange()))


def fill_regions(index: _core.Index, targets: Sequence[Target], options: ReadOptions) -> None:
    """Fills every tensor from the chunks that hold its region. Raises as :meth:`Load.add_targets`."""
    load = Load(index, options)
    load.add_targets(targets)
    load.run_all()


def _parts(index: _core.Index, target: Target) -> Iterator[Fill]:
    for chunk, chunk_offsets, region_offsets, sizes in index.cover(target.index, target.offsets, target.tensor.shape):
        part = target.tensor
        for dim, (offset, size) in enumerate(zip(region_offsets, sizes, strict=True)):
            if size != part.shape[dim]:
                part = part.narrow(dim, offset, size)
        yield Fill(chunk, chunk_offsets, part, target.name, target.dtype, target.place)


def _fill_staged(index: _core.Index, fills: Sequence[Fill], options: ReadOptions) -> None:
    """Through slabs."""
    if options.io == "gds" and fills:
        fills = gds.fill(index, fills, options)
    goals = [make_goal(item.tensor, item.dtype) for item in fills]
    devices = list({item.tensor.device: None for item in fills})
    groups = {device: number for number, device in enumerate(devices)}
    wants = [
        (item.chunk, item.offsets, item.tensor.shape, goal.flat, groups[item.tensor.device])
        for item, goal in zip(fills, goals, strict=True)
    ]
    if wants:
        upload(index, wants, goals, devices, options)


def _fill_opaque(index: _core.Index, fills: Sequence[Fill], options: ReadOptions) -> None:
    """By their own ``copy_``, from whole rectangles in host memory."""
    limit = options.inflight_bytes(accelerator=False)
    at = 0
    while at < len(fills):
        group: list[tuple[Fill, torch.Tensor]] = []
        nbytes = 0
        while at < len(fills) and (not group or nbytes < limit):
            item = fills[at]
            group.append((item, torch.empty(item.tensor.shape, dtype=item.dtype)))
            nbytes += group[-1][1].nbytes
            at += 1
        load = Load(index, options)
        load.add_fills(replace(item, tensor=values) for item, values in group)
        load.run_all()
        for item, values in group:
            try:
                with torch.no_grad():
                    item.tensor.copy_(values)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                kind = type(item.tensor).__name__
                msg = f"tensor {item.name!r}: its copy_, which only its class {kind} has, does not take what is stored: {error}"
                raise PlanError(msg, tensor=item.name) from error


def stored_dtype(name: str, dtype: str | None) -> torch.dtype:
    """The torch dtype for a name of the format."""
    found = BY_NAME.get(dtype or "")
    if found is None:
        msg = f"tensor {name!r} is of dtype {dtype}, which torch {torch.__version__} does not have"
        raise UnsupportedError(msg, tensor=name)
    return found
