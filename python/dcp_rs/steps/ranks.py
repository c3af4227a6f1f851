"""The ranks of a manager, and their save in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_rs import _torch, api
from dcp_rs.engine.background import SaveFuture
from dcp_rs.engine.ranks import RankGroup, check_group, has_group
from dcp_rs.errors import PlanError
from dcp_rs.transfer.buffers import shared_blocks

R = TypeVar("R")
T = TypeVar("T")

#: Votes of a rank in :meth:`ManagerRanks.agree`. The highest counts.
_STAY, _STOP, _RAISED = 0, 1, 2


class ManagerRanks(RankGroup):
    """The ranks of a manager. They make the same calls, and have one save in the background.

    The save has a process group of its own, so that its messages do not meet those of the manager.

    Args:
        process_group: the ranks. Default: all ranks. The manager makes gloo groups of them.
        no_dist: this process is alone.

    Attributes:
        parent: the group of these ranks that the caller has; None for a process that is alone.
        options: the arguments of a save or a load that name the ranks.
        pending: the save in the background, until all ranks know its result.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, no_dist: bool) -> None:
        if process_group is not None:
            check_group(process_group)
        is_alone = no_dist or not has_group()
        self.parent = None if is_alone else process_group or dist.group.WORLD
        self._groups = [] if is_alone else [_gloo_group(process_group) for _ in range(2)]
        super().__init__(None if is_alone else self._groups[0], no_dist=is_alone)
        self.options: dict[str, Any] = {
            "process_group": None if is_alone else self._groups[1],
            "no_dist": is_alone,
        }
        self.pending: SaveFuture | None = None

    def decide(self, step: int | None, work: Callable[[], T]) -> T:
        """Call ``work`` on the coordinator. Return its result, or raise its error, on all ranks.

        Raises:
            PlanError: the ranks give different steps.
        """
        return self.decide_by(step, lambda: None, lambda _: work())

    def decide_by(self, step: int | None, tell: Callable[[], R], work: Callable[[list[R]], T]) -> T:
        """Call ``tell`` on every rank, and ``work`` on the coordinator with all results.

        Returns:
            What ``work`` returned, on all ranks.

        Raises:
            PlanError: the ranks give different steps.
        """

        def join(told: list[tuple[int | None, R]]) -> T:
            first = told[0][0]
            for rank, (other, _) in enumerate(told):
                if other != step:
                    msg = (
                        f"the ranks give different steps: rank 0 gives {first!r}, "
                        f"rank {rank} gives {other!r}"
                    )
                    raise PlanError(msg)
            return work([each for _, each in told])

        return self.all_reduce(lambda: (step, tell()), join)

    def saving_ranks(self) -> RankGroup:
        """Return the same ranks, in the process group of the saves."""
        return RankGroup(self.options["process_group"], no_dist=self.is_alone)

    def settle(self, then: Callable[[], None]) -> None:
        """Wait for the save in the background, if there is one, and call ``then`` after it.

        An error of one rank is raised on all.
        """
        pending = self.pending
        if pending is not None:

            def work() -> None:
                pending.result()
                then()

            try:
                self.run(work)
            finally:
                if pending.done():
                    self.pending = None

    def save(
        self,
        state_dict: dict[str, Any],
        path: Path,
        committed: Callable[[RankGroup], None],
        **options: Any,
    ) -> SaveFuture:
        """Begin a save in the background.

        Every rank calls ``committed`` after the save, before the future is done.
        """
        self.pending = done = SaveFuture()
        saving_ranks = self.saving_ranks()
        try:
            saving = api.async_save(state_dict, path, max_copies=1, **options)
        except BaseException as error:
            # Other ranks may not have this error. The next call raises it on all.
            done.staged.set_result(None)
            done.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return done
        done.staged = saving.staged

        def finish(_: Future[Any]) -> None:
            try:
                metadata = saving.result()
                committed(saving_ranks)
            except BaseException as error:  # noqa: BLE001  # goes into the future
                done.set_exception(error)
            else:
                done.report = saving.report
                done.set_result(metadata)

        # Runs in the thread of the saves, before the next save.
        saving.add_done_callback(finish)
        return done

    def agree(self, is_stopping: Callable[[], bool]) -> tuple[bool, bool]:
        """Return whether any rank is to stop, and whether the save in the background failed.

        This is one collective of two integers. An error of ``is_stopping`` on one rank is raised on
        all.
        """
        saving = self.pending
        failed = saving is not None and saving.done() and saving.exception() is not None
        if self.is_alone:
            return is_stopping(), failed
        stops, raised = _STAY, None
        try:
            stops = _STOP if is_stopping() else _STAY
        except BaseException as error:  # noqa: BLE001  # raised below, on all ranks
            stops, raised = _RAISED, error
        votes = torch.tensor([stops, failed], dtype=torch.int32, device="cpu")
        with self.talking():
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.process_group)
        stops, failed = votes.tolist()
        if stops == _RAISED:

            def fail() -> None:
                if raised is not None:
                    raise raised

            self.run(fail)
        return stops == _STOP, bool(failed)

    def retire(self) -> SaveFuture | None:
        """Wait for the save in the background, and close. Return the save if it failed."""
        pending = self.pending
        failed = pending is not None and pending.exception() is not None
        self.close()
        return pending if failed else None

    def close(self) -> None:
        """Release host memory, and destroy the groups. A rank that waits in one gets an error."""
        shared_blocks.clear()
        # A group closes its connections once nothing refers to it.
        self.process_group, self.options = None, {}
        while self._groups and dist.is_initialized():
            with suppress(ValueError):  # the caller destroyed all groups
                dist.destroy_process_group(self._groups.pop())


def save_of_others() -> SaveFuture:
    """Return a save that is over, for a rank that took no part in it."""
    over = SaveFuture()
    over.staged.set_result(None)
    over.set_result(None)  # type: ignore[arg-type]  # nobody reads it
    return over


def _gloo_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if process_group is dist.group.WORLD:
        process_group = None
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    group = dist.new_group(
        ranks,
        timeout=_torch.timeout_of(process_group),
        backend="gloo",
        use_local_synchronization=process_group is not None,
    )
    assert isinstance(group, dist.ProcessGroup)  # noqa: S101  # this process is one of the ranks
    return group
