"""State of learning rate schedulers for groups of an optimizer that were moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_rs.tensors.nesting import like

#: The lists of torch's schedulers that have an entry for each group of the optimizer.
_BY_GROUP = {
    *("base_lrs", "max_lrs", "min_lrs", "_last_lr", "lr_lambdas"),
    *("base_momentums", "max_momentums"),
}


@dataclass(frozen=True)
class GroupPlaces:
    """The saved groups of an optimizer's groups.

    Attributes:
        places: the number of the saved group of each group, among those of all saved optimizers.
        count: the number of all of these.
    """

    places: list[int]
    count: int

    def arrange(self, state: Any) -> Any:
        """Return the saved state of a scheduler with its lists in the order of the groups.

        The state of a scheduler of schedulers contains theirs.
        """
        if isinstance(state, Mapping):
            arranged = (
                self._arranged(value)
                if key in _BY_GROUP and isinstance(value, list)
                else self.arrange(value)
                for key, value in state.items()
            )
            return like(state, zip(state, arranged, strict=True))
        if isinstance(state, list):
            return [self.arrange(value) for value in state]
        return state

    def _arranged(self, values: list[Any]) -> list[Any]:
        first = 0
        if len(values) != self.count:  # one of several optimizers: its groups follow each other
            first = min(self.places)
            if sorted(self.places) != list(range(first, first + len(values))):
                return values
        return [values[place - first] for place in self.places]
