"""Optimizers whose ``state_dict()`` is not their ``state``, such as those that compress it.

Their saved floats were cast into the compressed tensors, without a word.
"""

import pytest
import torch
from torch import nn

from dcp_rs.optim import load_optim_state_dict, load_training_state, save_training_state
from support import assert_state_equal
from support.training import train


class Compressed(torch.optim.Optimizer):
    """Momentum in blocks of int8 with a scale; float32 in the state dict."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                old = unpacked(state) if state else torch.zeros_like(param)
                new = 0.9 * old + param.grad
                state.clear()
                state |= packed(new)
                param.sub_(unpacked(state) * group["lr"])

    def state_dict(self):
        state = super().state_dict()
        state["state"] = {key: {"moment": unpacked(own)} for key, own in state["state"].items()}
        return state

    def load_state_dict(self, state_dict):
        state = {key: packed(own["moment"]) for key, own in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})
        for key, param in enumerate(self.param_groups[0]["params"]):
            if key in state:
                self.state[param] = state[key]  # not cast to the dtype of the parameter


def packed(value):
    scale = value.abs().max() / 127 + 1e-12
    codes = (value / scale).round().to(torch.int8).reshape(-1)
    return {"moment": codes.view(-1, 2), "scale": scale, "shape": tuple(value.shape)}


def unpacked(state):
    return (state["moment"].float() * state["scale"]).reshape(state["shape"])


class Hooked(torch.optim.SGD):
    """The same by hooks, which convert momentum in place of a class."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, momentum=0.9)
        self.register_state_dict_post_hook(halved)
        self.register_load_state_dict_pre_hook(doubled)


def halved(optimizer, state):
    state["state"] = {
        key: {"momentum_buffer": own["momentum_buffer"].double().reshape(-1) / 2}
        for key, own in state["state"].items()
    }


def doubled(optimizer, state):
    shapes = [param.shape for param in optimizer.param_groups[0]["params"]]
    state["state"] = {
        key: {"momentum_buffer": (own["momentum_buffer"] * 2).float().reshape(shapes[key])}
        for key, own in state["state"].items()
    }


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", [Compressed, Hooked])
def test_state_as_the_state_dict_has_it(ckpt, kind, steps):
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    optimizer = kind(model.parameters())
    train(model, optimizer, 2)
    save_training_state(ckpt, model, optimizer, fsync=False)
    want = {key: value.clone() for key, value in model.state_dict().items()}
    state = optimizer.state_dict()
    other = nn.Linear(4, 6)
    by_torch = kind(other.parameters())
    by_torch.load_state_dict(state)
    for load in (load_training_state, load_optim_state_dict):
        other = nn.Linear(4, 6)
        resumed = kind(other.parameters())
        train(other, resumed, steps)
        load(ckpt, other, resumed)
        assert_state_equal(list(resumed.state.values()), list(by_torch.state.values()))
        other.load_state_dict(want)
        train(other, resumed, 1)
    train(model, optimizer, 1)
    assert_state_equal(other.state_dict(), model.state_dict())
