"""What state an optimizer makes for a parameter: shapes, and whether it is sharded as the parameter is. No step of the optimizer itself is taken."""

from __future__ import annotations

import ast
import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.tensors.flatten import flatten
from dcp_rs.tensors.nesting import TreePath, text_path
from dcp_rs.tensors.shards import global_shape

__all__ = ["Made", "MadeState", "keys_of", "unclear_in", "with_keys"]


def keys_of(tree: Any) -> dict[TreePath, Any]:
    """The last part of the path to whatever is in a tree, by the path as text."""
    found: dict[TreePath, Any] = {}
    _collect(tree, (), found)
    return found


def with_keys(path: TreePath, keys: Mapping[TreePath, Any]) -> TreePath:
    """The path with the keys that are known in place of the text that stands for them."""
    text = text_path(path)
    return tuple(keys.get(text[:end], part) if type(part) is str else part for end, part in enumerate(path, 1))


def unclear_in(path: TreePath, keys: Mapping[TreePath, Any]) -> str | None:
    """The first part of a path of text that is not among the known keys, and reads as if it was a number, a tuple or None; None if no part does."""
    text = text_path(path)
    for end, part in enumerate(path, 1):
        if type(part) is str and text[:end] not in keys and _reads_as_no_text(part):
            return part
    return None


def _collect(tree: Any, path: TreePath, found: dict[TreePath, Any]) -> None:
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            here = (*path, str(key))
            if type(key) is str:
                found[here] = key
            else:
                found.setdefault(here, (key,))
            _collect(child, here, found)
    elif isinstance(tree, list):
        for place, child in enumerate(tree):
            _collect(child, (*path, place), found)


def _reads_as_no_text(text: str) -> bool:
    if text.isidentifier() and text not in ("None", "True", "False"):
        return False
    try:
        return not isinstance(ast.literal_eval(text), str)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


#: Kinds of attributes that another optimizer of the class may have as well: nothing that leads to the parameters.
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
#: Settings that choose between ways of taking the same step, some of which are for accelerators alone.
_WAYS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class Made:
    """The state that an optimizer makes for a parameter, as far as it tells.

    Attributes:
        tensors: by path: on ``meta``, but for those that the optimizer puts elsewhere.
        keys: as :func:`keys_of` gives them.
    """

    tensors: Mapping[TreePath, torch.Tensor] = field(default_factory=dict)
    keys: Mapping[TreePath, Any] = field(default_factory=dict)


class MadeState:
    """The state that an optimizer makes, asked of another one of its class, which takes a step on ``meta`` with one parameter.

    Nothing is computed there, and nothing sent to other ranks. An optimizer that cannot do it tells nothing: one that needs
    values, or that wraps another.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[Any, Made] = {}

    def of(self, param: torch.Tensor, group: int) -> Made:
        """The state of a parameter.

        Args:
            param: of the optimizer.
            group: the number of the group that it is in.
        """
        sharding = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        local = param.to_local().shape if isinstance(param, DTensor) else param.shape
        key = (group, type(param), global_shape(param), local, param.dtype, sharding)
        if key not in self._known:
            self._known[key] = self._ask(param, group)
        return self._known[key]

    def _ask(self, param: torch.Tensor, group: int) -> Made:
        if not param.is_floating_point():
            return Made()
        kind = type(self._optimizer)
        meta = torch.device("meta")
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            like = torch.nn.Parameter(_torch.empty_like(param.detach(), dtype=param.dtype, device=meta))
            like.grad = _torch.empty_like(param.detach(), dtype=param.dtype, device=meta)
            other = object.__new__(kind)
            # Whatever goes wrong in the code of others: some state may be there already.
            with contextlib.suppress(Exception):
                other.__dict__.update({k: v for k, v in vars(self._optimizer).items() if isinstance(v, _PLAIN)})
                other.__setstate__(
                    {
                        "defaults": dict(self._optimizer.defaults),
                        "state": defaultdict(dict),
                        "param_groups": [self._settings(group) | {"params": [like]}],
                    }
                )
                _step_of(kind)(other)
            with contextlib.suppress(Exception):
                state = dict(other.state[like])
                flat = flatten(state)
                tensors = {
                    flat.paths[name]: value
                    for name, value in flat.values.items()
                    if isinstance(value, torch.Tensor) and not _is_partial(value)
                }
                return Made(tensors, keys_of(state))
        return Made()

    def _settings(self, group: int) -> dict[str, Any]:
        settings = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self._optimizer.param_groups[group].items()
            if name not in ("params", "param_names")
        }
        return settings | {way: False for way in _WAYS if way in settings}


def _step_of(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the step of a class of optimizers, without the hooks that users registered for all of them: this one only stands for another."""
    return kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step  # type: ignore[attr-defined]


def _is_partial(tensor: torch.Tensor) -> bool:
    """Whether its values are yet to be summed: nothing can be loaded into that."""
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)
