"""What one rank reads for its own plan: a few lists, without an object for every item."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_rs import _core, _torch
from dcp_rs._torch import PLAIN_TYPES
from dcp_rs.checkpoint.blocks import rectangles
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.boxes import narrow
from dcp_rs.tensors.dtypes import NAMES as DTYPE_NAMES
from dcp_rs.tensors.memory import twins
from dcp_rs.tensors.shards import Layouts, local_pieces
from dcp_rs.transfer.load import Load
from dcp_rs.transfer.replicas import Offer
from dcp_rs.transfer.target import Target, stored_dtype

__all__ = ["Begun", "LocalReads"]

#: Of tensors that are one in the state dict, so much is compared.
_HEAD_BYTES = 1 << 20


@dataclass
class LocalReads:
    """What one rank reads, without items: whole tensors, regions of tensors, and values (index, name).

    ``plain`` is what ``whole`` was made of: stored names, tensors, and the places of those that are not in it.
    """

    index: _core.Index
    whole: _core.Batch | None = None
    plain: tuple[list[str], list[torch.Tensor], list[int]] = field(default_factory=lambda: ([], [], []))
    targets: list[Target] = field(default_factory=list)
    values: list[tuple[int, str]] = field(default_factory=list)
    _plain_fqns: list[str] = field(default_factory=list)
    _asked: list[tuple[str, Target]] = field(default_factory=list)  # what `targets` was made of
    _shapes: list[tuple[int, ...]] = field(default_factory=list)  # of their tensors, when they were planned
    _in_part: set[int] = field(default_factory=set)  # the places in it of what the checkpoint holds in part
    _left_alone: set[str] = field(default_factory=set)
    _memory: dict[str, Any] = field(default_factory=dict)  # that of the tensors in it, as it was

    def plan_plain(self, wanted: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, int]:
        """Plans the tensors that are plain and fit what is stored, in one call for all.

        Args:
            wanted: stored names, by names in the state dict.
            values: the state dict.

        Returns:
            The others, with their places among all that is wanted.
        """
        names, tensors = list(wanted.values()), [values[fqn] for fqn in wanted]
        self.whole, others = self.index.plan_plain(names, tensors, PLAIN_TYPES, DTYPE_NAMES)
        self.plain, self._plain_fqns = (names, tensors, others), list(wanted)
        return {self._plain_fqns[i]: i for i in others}

    def tensors(self) -> list[torch.Tensor]:
        """All that is filled."""
        _, plain, others = self.plain
        if others:
            left_out = set(others)
            plain = [tensor for i, tensor in enumerate(plain) if i not in left_out]
        return [*plain, *(target.tensor for target in self.targets)]

    @property
    def nbytes(self) -> int:
        """Of all tensors, as they are stored."""
        tensors = self.tensors()
        plain = sum(tensor.nbytes for tensor in tensors[: len(tensors) - len(self.targets)])
        return plain + sum(target.nbytes for target in self.targets)

    def stored_names(self) -> tuple[list[str], Iterable[str]]:
        """Of values, and of tensors."""
        values = [self.index.name(value) for value, _ in self.values]
        others = (target.index for target in self.targets if not target.of_chunk)
        return values, chain(self.plain[0], (self.index.name(tensor) for tensor in others))

    def add_covered(
        self,
        targets: list[tuple[str, Target]],
        values: Mapping[str, Any],
        fill_partly: Callable[[str, Iterable[int], Iterable[int]], bool],
    ) -> None:
        """Adds targets, as far as the checkpoint holds them. Finds what no chunk holds, and data files that are missing or of another length.

        Args:
            targets: each with its name in the state dict.
            values: the state dict.
            fill_partly: hears of elements of a name that no chunk holds, and says whether the others are to be read.
        """
        regions = [(target.index, target.offsets, target.tensor.shape) for _, target in targets]
        holes = self.index.check_regions(regions, [value for value, _ in self.values])
        self._left_alone = {
            targets[at][0] for at, offsets, sizes in holes if not fill_partly(targets[at][0], offsets, sizes)
        }
        self._in_part = {at for at, _, _ in holes}
        self._asked = targets
        self._shapes = [tuple(target.tensor.shape) for _, target in targets]
        self._memory = {fqn: _memory_of(values[fqn]) for fqn, _ in targets}
        self.targets = self._covered()

    def _covered(self) -> list[Target]:
        found: list[Target] = []
        for at, (fqn, target) in enumerate(self._asked):
            if fqn in self._left_alone:
                continue
            if at not in self._in_part:
                found.append(target)
                continue
            for held in self.index.touching(target.index, target.offsets, target.tensor.shape):
                part = narrow(target.tensor, held.region_offsets, held.sizes)
                found.append(replace(target, index=held.chunk, of_chunk=True, offsets=held.chunk_offsets, tensor=part))
        return found

    @torch.no_grad()
    def follow(self, values: Mapping[str, Any]) -> None:
        """Take the memory that tensors have now. To be called right before the read.

        A planner's ``finish_plan`` may have given them other memory since they were planned, as ``tensor.data = ...`` does.

        Args:
            values: the state dict, with the same names.

        Raises:
            PlanError: one has another shape by now.
        """
        layouts: Layouts = {}
        asked: dict[str, list[tuple[Target, tuple[int, ...]]]] = {}
        for (fqn, target), planned_shape in zip(self._asked, self._shapes, strict=True):
            asked.setdefault(fqn, []).append((target, planned_shape))
        for fqn, targets in asked.items():
            memory = _memory_of(values.get(fqn))
            if memory is not None and memory == self._memory[fqn]:
                continue
            self._memory[fqn] = memory
            planned = [(tuple(target.offsets), shape) for target, shape in targets]
            for (target, _), tensor in zip(targets, _tensors_now(fqn, values.get(fqn), planned, layouts), strict=True):
                target.tensor = tensor
        names, tensors, others = self.plain
        now = list(map(values.get, self._plain_fqns, tensors))
        if self.whole is not None and self.whole.moved(now, PLAIN_TYPES, DTYPE_NAMES):
            left_out = set(others)
            kept = [at for at in range(len(now)) if at not in left_out]
            for at, found in zip(kept, self.index.describe([names[at] for at in kept]), strict=True):
                assert found is not None  # noqa: S101  # it was planned
                fqn, (number, dtype, shape) = self._plain_fqns[at], found
                zeros = (0,) * len(shape)
                (tensor,) = _tensors_now(fqn, now[at], [(zeros, shape)], layouts)
                target = Target(number, zeros, tensor, names[at], stored_dtype(names[at], dtype), at)
                self._asked.append((fqn, target))
                self._shapes.append(shape)
                self._memory[fqn] = _memory_of(now[at])
            self.whole, self.plain, self._plain_fqns = _core.Batch(self.index), ([], [], []), []
        self.targets = self._covered()

    def untied(self, values: Mapping[str, Any], first: Collection[int], options: ReadOptions) -> dict[str, str]:
        """Return names whose tensor is that of another name, where the checkpoint has two that differ. By them the one that is filled last.

        The first MiB of each is compared: weights that were trained apart differ everywhere.

        Args:
            values: the state dict.
            first: the places that are filled first, and not hidden by others.
            options: how to read.
        """
        names, _, others = self.plain
        if len(first) == len(names) - len(others) + len({target.place for target in self.targets}):
            return {}  # no two are of the same memory
        planned = set(range(len(names))).difference(others).union(target.place for target in self.targets)
        late = [self._plain_fqns[place] for place in sorted(planned.difference(first)) if place < len(names)]
        if not late:
            return {}
        stored = dict(zip(self._plain_fqns, names, strict=True))
        tied = twins(late, [self._plain_fqns[place] for place in first if place < len(names)], values)
        return {
            fqn: other for fqn, other in tied.items() if not _same_head(self.index, stored[fqn], stored[other], options)
        }


def _same_head(index: _core.Index, one: str, other: str, options: ReadOptions) -> bool:
    """Return whether two stored tensors begin with the same elements."""
    if one == other:
        return True
    heads = []
    for found in index.describe([one, other]):
        assert found is not None  # noqa: S101  # it was planned
        number, name, shape = found
        dtype = stored_dtype(one, name)
        flat = torch.empty(min(math.prod(shape), _HEAD_BYTES // dtype.itemsize), dtype=dtype, device="cpu")
        fills, at = [], 0
        for offsets, sizes in rectangles(shape, 0, flat.numel()):
            into = flat[at : at + math.prod(sizes)].view(sizes)
            fills.append(_core.Fill(number, offsets, into.shape, into.data_ptr(), into.stride()))
            at += into.numel()
        index.read_regions(fills, **options.engine())
        heads.append(flat)
    a, b = heads
    return a.dtype != b.dtype or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _memory_of(tensor: Any) -> Any:
    """Return what tells whether a tensor of the state dict got other memory; None where that is not known."""
    local = _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor
    if type(local) not in PLAIN_TYPES or local.layout is not torch.strided:
        return None
    return id(local), local.data_ptr(), local.shape, local.stride()


def _tensors_now(
    fqn: str, value: Any, planned: list[tuple[tuple[int, ...], tuple[int, ...]]], layouts: Layouts
) -> list[torch.Tensor]:
    """Return the tensors of the rectangles that were planned for an entry of the state dict."""
    pieces = local_pieces(fqn, value, layouts) if isinstance(value, torch.Tensor) else []
    if [(tuple(piece.offsets), tuple(piece.tensor.shape)) for piece in pieces] != planned:
        msg = f"tensor {fqn!r} was changed after the load was planned: its shape, or what this rank holds of it, is another one now"
        raise PlanError(msg, tensor=fqn)
    return [piece.tensor for piece in pieces]


@dataclass
class Begun:
    """A load of such reads that can only fail for its data now: in how many turns it is done, the values, and what others may need as well."""

    reads: LocalReads
    load: Load
    turns: int
    values: dict[str, Any]
    offer: Offer
