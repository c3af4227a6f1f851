"""Collective steps of one process group, which raise the same error on all ranks."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dcp_rs import _torch
from dcp_rs.engine.destination import commit_outcome
from dcp_rs.errors import DcpRsError, PlanError, RankLostError, UnsupportedError

T = TypeVar("T")
R = TypeVar("R")

#: Tag of a receive that no rank answers. Its timeout closes the connections of a gloo group.
_TAG = 0xDC9
#: Number of ranks that a message names.
_NAMED = 8


def has_group() -> bool:
    """Return true if there is a process group.

    Raises:
        PlanError: there is none, and ``WORLD_SIZE`` in the environment is more than 1. Each rank
            would save a checkpoint of its own to the same path.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        msg = (
            f"the environment says WORLD_SIZE={size}, and this process has no process group, "
            "so no rank knows of the others: call torch.distributed.init_process_group() before "
            "you save or load, or dcp_rs.save and dcp_rs.load with no_dist=True if this process "
            "does so alone"
        )
        raise PlanError(msg)
    return False


class RankGroup:
    """Ranks of a process group that save or load together.

    Each of the methods :meth:`run`, :meth:`all_gather`, :meth:`broadcast`, :meth:`reduce_scatter`
    and :meth:`all_reduce` is a *step*. Every rank calls it, with work of its own, and one
    collective ends it. If the work fails on some ranks, the step raises on all of them: a failed
    rank raises its own error, and the others raise the error of the first failed rank. A note
    names the failed ranks.

    A rank that fails between two steps raises its error in the next step, whichever that is. The
    work of a step may contain further steps of all ranks.

    An exception that cannot be pickled reaches the other ranks as a :class:`DcpRsError` with the
    same text. If a save may be committed, the other ranks get the ``StorageUnclearError``.

    Args:
        process_group: the group. Default: all ranks. Objects travel over its backend, as in torch.
        no_dist: ignore process groups: this rank is alone.
        coordinator: the rank in the group that decides for all.

    Attributes:
        rank: the rank of this process in the group.
        size: the number of ranks.
        is_alone: there is one rank.
        is_coordinator: this rank is the coordinator.
        failures: the errors of the failed step, by rank in the group. All ranks have the same keys.
        may_be_committed: the failed step was a commit, and a store did not say how it ended.

    Raises:
        PlanError: the environment names other ranks, and there is no process group.
        TypeError: ``process_group`` is no process group.
        ValueError: this process is not in the group.
        RankLostError: from each step: a collective failed. The connections of a gloo group are
            closed then, so that no rank waits for another.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        no_dist: bool = False,
        coordinator: int = 0,
    ) -> None:
        if process_group is not None:
            check_group(process_group)
        self.process_group = process_group
        self._has_group = not no_dist and has_group()
        self.rank = dist.get_rank(process_group) if self._has_group else 0
        self.size = dist.get_world_size(process_group) if self._has_group else 1
        if self.rank < 0:
            msg = "this process is not in the process group that it was called with"
            raise ValueError(msg)
        self.is_alone = self.size == 1
        self.is_coordinator = self.rank == coordinator or not self._has_group
        self.failures: dict[int, BaseException] = {}
        self.may_be_committed = False
        self._coordinator = self.global_rank(coordinator) if self._has_group else 0
        self._error: BaseException | None = None  # of this rank, in the present step
        self._raised: BaseException | None = None  # by a step, so all ranks know of it

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None if this rank needs none."""
        return (self.process_group or dist.group.WORLD) if self._has_group else None

    def global_rank(self, rank: int) -> int:
        """Convert a rank in the group to a rank among all."""
        return (
            rank if self.process_group is None else dist.get_global_rank(self.process_group, rank)
        )

    # --- steps ------------------------------------------------------------------------------------

    def run(self, work: Callable[[], T]) -> T:
        """Call ``work`` on every rank. Return the result of this rank."""
        value: T
        with self._attempt() as mine:
            value = work()
        if not self.is_alone:
            self._raise_failures(_failures(self._all_gather(mine.reply)))
        return value

    def all_gather(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on every rank. Return the results of all ranks, by rank."""
        with self._attempt() as mine:
            if self.is_alone:
                return [work()]
            mine.reply = _dumps(work())
        replies = self._all_gather(mine.reply)
        self._raise_failures(_failures(replies))
        return [_unpickled(reply) for reply in replies]

    def broadcast(self, work: Callable[[], T]) -> T:
        """Call ``work`` on the coordinator. Return its result on all ranks."""
        return self.all_reduce(lambda: None, lambda _: work())

    def reduce_scatter(self, work: Callable[[], T], divide: Callable[[list[T]], Sequence[R]]) -> R:
        """Call ``work`` on every rank, and ``divide`` on the coordinator with all results.

        Returns:
            The element for this rank of what ``divide`` returned.
        """
        with self._attempt() as mine:
            if self.is_alone:
                return divide([work()])[0]
            mine.reply = _dumps(work())
        replies = self._gather(mine.reply)
        parts = None
        if replies is not None:
            made = self._combine(replies, lambda values: [_dumps(part) for part in divide(values)])
            parts = [made] * self.size if isinstance(made, dict) else made
        part: R = self._loads(self._scatter(parts))
        return part

    def all_reduce(self, work: Callable[[], T], join: Callable[[list[T]], R]) -> R:
        """Call ``work`` on every rank, and ``join`` on the coordinator with all results.

        Returns:
            What ``join`` returned, on all ranks.
        """
        with self._attempt() as mine:
            if self.is_alone:
                return join([work()])
            mine.reply = _dumps(work())
        replies = self._gather(mine.reply)
        if replies is None:
            reply: R = self._loads(self._broadcast(None))
            return reply
        joined: R

        def make(values: list[T]) -> bytes:
            nonlocal joined
            joined = join(values)
            return _dumps(joined)

        made = self._broadcast(self._combine(replies, make))
        self._raise_failures(made if isinstance(made, dict) else {})
        return joined

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Send and receive over the group within this context.

        An error in it, Ctrl-C too, closes the connections of a gloo group, so that no rank waits.

        Raises:
            RankLostError: in place of any ``Exception``.
        """
        if isinstance(self._raised, RankLostError):
            raise self._raised
        try:
            with _torch.at_device(self.process_group):
                yield
        except Exception as error:
            self._raised = self._close_connections(error)
            raise self._raised from error
        except BaseException as error:
            self._close_connections(error)
            self._raised = error
            raise

    # --- results and errors -----------------------------------------------------------------------

    @contextmanager
    def _attempt(self) -> Iterator[_Attempt]:
        """Do the work of a step within this context. Among several ranks, an error is kept."""
        handled = sys.exception()  # by the caller: Python puts it into the context of each error
        self._error, self.failures, self.may_be_committed = None, {}, False
        mine = _Attempt()
        try:
            yield mine
        except BaseException as error:
            if error is self._raised:  # by a step within the work, on all ranks
                raise
            outcome = commit_outcome(error, handled)
            self.may_be_committed = outcome is not None
            if self.is_alone:
                self.failures = {self.rank: error}
                raise
            self._error = error
            mine.reply = _Failure.of(error, outcome or error)

    def _combine(
        self, replies: list[Any], work: Callable[[list[Any]], T]
    ) -> T | dict[int, _Failure]:
        """Call ``work`` with the results of all ranks. Return the failures if there are any."""
        if failures := _failures(replies):
            return failures
        with self._attempt() as mine:
            mine.reply = work([_unpickled(reply) for reply in replies])
        made: T | _Failure = mine.reply
        return {self.rank: made} if isinstance(made, _Failure) else made

    def _loads(self, reply: bytes | dict[int, _Failure]) -> Any:
        """Unpickle the coordinator's reply, or raise the failures in it."""
        if not isinstance(reply, dict):
            return _unpickled(reply)
        return self._raise_failures(reply)

    def _raise_failures(self, failures: dict[int, _Failure]) -> None:
        """Raise if there are failures. Every rank has the same ones."""
        if not failures:
            return
        errors = {rank: failure.error() for rank, failure in failures.items()}
        if self._error is not None:
            errors[self.rank] = self._error
        for rank, error in errors.items():
            if commit_outcome(error) is error:
                self.may_be_committed = True
            if rank != self.rank and not isinstance(error, DcpRsError) and failures[rank].trace:
                error.add_note(f"there:\n{failures[rank].trace}")
        self._raise(errors)

    def _raise(self, errors: dict[int, BaseException]) -> NoReturn:
        self.failures = errors
        rank = self.rank if self.rank in errors else min(errors)
        named = [str(self.global_rank(r)) for r in sorted(errors)]
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        note = f"raised on rank {named[0]}"
        if len(named) > 1:
            note = (
                f"raised on ranks {', '.join(named[:_NAMED])}{more}; "
                f"this is rank {self.global_rank(rank)}'s"
            )
        self._raised = errors[rank]
        self._raised.add_note(note)
        raise self._raised

    # --- collectives ------------------------------------------------------------------------------

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

    def _close_connections(self, error: BaseException) -> RankLostError:
        """Close the connections of a gloo group. Return the error that says that a rank is lost."""
        if _torch.is_gloo(self.process_group):
            # gloo closes all connections of a group if one receive waits too long.
            for rank in range(self.size):
                if rank != self.rank:
                    with suppress(Exception):
                        message = torch.empty(1, dtype=torch.uint8, device="cpu")
                        work = dist.irecv(
                            message, self.global_rank(rank), self.process_group, tag=_TAG
                        )
                        work.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]
        reason = str(error).partition("\n")[0]
        msg = (
            "a rank is lost, and the process group does not say which: it was killed or stopped, "
            "or cannot be reached; see which process ended without an error of its own "
            f"({reason})"
        )
        return RankLostError(msg)


