"""The ranks of one call: what one of them cannot do, all of them raise, and nobody waits for one that has failed."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dcp_rs import _torch
from dcp_rs.engine.destination import commit_outcome
from dcp_rs.errors import DcpRsError, PlanError, RankLostError, UnsupportedError

__all__ = ["RankGroup", "failures_among", "has_group"]

T = TypeVar("T")
R = TypeVar("R")

#: Of a receive that nobody answers: it ends the connections.
_TAG = 0xDC9
#: As many ranks are named in a message.
_NAMED = 8


def has_group() -> bool:
    """Return whether there is a process group.

    Raises:
        PlanError: there is none, and ``WORLD_SIZE`` in the environment is more than 1. Each rank
            would save a checkpoint of its own to the one path.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        msg = (
            f"the environment says WORLD_SIZE={size}, and this process has no process group, so no rank knows of the others: "
            "call torch.distributed.init_process_group() before you save or load, or pass no_dist=True if this process does so alone"
        )
        raise PlanError(msg)
    return False


def _check_group(group: Any) -> None:
    """Raise a TypeError that says what to pass, unless this may be a process group."""
    # A rank that is not in a group has a mark in place of it, which is refused later, on all ranks.
    if (
        group is None
        or isinstance(group, dist.ProcessGroup)
        or group is dist.GroupMember.NON_GROUP_MEMBER
    ):
        return
    instead = (
        ": pass mesh.get_group(), the group of one dimension"
        if isinstance(group, DeviceMesh)
        else ""
    )
    msg = f"process_group= takes a group, as torch.distributed.new_group() returns, not {type(group).__name__}{instead}"
    raise TypeError(msg)


