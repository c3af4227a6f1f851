"""The attempts of one load: what one that failed has filled, the next may not leave alone. A state of two saves is none."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner

from dcp_rs.dcp.load_planner import RsLoadPlanner, local_reads
from dcp_rs.dcp.local_items import planner_of
from dcp_rs.errors import CorruptDataError

__all__ = ["Attempts"]

#: As many names are told.
_NAMED = 8


class Attempts:
    """What the failed attempts of a load may have filled, by name in the state dict, on this rank.

    Attributes:
        is_refused: whether an attempt was refused here.
    """

    def __init__(self) -> None:
        self.is_refused = False
        self._filled: dict[str, Any] = {}  # and from what

    @classmethod
    @contextmanager
    def of_load(cls) -> Iterator[Attempts]:
        """The attempts that the load which begins belongs to. Loads within it are others."""
        given = _given.get()
        token = _given.set(None)
        try:
            yield cls() if given is None else given
        finally:
            _given.reset(token)

    @contextmanager
    def given(self) -> Iterator[None]:
        """A load within it belongs to these."""
        token = _given.set(self)
        try:
            yield
        finally:
            _given.reset(token)

    def check(self, path: Any, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Looks whether a plan fills all that attempts before it may have filled.

        Raises:
            CorruptDataError: it does not.
        """
        if not self._filled:
            return
        covered = {item.dest_index.fqn for item in plan.items}
        if isinstance(planner, RsLoadPlanner):
            covered -= set(planner.report.partly_filled)
            covered |= planner.report.tied.keys()
        left = [name for name in self._filled if name not in covered]
        if left:
            self.is_refused = True
            named = ", ".join(map(repr, left[:_NAMED])) + (f" and {len(left) - _NAMED} more" if left[_NAMED:] else "")
            msg = (
                f"{path} does not hold all of {named}, and a load of {self._filled[left[0]]} that failed may have written there: the state is of no "
                "one save; make it anew before it is loaded into"
            )
            raise CorruptDataError(msg, path=path, tensor=left[0])

    def failed(
        self, path: Any, plan: LoadPlan, planner: LoadPlanner, unseen: Collection[str], *, is_filled: bool
    ) -> None:
        """Notes what was filled by an attempt that failed while it was read.

        Args:
            path: what was read.
            plan: as the planner made it.
            planner: of the attempt.
            unseen: names of what nobody sees before the load is over.
            is_filled: whether this rank had read all by then.
        """
        own = None if is_filled or local_reads(plan, planner) is None else planner_of(plan)
        for item in plan.items:
            name = item.dest_index.fqn
            # Such a planner puts values and new tensors into the state dict when all is read.
            is_put = own is None or not (item.type == LoadItemType.BYTE_IO or own.replaces(name))
            if is_put and name not in unseen:
                self._filled[name] = path


_given: ContextVar[Attempts | None] = ContextVar("given", default=None)
