"""All destinations of a load: in place where the bytes fit as they are, through slabs otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from dcp_rs import _core
from dcp_rs._progress import Counts
from dcp_rs.errors import PlanError
from dcp_rs.options import ReadOptions
from dcp_rs.tensors.memory import check_fillable, check_made, is_opaque, is_plain, parts, space_of
from dcp_rs.transfer.target import Target
from dcp_rs.transfer.upload import upload

__all__ = ["Load", "fill"]


class Load:
    """All destinations of one load, together.

    Those that share memory hold in the end what filling one after another would leave: file by
    file, as the plan first comes to them, and of a file in the order of the plan. That is what
    stock DCP's readers do.

    In place are filled CPU tensors of the stored dtype, strided ones too. The others through slabs
    of host memory of bounded size, by copies that convert device and dtype.

    Args:
        index: where the data is.
        options: how to read.
        batch: what is planned already.
        counts: where the bytes are counted.
        common: what is known of what other ranks want, of the same files.
    """

    def __init__(
        self,
        index: _core.Index,
        options: ReadOptions,
        batch: _core.Batch | None = None,
        counts: Counts | None = None,
        common: _core.Common | None = None,
    ) -> None:
        self._common = common
        self._counts = Counts() if counts is None else counts
        self._index = index
        self._options = options
        self._batch = _core.Batch(index) if batch is None else batch
        self._elsewhere: list[Target] = []

    def add(self, targets: Iterable[Target]) -> None:
        """Adds targets.

        Raises:
            PlanError: no chunk holds some part of one, or a tensor cannot be filled: it has no
                memory, or elements that share bytes.
            UnsupportedError: a tensor that is not strided.
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
            self._batch.add_opaque(number, target, parts(target.tensor))
        else:
            self._batch.add_elsewhere(number, target, space_of(target.tensor.device), there=True)

    def arrange(self) -> int:
        """Ends the adding; returns how many turns it takes."""
        turns = self._batch.arrange()
        if self._common is not None:
            self._batch.divide(self._common)
        return turns

    def at_once(self) -> list[int]:
        """The places of which nothing has to wait for others, nor is hidden."""
        return self._batch.at_once()

    def leave_out(self, places: Iterable[int]) -> None:
        """What has these places is filled by others."""
        self._batch.leave_out(list(places))

    def run(self, turn: int) -> int:
        """Fills what has this turn. Returns the bytes that were read for what is filled in place."""
        tell = None if self._counts.watch is None else self._counts.tell
        stats = self._batch.read(turn, progress=tell, **self._options.engine())
        self._counts.add(stats)
        wants = self._batch.wants(turn)
        if wants:
            self._counts.add(upload(self._batch, wants, self._elsewhere, self._options, tell))
        if opaque := self._batch.opaque(turn):
            _fill_opaque(
                self._index, [self._elsewhere[i] for i in opaque], self._options, self._counts
            )
        return stats.read

    def run_all(self) -> int:
        """Fills everything, turn by turn."""
        return sum(self.run(turn) for turn in range(self.arrange()))


def fill(
    index: _core.Index,
    targets: Sequence[Target],
    options: ReadOptions,
    counts: Counts | None = None,
) -> None:
    """Fills every tensor from the chunks that hold its region. Raises as :meth:`Load.add`."""
    load = Load(index, options, counts=counts)
    load.add(targets)
    load.run_all()


def _fill_opaque(
    index: _core.Index, targets: Sequence[Target], options: ReadOptions, counts: Counts
) -> None:
    """By their own ``copy_``, from whole rectangles in host memory."""
    limit = options.inflight_bytes(accelerator=False)
    at = 0
    while at < len(targets):
        group: list[tuple[Target, torch.Tensor]] = []
        nbytes = 0
        while at < len(targets) and (not group or nbytes < limit):
            target = targets[at]
            group.append(
                (
                    target,
                    check_made(torch.empty(target.tensor.shape, dtype=target.dtype, device="cpu")),
                )
            )
            nbytes += group[-1][1].nbytes
            at += 1
        fill(index, [replace(target, tensor=values) for target, values in group], options, counts)
        for target, values in group:
            try:
                with torch.no_grad():
                    target.tensor.copy_(values)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                kind = type(target.tensor).__name__
                msg = f"tensor {target.name!r}: its copy_, which only its class {kind} has, does not take what is stored: {error}"
                raise PlanError(msg, tensor=target.name) from error
