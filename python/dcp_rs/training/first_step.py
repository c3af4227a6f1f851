"""The state that an optimizer makes in its first step, made without a step of the job."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch.optim import Optimizer

from dcp_rs import _torch
from dcp_rs.training.extra import RngState
from dcp_rs.training.settings import is_of_torch


@contextmanager
def with_state(optimizer: Optimizer, *, needed: bool) -> Iterator[bool]:
    """Give an optimizer without state, within this context, the state that its first step makes.

    As in ``get_optimizer_state_dict``, it makes a step with gradients and learning rates of zero.
    Nothing but the state changes.

    Args:
        optimizer: the optimizer.
        needed: make that state.

    Yields:
        True if it was made: the optimizer had none, and could make such a step.
    """
    if optimizer.state or not needed:
        yield False
        return
    is_made = False
    try:
        # Any error may come from the code of the optimizer.
        with suppress(Exception), _unchanged(optimizer) as params:
            _make_state(optimizer, params)
            is_made = True
        if not is_made:
            optimizer.state.clear()
        yield is_made
    finally:
        optimizer.state.clear()


@contextmanager
def _unchanged(optimizer: Optimizer) -> Iterator[list[torch.Tensor]]:
    """Undo, after this context, what a step changed apart from the state. Yield the parameters.

    The step of an optimizer that is not torch's may change parameters at a learning rate of zero,
    count in its groups and attributes, and draw random numbers. No hooks are called: the step is
    not one of the job.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    groups = [dict(group) for group in optimizer.param_groups]
    attributes = dict(vars(optimizer))
    changing = () if is_of_torch(optimizer) else params
    values = [param.detach().clone() for param in changing]
    random_state = RngState().state_dict()
    _torch.drop_step_hooks(optimizer)
    try:
        yield params
    finally:
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(settings)
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        with torch.no_grad():
            for param, value in zip(changing, values, strict=True):
                param.copy_(value)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        RngState().load_state_dict(random_state)


def _make_state(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """Make the state of an optimizer, by a step with gradients and learning rates of zero."""
    for group in optimizer.param_groups:
        if "lr" in group:
            rate = group["lr"]
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    trained = [param for param in params if param.requires_grad]
    for param in params:
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimizer.step()
        except Exception:  # noqa: BLE001  # any, from the code of the optimizer
            optimizer.state.clear()
            # SparseAdam takes sparse gradients alone.
            for param in trained:
                param.grad = torch.zeros_like(param).to_sparse()
            optimizer.step()
