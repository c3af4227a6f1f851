"""What state an optimizer makes for its parameters: shapes, keys, and how it is sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.tensors.nesting import TreePath
from dcp_rs.tensors.trees import flatten
from dcp_rs.training.keys import keys_of

__all__ = ["Made", "made_state"]


@dataclass(frozen=True, slots=True)
class Made:
    """The state that an optimizer makes for a parameter.

    Attributes:
        tensors: on ``meta``, by path.
        keys: as :func:`keys_of` gives them.
    """

    tensors: Mapping[TreePath, torch.Tensor] = field(default_factory=dict)
    keys: Mapping[TreePath, Any] = field(default_factory=dict)


def made_state(optimizer: Optimizer) -> dict[int, Made]:
    """Return the state that an optimizer without any makes, by the ``id`` of its parameters. It has none afterwards.

    torch makes it, by a step at a rate of zero with gradients of zero, as ``get_optimizer_state_dict`` does. Every rank has to call this: a
    step may talk to the others. An optimizer that cannot take such a step tells nothing.
    """
    if optimizer.state:
        return {}
    made: dict[int, Made] = {}
    with _as_it_was(optimizer), contextlib.suppress(Exception):  # whatever goes wrong in the code of others
        _torch.init_optimizer_state(optimizer)
        for param, state in optimizer.state.items():
            flat = flatten(dict(state))
            tensors = {flat.paths[name]: value for name, value in flat.values.items() if _is_filled(value)}
            made[id(param)] = Made(
                {
                    path: _torch.empty_like(value.detach(), dtype=value.dtype, device=torch.device("meta"))
                    for path, value in tensors.items()
                },
                keys_of(state),
            )
    return made


@contextlib.contextmanager
def _as_it_was(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer its gradients and rates back, and no state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        optimizer.state.clear()
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate


def _is_filled(value: Any) -> bool:
    """Whether a value is a tensor that can be loaded into, not one whose values are yet to be summed."""
    if not isinstance(value, torch.Tensor):
        return False
    return not (isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements))