class RankGroup:
    """The ranks of a process group, in step.

    Each method is a *step*, which every rank takes, with work of its own. A step ends on all ranks
    in the same way: where the work of some ranks failed, a rank of these raises its own error, and
    every other one that of the first of them. Notes say which ranks raised it. What does not pickle
    comes to the others as a :class:`DcpRsError` with its text; what says, or follows an error that
    says, that a save may be committed, as that.

    A rank may also take part in a step of the others by failing, without knowing which one they are
    at: an error between two steps, raised in the next :meth:`run` or :meth:`all_gather`, meets the
    others there. Steps within the work of a step are steps of all ranks, too.

    Args:
        process_group: default: all ranks. What ranks tell each other goes as objects over its
            backend, as torch's own do.
        no_dist: this rank is alone, whatever groups there are.
        coordinator: the rank in the group that decides for all.

    Attributes:
        rank: of this process, in the group.
        size: how many ranks there are.
        is_alone: whether there is one.
        is_coordinator: whether this is the one.
        failures: the errors of the step that failed, by rank in the group; the same ranks are in it
            everywhere. Empty while all is well.

    Raises (from every step):
        RankLostError: a rank is gone. The connections of a gloo group are ended then: its other
            ranks would wait for each other in vain.
        ValueError: this process is not in the group.

    Raises:
        PlanError: the environment says that there are other ranks, and there is no process group to
            reach them.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        no_dist: bool = False,
        coordinator: int = 0,
    ) -> None:
        _check_group(process_group)
        together = not no_dist and has_group()
        self.process_group = process_group
        self.rank = dist.get_rank(process_group) if together else 0
        self.size = dist.get_world_size(process_group) if together else 1
        if self.rank < 0:
            msg = "this process is not in the process group that it was called with"
            raise ValueError(msg)
        self.is_alone = self.size == 1
        self.is_coordinator = self.rank == coordinator or not together
        self.failures: dict[int, BaseException] = {}
        self.handled = (
            sys.exception()
        )  # by the caller: Python puts it into the chain of each error here
        self._coordinator = self.global_rank(coordinator) if together else 0
        self._is_single = not together
        #: What this rank raised, and all know of: an outer step raises it, and says nothing.
        self.met: BaseException | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None where there is none, or no need of it."""
        return None if self._is_single else self.process_group or dist.group.WORLD

    def global_rank(self, rank: int) -> int:
        """What a rank of the group is called among all."""
        return (
            rank if self.process_group is None else dist.get_global_rank(self.process_group, rank)
        )

    # --- steps
    # ----------------------------------------------------------------------------------------

    def run(self, work: Callable[[], T]) -> T:
        """Every rank does its part. Returns what this one's gave."""
        with _Part[T](self) as mine:
            mine.value = work()
        if not self.is_alone:
            self._meet(failures_among(self._all_gather(mine.failure)), mine)
        return mine.value

    def all_gather(self, work: Callable[[], T]) -> list[T]:
        """Every rank does its part. Returns what all of them gave, by rank."""
        with _Part[T](self) as mine:
            mine.value = work()
        if self.is_alone:
            return [mine.value]
        said = self._all_gather(mine.told())
        self._meet(failures_among(said), mine)
        return [pickle.loads(value) for value in said]  # noqa: S301  # of a rank of this job

    def broadcast(self, work: Callable[[], T]) -> T:
        """The coordinator does it. Returns on all ranks what it gave."""
        return self.all_reduce(lambda: None, lambda _: work())

    def reduce_scatter(self, work: Callable[[], T], divide: Callable[[list[T]], Sequence[R]]) -> R:
        """Every rank does its part, and the coordinator makes something for each of them out of what all gave. Returns this one's."""
        with _Part[T](self) as mine:
            mine.value = work()
            if self.is_alone:
                return divide([mine.value])[0]
        said, parts = self._gather(mine.told()), None
        if said is not None:
            whole = self._conclude(
                said, mine, lambda values: [pickle.dumps(part) for part in divide(values)]
            )
            parts = [whole] * self.size if isinstance(whole, dict) else whole
        part: R = self._take(self._scatter(parts), mine)
        return part

    def all_reduce(self, work: Callable[[], T], join: Callable[[list[T]], R]) -> R:
        """Every rank does its part, and the coordinator makes one thing out of what all gave. Returns that on all ranks."""
        with _Part[T](self) as mine:
            mine.value = work()
            if self.is_alone:
                return join([mine.value])
        said = self._gather(mine.told())
        if said is None:
            told: R = self._take(self._broadcast(None), mine)
            return told
        made: list[R] = []

        def make(values: list[T]) -> bytes:
            made.append(join(values))
            return pickle.dumps(made[0])

        self._meet(self._broadcast(self._conclude(said, mine, make)), mine)
        return made[0]

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Wrap what sends and receives over the group. What fails within it, Ctrl-C too, ends the connections, so that no rank waits.

        Raises:
            RankLostError: in place of any other error.
        """
        if isinstance(self.met, RankLostError):
            raise self.met
        try:
            yield
        except BaseException as error:
            lost = self._give_up(error)
            self.met = lost if isinstance(error, Exception) else error
            if self.met is error:
                raise
            raise lost from error

    # --- what a step is made of
    # -----------------------------------------------------------------------

    def _meet(self, said: Any, mine: _Part[Any]) -> None:
        """Raises if there are failures, on every rank: each knows the same."""
        if not isinstance(said, dict) or not said:
            return
        errors = {rank: failure.error() for rank, failure in said.items()}
        if mine.error is not None:
            errors[self.rank] = mine.error
        for rank, error in errors.items():
            if rank != self.rank and not isinstance(error, DcpRsError) and said[rank].trace:
                error.add_note(f"there:\n{said[rank].trace}")
        self.raise_failures(errors)

    def raise_failures(self, errors: dict[int, BaseException]) -> NoReturn:
        """Raises what some ranks raised, of which all of them know."""
        self.failures = errors
        rank = self.rank if self.rank in errors else min(errors)
        self.met = errors[rank]
        self.met.add_note(self._note(sorted(errors), rank))
        raise self.met

    def _note(self, ranks: list[int], rank: int) -> str:
        named = [str(self.global_rank(r)) for r in ranks]
        if len(named) == 1:
            return f"raised on rank {named[0]}"
        which = ", ".join(named[:_NAMED]) + (
            f" and {len(named) - _NAMED} more" if named[_NAMED:] else ""
        )
        return f"raised on ranks {which}; this is rank {self.global_rank(rank)}'s"

    def _conclude(
        self, said: list[Any], mine: _Part[Any], work: Callable[[list[Any]], T]
    ) -> T | dict[int, _Failure]:
        """What the coordinator makes of what all gave, or who failed, itself among them."""
        failures = failures_among(said)
        if not failures:
            with _Part[T](self) as whole:
                whole.value = work([pickle.loads(value) for value in said])  # noqa: S301  # of a rank of this job
            if whole.error is None:
                return whole.value
            mine.error = whole.error
            failures = {self.rank: _Failure.of(whole.error, self.handled)}
        return failures

    def _take(self, said: Any, mine: _Part[Any]) -> Any:
        self._meet(said, mine)
        return pickle.loads(said)  # noqa: S301  # of the coordinator

    # --- the group
    # ------------------------------------------------------------------------------------

    def _all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with self.talking():
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def _gather(self, value: Any) -> list[Any] | None:
        values: list[Any] | None = [None] * self.size if self.is_coordinator else None
        with self.talking():
            dist.gather_object(value, values, dst=self._coordinator, group=self.process_group)
        return values

    def _scatter(self, values: list[Any] | None) -> Any:
        own: list[Any] = [None]
        with self.talking():
            dist.scatter_object_list(own, values, src=self._coordinator, group=self.process_group)
        return own[0]

    def _broadcast(self, value: Any) -> Any:
        values = [value]
        with self.talking():
            dist.broadcast_object_list(values, src=self._coordinator, group=self.process_group)
        return values[0]

    def _give_up(self, error: BaseException) -> RankLostError:
        """End the connections of this rank, so that no other waits for it. Return the error to raise."""
        if _torch.is_gloo(self.process_group):
            # gloo closes all connections of a group in which a receive waited too long. One that is
            # closed raises at once.
            for rank in range(self.size):
                if rank != self.rank:
                    with suppress(Exception):
                        message = torch.empty(1, dtype=torch.uint8, device="cpu")
                        work = dist.irecv(
                            message, self.global_rank(rank), self.process_group, tag=_TAG
                        )
                        work.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]  # this process is in the group
        reason = str(error).partition("\n")[0]
        msg = (
            f"a rank is lost, and the process group does not say which: it was killed or stopped, or cannot be reached; "
            f"see which process ended without an error of its own ({reason})"
        )
        return RankLostError(msg)


@dataclass(frozen=True)
class _Failure:
    """An error on its way to other ranks."""

    text: str
    trace: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, handled: BaseException | None) -> _Failure:
        text = traceback.format_exception_only(error)[-1].strip()
        trace = "".join(traceback.format_exception(error)) if error.__traceback__ else ""
        pickled = None
        sent = commit_outcome(error, handled) or error
        if isinstance(sent, Exception):  # not an exit, nor Ctrl-C: those are this process's
            with suppress(Exception):
                pickled = pickle.dumps(sent)
                if type(pickle.loads(pickled)) is not type(sent):  # noqa: S301  # pickled above
                    pickled = None
        return cls(text, trace, pickled)

    def error(self) -> BaseException:
        if self.pickled is not None:
            with suppress(Exception):
                error: BaseException = pickle.loads(self.pickled)  # noqa: S301  # of a rank of this job
                return error
        return DcpRsError(self.text)


class _Part(Generic[T]):
    """One rank's part of a step, done within ``with``. An error in it is kept, to be raised on all ranks; a rank that is alone raises it."""

    value: T

    def __init__(self, ranks: RankGroup) -> None:
        self.error: BaseException | None = None
        self._ranks = ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        if self._ranks.is_alone:
            self._ranks.failures = {self._ranks.rank: error}
        elif error is not self._ranks.met:
            self.error = error
            return True
        return False

    @property
    def failure(self) -> _Failure | None:
        """The error, for the others."""
        return None if self.error is None else _Failure.of(self.error, self._ranks.handled)

    def told(self) -> bytes | _Failure:
        """The value or the error, for the others."""
        if self.error is None:
            try:
                return pickle.dumps(self.value)
            except Exception as reason:  # noqa: BLE001  # whatever it is that does not pickle
                self.error = UnsupportedError(
                    f"what the ranks tell each other does not pickle: {reason}"
                )
        return _Failure.of(self.error, self._ranks.handled)


def failures_among(said: list[Any]) -> dict[int, _Failure]:
    """The errors in what ranks told each other, by rank."""
    return {rank: value for rank, value in enumerate(said) if isinstance(value, _Failure)}
