"""Retention: which steps stay, and the removal of the others on one rank, once a newer step is durable."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from dcp_rs._shown import Report
from dcp_rs.errors import DcpRsError, RunTakenOverError, StorageError, StoragePreconditionError
from dcp_rs.steps.root import Root, SkippedStep, Step

__all__ = [
    "Policies",
    "Pruned",
    "best",
    "beyond",
    "check_positive",
    "expendable",
    "keep_best",
    "keep_every",
    "keep_last",
    "keep_within",
    "prune",
    "unneeded",
    "used",
]

#: Seconds. The clocks of two machines may differ by so much.
_CLOCKS_DIFFER = 60.0


def keep_last(steps: Iterable[Step], count: int) -> set[int]:
    """The ``count`` newest."""
    return set(sorted(step.number for step in steps)[-count:])


def keep_every(steps: Iterable[Step], interval: int) -> set[int]:
    """The first at or after each multiple of ``interval``, from ``interval`` on: the multiples, where those are saved."""
    firsts: dict[int, int] = {}
    for number in sorted(step.number for step in steps):
        firsts.setdefault(number // interval, number)
    return {number for multiple, number in firsts.items() if multiple > 0}


def keep_within(steps: Iterable[Step], seconds: float, now: float = math.inf) -> set[int]:
    """Those saved within ``seconds`` of the newest: a run that rested for a week has them all when it goes on.

    A clock was wrong where a step is stamped later than ``now``. It stays, and no other step is
    compared with it.
    """
    steps = sorted(steps, key=lambda step: step.number)
    past = [step.saved for step in steps if step.saved <= now + _CLOCKS_DIFFER]
    return {step.number for step in steps if not past or step.saved >= past[-1] - seconds}


def keep_best(
    steps: Iterable[Step], count: int, metric: str, mode: Literal["min", "max"]
) -> set[int]:
    """The ``count`` best by a metric; of equal ones the newer. Those that lack it, or have NaN, are not among them."""
    sign = 1 if mode == "min" else -1
    rated = [(sign * step.metrics[metric], -step.number) for step in steps if _has(step, metric)]
    return {-number for _, number in sorted(rated)[:count]}


def best(steps: Iterable[Step], metric: str, mode: Literal["min", "max"]) -> int | None:
    """The best of all by a metric, if any step has it."""
    return next(iter(keep_best(steps, 1, metric, mode)), None)


def _has(step: Step, metric: str) -> bool:
    return not math.isnan(step.metrics.get(metric, math.nan))


def beyond(steps: Iterable[Step], max_bytes: int, protected: Collection[int]) -> set[int]:
    """What has to go, the oldest first, until the rest has no more than ``max_bytes``, or is protected."""
    steps = sorted(steps, key=lambda step: step.number)
    rest, holders = used(steps), Counter(file for step in steps for file in step.files)
    gone = set()
    for step in steps:
        if rest <= max_bytes:
            break
        if step.number not in protected:
            gone.add(step.number)
            holders.subtract(step.files.keys())
            rest -= step.nbytes - sum(size for file, size in step.files.items() if holders[file])
    return gone


def used(steps: Iterable[Step]) -> int:
    """Bytes that steps take together: what several share counts once."""
    steps = list(steps)
    shared: dict[Any, int] = {}
    for step in steps:
        shared.update(step.files)
    return sum(step.nbytes - sum(step.files.values()) for step in steps) + sum(shared.values())


def check_positive(name: str, value: object) -> None:
    """Raises ``ValueError`` unless it is a positive integer, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        msg = f"{name}={value!r}: must be a positive integer"
        raise ValueError(msg)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Which steps stay: each that one of the ``keep_*`` keeps, or all where none is set. What stays is bounded by ``max_bytes``.

    Attributes:
        keep_last: so many of the newest.
        keep_every: the first at or after each multiple of this number of steps.
        keep_within: those saved within this time, or this number of seconds, of the newest.
        keep_best: so many of the best by ``metric``.
        max_bytes: all of them together have no more; the oldest go first, whatever else would keep
            them.
        metric: the name of what ``keep_best`` goes by.
        mode: whether the lowest (``"min"``) or the highest (``"max"``) of it is best.

    Raises:
        ValueError: a number that is not positive; ``keep_best`` without ``metric``; another mode.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_within: timedelta | float | None = None
    keep_best: int | None = None
    max_bytes: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best", "max_bytes"):
            check_positive(name, getattr(self, name))
        if self.keep_within is not None and not 0 < self._seconds < math.inf:
            msg = f"keep_within={self.keep_within!r}: a positive time, as a timedelta or in seconds"
            raise ValueError(msg)
        if self.mode not in ("min", "max"):
            msg = f"mode={self.mode!r}: must be one of 'min', 'max'"
            raise ValueError(msg)
        if self.keep_best is not None and self.metric is None:
            msg = "keep_best= needs metric=, the name of the metric to compare"
            raise ValueError(msg)

    @property
    def _seconds(self) -> float:
        within = self.keep_within
        return within.total_seconds() if isinstance(within, timedelta) else float(within or 0)

    def kept(self, steps: Sequence[Step]) -> set[int]:
        """What the ``keep_*`` keep of ``steps``."""
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
        return kept

    def best(self, steps: Iterable[Step]) -> int | None:
        """The best of ``steps``, if there is a metric to tell by."""
        return None if self.metric is None else best(steps, self.metric, self.mode)

    def unneeded(self, steps: Sequence[Step], protected: Collection[int]) -> set[int]:
        """What may go: all that is neither kept nor protected, and what is beyond ``max_bytes`` of the rest."""
        gone = {step.number for step in steps} - self.kept(steps) - set(protected)
        return gone | self.too_much(
            [step for step in steps if step.number not in gone], protected, room=0
        )

    def too_much(self, steps: Sequence[Step], protected: Collection[int], *, room: int) -> set[int]:
        """What has to go so that there are ``room`` bytes left of ``max_bytes``."""
        return set() if self.max_bytes is None else beyond(steps, self.max_bytes - room, protected)


