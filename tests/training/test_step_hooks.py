"""Hooks for the steps of all optimizers hear of no step in a load, which takes none.

What state an optimizer makes is asked of another of its class, on ``meta``: the hooks were called with that one.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dcp_rs.optim import load_training_state, save_training_state
from support import assert_state_equal


class Nested(torch.optim.Adam):
    """Its step calls that of its base, which has hooks too once there is one of the base."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def made(kind: type[torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, kind(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.fixture
def heard() -> Iterator[list[tuple[str, torch.optim.Optimizer]]]:
    """What hooks before and after steps were called with."""
    calls: list[tuple[str, torch.optim.Optimizer]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(("before", optimizer))),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(("after", optimizer))),
    ]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", [torch.optim.Adam, Nested])
def test_a_load_is_no_step(tmp_path, heard, kind):
    made(torch.optim.Adam)
    model, optimizer = made(kind)
    step(model, optimizer)
    save_training_state(tmp_path, model, optimizer, no_dist=True, fsync=False)
    heard.clear()
    other, its_optimizer = made(kind)
    load_training_state(tmp_path, other, its_optimizer, no_dist=True)
    assert heard == []
    assert_state_equal(its_optimizer.state_dict(), optimizer.state_dict())
    step(other, its_optimizer)  # the hooks are back
    assert [name for name, _ in heard][:: len(heard) - 1] == ["before", "after"]
    assert all(which is its_optimizer for _, which in heard)


class Meanwhile(torch.optim.SGD):
    """Its step has others hear, and hooks come and go, while it lasts."""

    during: list[Any] = []  # noqa: RUF012  # the test's

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for call in self.during:
            call()


def test_others_are_heard_meanwhile(tmp_path, heard, monkeypatch):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer, resumed = (Meanwhile(which.parameters(), lr=0.1, momentum=0.9) for which in (model, other))
    step(model, optimizer)
    save_training_state(tmp_path, model, optimizer, no_dist=True, fsync=False)
    _, bystander = made(torch.optim.SGD)
    gone: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *_: gone.append(1))
    monkeypatch.setattr(Meanwhile, "during", [handle.remove, bystander.step])
    heard.clear()
    load_training_state(tmp_path, other, resumed, no_dist=True)
    assert heard
    assert all(which is bystander for _, which in heard)
    monkeypatch.setattr(Meanwhile, "during", [])
    gone.clear()
    step(other, resumed)
    assert gone == []  # what was removed in the middle did not come back
