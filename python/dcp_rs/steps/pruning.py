"""Removal of what the policies do not keep, on one rank, once a newer step is durable."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dcp_rs._shown import Report
from dcp_rs.errors import DcpRsError, RunTakenOverError, StorageError, StoragePreconditionError
from dcp_rs.steps.policies import Policies
from dcp_rs.steps.root import PassedOver, Root, Step

__all__ = ["Pruned", "expendable", "prune", "unneeded"]


@dataclass(frozen=True, repr=False)
class Pruned(Report):
    """Report of a removal.

    Attributes:
        removed: the steps that are gone.
        swept: what killed saves had left, and is gone.
        problems: what kept it from removing others, in words.
    """

    removed: list[Step] = field(default_factory=list)
    swept: list[PassedOver] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def expendable(steps: Sequence[Step], policies: Policies, protected: Collection[int] = ()) -> list[Step]:
    """The steps that may be removed if need be: all but the latest, the best, and those that are protected."""
    if not steps:
        return []
    fixed = {*protected, steps[-1].number, policies.best(steps)}
    return [step for step in steps if step.number not in fixed]


def unneeded(
    steps: Sequence[Step], policies: Policies, protected: Collection[int] = (), *, room: int | None = None
) -> list[Step]:
    """Those of the expendable steps that are not kept.

    Args:
        steps: what there is, the oldest first.
        policies: what to keep.
        protected: steps that stay in any case.
        room: bytes that a save is about to take; then only what it takes to stay below ``max_bytes`` goes.
    """
    fixed = {step.number for step in steps} - {step.number for step in expendable(steps, policies, protected)}
    gone = policies.unneeded(steps, fixed) if room is None else policies.too_much(steps, fixed, room=room)
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
        verify: remove nothing unless a step that stays is verified; where none is, the newest that stays is read for it, and the one before it if that
            is damaged.
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
            f"is damaged: {report.problems[0]}" if report.problems else "has no digests, so nothing of it was verified"
        )
        problems.append(f"step {step.number} {why}")
    return False
