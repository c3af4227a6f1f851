"""State dicts as trees: flattening, exactly as DCP does it, but in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from dcp_rs import _torch
from dcp_rs.errors import PlanError

__all__ = [
    "flatten",
    "get_at",
    "holds_only_tensors",
    "is_plain_state_dict",
    "is_stateful",
    "number_parameters",
    "set_at",
    "stateful_values",
]

Path = tuple[Any, ...]


def flatten(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """The leaves of a nested state dict by FQN, and their paths.

    Mappings are entered always, with their keys as text; lists only if they hold tensors or containers that do;
    tuples never (``torch.distributed.checkpoint._traverse``, torch 2.4 and later).

    Raises:
        PlanError: two leaves have the same FQN.
    """
    if holds_only_tensors(state_dict) and set(map(type, state_dict)) <= {str}:
        return dict(state_dict), {key: (key,) for key in state_dict}
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    _enter(state_dict, "", (), flat, paths)
    return flat, paths


def holds_only_tensors(state_dict: Mapping[str, Any]) -> bool:
    """Whether every value is a tensor. Asked of the few types there are, and not of every value."""
    return all(issubclass(kind, torch.Tensor) for kind in set(map(type, state_dict.values())))


def _enter(node: Any, prefix: str, path: Path, flat: dict[str, Any], paths: dict[str, Path]) -> None:
    pairs = node.items() if isinstance(node, Mapping) else enumerate(node)
    as_text = isinstance(node, Mapping)
    for key, value in pairs:
        if as_text and type(key) is not str:
            key = str(key)  # noqa: PLW2901  # as DCP has it
        fqn = f"{prefix}.{key}" if path else str(key)
        here = (*path, key)
        if not isinstance(value, torch.Tensor) and _is_inner(value):
            _enter(value, fqn, here, flat, paths)
            continue
        if fqn in flat:
            msg = f"two entries of the state dict flatten to {fqn!r}: {paths[fqn]} and {here}"
            raise PlanError(msg, tensor=fqn)
        flat[fqn] = value
        paths[fqn] = here


def _is_inner(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list):
        return False
    return any(isinstance(entry, torch.Tensor) or _is_inner(entry) for entry in value)


def is_plain_state_dict(state_dict: Mapping[str, Any]) -> bool:
    """Whether no ShardedTensor of torch's 2-D FSDP, one within another, is in it."""
    kinds = set(map(type, state_dict.values()))
    if any(issubclass(kind, ShardedTensor) for kind in kinds):
        return False
    inner = tuple(kind for kind in kinds if issubclass(kind, (Mapping, list)))
    return not inner or all(
        is_plain_state_dict(_children(value)) for value in state_dict.values() if isinstance(value, inner)
    )


def _children(node: Mapping[str, Any] | list[Any]) -> Mapping[Any, Any]:
    return node if isinstance(node, Mapping) else dict(enumerate(node))


def is_stateful(value: Any) -> bool:
    """Whether the value is one of DCP's ``Stateful``: it has ``state_dict`` and ``load_state_dict``."""
    # torch asks a runtime protocol, at some 30 microseconds a tensor.
    return not isinstance(value, _NEVER_STATEFUL) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def stateful_values(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are ``Stateful``."""
    if holds_only_tensors(state_dict):
        return {}
    return {key: value for key, value in state_dict.items() if is_stateful(value)}


_NEVER_STATEFUL = (torch.Tensor, dict, list, tuple, str, bytes, int, float)


def get_at(root: Any, path: Path) -> Any:
    """The entry of a nested state dict at ``path``, whose text may stand for other keys; None where there is none."""
    node = root
    for key in path:
        if isinstance(node, Mapping):
            node = node[key] if key in node else next((v for k, v in node.items() if str(k) == key), None)
        elif isinstance(node, list) and isinstance(key, int) and key < len(node):
            node = node[key]
        else:
            return None
    return node


def set_at(root: dict[str, Any], path: Path, value: Any) -> None:
    """Replaces the entry of a nested state dict at ``path``."""
    _torch.set_element(root, path, value)


def number_parameters(node: Any) -> None:
    """Gives the states of optimizers in a nested state dict their numbers as keys again, in place.

    DCP names entries by text, so that what ``optimizer.state_dict()["state"]`` has under 0 comes back under ``"0"``. ``load_state_dict`` would
    take that without a word, for a parameter that it does not know, and the optimizer would begin anew.
    """
    if isinstance(node, dict):
        groups, state = node.get("param_groups"), node.get("state")
        if isinstance(groups, list) and isinstance(state, dict):
            lists = [group.get("params") for group in groups if isinstance(group, Mapping)]
            numbers = {str(n): n for of in lists if isinstance(of, list) for n in of if type(n) is int}
            known = {numbers[key]: state.pop(key) for key in numbers if key in state}
            node["state"] = known | state
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        number_parameters(value)
