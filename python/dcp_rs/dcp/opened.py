"""Which save each rank of a load has opened, as its plan says."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from torch.distributed.checkpoint.planner import LoadPlan

from dcp_rs.dcp.wanted import Answer, Told, compare
from dcp_rs.errors import CheckpointReplacedError

__all__ = ["Opened", "answered", "check_one_save", "opened_of"]


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a rank's plan says of the load: which save it opened, and what it wants of it.

    Once all plans have met, in place of what it wants: how many ranks take part, and what is known of what they want. Of a rank-local save only that it
    is one: there each rank has a save of its own.
    """

    save_id: str | None
    of_all_ranks: bool = True
    wants: Told | None = None
    ranks: int = 0
    answer: Answer | None = None


def opened_of(plan: LoadPlan) -> Opened | None:
    """What a plan says; None where a reader of another kind, or a planner, left nothing there."""
    return plan.storage_data if isinstance(plan.storage_data, Opened) else None


def check_one_save(plans: Sequence[LoadPlan], path: str | os.PathLike[str]) -> bool:
    """Whether all ranks opened one save; False where each opened its own.

    Raises:
        CheckpointReplacedError: neither is so.
    """
    opened = {(each.of_all_ranks, each.save_id) for each in map(opened_of, plans) if each is not None}
    if len({of_all_ranks for of_all_ranks, _ in opened}) > 1:
        msg = f"a save of all ranks replaced those of single ranks while the ranks were opening it: {path}"
        raise CheckpointReplacedError(msg, path=path)
    if len(opened) > 1:
        msg = f"the checkpoint was replaced by another save while the ranks were opening it: {path}"
        raise CheckpointReplacedError(msg, path=path)
    return any(of_all_ranks for of_all_ranks, _ in opened)


def answered(plans: Sequence[LoadPlan]) -> list[LoadPlan]:
    """The plans as the coordinator sends them back, each with what others of its machine want too.

    Raises:
        PlanError: what a rank told of that is none of it.
    """
    told = [opened_of(plan) for plan in plans]
    answers = compare([None if each is None else each.wants for each in told])
    return [
        plan
        if each is None
        else dataclasses.replace(plan, storage_data=Opened(each.save_id, ranks=len(plans), answer=answer))
        for plan, each, answer in zip(plans, told, answers, strict=True)
    ]
