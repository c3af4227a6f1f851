"""The paths of a save's plan stay on their rank: what goes with its items says them too."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from dcp_rs.dcp.local_items import planner_of, planner_with

__all__ = ["stay_here"]


def stay_here(plan: SavePlan) -> SavePlan:
    """The plan, whose paths do not go to other ranks: what goes with its items says them too."""
    items: Any = plan.items
    if planner_of(plan) is None or type(plan.planner_data) is not dict:
        return plan
    return dataclasses.replace(plan, planner_data=_PathsHere(plan.planner_data, items.token))


class _PathsHere(dict[str, Any]):
    """The paths of a plan, in the process where it was made; in others they are empty."""

    def __init__(self, paths: dict[str, Any], token: bytes) -> None:
        super().__init__(paths)
        self._token = token

    def __reduce__(self) -> tuple[Any, ...]:
        return _paths_of, (self._token,)


def _paths_of(token: bytes) -> _PathsHere:
    planner = planner_with(token)
    return _PathsHere({} if planner is None else planner.mappings, token)
