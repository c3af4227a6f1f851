"""``Stateful`` objects in a state dict: their state is taken before a load, and handed back after it."""

from __future__ import annotations

from typing import Any

from dcp_rs.tensors.nesting import unwrap_in
from dcp_rs.tensors.trees import stateful_values

__all__ = ["hand_back", "take_states"]


def take_states(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of a state dict with the states of ``Stateful`` objects in their place, and those objects."""
    # In one order on all ranks: what is stateful may talk to the others.
    values = {key: state_dict[key] for key in sorted(state_dict, key=str)}
    holders = stateful_values(values)
    values.update({key: holder.state_dict() for key, holder in holders.items()})
    return values, holders


def hand_back(state_dict: dict[str, Any], values: dict[str, Any], holders: dict[str, Any], *, source: str) -> None:
    """Load the objects from what was read, and put all other entries into the state dict.

    Args:
        state_dict: the caller's.
        values, holders: what :func:`take_states` returned, ``values`` filled.
        source: of the index. This package marks mappings that it saved whole.
    """
    loaded = unwrap_in(values) if source == "dcp-rs" else values
    for key, holder in holders.items():
        holder.load_state_dict(loaded.pop(key))
    state_dict.update(loaded)
