"""Flattening of nested state dicts, as DCP does it, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful

from dcp_rs import _torch
from dcp_rs.errors import PlanError
from dcp_rs.tensors.nesting import Container, TreePath, kind_of, name_of, shown, text_path


@dataclass(slots=True)
class Flat:
    """A flattened state dict.

    Attributes:
        values: the leaves by FQN.
        paths: the path of each leaf, with keys of their own types. They include the ShardedTensors
            that have no shards on this rank.
        containers: the mappings that the paths do not describe.
        is_text: whether every key is a string.
    """

    values: dict[str, Any]
    paths: dict[str, TreePath]
    containers: list[Container]
    is_text: bool = True

    def text_paths(self) -> dict[str, TreePath]:
        """Return the paths as DCP stores them."""
        if self.is_text:
            return self.paths
        return {fqn: text_path(path) for fqn, path in self.paths.items()}


def flatten(state_dict: Mapping[Any, Any], state_of: Callable[[Any], Any] | None = None) -> Flat:
    """Flatten a nested state dict.

    Mappings are always entered, and their keys become text in the names. Lists are entered if they
    contain tensors or containers of tensors. Tuples are never entered. This is what
    ``torch.distributed.checkpoint._traverse`` does since torch 2.4. A ShardedTensor in a
    ShardedTensor, as 2-D FSDP makes them, becomes one. One without shards on this rank is no leaf.

    Args:
        state_dict: the state dict.
        state_of: returns the state of a ``Stateful`` entry of the state dict itself. Default: such
            entries are leaves.

    Raises:
        PlanError: two leaves have the same FQN; the state dict contains itself.
    """
    flat = Flat({}, {}, [])
    # A look at each type costs less than one at each value.
    types = set(map(type, state_dict.values()))
    if set(map(type, state_dict)) <= {str} and all(issubclass(t, torch.Tensor) for t in types):
        flat.values, flat.paths = dict(state_dict), {key: (key,) for key in state_dict}
        if (kind := kind_of(state_dict)) != "dict":
            flat.containers.append(_container(0, (), kind, state_dict))
    else:
        try:
            _enter(state_dict, "", (), flat, state_of)
        except RecursionError as error:
            last = next(reversed(flat.paths.values()), ())
            msg = "the state dict contains itself, or is nested too deep"
            msg += f": look at {shown(last[:2])}" if last else ""
            raise PlanError(msg) from error
    if any(issubclass(cls, ShardedTensor) for cls in set(map(type, flat.values.values()))):
        flat.values = _torch.flatten_sharded_tensors(flat.values)
    return flat


def _enter(
    node: Any,
    prefix: str,
    path: TreePath,
    flat: Flat,
    state_of: Callable[[Any], Any] | None = None,
) -> None:
    is_mapping = isinstance(node, Mapping)
    if is_mapping:
        kind = "dict" if type(node) is dict else kind_of(node)
        if kind != "dict" or (path and not node):
            flat.containers.append(_container(len(flat.values), path, kind, node))
    for key, entry in node.items() if is_mapping else enumerate(node):
        name = str(key)
        fqn = f"{prefix}.{name}" if path else name
        here = (*path, key)
        if is_mapping and type(key) is not str:
            here, flat.is_text = (*path, (key,)), False
        value = state_of(entry) if state_of is not None and is_stateful(entry) else entry
        if not isinstance(value, torch.Tensor) and _is_inner(value):
            _enter(value, fqn, here, flat)
            continue
        if fqn in flat.values:
            msg = (
                f"two entries of the state dict flatten to {fqn!r}: {shown(flat.paths[fqn])} "
                f"and {shown(here)}"
            )
            raise PlanError(msg, tensor=fqn)
        flat.values[fqn] = value
        flat.paths[fqn] = here


def _container(position: int, path: TreePath, kind: str, mapping: Any) -> Container:
    return Container(position, path, kind, _torch.module_versions(mapping))


def _is_inner(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list):
        return False
    return any(isinstance(entry, torch.Tensor) or _is_inner(entry) for entry in value)


def is_stateful(value: Any) -> bool:
    """Return whether a value is one of DCP's ``Stateful``, and no tensor."""
    if isinstance(value, torch.Tensor) or not hasattr(value, "load_state_dict"):
        return False
    return isinstance(value, Stateful)  # this takes some 30 microseconds


def get_at(root: Any, path: TreePath, default: Any = None) -> Any:
    """Return the entry of a nested state dict at ``path``, or ``default`` if there is none.

    A text key in the path also finds a key of another type with that text.
    """
    node = root
    for part in path:
        if isinstance(node, Mapping):
            node = node.get(_key_in(node, part), default)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            return default
    return node


def set_at(root: dict[Any, Any], path: TreePath, value: Any) -> None:
    """Replace the entry of a nested state dict at ``path``.

    Raises:
        PlanError: the container of the entry is gone.
    """
    node = root if len(path) == 1 else get_at(root, path[:-1])
    if isinstance(node, MutableMapping):
        node[_key_in(node, path[-1])] = value
    elif isinstance(node, list) and isinstance(path[-1], int) and path[-1] < len(node):
        node[path[-1]] = value
    else:
        msg = f"there is nothing at {shown(path[:-1])} of the state dict to put a value into"
        raise PlanError(msg, tensor=name_of(path))


def _key_in(node: Mapping[Any, Any], part: Any) -> Any:
    if type(part) is tuple:
        return part[0]
    return part if part in node else next((key for key in node if str(key) == part), part)


def number_parameters(node: Any) -> None:
    """Turn the text keys of optimizer states into parameter numbers again, in place.

    DCP's names are text, so the key 0 of ``optimizer.state_dict()["state"]`` comes back as "0".
    ``load_state_dict`` accepts that silently, for a parameter it does not know, and the optimizer
    would start anew.
    """
    if isinstance(node, list):
        for value in node:
            number_parameters(value)
    elif isinstance(node, dict):
        groups, state = node.get("param_groups"), node.get("state")
        if isinstance(groups, list) and isinstance(state, dict):
            lists = [group.get("params") for group in groups if isinstance(group, Mapping)]
            numbers = {
                str(n): n for of in lists if isinstance(of, list) for n in of if type(n) is int
            }
            known = {numbers[key]: state.pop(key) for key in numbers if key in state}
            node["state"] = known | state
        for value in node.values():
            number_parameters(value)
