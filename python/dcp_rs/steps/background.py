"""The saves of a manager that go on in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcp_rs import api
from dcp_rs.engine.background import SaveFuture
from dcp_rs.steps.team import Team
from dcp_rs.transfer.stage import HostStager

__all__ = ["Background"]


class Background:
    """Saves, one at a time, and the memory that each is staged to, which is that of the one before.

    Args:
        team: the ranks that save.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._stager: HostStager | None = None

    def save(
        self,
        state_dict: dict[str, Any],
        path: Path,
        committed: Callable[[], None],
        **options: Any,
    ) -> SaveFuture:
        """Begins one. ``committed`` is called on the first rank once it is durable, and before the future is done."""
        if self._stager is None:
            self._stager = HostStager(cache=True)
        done = SaveFuture()
        self._team.pending = done
        try:
            saving = api.async_save(state_dict, path, stager=self._stager, **options)
        except BaseException as error:  # it may be this rank's alone: the next call raises it on all
            done.staged.set_result(None)
            done.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            done.staged = saving.staged
            self._team.follow(saving, done, committed)
        return done

    def let_go(self) -> None:
        """Gives back the memory that no save is staged to."""
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.release()