@dataclass
class _Attempt:
    """Work of one rank in a step.

    Attributes:
        reply: the pickled result for the other ranks, or the failure.
    """

    reply: Any = None


@dataclass(frozen=True)
class _Failure:
    """An error that travels to other ranks.

    Attributes:
        text: the error in one line.
        trace: its traceback.
        pickled: the error, if it pickles.
    """

    text: str
    trace: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, sent: BaseException) -> _Failure:
        """Describe ``error`` for other ranks, which raise ``sent``."""
        text = traceback.format_exception_only(error)[-1].strip()
        trace = "".join(traceback.format_exception(error)) if error.__traceback__ else ""
        pickled = None
        if isinstance(sent, Exception):  # Ctrl-C and exits concern this process alone
            with suppress(Exception):
                pickled = pickle.dumps(sent)
                if type(pickle.loads(pickled)) is not type(sent):  # noqa: S301  # pickled above
                    pickled = None
        return cls(text, trace, pickled)

    def error(self) -> BaseException:
        """Return the error to raise on another rank."""
        if self.pickled is not None:
            with suppress(Exception):
                error: BaseException = pickle.loads(self.pickled)  # noqa: S301  # as above
                return error
        return DcpRsError(self.text)


def check_group(group: Any) -> None:
    """Raise unless ``group`` may be a process group of torch.distributed.

    Raises:
        TypeError: it is no process group.
        ValueError: torch.distributed does not know it.
    """
    # torch gives a marker to ranks outside of a new group. It is refused later, on all ranks.
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    if isinstance(group, dist.ProcessGroup):
        if not _torch.is_known(group):
            raise ValueError(
                "torch.distributed does not know the process_group=: it was destroyed, or torchft "
                "made it. Pass a group that init_process_group() or new_group() made"
            )
        return
    hint = (
        ": pass mesh.get_group(), the group of one dimension"
        if isinstance(group, DeviceMesh)
        else ""
    )
    msg = (
        "process_group= takes a group, as torch.distributed.new_group() returns, "
        f"not {type(group).__name__}{hint}"
    )
    raise TypeError(msg)


def _failures(replies: list[Any]) -> dict[int, _Failure]:
    """Return the failures among the replies of all ranks, by rank."""
    return {rank: reply for rank, reply in enumerate(replies) if isinstance(reply, _Failure)}


def _unpickled(message: Any) -> Any:
    """Unpickle what another rank sent.

    Raises:
        PlanError: it is not of such a step.
    """
    if not isinstance(message, bytes):
        msg = (
            "another rank is in another call of torch.distributed: make the same calls on all "
            "ranks, with planners and readers of the same class"
        )
        raise PlanError(msg)
    return pickle.loads(message)  # noqa: S301  # sent by this job


def _dumps(value: Any) -> bytes:
    """Pickle a value for other ranks.

    Raises:
        UnsupportedError: it does not pickle.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        msg = f"a message between ranks cannot be pickled: {error}"
        raise UnsupportedError(msg) from error
