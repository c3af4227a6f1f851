"""The items of a plan that stays on its rank: they come into being when somebody looks at them."""

from __future__ import annotations

import copy
import dataclasses
import secrets
from collections import UserList
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakMethod, ref

from dcp_rs.errors import PlanError

__all__ = ["LocalItems", "bring_back", "planner_of"]

P = TypeVar("P", bound=Any)


class LocalItems(UserList[Any]):
    """A list of items that its planner makes when it is looked at, and that crosses the collectives as a few bytes.

    Whoever wraps a planner, reader or writer finds in it what torch's planner would have put there. As long as nobody changed it, it stands for
    what the planner planned, with items or without.

    Args:
        items: of an ordinary list.
        planner: whose plan it is; None: it is ordinary, or its items are on another rank.
        make: makes the items: a method of the planner. Neither is kept alive: a planner has its items, and goes when the load is over.
        token: tells this plan from all others.
    """

    def __init__(
        self,
        items: Iterable[Any] | None = None,
        *,
        planner: Any = None,
        make: Callable[[], list[Any]] | None = None,
        token: bytes = b"",
    ) -> None:
        self._planner = None if planner is None else ref(planner)
        self.token = token or secrets.token_bytes(16)
        self._make = None if make is None else WeakMethod(make)
        self._made: list[Any] | None = None
        self._items: list[Any] | None = None
        if make is None and not token:
            self._items = [] if items is None else list(items)

    @property
    def planner(self) -> Any:
        """Whose plan it is, if there is one."""
        return None if self._planner is None else self._planner()

    @property
    def data(self) -> list[Any]:  # type: ignore[override]  # what UserList keeps its items in
        """The items.

        Raises:
            PlanError: they are on another rank.
        """
        if self._items is None:
            make = None if self._make is None else self._make()
            if make is None:
                raise PlanError(
                    "the items of this plan stay on the rank that made it: who needs those of all ranks derives from the planner of dcp_rs "
                    "and overrides create_global_plan; who needs them later passes the plan through its finish_plan"
                )
            self._made = make()
            self._items = list(self._made)
        return self._items

    @property
    def is_as_planned(self) -> bool:
        """Whether these are the items of its planner, all of them and no others."""
        return self.planner is not None and self._items == self._made

    @property
    def is_elsewhere(self) -> bool:
        """Whether the items are on another rank, or were on their way."""
        return self._items is None and self._make is None

    def __repr__(self) -> str:
        where = "on another rank" if self.is_elsewhere else "not made yet" if self._items is None else repr(self._items)
        return f"LocalItems({where})"

    def __copy__(self) -> LocalItems:
        return LocalItems(self.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalItems:
        return LocalItems(copy.deepcopy(self.data, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_elsewhere or self.is_as_planned:
            return _elsewhere, (self.token,)
        return list, (self.data,)


def _elsewhere(token: bytes) -> LocalItems:
    return LocalItems(token=token)


def bring_back(plan: P, items: LocalItems) -> P:
    """The plan with its items, when it comes back from the coordinator to the rank that has them.

    Raises:
        PlanError: it is the plan of another rank.
    """
    came = plan.items
    if not isinstance(came, LocalItems) or not came.is_elsewhere:
        return plan
    if came.token != items.token:
        raise PlanError("this rank got the plan of another rank or load, whose items are not here")
    brought: P = dataclasses.replace(plan, items=items)
    return brought


def planner_of(plan: Any) -> Any:
    """The planner whose own plan it is, as that planned it; None where it is another, or somebody changed its items."""
    items = plan.items
    return items.planner if isinstance(items, LocalItems) and items.is_as_planned else None
