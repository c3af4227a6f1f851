"""The items of a plan that stays on its rank: they come into being when somebody looks at them."""

from __future__ import annotations

import copy
import secrets
from collections import UserList
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod, WeakValueDictionary, ref

from dcp_rs.errors import PlanError

__all__ = ["LocalItems", "check_own", "note_of", "planner_of", "planner_with"]

#: The items that were planned in this process, by their tokens, for when they come back from the coordinator.
_planned_here: WeakValueDictionary[bytes, LocalItems] = WeakValueDictionary()


class LocalItems(UserList[Any]):
    """A list of items that its planner makes when it is looked at, and that crosses the collectives as a few bytes.

    Whoever wraps a planner, reader or writer finds in it what torch's planner would have put there; on other ranks, an error. As long as nobody
    changed it, it stands for what the planner planned, with items or without.

    Args:
        items: of an ordinary list.
        planner: whose plan it is; None: it is ordinary, or its items are on another rank.
        make: makes the items, from ``note``: a method of the planner. Neither is kept alive: a planner has its items, and goes when the load is over.
        token: tells this plan from all others.
        note: what crosses with them, for the planner of the coordinator or of this rank.
    """

    def __init__(
        self,
        items: Iterable[Any] | None = None,
        *,
        planner: Any = None,
        make: Callable[[Any], list[Any]] | None = None,
        token: bytes = b"",
        note: Any = None,
    ) -> None:
        self._planner = None if planner is None else ref(planner)
        self.token = token or secrets.token_bytes(16)
        self.note = note
        self._make = None if make is None else WeakMethod(make)
        self._made: list[Any] | None = None
        self._items: list[Any] | None = None
        if make is None and not token:
            self._items = [] if items is None else list(items)
        if make is not None and not token:
            _planned_here[self.token] = self

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
                    "and overrides create_global_plan"
                )
            self._made = make(self.note)
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

    def answered(self, note: Any) -> LocalItems:
        """These items, of which the coordinator says something."""
        if note is self.note:
            return self
        make = None if self._make is None else self._make()
        return LocalItems(planner=self.planner, make=make, token=self.token, note=note)

    def __repr__(self) -> str:
        where = "on another rank" if self.is_elsewhere else "not made yet" if self._items is None else repr(self._items)
        return f"LocalItems({where})"

    def __copy__(self) -> LocalItems:
        return LocalItems(self.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalItems:
        return LocalItems(copy.deepcopy(self.data, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_elsewhere or self.is_as_planned:
            return _elsewhere, (self.token, self.note)
        return list, (self.data,)


def _elsewhere(token: bytes, note: Any) -> LocalItems:
    items = _planned_here.get(token)
    return LocalItems(token=token, note=note) if items is None else items.answered(note)


def check_own(plan: Any, token: bytes) -> None:
    """Looks whether a plan that came back from the coordinator is that of this rank.

    Raises:
        PlanError: it is the plan of another rank.
    """
    items = plan.items
    if isinstance(items, LocalItems) and items.token != token and items.is_elsewhere:
        raise PlanError("this rank got the plan of another rank or load, whose items are not here")


def note_of(plan: Any) -> Any:
    """What came with the items of a plan, if they are as their planner planned them."""
    items = plan.items
    return items.note if isinstance(items, LocalItems) and (items.is_elsewhere or items.is_as_planned) else None


def planner_of(plan: Any) -> Any:
    """The planner whose own plan it is, as that planned it; None where it is another, or somebody changed its items."""
    items = plan.items
    return items.planner if isinstance(items, LocalItems) and items.is_as_planned else None


def planner_with(token: bytes) -> Any:
    """The planner of this process whose items have this token, if there is one."""
    items = _planned_here.get(token)
    return None if items is None else items.planner
