"""The ranks of a manager: what they agree on, and the save that they have in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_rs import _torch, api
from dcp_rs.engine.background import SaveFuture
from dcp_rs.engine.ranks import RankGroup, has_group
from dcp_rs.errors import PlanError
from dcp_rs.transfer.stage import HostStager

__all__ = ["Team"]

T = TypeVar("T")


class Team:
    """The ranks that make the same calls, and one save at most that they have in the background.

    A save in the background talks in a group of its own, while the ranks go on to talk in another.

    Args:
        process_group: whose ranks they are; default: all. The groups are made here, of gloo.
        no_dist: this process is alone.

    Attributes:
        options: the arguments of a save or a load that say whose it is.
        leads: whether this rank does what one does for all.
        pending: the save in the background, until all ranks know how it went.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, no_dist: bool) -> None:
        is_alone = no_dist or not has_group()
        self._groups = [] if is_alone else [_group_like(process_group), _group_like(process_group)]
        self._talks_in = None if is_alone else self._groups[1]
        self.options: dict[str, Any] = {
            "process_group": None if is_alone else self._groups[0],
            "no_dist": is_alone,
        }
        self._ranks = RankGroup(self._talks_in, no_dist=is_alone)
        self.leads = self._ranks.is_coordinator
        self.pending: SaveFuture | None = None
        self._stager: HostStager | None = None  # the memory of each save is that of the one before

    def all_gather(self, work: Callable[[], T]) -> list[T]:
        """Every rank does its part: what all of them gave. An error of one is raised on all."""
        return self._ranks.all_gather(work)

    def decide(self, step: int | None, what: Callable[[Any], T]) -> T:
        """What one rank decides of a step, which is the same on all. An error there is raised on all.

        Raises:
            PlanError: the ranks give different steps.
        """
        return self._ranks.all_reduce(lambda: step, lambda steps: what(_same(steps)))

    def settle(self) -> None:
        """Waits for the save in the background. Where it failed on one rank, it is raised on all."""
        pending = self.pending
        if pending is not None:
            try:
                self._ranks.run(pending.result)
            finally:
                if pending.done():
                    self.pending = None

    def save(
        self, state_dict: dict[str, Any], path: Path, committed: Callable[[], None], **options: Any
    ) -> SaveFuture:
        """Begin a save in the background. The first rank calls ``committed`` once it is durable, and before the future is done."""
        if self._stager is None:
            self._stager = HostStager(cache=True)
        self.pending = done = SaveFuture()
        try:
            saving = api.async_save(state_dict, path, stager=self._stager, **options)
        except (
            BaseException
        ) as error:  # it may be this rank's alone: the next call raises it on all
            done.staged.set_result(None)
            done.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return done
        done.staged = saving.staged

        def finish(_: Future[Any]) -> None:
            try:
                metadata = saving.result()
                if self.leads:
                    committed()
            except BaseException as error:  # noqa: BLE001  # it is the future's
                done.set_exception(error)
            else:
                done.report = saving.report
                done.set_result(metadata)

        # In the thread that saves, before it turns to another save.
        saving.add_done_callback(finish)
        return done

    def agree(self, told: bool) -> tuple[bool, bool]:
        """Whether any rank was told, and whether the save in the background failed on any, as far as it is over."""
        failed = (
            self.pending is not None
            and self.pending.done()
            and self.pending.exception() is not None
        )
        if self._ranks.is_alone:
            return told, failed
        flags = torch.tensor([told, failed], dtype=torch.int32, device="cpu")
        with self._ranks.talking():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._talks_in)
        any_told, any_failed = flags.tolist()
        return bool(any_told), bool(any_failed)

    def let_go(self) -> None:
        """Give back the memory of saves, and the groups. That ends their connections: other ranks that wait in one of them are told."""
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.release()
        groups, self._groups, self._talks_in, self.options = self._groups, [], None, {}
        self._ranks = RankGroup(no_dist=True)
        while groups and dist.is_initialized():
            dist.destroy_process_group(groups.pop())


def _group_like(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    group = dist.new_group(
        ranks,
        timeout=_torch.timeout_of(process_group),
        backend="gloo",
        use_local_synchronization=process_group is not None,
    )
    assert isinstance(group, dist.ProcessGroup)  # noqa: S101  # this process is one of the ranks
    return group


def _same(steps: Sequence[T]) -> T:
    """The step that all ranks gave."""
    for rank, step in enumerate(steps):
        if step != steps[0]:
            msg = f"the ranks give different steps: rank 0 gives {steps[0]!r}, rank {rank} gives {step!r}"
            raise PlanError(msg)
    return steps[0]
