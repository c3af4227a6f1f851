"""Loading a step on all ranks: the newest that is whole, if no other is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dcp_rs.engine.attempts import Attempts
from dcp_rs.errors import CheckpointNotFoundError, CorruptDataError, CorruptIndexError
from dcp_rs.steps.keeper import Keeper
from dcp_rs.steps.root import PassedOver
from dcp_rs.steps.team import Team

__all__ = ["resume"]

#: A load of the latest step that fails with one of these goes on with the step before.
_DAMAGED = (CorruptDataError, CorruptIndexError, CheckpointNotFoundError)


def resume(
    team: Team, keeper: Keeper, step: int | None, load: Callable[[Path], object], attempts: Attempts
) -> tuple[int | None, list[PassedOver]]:
    """Loads ``step``, or the newest that is whole and does not turn out to be damaged. Returns which, and what was passed over.

    Args:
        team, keeper: of the manager.
        step: None: the newest.
        load: loads from a folder.
        attempts: the loads of this call, which ``load`` knows too.

    Raises:
        CorruptDataError: a step was damaged, and the one before it has not all that the load of the damaged one may have filled.
    """

    def attempt(number: int) -> str | None:
        try:
            load(keeper.folder(number))
        except _DAMAGED as error:
            if step is not None or attempts.is_refused:
                raise
            return str(error)
        return None

    damaged: dict[int, str] = {}
    while True:
        number, passed = team.decide(step, lambda step: keeper.choose(step, damaged))
        # What one rank finds damaged, none has.
        reasons = [] if number is None else [why for why in team.all(partial(attempt, number)) if why is not None]
        if number is None or not reasons:
            keeper.resumed = number
            return number, passed
        damaged[number] = reasons[0]