@dataclass(frozen=True, repr=False)
class Pruned(Report):
    """Report of a removal.

    Attributes:
        removed: the steps that are gone.
        swept: what killed saves had left, and is gone.
        problems: what kept it from removing others, in words.
    """

    removed: list[Step] = field(default_factory=list)
    swept: list[SkippedStep] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def expendable(
    steps: Sequence[Step], policies: Policies, protected: Collection[int] = ()
) -> list[Step]:
    """The steps that may be removed if need be: all but the latest, the best, and those that are protected."""
    if not steps:
        return []
    fixed = {*protected, steps[-1].number, policies.best(steps)}
    return [step for step in steps if step.number not in fixed]


def unneeded(
    steps: Sequence[Step],
    policies: Policies,
    protected: Collection[int] = (),
    *,
    room: int | None = None,
) -> list[Step]:
    """Those of the expendable steps that are not kept.

    Args:
        steps: what there is, the oldest first.
        policies: what to keep.
        protected: steps that stay in any case.
        room: bytes that a save is about to take; then only what it takes to stay below
            ``max_bytes`` goes.
    """
    fixed = {step.number for step in steps} - {
        step.number for step in expendable(steps, policies, protected)
    }
    gone = (
        policies.unneeded(steps, fixed)
        if room is None
        else policies.too_much(steps, fixed, room=room)
    )
    return [step for step in steps if step.number in gone]


def prune(
    root: Root,
    policies: Policies,
    *,
    protected: Collection[int] = (),
    room: int | None = None,
    verify: bool = False,
) -> Pruned:
    """Removes what :func:`unneeded` names, and what killed saves and removals left.

    Args:
        root: where.
        policies, protected, room: as there.
        verify: remove nothing unless a step that stays is verified; where none is, the newest that
            stays is read for it, and the one before it if that is damaged.
    """
    done = Pruned()
    try:
        found = root.sweep()
        done.swept.extend(found.left)
        done.problems.extend(found.problems)
    except RunTakenOverError:
        raise
    except (DcpRsError, OSError) as error:
        done.problems.append(f"what killed saves left is still there: {error}")
        found = root.look()
    steps = found.steps
    gone = unneeded(steps, policies, protected, room=room)
    stay = [step for step in steps if step not in gone]
    if gone and verify and not _has_verified(root, stay, done.problems):
        done.problems.append("nothing was removed: no step that would stay is as its digests say")
        return done
    for step in gone:
        try:
            root.remove(step.number)
        except OSError as error:
            done.problems.append(f"step {step.number} could not be removed: {error}")
            if isinstance(error, StorageError) and not isinstance(error, StoragePreconditionError):
                break  # nor could the next: each would be waited for
        else:
            done.removed.append(step)
    return done


def _has_verified(root: Root, steps: list[Step], problems: list[str]) -> bool:
    if any(step.verified for step in steps):
        return True
    for step in reversed(steps):
        try:
            report = root.verify(step)
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
