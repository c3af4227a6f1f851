"""Retention: the policies that keep steps, and the removal of the other steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict

from dcp_rs._reports import Report
from dcp_rs.errors import DcpRsError, StorageError, StoragePreconditionError
from dcp_rs.options import check_choice, check_function, check_positive
from dcp_rs.steps.step_store import SkippedStep, Step, StepStore

#: Seconds by which the clocks of two machines may differ.
_CLOCK_SKEW = 60.0


def keep_last(steps: Iterable[Step], count: int) -> set[int]:
    """Return the ``count`` newest steps."""
    return {step.number for step in sorted(steps, key=lambda step: step.age)[-count:]}


def keep_every(steps: Iterable[Step], interval: int) -> set[int]:
    """Return the first step at or after each multiple of ``interval``, from ``interval`` on."""
    firsts: dict[int, int] = {}
    for number in sorted(step.number for step in steps):
        firsts.setdefault(number // interval, number)
    return {number for multiple, number in firsts.items() if multiple > 0}


def keep_within(steps: Iterable[Step], seconds: float, now: float = math.inf) -> set[int]:
    """Return the steps saved within ``seconds`` of the newest, and those saved after one of them.

    A pause of the run does not count. The order of steps is certain, and clocks may be wrong. So a
    step stays if one before it does. A time later than ``now``, or than that of the newest step,
    says nothing: its step stays if the next one does.
    """
    ordered = sorted(steps, key=lambda step: step.age)
    times = [step.saved for step in ordered]
    newest = next((time for time in reversed(times) if time <= now + _CLOCK_SKEW), math.inf)
    within = (at for at, time in enumerate(times) if newest - seconds <= time <= newest)
    first = next(within, 0)
    while first and times[first - 1] > newest:
        first -= 1
    return {step.number for step in ordered[first:]}


def keep_best(
    steps: Iterable[Step], count: int, metric: str, mode: Literal["min", "max"]
) -> set[int]:
    """Return the ``count`` best steps by a metric; of equal steps the newer.

    Steps without the metric, or with NaN, are not among them.
    """
    sign = 1 if mode == "min" else -1
    rated = [
        (sign * step.metrics[metric], -step.number)
        for step in steps
        if not math.isnan(step.metrics.get(metric, math.nan))
    ]
    return {-number for _, number in sorted(rated)[:count]}


def beyond(steps: Iterable[Step], max_bytes: int, protected: Collection[int]) -> set[int]:
    """Return the oldest steps whose removal brings the others down to ``max_bytes``.

    Protected steps are not among them.
    """
    rest = sorted(steps, key=lambda step: step.age)
    expendable = [step for step in rest if step.number not in protected]
    gone = set()
    while expendable and used(rest) > max_bytes:
        oldest = expendable.pop(0)
        rest.remove(oldest)
        gone.add(oldest.number)
    return gone


def used(steps: Iterable[Step]) -> int:
    """Return the bytes of all steps. A file that several share counts once."""
    steps = list(steps)
    shared: dict[Any, int] = {}
    for step in steps:
        shared.update(step.files)
    return sum(step.nbytes - sum(step.files.values()) for step in steps) + sum(shared.values())


class PolicyArguments(TypedDict, total=False):
    """Keyword arguments of :class:`Policies`, for signatures."""

    keep_last: int | None
    keep_every: int | None
    keep_within: timedelta | float | None
    keep_best: int | None
    max_bytes: int | None
    metric: str | None
    mode: Literal["min", "max"]
    keep: Callable[[int, Mapping[str, float]], bool] | None


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Retention policies of a run.

    A step stays if any of the ``keep_*`` keeps it. If none is set, all steps stay. ``max_bytes``
    bounds their size.

    Attributes:
        keep_last: the number of newest steps.
        keep_every: the first step at or after each multiple of this number.
        keep_within: steps saved within this time (or seconds) of the newest.
        keep_best: the number of best steps by ``metric``.
        max_bytes: the bytes of all steps. The oldest go first, even if another policy keeps them.
        metric: the name of the metric of ``keep_best``.
        mode: the best step has the lowest (``"min"``) or the highest (``"max"``) metric.
        keep: a function of a step's number and metrics. The steps for which it is true stay,
            unless ``max_bytes`` removes them.

    Raises:
        TypeError: ``keep`` is not a function.
        ValueError: a number that is not positive; ``keep_best`` without ``metric``; another mode.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_within: timedelta | float | None = None
    keep_best: int | None = None
    max_bytes: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    keep: Callable[[int, Mapping[str, float]], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best", "max_bytes"):
            check_positive(name, getattr(self, name))
        is_time = isinstance(self.keep_within, timedelta | float | int)
        if self.keep_within is not None and not (is_time and 0 < self._seconds < math.inf):
            msg = (
                f"keep_within={self.keep_within!r}: must be a positive time, as a timedelta or in "
                "seconds"
            )
            raise ValueError(msg)
        check_choice("mode", self.mode, "min", "max")
        check_function("keep", self.keep, "of a step's number and metrics")
        if self.keep_best is not None and self.metric is None:
            msg = "keep_best= needs metric=, the name of the metric to compare"
            raise ValueError(msg)

    @property
    def _seconds(self) -> float:
        within = self.keep_within
        return within.total_seconds() if isinstance(within, timedelta) else float(within or 0)

    @property
    def keep_all(self) -> bool:
        """True if no policy removes a step."""
        policies = (self.keep_last, self.keep_every, self.keep_within, self.keep_best)
        return not any(policies) and self.max_bytes is None

    def kept(self, steps: Sequence[Step]) -> set[int]:
        """Return the steps that the ``keep_*`` keep."""
        if not any((self.keep_last, self.keep_every, self.keep_within, self.keep_best)):
            return {step.number for step in steps}
        kept: set[int] = set()
        if self.keep_last is not None:
            kept |= keep_last(steps, self.keep_last)
        if self.keep_every is not None:
            kept |= keep_every(steps, self.keep_every)
        if self.keep_within is not None:
            kept |= keep_within(steps, self._seconds, time.time())
        if self.keep_best is not None and self.metric is not None:
            kept |= keep_best(steps, self.keep_best, self.metric, self.mode)
        if self.keep is not None:
            kept |= {step.number for step in steps if self.keep(step.number, step.metrics)}
        return kept

    def rivals(self, steps: Sequence[Step], gone: Iterable[Step]) -> set[int]:
        """Return the steps without which the ``keep_*`` would keep some that are to go."""
        found = keep_last(steps, self.keep_last or 1)
        if (interval := self.keep_every) is not None:
            multiples = {step.number // interval for step in gone}
            found |= {n for n in keep_every(steps, interval) if n // interval in multiples}
        if self.metric is not None:
            found |= keep_best(steps, self.keep_best or 1, self.metric, self.mode)
        return found

    def best(self, steps: Iterable[Step]) -> int | None:
        """Return the best step; None without a metric, or if no step has it."""
        if self.metric is None:
            return None
        return next(iter(keep_best(steps, 1, self.metric, self.mode)), None)

    def expendable(
        self, steps: Sequence[Step], protected: Collection[int | None] = ()
    ) -> list[Step]:
        """Return all steps but the latest, the best, the protected ones, and those of torch."""
        if not steps:
            return []
        fixed = {*protected, steps[-1].number, self.best(steps)}
        return [step for step in steps if step.number not in fixed and not step.is_stock]

    def unneeded(
        self,
        steps: Sequence[Step],
        protected: Collection[int | None] = (),
        *,
        room: int | None = None,
    ) -> list[Step]:
        """Return the expendable steps that the policies do not keep.

        Args:
            steps: all steps, oldest first.
            protected: steps that stay in any case.
            room: the bytes of a save that is about to begin. If given, only ``max_bytes`` counts.
        """
        expendable = {step.number for step in self.expendable(steps, protected)}
        gone = expendable - self.kept(steps) if room is None else set()
        if self.max_bytes is not None:
            rest = [step for step in steps if step.number not in gone]
            fixed = {step.number for step in rest} - expendable
            gone |= beyond(rest, self.max_bytes - (room or 0), fixed)
        return [step for step in steps if step.number in gone]


@dataclass(frozen=True, repr=False)
class Pruned(Report):
    """Report of a removal.

    Attributes:
        removed: the removed steps.
        swept: the removed leftovers of killed saves.
        aside: the removed folders of steps that an earlier removal could not delete.
        problems: what could not be removed, and why.
    """

    removed: list[Step] = field(default_factory=list)
    swept: list[SkippedStep] = field(default_factory=list)
    aside: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def prune(
    store: StepStore,
    policies: Policies,
    *,
    protected: Collection[int | None] = (),
    room: int | None = None,
    verify: bool = False,
    since: int = 0,
) -> Pruned:
    """Remove unneeded steps, and the leftovers of killed saves and removals.

    Args:
        store: the steps.
        policies: the steps to keep.
        protected, room: as for :meth:`Policies.unneeded`.
        verify: remove nothing unless a step that stays is verified. If none is, the newest is read,
            and if that is damaged, the one before.
        since: look at no steps before this one.
    """
    found = store.sweep(since=since)
    done = Pruned(swept=found.left, aside=store.aside(found.names))
    steps = found.steps
    gone = policies.unneeded(steps, protected, room=room)
    # Steps were whole when they were last looked at. Those that are to go, and those for which they
    # go, are looked at again. If one is not whole any more, nothing goes before the next time.
    if gone:
        seen = {step.number for step in gone} | policies.rivals(steps, gone)
        steps = store.look_again(found, seen)
        again = policies.unneeded(steps, protected, room=room)
        is_same = len(steps) == len(found.steps)
        gone = [step for step in again if is_same and step.number in seen]
    stay = [step for step in steps if step not in gone]
    if gone and verify and not _has_verified(store, stay, done.problems):
        done.problems.append("nothing was removed: no step that would stay is as its digests say")
        gone = []
    for step in gone:
        try:
            store.remove(step.number)
        except OSError as error:
            done.problems.append(f"step {step.number} could not be removed: {error}")
            if isinstance(error, StorageError) and not isinstance(error, StoragePreconditionError):
                break  # the next removal would fail too, after all its retries
        else:
            done.removed.append(step)
    done.problems.extend(store.problems)
    store.problems.clear()
    return done


def _has_verified(store: StepStore, steps: list[Step], problems: list[str]) -> bool:
    """Return whether a step is verified. If none is, read them, the newest first."""
    if any(step.verified for step in steps):
        return True
    for step in reversed(steps):
        try:
            report = store.verify(step)
        except (DcpRsError, OSError) as error:
            problems.append(f"step {step.number} could not be verified: {error}")
            continue
        if report.ok:
            return True
        why = (
            f"is damaged: {report.problems[0]}"
            if report.problems
            else "has no digests, so nothing of it was verified"
        )
        problems.append(f"step {step.number} {why}")
    return False
