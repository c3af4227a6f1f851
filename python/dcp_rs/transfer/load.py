"""Loads: bytes go in place where they fit unchanged, and through slabs otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from dcp_rs import _core
from dcp_rs._progress import Counts
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.memory import (
    check_fillable,
    check_made,
    is_opaque,
    is_plain,
    memory_of,
    space_of,
)
from dcp_rs.transfer.target import Target, groups
from dcp_rs.transfer.upload import upload

__all__ = ["Load", "fill"]


class Load:
    """All targets of one load.

    CPU tensors of the stored dtype are filled in place, strided ones too. Other tensors are filled
    by copies from slabs of host memory, which convert device and dtype.

    Targets that share memory end with the values that filling one after another leaves. The order
    is that of stock DCP's readers: file by file as the plan first needs them, and within a file as
    planned.

    Args:
        index: the checkpoint.
        options: how to read.
        batch: the batch, which may have targets already.
        counts: counters for the bytes.
        common: the sections of the checkpoint that other ranks read, too.
    """

    def __init__(
        self,
        index: _core.Index,
        options: ReadOptions,
        batch: _core.Batch,
        counts: Counts,
        common: _core.SharedSections | None = None,
    ) -> None:
        self._common = common
        self._counts = counts
        self._index = index
        self._options = options
        self._batch = batch
        #: The targets that the engine does not fill in place.
        self._elsewhere: list[Target] = []

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
                self._add_elsewhere(target)
        self._batch.add(direct)

    def _add_elsewhere(self, target: Target) -> None:
        check_fillable(target.name, target.tensor)
        number = len(self._elsewhere)
        self._elsewhere.append(target)
        if is_opaque(target.tensor):
            self._batch.add_opaque(number, target, memory_of(target.tensor))
        else:
            space = space_of(target.tensor.device)
            self._batch.add_device_target(number, target, space, there=True)

    def arrange(self) -> int:
        """Arrange the targets after the last one was added, and return the number of passes."""
        passes = self._batch.arrange()
        if self._common is not None:
            self._batch.divide(self._common)
        return passes

    def run(self, number: int) -> None:
        """Fill the targets of one pass."""
        tell = None if self._counts.watch is None else self._counts.tell
        self._counts.add(self._batch.read(number, progress=tell, **self._options.engine()))
        wants = self._batch.wants(number)
        if wants:
            self._counts.add(upload(self._batch, wants, self._elsewhere, self._options, tell))
        if opaque := self._batch.opaque(number):
            _fill_opaque(
                self._index, [self._elsewhere[i] for i in opaque], self._options, self._counts
            )


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
    for number in range(load.arrange()):
        load.run(number)


def _fill_opaque(
    index: _core.Index, targets: Sequence[Target], options: ReadOptions, counts: Counts
) -> None:
    """Fill tensors that only their class can access, by ``copy_`` from host memory."""
    sizes = ((target, target.nbytes) for target in targets)
    for group in groups(sizes, options.inflight_bytes(accelerator=False)):
        stored = [
            replace(
                target,
                tensor=check_made(
                    torch.empty(target.tensor.shape, dtype=target.dtype, device="cpu")
                ),
            )
            for target in group
        ]
        fill(index, stored, options, counts)
        for target, values in zip(group, stored, strict=True):
            try:
                with torch.no_grad():
                    target.tensor.copy_(values.tensor)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                kind = type(target.tensor).__name__
                msg = (
                    f"tensor {target.name!r}: its copy_, which only its class {kind} has, does not "
                    f"take what is stored: {error}"
                )
                raise PlanError(msg, tensor=target.name) from error
